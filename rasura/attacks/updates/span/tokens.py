"""Which tokens stand where: the plain span test, and a search that also works under active dropout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.shared.twins import one_of_twins
from rasura.attacks.updates.span.passing import TOLERANT, Passing, largest_residual
from rasura.attacks.updates.span.rows import TOLERANCE
from rasura.attacks.updates.span.scan import Scan
from rasura.core.so_far import tell
from rasura.core.values import UNKNOWN, Vocabulary

EDGE = 0.5
"""A token's residual must be below this fraction of the smallest residual of another token at its position."""

FAR = 10.0
"""Where several tokens of a position are named: how many times as far away the next one must be. It was 70 and more in four
steps of a client on DistilBERT, where true inputs had up to 1.1 times their tolerance."""

NEAREST = 16
"""Tokens of which the clearest ones are chosen."""

FIRST = 60
"""Steps of the first fits, from the middle of what dropout may have left."""

STEPS = 160
"""Steps of the later fits, which start at random."""

SPREAD = 32.0
"""How far random starts spread. Of 64 starts, a copy that others hid was found by 0, 8, 12 and 18 with 2, 8, 16 and 32; a
token without copies is found as often by all of them."""

STARTS = 2
"""Fits of each token in a round."""

EMPTY = 3
"""Positions in a row where a first fit finds nothing although texts go on: what stands there hides behind copies."""

COMMON = 16
"""Where the rate is not known: how many tokens of a position, nearest to the row space first, are searched for
again although no copy was found: copies may hide each other."""

FRUITLESS = 8
"""Rounds without a new copy after which a token is no longer searched for at a position. Of 64 fits, 10 to 33 found a copy
that the rounds before had not found."""

LARGER = 10
"""How many times the usual residual of a true input may be."""

TOGETHER = 192
"""Fits at once."""

EXCLUDED = 0.1
"""Share of the coordinates that a known copy lacks by which it is excluded. Another copy lacks few of them."""

DEVIATIONS = 5.0
"""How many standard deviations more than is expected dropout may have removed of a token that is searched for."""


@dataclass(frozen=True)
class Row:
    """One private token, with its layer input ``(hidden,)``, in which dropped coordinates are zero."""

    position: int
    token: int
    segment: int
    input: Tensor
    residual: float


def candidates(vocabulary: Vocabulary) -> Tensor:
    """All ids that text can hold, special ones included."""
    return torch.tensor([i for i in range(vocabulary.size) if i not in vocabulary.unused_ids])


def plain(scan: Scan, position: int) -> list[Row]:
    """Tokens whose input at ``position`` lies in the row space, best first (DAGER's first-layer test)."""
    for segment in range(scan.inputs.types):
        hits, states, residual = scan.within(position, TOLERANCE, segment)
        if len(hits):
            found = zip(scan.ids[hits].tolist(), states, residual.tolist())
            return [Row(position, token, segment, state, r) for token, state, r in found]
    return []


def clearest(scan: Scan, position: int) -> list[Row]:
    """The tokens whose inputs at ``position`` are nearest to the row space, up to a clear gap behind them, best first.

    The bases of several steps of a client are off by more than their noise says. Then some true inputs exceed the tolerance,
    while other tokens stay a hundred times as far away. ``scan`` orders tokens only roughly, so a few are computed.
    """
    near = scan.missing(position).topk(min(NEAREST, len(scan.ids)), largest=False).indices
    states = scan.inputs.first(scan.ids[near], position).double()
    residual = scan.space.residual(states)
    order = residual.argsort()
    table = scan.inputs.model.get_parameter(scan.inputs.parts.word_embedding)
    order = order[one_of_twins(table, scan.ids[near[order]], scan.standing)]
    gaps = residual[order[1:]] / residual[order[:-1]].clamp_min(1e-12)
    last = int(gaps.argmax()) if len(gaps) else 0
    if not len(gaps) or float(gaps[last]) < (FAR if last else 1 / EDGE):
        return []
    return [Row(position, int(scan.ids[near[k]]), 0, states[k], float(residual[k])) for k in order[: last + 1].tolist()]


