"""What a configuration says: the calls that it makes, what is known about the run, and what is stated about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal, Self

from rasura.core.errors import InputError
from rasura.core.options import known

Value = object
"""Of an argument: a number, text, flag or list; ``Unread`` where only its expression is known."""


class Unknown(Exception):
    """Something that a figure depends on is not known; the message says what, and how to pass it."""


@dataclass(frozen=True)
class Unread:
    """An argument whose value is not written in the file; ``text`` is its expression."""

    text: str


@dataclass(frozen=True)
class Call:
    """One component that a configuration uses: its class or function, with arguments by name.

    ``place``: the file, with a line or a table. ``extra``: what a reader adds, such as the tasks of a filter.
    """

    name: str
    arguments: Mapping[str, Value]
    place: str = ""
    extra: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Facts:
    """What is known about a run, each None if unknown.

    ``examples``: number of training examples (of one client, where there are clients). ``clients``: number of all clients.
    ``clients_per_round``: how many answer in each round. ``rounds_per_client``: the most rounds that one client takes part
    in; all rounds if None. ``batch_size``: examples in a step, on average; ``epochs``: passes over the examples, in each
    round; ``steps``: steps in each round. ``weights``: "equal", or the largest fraction that one client has in a round's
    average. ``parameters``: entries of the update. ``version``: of the framework. ``client_mods``: mods of a Flower
    ClientApp. ``drop_last``: the loader leaves out a last batch that is smaller. ``aggregation``: "mean" if the server
    averages the updates, as FedAvg does.
    """

    examples: int | None = None
    clients: int | None = None
    clients_per_round: int | None = None
    rounds: int | None = None
    rounds_per_client: int | None = None
    batch_size: int | None = None
    epochs: int | None = None
    steps: int | None = None
    sampling: str | None = None
    delta: float | None = None
    weights: str | float | None = None
    parameters: int | None = None
    version: str | None = None
    client_mods: tuple[str, ...] = ()
    drop_last: bool = False
    aggregation: str | None = None

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InputError(f"{name} is {value!r}; expected a whole number, at least 1")
        if self.delta is not None and not probability(self.delta):
            raise InputError(f"delta is {self.delta!r}; expected above 0 and below 1")
        if self.sampling is not None:
            known("sampling", str(self.sampling), SAMPLINGS)
        weight = self.weights
        if weight not in (None, "equal") and not (isinstance(weight, float | int) and 0 < float(weight) <= 1):
            raise InputError(f"weights is {weight!r}; expected equal, or the largest fraction of one client in the average")
        if not isinstance(self.client_mods, tuple) or not isinstance(self.drop_last, bool):
            raise InputError("client_mods is not a list, or drop_last is not true or false")
        if self.aggregation is not None and not isinstance(self.aggregation, str):
            raise InputError(f"aggregation is {self.aggregation!r}; expected mean, or the name of another one")
        if self.version is not None and not isinstance(self.version, str):
            raise InputError(f"version is {self.version!r}; expected a text such as '2.8.0'")
        if self.clients is not None and self.clients_per_round is not None and self.clients_per_round > self.clients:
            raise InputError(f"clients_per_round is {self.clients_per_round}, but there are {self.clients} clients")

    @property
    def rounds_made(self) -> int:
        """The rounds that one client takes part in, at most; 1 where there are none."""
        return self.rounds_per_client or self.rounds or 1

    @classmethod
    def read(cls, found: Mapping[str, Value]) -> Self:
        """From a table of a file. Raises ``InputError`` for unknown names and invalid values."""
        names = [one.name for one in fields(cls)]
        for name in found:
            known("fact about the run", name, names)
        plain = dict(found)
        if isinstance(mods := plain.get("client_mods"), list):
            plain["client_mods"] = tuple(str(one) for one in mods)
        return cls(**plain)  # type: ignore[arg-type]  # __post_init__ checks each value

    def over(self, other: Facts) -> Facts:
        """These facts, with those of ``other`` where these are unknown."""
        empty = Facts()
        mine = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != getattr(empty, f.name)}
        return replace(other, **mine)


COUNTS = (
    "examples", "clients", "clients_per_round", "rounds", "rounds_per_client", "batch_size", "epochs", "steps", "parameters",
)  # fmt: skip
SAMPLINGS = ("poisson", "shuffled", "fixed")


@dataclass(frozen=True)
class Stated:
    """The guarantee that somebody states: ``epsilon`` at ``delta`` (None: not said) for an ``example`` or a ``client``,
    for the whole ``run`` or one ``round``. ``by_argument``: it is an argument of the mechanism, not a statement about a run.
    """

    epsilon: float
    delta: float | None = None
    unit: Literal["example", "client"] | None = None
    per: Literal["run", "round"] = "run"
    by_argument: bool = False

    def __post_init__(self) -> None:
        if not positive(self.epsilon):
            raise InputError(f"the stated epsilon is {self.epsilon!r}; expected a finite number above 0")
        if self.delta is not None and not (probability(self.delta) or self.delta == 0):
            raise InputError(f"the stated delta is {self.delta!r}; expected at least 0 and below 1")
        if self.unit is not None:
            known("unit of privacy", self.unit, ("example", "client"))
        known("span of a statement", self.per, ("run", "round"))

    @classmethod
    def read(cls, found: Mapping[str, Value]) -> Self:
        """From a table of a file. Raises ``InputError`` for unknown names and invalid values."""
        for name in found:
            known("part of a statement", name, ("epsilon", "delta", "unit", "per"))
        if "epsilon" not in found:
            raise InputError("the statement has no epsilon")
        return cls(**found)  # type: ignore[arg-type]  # __post_init__ checks each value


def positive(value: Value) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def probability(value: Value) -> bool:
    """Whether it is a number above 0 and below 1."""
    return positive(value) and isinstance(value, int | float) and value < 1
