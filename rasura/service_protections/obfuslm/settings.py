"""The settings of an obfuscation. They are not secret."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite

from rasura.core.interfaces import InputError


@dataclass(frozen=True)
class ObfuscationSettings:
    """Rows a cluster ``k``, strength ``epsilon`` of a row's own share in its mixture, threshold ratio ``beta``; ``k=1`` only
    permutes the vocabulary. Unless ``calibrated``, neither k nor epsilon is a guarantee: ``docs/obfuslm.md`` says what they
    achieve in measurements.

    ``plus``: ObfusLM+, the hidden dimension too, with ``hidden_k`` and ``hidden_epsilon`` (the paper's 10 and 3).
    ``disjoint=False`` and ``merge_leftovers=False`` are the algorithms as printed. ``calibrated``, ours: noise of one width
    a cluster and a new random order within it. Then epsilon bounds how often the table alone tells a token
    (``synthesis.max_success``). Raises ``InputError`` for invalid values.

    Examples:
        >>> ObfuscationSettings(k=4).plus
        False

    """

    k: int = 10
    epsilon: float = 1.0
    beta: float = 0.99
    plus: bool = False
    hidden_k: int = 10
    hidden_epsilon: float = 3.0
    disjoint: bool = True
    merge_leftovers: bool = True
    calibrated: bool = False

    def __post_init__(self) -> None:
        for name in ("k", "hidden_k"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected a number of rows of at least 1")
        for name in ("epsilon", "hidden_epsilon"):
            if not (getattr(self, name) > 0 and isfinite(getattr(self, name))):
                raise InputError(f"{name} is {getattr(self, name)}; expected a finite number above 0")
        if self.calibrated and not (self.disjoint and self.merge_leftovers):
            raise InputError("calibrated noise needs clusters of at least k rows; leave out disjoint and merge_leftovers")
        if not 0 <= self.beta <= 1:
            raise InputError(f"beta is {self.beta}; expected a fraction between 0 and 1")

    def to_dict(self) -> Mapping[str, float | int | bool]:
        """The settings by name, as plain figures."""
        return asdict(self)
