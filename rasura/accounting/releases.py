"""One release of a protected training step, and the privacy budget that several releases spend.

A release records what happened: the mechanism, how its batch was drawn, and for how many entries noise was drawn. Anything
unknown raises an error; it is never replaced by a figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from rasura.accounting.banded import BandedPlan
from rasura.accounting.compositions import BANDED, DIRECTIONAL, FORMAL, POISSON
from rasura.accounting.directional import directional_epsilon
from rasura.accounting.epsilon import NOISES, Sampled, composed_epsilon, finite, pure_of_laplace
from rasura.core.errors import InputError
from rasura.core.values import Mechanism

Sampling = Literal["poisson", "disjoint", "fixed", "unknown"]
"""How a batch was drawn: each text at random; from a partition of all texts that does not depend on them; the next one of a
partition that is the same in every pass; or unknown."""

ORDERED = frozenset({"band", "separation"})
"""The figures of a release that only a fixed order has."""

UNPROVEN = "unproven"
"""The mechanism of a release without a formal guarantee."""


@dataclass(frozen=True)
class Draw:
    """How one batch was drawn: ``rate``, the probability of each text to be in it (poisson; unknown: the fraction of all
    texts that it holds), or ``number``, the pass over the texts that it belongs to (disjoint, fixed), counted from 1;
    ``separation``, the batches of a pass (fixed)."""

    sampling: Sampling = "unknown"
    rate: float | None = None
    number: int | None = None
    separation: int | None = None


@dataclass(frozen=True)
class Release:
    """One noisy update that was released.

    ``noise``: gaussian, laplace or von-mises-fisher. ``multiplier``: deviation (Laplace: scale) of the noise relative to
    ``clip``, the largest contribution of one text to the sum; kappa for a directional draw. ``blocks``: entries of each
    draw. ``secret``: the randomness came from the operating system. ``band``, ``separation``: over how many steps noise is
    correlated, and how many batches a pass has, for batches in a fixed order. Raises ``InputError`` for invalid values.
    """

    mechanism: str
    noise: str = ""
    multiplier: float = 0.0
    clip: float = 0.0
    sampling: Sampling = "unknown"
    rate: float | None = None
    number: int | None = None
    blocks: tuple[int, ...] = ()
    secret: bool = True
    band: int | None = None
    separation: int | None = None

    def __post_init__(self) -> None:
        if self.mechanism == UNPROVEN:
            if any(getattr(self, f.name) != f.default for f in fields(self) if f.name not in ("mechanism", "secret")):
                raise InputError("accounting: a release without a formal guarantee must not have the figures of a guarantee")
            return
        if self.mechanism not in FORMAL:
            raise InputError(f"accounting: unknown mechanism {self.mechanism!r}; known: {', '.join(FORMAL)}")
        noises = {DIRECTIONAL: ("von-mises-fisher",), BANDED: ("gaussian",)}.get(self.mechanism, NOISES)
        wrong = [
            text
            for text, right in {
                f"noise {self.noise!r}, expected {' or '.join(noises)}": self.noise in noises,
                f"multiplier {self.multiplier}, expected a finite number above 0": _positive(self.multiplier),
                f"clip {self.clip}, expected a finite number above 0": _positive(self.clip),
                f"sampling {self.sampling!r}": self.sampling
                in (("fixed", "unknown") if self.mechanism == BANDED else ("poisson", "disjoint", "unknown")),
                f"band {self.band}, separation {self.separation}": self._in_order(),
                f"rate {self.rate}, expected above 0 and at most 1": self.rate is None
                or (_positive(self.rate) and self.rate <= 1),
                "no rate for a batch drawn by Poisson sampling": self.sampling != "poisson" or self.rate is not None,
                f"pass {self.number}, expected a whole number from 1 on": self.sampling not in ("disjoint", "fixed")
                or (_whole(self.number)),
                f"blocks {list(self.blocks)[:4]}, expected whole numbers from 1 on": bool(self.blocks)
                and all(_whole(size) for size in self.blocks),
                f"secret {self.secret!r}, expected true or false": isinstance(self.secret, bool),
            }.items()
            if not right
        ]
        if wrong:
            raise InputError(f"accounting: a release with {'; '.join(wrong)}")

    def _in_order(self) -> bool:
        """Whether band and separation are there exactly where noise is correlated, and batches in a fixed order."""
        if self.mechanism != BANDED:
            return self.band is None and self.separation is None
        if self.sampling != "fixed":
            return _whole(self.band) and self.separation is None
        return _whole(self.band) and _whole(self.separation) and (self.band or 0) <= (self.separation or 0)

    @classmethod
    def of(cls, mechanism: Mechanism | None, draw: Draw, sizes: Iterable[int], *, secret: bool) -> Release:
        """The release of ``mechanism`` for a batch drawn as ``draw``; ``sizes``: entries of each tensor that came out of it.
        None: one without a formal guarantee."""
        every, how = [int(s) for s in sizes], asdict(draw)
        if mechanism is None:
            return cls(UNPROVEN, secret=secret)
        known = mechanism.parameters
        if mechanism.name == DIRECTIONAL:
            blocks = tuple(every) if known["blocks"] == "parameters" else (sum(every),)
            return cls(DIRECTIONAL, "von-mises-fisher", float(known["kappa"] or 0), 1.0, blocks=blocks, secret=secret, **how)
        return cls(
            mechanism.name, str(known["noise"]), float(known["sigma"] or 0), float(known["clip"] or 0),
            blocks=(sum(every),), secret=secret, band=int(known["band"] or 0) if mechanism.name == BANDED else None, **how,
        )  # fmt: skip

    @classmethod
    def read(cls, found: Any) -> Release:
        """A release as written by ``to_dict``. Raises ``InputError`` for anything else."""
        names = {f.name for f in fields(cls)}
        always = names - ORDERED
        if not isinstance(found, Mapping) or set(found) not in (names, always):
            raise InputError(
                f"accounting: {str(found)[:80]} is not a release; expected an object with {', '.join(sorted(always))}"
            )
        sizes = found["blocks"]
        if not isinstance(sizes, list):
            raise InputError("accounting: the blocks of a release are not a list")
        return cls(**{**found, "blocks": tuple(sizes)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values. Figures of a fixed order are there where they are known."""
        told = {k: v for k, v in asdict(self).items() if k not in ORDERED or self.mechanism == BANDED}
        return {**told, "blocks": list(self.blocks)}