def hold_named(texts: Sequence[Sequence[int]], scan: Scan) -> bool:
    """Whether ``texts`` hold most of the tokens that block 0 names. Each of them stands in some text, so that texts without
    them are not those of the batch. Where tokens are named by position, any text counts."""
    if scan.inputs.parts.position_embedding is not None:
        return bool(texts)
    named = {row.token for row in plain(scan, 0)}
    return len(named & {t for text in texts for t in text}) > len(named) / 2


def nearest(rows: Iterable[Row]) -> list[Row]:
    """At each position, the row that is nearest to the row space."""
    best: dict[int, Row] = {}
    for row in rows:
        if row.position not in best or row.residual < best[row.position].residual:
            best[row.position] = row
    return list(best.values())


def tell_rows(rows: Sequence[Row], *, placed: bool) -> None:
    """Tell a listener of the ``rows`` found so far: in their places if they are ``placed``, as those of one text are;
    otherwise as a bag."""

    def read() -> list[list[int]]:
        if not placed:
            return [list(dict.fromkeys(row.token for row in rows))]
        here = {row.position: row.token for row in nearest(rows)}
        return [[here.get(n, UNKNOWN) for n in range(max(here, default=-1) + 1)]]

    tell(read, ordered=placed)


Key = tuple[int, int, int]
"""Position, token and segment."""


