"""The questions that an adaptive attack asks of every protection of an update, and the register of protections by name.

Values are checked on construction, so noise that is not a number, or a fraction above 1, cannot be described.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from rasura.core.checked import settle
from rasura.core.errors import InputError
from rasura.core.values import Mechanism, Parameter, Stage

KNOWN: dict[str, type[Protection]] = {}
"""Every protection by name."""


def _of_rasura(kind: type[Protection]) -> bool:
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


@dataclass(frozen=True)
class Protection(Mechanism):
    """A mechanism that answers these questions. The default answers mean that the mechanism does none of these things.

    Raises ``InputError`` for a class of somebody else that takes the name of one of Rasura's.
    """

    name: str = field(init=False, repr=False, compare=False)
    stage: Stage = field(init=False, repr=False, compare=False)
    parameters: Mapping[str, Parameter] = field(init=False, repr=False, compare=False)

    NAME: ClassVar[str]
    STAGE: ClassVar[Stage]

    def __init_subclass__(cls, *, named: str = "", at: Stage = Stage.WIRE) -> None:
        if named:  # else it is what several have in common
            taken = KNOWN.get(named)
            if taken is not None and _of_rasura(taken) and not _of_rasura(cls):
                # Ledgers, update files and settings name protections, and would mean this one from now on.
                raise InputError(f"{cls.__qualname__}: {named!r} names a protection of Rasura; give yours another name")
            cls.NAME, cls.STAGE = named, at
            KNOWN[named] = cls

    def __post_init__(self) -> None:
        told = settle(self, self.NAME)
        object.__setattr__(self, "name", self.NAME)
        object.__setattr__(self, "stage", self.STAGE)
        object.__setattr__(self, "parameters", told)

    def noise_per_entry(self, batch_size: int = 1, entries: int | None = None) -> float:
        """The standard deviation of the noise on one entry of what is sent for ``batch_size`` texts; 0 where none is added.

        It is added after any clipping, and no later part of this protection shrinks it. ``entries``: the total number of
        entries of the update, used only by directional noise; without it the result is an upper bound.
        """
        return 0.0

    @property
    def largest_norm(self) -> float:
        """The largest Euclidean norm of the update before noise is added: its clip. Infinite without clipping."""
        return math.inf

    @property
    def dropout_rate(self) -> float:
        """The fraction of activations that is dropped while the gradient is computed."""
        return 0.0

    @property
    def hides_entries(self) -> bool:
        """Whether some entries of the update do not arrive or are unreadable; the message's masks say which."""
        return False

    @property
    def changes_texts(self) -> bool:
        """Whether the update is computed on texts other than the private ones."""
        return False

    @property
    def accumulates(self) -> bool:
        """Whether an update is held back until it contains enough different tokens."""
        return False
