"""How shadow tokens are chosen: the settings of GHOST's selection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rasura.core.interfaces import InputError


@dataclass(frozen=True)
class Selection:
    """How shadow tokens are chosen: the ``beam`` best texts are kept, ``tried`` candidates a place are run through the model
    (0: all, as in the paper), and sweeps over the text end when one improves the error by less than the fraction ``enough``
    or after ``sweeps``; none leaves the ``start``, each place's ``nearest`` substitute or a ``random`` one (the paper's).

    The paper stops on an absolute change, which longer texts dilute, and inside the sweep; here on a relative one, after it.
    """

    beam: int = 1
    tried: int = 8
    sweeps: int = 2
    enough: float = 0.01
    start: Literal["nearest", "random"] = "nearest"

    def __post_init__(self) -> None:
        if self.start not in ("nearest", "random"):
            raise InputError(f"ghost: start is {self.start!r}; expected nearest or random")
        if self.beam < 1 or self.tried < 0 or self.sweeps < 0 or not 0 <= self.enough < 1:
            raise InputError(f"ghost: beam {self.beam}, tried {self.tried}, sweeps {self.sweeps}, enough {self.enough}")


DEFAULT = Selection()
