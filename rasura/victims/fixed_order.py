"""Training in a fixed order under DP-FTRL: the batches of every pass, and the noise of every step."""

from __future__ import annotations

from collections.abc import Sequence

from rasura.accounting import Draw, Ledger
from rasura.accounting.banded import BandedNoise, BandedPlan
from rasura.accounting.compositions import BANDED, composition
from rasura.core.errors import InputError
from rasura.core.rng import Randomness
from rasura.core.values import Mechanism
from rasura.victims.batching import in_order


def ordered(defense: Sequence[Mechanism]) -> bool:
    """Whether ``defense`` has correlated noise, for batches in a fixed order."""
    return any(part.name == BANDED for part in defense)


def check_ordered(defense: Sequence[Mechanism]) -> None:
    """Raises ``InputError`` for correlated noise beside a protection with which nothing is proven for it."""
    standing = composition(defense)
    if ordered(defense) and standing.formal is None:
        raise InputError(f"dp-ftrl trains only where its guarantee holds: {standing.why}")


class FixedOrder:
    """One random order of the texts that ``ledger`` counts, for all passes, and the noise of all its planned steps.

    ``parts``: the rows of each batch of a pass. The last batch may be smaller; it is divided by the size of the others, as
    if padded by texts without a gradient. ``rng`` draws the order and the noise. Raises ``InputError`` where ``ledger`` has
    no such guarantee, for a band above the batches of a pass, and for a ledger that has counted releases.
    """

    def __init__(self, ledger: Ledger, rng: Randomness) -> None:
        check_ordered(ledger.defense)
        known, run = ledger.formal, ledger.run
        if known is None or known.name != BANDED or run.sampling != "fixed" or run.unit != "text":
            raise InputError("dp-ftrl trains on texts in a fixed order; this ledger plans another training")
        if ledger.releases:
            ledger.check_resumable()
        plan = BandedPlan(
            float(known.parameters["sigma"] or 0), run.steps, run.steps_an_epoch, int(known.parameters["band"] or 0)
        )
        self.ledger, self.rng, self.size = ledger, rng, run.batch_size
        self.parts = in_order(run.examples, run.batch_size, rng)
        self.noise = BandedNoise(plan, float(known.parameters["clip"] or 0), rng)

    @property
    def texts(self) -> int:
        """The public number that each sum is divided by."""
        return min(self.size, self.ledger.run.examples)

    def next_rows(self) -> list[int]:
        """The rows of the next batch: after the last of a pass, the first again."""
        return self.parts[self.ledger.releases % len(self.parts)]

    def take(self, rows: Sequence[int]) -> Draw:
        """The draw of a batch of ``rows``. Raises ``InputError`` unless it is the next one of the order, and where the batch
        before was not released."""
        turn = self.ledger.turn()
        place = f"batch {self.ledger.releases % len(self.parts) + 1} of {len(self.parts)} in pass {turn.number}"
        self.ledger.room(turn)
        if self.noise.drawn != self.ledger.releases:
            raise InputError(
                f"dp-ftrl: the noise of {place} was drawn, and nothing was released with it. Call loss.backward() once for "
                "each batch before the next one, and use torch.no_grad() to evaluate"
            )
        if sorted(rows) != sorted(self.next_rows()):
            raise InputError(
                f"dp-ftrl: expected {place}, and this is another batch. All batches of a pass are used once, whole, in "
                "the order of the loader that protect_training returned, and none is left out or repeated"
            )
        return turn