class Search:
    """Searches for all private tokens under active dropout, until as many are found as the row space has dimensions.

    ``longest``: places that are searched at most. ``rate``: the dropout rate, 0 if it is not known. ``copies``: how many
    texts may share a token at one place. ``opening``: tokens that open every text; one copy is enough.
    """

    def __init__(
        self,
        scan: Scan,
        longest: int,
        *,
        rate: float,
        copies: int,
        opening: Sequence[int] = (),
        rng: torch.Generator,
    ) -> None:
        self.scan, self.longest = scan, longest
        self.space, self.inputs, self.ids = scan.space, scan.inputs, scan.ids
        self.fit = Passing(scan.space, rate, largest_residual(scan.space, len(scan.ids) * longest))
        self.rate = rate
        self.tolerant = self.fit.most
        self.copies = copies
        self.opening = tuple(enumerate(opening))
        self.rng = rng
        self.rows: list[Row] = []
        self.nearest: list[Tensor] = []
        """The tokens of each position, nearest to the row space first. Set by the search."""
        self._inputs: dict[Key, Tensor] = {}

    def __call__(self, *, known_length: bool, prefilter: int, rounds: int) -> list[Row]:
        """The rows found, with ``prefilter`` candidates a position, best plain residual first.

        A first pass fits some of them everywhere; further rounds search for copies and for tokens hidden by others.
        """
        some = min(48, prefilter)
        best = self.nearest
        empty = 0
        for position in range(self.longest):
            missing = self.scan.missing(position)
            near = missing.topk(min(prefilter, len(self.ids)), largest=False)
            best.append(self._plausible(position, self.ids[near.indices], near.values))
            empty = 0 if self._fit(position, best[-1][:some]) else empty + 1
            self._tell()
            if empty > EMPTY and not known_length:
                break
        if prefilter > some and not self.complete:
            for position, tokens in enumerate(best):
                self._fit(position, tokens[some:])
        self._settle()
        self._again(rounds)
        return self.rows

    @property
    def complete(self) -> bool:
        """Whether every dimension of the row space is explained, copies of the opening included."""
        return len(self.rows) + self.owed >= self.space.rank

    @property
    def owed(self) -> int:
        """Copies of the opening that need not be found."""
        counts = Counter((r.position, r.token) for r in self.rows)
        return sum(self.copies - counts[key] for key in self.opening if counts[key])

    def _tell(self) -> None:
        tell_rows(self.rows, placed=self.copies == 1 and self.inputs.parts.position_embedding is not None)

    def _plausible(self, position: int, tokens: Tensor, missing: Tensor) -> Tensor:
        """Those ``tokens`` of whose square dropout may have put as much as is ``missing`` outside the row space.

        The share that it removes of an input has the mean ``rate`` and a variance that a few large coordinates make large.
        """
        if not self.rate:
            return tokens
        square = self.inputs.first(tokens, position).square()
        spread = (self.rate * (1 - self.rate) * square.square().sum(1)).sqrt() / square.sum(1).clamp_min(1e-30)
        kept: Tensor = tokens[missing < self.fit.equations * (self.rate + DEVIATIONS * spread) + TOLERANT]
        return kept

    def _settle(self) -> None:
        """What true inputs leave is known from the first fits; those that leave much more have a coordinate wrong."""
        if self.rows:
            usual = torch.tensor([r.residual for r in self.rows]).median()
            self.tolerant = float((LARGER * usual).clamp(TOLERANCE, self.tolerant))
            self.rows = [r for r in self.rows if r.residual < float(self.space.tolerance(r.input, self.tolerant))]

    def _fit(self, position: int, tokens: Tensor) -> bool:
        """The first fits at a position; the segment is the first one in which a token fits."""
        if not len(tokens):  # GPT-2 takes no empty batch
            return False
        for segment in range(self.inputs.types):
            fit = self.fit(self.inputs.first(tokens, position, segment), steps=FIRST, tolerant=self.tolerant)
            good = fit.accepted.nonzero().flatten().tolist()
            found = [self._add((position, int(tokens[i]), segment), fit.inputs[i], fit.residual[i]) for i in good]
            if any(found):
                return True
        return False

    def _add(self, key: Key, x: Tensor, residual: Tensor) -> bool:
        known = [r.input for r in self.rows if (r.position, r.token, r.segment) == key]
        # The fit is exact, so another copy differs by whole coordinates.
        if any(float((k - x).norm()) < 1e-2 * float(x.norm()) for k in known) or len(known) >= self.copies:
            return False
        self.rows.append(Row(*key, x, float(residual)))
        return True

    def _again(self, rounds: int) -> None:
        """Copies of found tokens, found tokens at other positions, and the likeliest ones: a mixture of copies, or of near
        copies at other positions, fits best at first.

        Fits start at random, and each known copy is excluded by coordinates that it lacks. Tokens of the opening need no
        copy.
        """
        waited: Counter[Key] = Counter()
        for _ in range(rounds):
            copies: dict[Key, list[Tensor]] = {}
            for row in self.rows:
                copies.setdefault((row.position, row.token, row.segment), []).append(row.input)
            tokens = {row.token for row in self.rows}
            places = ((n, k, int(t)) for n, ids in enumerate(self.nearest) for k, t in enumerate(ids))
            near = [(n, t, 0) for n, k, t in places if self.rate or k < COMMON or t in tokens]
            full = Counter(row.position for row in self.rows)
            keys = [key for key in dict.fromkeys([*copies, *near]) if key[:2] not in self.opening or key not in copies]
            keys = [key for key in keys if full[key[0]] < self.copies and waited[key] < FRUITLESS]
            if self.complete or not keys:
                return
            starts = [key for key in keys for _ in range(STARTS)]
            for begin in range(0, len(starts), TOGETHER):
                part = starts[begin : begin + TOGETHER]
                targets = torch.cat([self._input(key) for key in part])
                kept = torch.stack([self._kept(x, copies.get(key, ())) for x, key in zip(targets, part)])
                fit = self.fit(targets, steps=STEPS, tolerant=self.tolerant, spread=SPREAD, kept=kept, rng=self.rng)
                for i in fit.accepted.nonzero().flatten().tolist():
                    if self._add(part[i], fit.inputs[i], fit.residual[i]):
                        waited[part[i]] = -1
                self._tell()
                if self.complete:
                    return
            waited.update(keys)

    def _kept(self, x: Tensor, copies: Iterable[Tensor]) -> Tensor:
        """Some of the coordinates that each of the ``copies`` of the input ``x`` ``(hidden,)`` lacks, ``(hidden,)`` bool."""
        kept = torch.zeros(len(x), dtype=torch.bool)
        for copy in copies:
            kept |= (copy == 0) & (x != 0) & (torch.rand(len(x), generator=self.rng) < EXCLUDED)
        return kept

    def _input(self, key: Key) -> Tensor:
        if key not in self._inputs:
            position, token, segment = key
            self._inputs[key] = self.inputs.first(torch.tensor([token]), position, segment)
        return self._inputs[key]