def _positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def alike(release: Release, planned: Release) -> bool:
    """Whether a release spends what the planned one does."""
    figures = ("noise", "multiplier", "sampling", "rate", "band", "separation")
    return all(getattr(release, name) == getattr(planned, name) for name in figures)


Counted = tuple[Release, int]
"""A release, and how often it took place in a row."""


@dataclass(frozen=True)
class Spent:
    """The privacy budget that releases spent together: epsilon at the requested delta, ``pure`` at delta 0 (None if there is
    none), ``metric`` the factor of the metric guarantee on directions, ``cross_check`` epsilon by RDP."""

    epsilon: float
    pure: float | None = None
    metric: float | None = None
    cross_check: float | None = None


def spent(runs: Sequence[Counted], delta: float) -> Spent:
    """The privacy budget of ``runs`` together at ``delta``. Raises ``InputError`` if no composition of them is proven."""
    kinds = {release.mechanism for release, _ in runs}
    if UNPROVEN in kinds:
        raise InputError("accounting: a release without a formal guarantee has no epsilon")
    if any(release.sampling == "unknown" for release, _ in runs):
        raise InputError("accounting: it is not known how the batch of a release was drawn, so nothing is proven for it")
    if not runs:
        return Spent(0.0, 0.0)
    if kinds <= set(POISSON) and all(release.sampling == "poisson" for release, _ in runs):
        return _by_chance(runs, delta)
    if kinds == {DIRECTIONAL}:
        return _directional(runs, delta)
    if kinds == {BANDED}:
        return Spent(_in_turn(runs).epsilon(delta))
    raise InputError(f"accounting: no composition is proven for {', '.join(sorted(kinds))} with these batches")


def _by_chance(runs: Sequence[Counted], delta: float) -> Spent:
    counts: dict[Sampled, int] = {}
    for release, count in runs:
        part = Sampled(release.multiplier, release.rate or 0.0, 1, release.noise)
        counts[part] = counts.get(part, 0) + count
    parts = tuple(part._replace(steps=count) for part, count in sorted(counts.items()))
    found = composed_epsilon(parts, delta)
    noises = {part.noise for part in parts}
    pure = sum(part.steps * pure_of_laplace(part) for part in parts) if noises == {"laplace"} else None
    other = composed_epsilon(parts, delta, by="rdp") if noises == {"gaussian"} else None
    return Spent(found if pure is None else min(found, pure), pure, None, other)


def _in_turn(runs: Sequence[Counted]) -> BandedPlan:
    """The plan whose first steps are ``runs``: releases of all batches in turn, in every pass. Raises ``InputError`` for any
    other releases, such as those of a pass that was left before its end."""
    first, made = runs[0][0], 0
    band, separation = first.band or 0, first.separation or 0
    for release, count in runs:
        one = Release(**{**vars(first), "number": release.number, "secret": release.secret})
        if release != one or release.number != made // separation + 1 or count > separation - made % separation:
            raise InputError("accounting: these releases are not those of a fixed order, so nothing is proven for them")
        made += count
    return BandedPlan(first.multiplier, made, separation, band)


def _directional(runs: Sequence[Counted], delta: float) -> Spent:
    """A text is in at most one batch of a pass, so a pass spends what one of its releases spends."""
    seen: dict[tuple[float, tuple[int, ...]], int] = {}
    passes: set[tuple[float, tuple[int, ...], int | None]] = set()
    for release, count in runs:
        kind = (release.multiplier, release.blocks)
        if release.sampling == "disjoint":
            count = int((*kind, release.number) not in passes)
            passes.add((*kind, release.number))
        seen[kind] = seen.get(kind, 0) + count
    # Different kinds share delta: basic composition.
    each = [directional_epsilon(kappa, blocks, count, delta / len(seen)) for (kappa, blocks), count in seen.items()]
    metric = sum(kappa * count for (kappa, _), count in seen.items())
    pure = finite("epsilon", 2 * metric)
    return Spent(min(sum(each), pure), pure, metric)
