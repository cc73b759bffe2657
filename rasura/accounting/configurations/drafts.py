"""The finding on one mechanism of a configuration while it is being made: hazards, figures, and what stays unknown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rasura.accounting.configurations.facts import Call, Facts, Stated, Unknown, Unread, Value, probability

Unit = Literal["example", "client"]

LEFT_OUT = "left out (its contribution is zero)"
ADDED = "added or removed"
REPLACED = "replaced by another"

HAZARDS: Mapping[str, str] = {
    "no-noise": "no noise is added",
    "no-clip": "contributions are not bounded",
    "clip-of-batch": "the clip bounds a batch, not a single example",
    "clip-of-layer": "each layer is clipped alone, but the noise fits one clip",
    "sensitivity": "the sensitivity is not that of the clip",
    "formula": "the noise formula does not hold at this epsilon",
    "noise-before-clip": "noise is added to values that were not clipped",
    "partial": "the stated epsilon covers a part of what is sent",
    "per-round": "the figure of one round is stated for the run",
    "steps": "more steps are made than were counted",
    "sampling": "batches are not drawn as the accounting assumes",
    "weights": "one client may weigh more than the noise allows for",
    "count": "the noise fits another number of clients",
    "multiplier": "a noise multiplier and a standard deviation are confused",
    "delta": "delta is too large, or not a probability",
    "seeded-noise": "the noise can be computed from a known seed",
    "unfiltered-task": "a task sends weights without noise",
    "exceeds": "the recomputed epsilon is above the stated one",
}
"""Every hazard that is looked for, by code."""


@dataclass(frozen=True)
class Hazard:
    """Something that breaks or weakens a guarantee. ``code``: one of ``HAZARDS``; ``says``: what was found here."""

    code: str
    says: str


@dataclass(frozen=True)
class Bound:
    """What is guaranteed for one example or one client after the whole run; ``epsilon`` is None where nothing is, and
    ``says`` gives the reason. ``relation``: how neighbouring data differ."""

    unit: Unit
    epsilon: float | None
    delta: float | None
    relation: str
    says: str


@dataclass(frozen=True)
class Finding:
    """What was found out about one mechanism.

    ``one_round``: epsilon of a client after one round. ``unknown``: what no figure could be given for, and why.
    ``equal_noise``: noise multiplier and clip of the equal DP-SGD step on a single text, for an attack.
    ``assumptions``: what the figures take for granted, since no file shows it.
    """

    mechanism: str
    place: str
    hazards: tuple[Hazard, ...]
    bounds: tuple[Bound, ...]
    one_round: float | None
    stated: Stated | None
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    equal_noise: tuple[float, float] | None
    assumptions: tuple[str, ...] = ()

    @property
    def outcome(self) -> Literal["holds", "does not hold", "not known", "computed"]:
        """Whether the stated guarantee is confirmed; ``computed`` where none is stated and no hazard was found."""
        if self.hazards:
            return "does not hold"
        if self.unknown or not any(one.epsilon is not None for one in self.bounds):
            return "not known"
        return "computed" if self.stated is None else "holds"


@dataclass
class Draft:
    """A finding in the making, on ``call``. ``names``: every component that the configuration uses."""

    call: Call
    facts: Facts
    stated: Stated | None
    names: frozenset[str] = frozenset()
    others: Sequence[Call] = ()
    hazards: list[Hazard] = field(default_factory=list)
    bounds: list[Bound] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    one_round: float | None = None
    equal_noise: tuple[float, float] | None = None
    assumptions: list[str] = field(default_factory=list)

    def hazard(self, code: str, says: str) -> None:
        """Record a hazard, once for each code."""
        assert code in HAZARDS
        if code not in {one.code for one in self.hazards}:
            self.hazards.append(Hazard(code, says))

    def value(self, name: str, default: Value = None) -> Value:
        """The argument ``name``. Raises ``Unknown`` if its value is not written in the file."""
        if name not in self.call.arguments and "**" in self.call.arguments:
            raise Unknown(f"{name} of {self.call.name} may be among its further arguments, which are not in this file")
        found = self.call.arguments.get(name, default)
        if isinstance(found, Unread):
            raise Unknown(f"{name} of {self.call.name} is {found.text}, which is not a number in this file")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """The argument ``name`` as a number, which may be infinite. Raises ``Unknown`` if it is missing or not a number."""
        found = self.value(name, default)
        if found is None:
            raise Unknown(f"{name} of {self.call.name} is missing")
        if isinstance(found, bool) or not isinstance(found, int | float) or math.isnan(found):
            raise Unknown(f"{name} of {self.call.name} is {found!r}, which is not a number")
        return float(found)

    def count(self, name: str, default: int | None = None) -> int:
        """The argument ``name`` as a whole number of at least 1. Raises ``Unknown`` for anything else."""
        found = self.number(name, default)
        if not 1 <= found < math.inf or found != int(found):
            raise Unknown(f"{name} of {self.call.name} is {found:g}; expected a whole number, at least 1")
        return int(found)

    def noise(self, name: str, default: float | None = None) -> float:
        """A noise argument: raises ``Unknown`` with a hazard at 0."""
        found = self.number(name, default)
        if found <= 0 or math.isinf(found):
            if found == 0:
                self.hazard("no-noise", f"{name} is 0: no noise is added")
            raise Unknown(f"with {name} {found:g} there is no guarantee")
        return found

    def clip(self, name: str, default: float | None = None) -> float:
        """A clipping norm: raises ``Unknown`` with a hazard where nothing is clipped."""
        found = self.number(name, default)
        if math.isinf(found) or found <= 0:
            self.hazard("no-clip", f"{name} is {found:g}: contributions of any size are let through")
            raise Unknown(f"with {name} {found:g} there is no guarantee")
        return found

    def secret_noise(self, name: str) -> None:
        """The argument ``name`` seeds the noise. Raises ``Unknown`` where it is given, with a hazard if it is a number."""
        found = self.call.arguments.get(name)
        if found is None:
            return
        text = found.text if isinstance(found, Unread) else str(found)
        if re.search(r"\d", text):
            self.hazard("seeded-noise", f"{name} is {text}: anyone who knows the seed can subtract the noise")
            raise Unknown("noise from a known seed guarantees nothing")
        raise Unknown(f"{name} is {text}; whether its seed is secret is not known")

    def fact(self, name: str) -> int:
        """A fact about the run. Raises ``Unknown`` if it was not passed."""
        found = getattr(self.facts, name)
        if found is None:
            raise Unknown(f"the figure depends on {name}, which is not known; pass --{name.replace('_', '-')}")
        return int(found)

    def rounds(self) -> int:
        """How many rounds one client takes part in, at most."""
        return self.facts.rounds_per_client or self.fact("rounds")

    def delta(self, unit: Unit, argument: Value = None) -> float:
        """The delta of the figures: of the statement, the argument, the facts, or a tenth of 1 over the number of units."""
        units = self.facts.clients if unit == "client" else self.facts.examples
        stated = self.stated.delta if self.stated is not None else None
        if stated == 0:
            raise Unknown("delta 0 is stated, but Gaussian noise guarantees nothing at delta 0")
        for found in (stated, argument, self.facts.delta, 0.1 / units if units else None):
            if found is None:
                continue
            if not isinstance(found, float | int) or not probability(found):
                self.hazard("delta", f"delta is {found!r}; a probability above 0 and below 1 is needed")
                raise Unknown(f"with delta {found!r} there is no guarantee")
            if units and found >= 1 / units:
                self.hazard(
                    "delta",
                    f"delta {found:g} is not below 1 / {units} {unit}s: publishing one {unit} in full would satisfy it",
                )
            if not units:
                self.notes.append(f"delta was not compared with the number of {unit}s, which is not known")
            return float(found)
        raise Unknown(f"delta is not known; pass --delta or --{unit}s")

    def bound(self, unit: Unit, epsilon: float | None, delta: float | None, relation: str, says: str = "") -> None:
        """Record the figure of one unit after the whole run."""
        self.bounds.append(Bound(unit, epsilon, delta, relation, says))

    def compared(self, unit: Unit, one_round: float | None = None) -> None:
        """Compare the figure of ``unit`` with what is stated, for the unit of the statement if it names one."""
        stated = self.stated
        if stated is None:
            return
        asked = stated.unit or unit
        found = next((one.epsilon for one in self.bounds if one.unit == asked), None)
        if stated.per == "round":
            found = one_round if asked == unit else None
        if found is None:
            self.unknown.append(f"the stated epsilon is for one {asked}, for which nothing is proven here")
        elif found > stated.epsilon * (1 + 1e-6):
            span = "one round" if stated.per == "round" else "the run"
            self.hazard("exceeds", f"epsilon of {span} is {found:.4g} for one {asked}; {stated.epsilon:g} is stated")

    def confused(self, spent: Callable[[float], float], multiplier: float, readings: Mapping[str, float]) -> None:
        """Say whether the stated epsilon is that of another reading of ``multiplier``: a sign that two scales are mixed up.

        ``readings``: what the figure might mean, with the multiplier that it would then be.
        """
        if self.stated is None or spent(multiplier) <= self.stated.epsilon:
            return
        for meaning, other in readings.items():
            if other > multiplier and 0.95 <= spent(other) / self.stated.epsilon <= 1.001:
                self.hazard(
                    "multiplier",
                    f"the stated epsilon fits a noise multiplier of {other:.4g}, which {meaning}; it is {multiplier:.4g}",
                )
                return

    def finding(self) -> Finding:
        """What was found."""
        return Finding(
            self.call.name, self.call.place, tuple(self.hazards), tuple(self.bounds), self.one_round, self.stated,
            tuple(self.unknown), tuple(dict.fromkeys(self.notes)), self.equal_noise,
            tuple(dict.fromkeys(self.assumptions)),
        )  # fmt: skip
