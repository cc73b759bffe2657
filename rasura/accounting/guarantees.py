"""The guarantee of releases in words: (epsilon, delta) for DP-SGD, the guarantees of DirDP-SGD, or none.

The same words are used for a plan, with the releases that would be made, and for a run, with those that the ledger counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rasura.accounting.compositions import BANDED, DIRECTIONAL, FORMAL, POISSON, composition
from rasura.accounting.epsilon import MIN_SIGMA, checked_delta
from rasura.accounting.releases import UNPROVEN, Counted, Draw, Release, Spent, spent
from rasura.core.errors import InputError
from rasura.core.rounding import above
from rasura.core.values import Mechanism

NONE = "no formal guarantee"

SHUFFLES = "the loader shuffles, but the accountant assumes Poisson sampling: epsilon is not proven for this run"

Batching = Literal["poisson", "shuffled", "fixed"]
"""How batches are drawn, as in ``Run``."""

UNORDERED = f"{NONE}: dp-ftrl needs batches of texts in one order that is the same in every pass, and these were not"


@dataclass(frozen=True)
class Run:
    """How a model is trained: ``examples`` texts, ``batch_size`` of them per step, each on average once per epoch.

    ``delta``: probability with which the guarantee may fail, a tenth of 1 / examples if None. ``sampling``: how batches are
    drawn; most loaders are ``shuffled``; ``fixed``: the same batches in the same order in every pass. ``max_steps``: the
    training ends after so many batches, if the epochs have more.
    ``unit``: what is drawn, clipped and counted as one; ``examples`` are then persons, each with all their texts.
    """

    examples: int
    batch_size: int
    epochs: int
    delta: float | None = None
    sampling: Batching = "poisson"
    max_steps: int | None = None
    unit: Literal["text", "person"] = "text"

    def __post_init__(self) -> None:
        for name in ("examples", "batch_size", "epochs", "max_steps"):
            value = getattr(self, name)
            if value is None and name == "max_steps":
                continue
            if not 1 <= value < math.inf:
                raise InputError(f"accounting: {name} is {value}; expected at least 1")
            if value != int(value):
                raise InputError(f"accounting: {name} is {value}; expected a whole number")
            object.__setattr__(self, name, int(value))  # 3.0 is one, too
        checked_delta(self.fails)

    @property
    def steps_an_epoch(self) -> int:
        """Number of batches until each text has been used once, on average."""
        return math.ceil(self.examples / self.batch_size)

    @property
    def steps(self) -> int:
        """Batches in all."""
        whole = self.epochs * self.steps_an_epoch
        return whole if self.max_steps is None else min(whole, self.max_steps)

    @property
    def rate(self) -> float:
        """Probability of each text to be in a batch."""
        return min(1.0, self.batch_size / self.examples)

    @property
    def fails(self) -> float:
        """Delta."""
        return 0.1 / self.examples if self.delta is None else self.delta


@dataclass(frozen=True)
class Guarantee:
    """The guarantee for each text, in words, with its figures.

    ``epsilon`` and ``delta`` are None where nothing is guaranteed. ``pure`` is epsilon at delta 0, ``metric`` the factor of
    the metric guarantee on directions (``DirDP``; of several tensors, on that which differs most), ``cross_check`` epsilon
    by the other accountant; ``steps`` the releases that are counted. ``otherwise``: epsilon and delta that would hold
    without what voids the guarantee (a seed, a loader that shuffles). ``warnings`` say what weakens or voids it.
    """

    statement: str
    epsilon: float | None = None
    delta: float | None = None
    pure: float | None = None
    metric: float | None = None
    cross_check: float | None = None
    neighbours: str | None = None
    steps: int | None = None
    rate: float | None = None
    sampling: str | None = None
    otherwise: tuple[float, float] | None = None
    warnings: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a record, without unknown ones."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v not in (None, ())}


def assumes_poisson(defense: Sequence[Mechanism]) -> bool:
    """Whether the guarantee of ``defense`` assumes Poisson sampling."""
    return any(m.name in POISSON for m in defense)


def sampling_for(defense: Sequence[Mechanism]) -> Batching:
    """How batches must be drawn for the guarantee of ``defense``."""
    names = {m.name for m in defense}
    return "poisson" if names & set(POISSON) else "fixed" if BANDED in names else "shuffled"


def carries(defense: Sequence[Mechanism]) -> bool:
    """Whether a part of ``defense`` is a mechanism that could carry a guarantee, whether or not it is proven for the
    whole."""
    return any(m.name in FORMAL for m in defense)


def formal(defense: Sequence[Mechanism]) -> Mechanism | None:
    """The part of ``defense`` that carries a formal guarantee; None where nothing is proven for the whole."""
    return composition(defense).formal


def guarantee(defense: Sequence[Mechanism], run: Run, *, sizes: Sequence[int] = (), secure: bool = True) -> Guarantee:
    """The planned guarantee of ``defense`` for each text after all of ``run``, not the guarantee of an actual run.

    ``sizes``: entries of each trained parameter tensor, which DirDP's guarantee depends on; without them only its pure form
    is stated. ``secure``: the noise comes from the operating system; anyone who knows the seed can subtract the noise of a
    seeded generator.
    """
    standing = composition(defense)
    part = standing.formal
    if part is None:
        return _unproven(standing.why)
    runs = planned_releases(part, run, sizes=sizes, secure=secure)
    return stated(runs, run, carrier=part.name, planned=True, sized=bool(sizes))


def planned_releases(part: Mechanism, run: Run, *, sizes: Sequence[int] = (), secure: bool = True) -> list[Counted]:
    """The releases that ``part`` makes in all of ``run``; ``sizes`` and ``secure`` as in ``guarantee``."""
    if part.name == BANDED:
        draws = _in_turn(run, int(part.parameters["band"] or 0))
    elif run.sampling == "poisson":
        draws = [(Draw("poisson", run.rate), run.steps)]
    elif part.name == DIRECTIONAL:
        # Batches that a loader shuffles are disjoint within a pass; otherwise every step counts.
        draws = [(Draw("disjoint", number=k), 1) for k in range(1, run.epochs + 1)]
    else:
        draws = [(Draw(rate=run.rate), run.steps)]
    # Without sizes nothing depends on them, but on whether there are several.
    return [(Release.of(part, draw, sizes or [1, 1], secret=secure), count) for draw, count in draws]


def stated(
    runs: Sequence[Counted], run: Run, *, carrier: str | None, planned: bool, why: str = "", sized: bool = True
) -> Guarantee:
    """The guarantee for each text after ``runs``; the words say whether it is ``planned`` or counted.

    ``run``: how many texts there are, and delta. ``carrier``: the mechanism with the guarantee; None where nothing is
    proven, and ``why``. ``sized``: the entries of the draws are known.
    """
    if carrier is None or any(release.mechanism == UNPROVEN for release, _ in runs):
        return _unproven(why or "its releases were made without a proof")
    made = sum(count for _, count in runs)
    notes, voids = [], []
    if not all(release.secret for release, _ in runs):
        voids.append("the noise is seeded: nothing is guaranteed against anyone who knows or guesses the seed")
    if run.fails >= 1 / run.examples:
        notes.append(
            f"delta {run.fails:.3g} is not below 1 / {run.examples} {run.unit}s: publishing one random {run.unit} in full "
            "would satisfy this guarantee"
        )
    if any(release.mechanism in (*POISSON, BANDED) and release.multiplier < MIN_SIGMA for release, _ in runs):
        min_multiplier = min(release.multiplier for release, _ in runs)
        return Guarantee(f"{NONE}: sigma {min_multiplier:.3g} is too small for a guarantee", warnings=(*voids, *notes))
    if carrier == BANDED:
        return _ordered(runs, run, planned, notes, voids)
    if any(release.sampling == "unknown" for release, _ in runs):
        if carrier == DIRECTIONAL:
            return Guarantee(f"{NONE}: it is not known how its batches were drawn", warnings=(*voids, *notes))
        voids.append(SHUFFLES)
        runs = [(_by_chance(release), count) for release, count in runs]
    found = spent(runs, run.fails)
    if carrier == DIRECTIONAL:
        return _directional(found, runs, run, (planned, sized, made), notes, voids)
    kind = f"({above(found.epsilon)}, {above(run.fails, 3)})-differential privacy for each {run.unit}"
    there = "one text is there or not" if run.unit == "text" else "all texts of one person are there or not"
    rates = {release.rate for release, _ in runs}
    return _worded(
        kind, Guarantee(
            "", found.epsilon, run.fails, found.pure, None, found.cross_check, there, made,
            rates.pop() if len(rates) == 1 else None, "shuffled" if SHUFFLES in voids else "poisson",
        ), planned, run, notes, voids,
    )  # fmt: skip


def _in_turn(run: Run, band: int) -> list[tuple[Draw, int]]:
    """The draws of ``run`` in a fixed order, pass by pass. Raises ``InputError`` for a ``band`` above the batches of one."""
    if run.sampling != "fixed":
        return [(Draw(), run.steps)]
    every = run.steps_an_epoch
    if band > every:
        raise InputError(
            f"dp-ftrl: the band {band} is above the {every} batches of a pass, and nothing is proven for it; use a band of "
            f"{every} or less, or smaller batches"
        )
    counts = [min(every, run.steps - start) for start in range(0, run.steps, every)]
    return [(Draw("fixed", number=k, separation=every), count) for k, count in enumerate(counts, 1)]


def _ordered(runs: Sequence[Counted], run: Run, planned: bool, notes: list[str], voids: list[str]) -> Guarantee:
    """The guarantee of DP-FTRL: none unless all ``runs`` are of the fixed order that ``run`` describes."""
    in_order = all(r.sampling == "fixed" and r.separation == run.steps_an_epoch for r, _ in runs)
    if run.unit != "text":
        return Guarantee(f"{NONE}: that of dp-ftrl is for texts, not for persons", warnings=(*voids, *notes))
    if not in_order:
        return Guarantee(UNORDERED, warnings=(*voids, *notes))
    found = spent(runs, run.fails)
    kind = f"({above(found.epsilon)}, {above(run.fails, 3)})-differential privacy for each text, without sampling"
    made = sum(count for _, count in runs)
    zero = "the gradient of one text is zero in each of its steps"
    return _worded(
        kind,
        Guarantee("", found.epsilon, run.fails, neighbours=zero, steps=made, sampling="fixed"),
        planned,
        run,
        notes,
        voids,
    )


def _unproven(why: str) -> Guarantee:
    return Guarantee(f"{NONE}: {why}; only an audit can show what it stops")


def _by_chance(release: Release) -> Release:
    """``release`` as if Poisson sampling had drawn its batch: at its own rate, and if that is not known with every text."""
    return Release(**{**vars(release), "sampling": "poisson", "rate": release.rate or 1.0})


def _directional(
    found: Spent, runs: Sequence[Counted], run: Run, told: tuple[bool, bool, int], notes: list[str], voids: list[str]
) -> Guarantee:
    planned, sized, made = told
    by_pass = all(release.sampling == "disjoint" for release, _ in runs)
    if not by_pass:
        notes.append("batches overlap within an epoch, so every step counts; with a loader that shuffles, only epochs count")
    pure, metric = float(found.pure or 0), float(found.metric or 0)
    epsilon, delta = (found.epsilon, run.fails) if sized else (pure, 0.0)
    # Each tensor has a direction, and a part of kappa, of its own.
    whole = all(len(release.blocks) == 1 for release, _ in runs)
    kind = (
        f"({above(epsilon)}, {above(delta, 3)})-differential privacy for each text; pure {above(pure)}; the directions of "
        f"two texts at distance x on the sphere are told apart by at most {above(metric)} x"
        f"{'' if whole else ', x being that of the tensor that differs most'}"
    )
    counted = len({release.number for release, _ in runs}) if by_pass else made
    figures = Guarantee(
        "", epsilon, delta, pure, metric, None, "one text is replaced", counted, None,
        "shuffled" if by_pass else "poisson",
    )  # fmt: skip
    return _worded(kind, figures, planned, run, notes, voids)


def _worded(kind: str, figures: Guarantee, planned: bool, run: Run, notes: list[str], voids: list[str]) -> Guarantee:
    """``figures`` with the statement; nothing but words, where something voids them."""
    by_pass = figures.neighbours == "one text is replaced" and figures.sampling == "shuffled"
    many = f"{figures.steps} {'passes over the texts' if by_pass else 'releases'}"
    when = f"planned, for {run.epochs} epochs ({many})" if planned else f"counted, after {many}"
    if not voids:
        return Guarantee(**{**vars(figures), "statement": f"{kind}; {when}", "warnings": tuple(notes)})
    return Guarantee(
        f"{NONE} for this run: {'; '.join(voids)}. Otherwise it would be {kind}; {when}",
        steps=figures.steps, sampling=figures.sampling, otherwise=(figures.epsilon or 0.0, figures.delta or 0.0),
        warnings=(*voids, *notes),
    )  # fmt: skip
