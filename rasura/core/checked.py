"""Fields of frozen dataclasses with rules for their values, and the check of these rules."""

from __future__ import annotations

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any

from rasura.core.errors import InputError
from rasura.core.values import Parameter


@dataclass(frozen=True)
class Rule:
    """The allowed values of a field: a number between bounds (``open`` bounds excluded), one of ``words``, a flag, or
    None."""

    kind: type[float] | type[int] | type[str] | type[bool]
    minimum: float = -math.inf
    maximum: float = math.inf
    open: str = ""
    words: tuple[str, ...] = ()
    optional: bool = False
    infinite: bool = False

    def checked(self, owner: str, name: str, value: Any) -> Parameter:
        if value is None and self.optional:
            return None
        if self.kind is bool or self.kind is str:
            fits = isinstance(value, self.kind) and (not self.words or value in self.words)
        else:
            fits = isinstance(value, (int, float)) and not isinstance(value, bool) and self._within(value)
        if not fits:
            raise InputError(f"{owner}: {name} is {value!r}; expected {self.wanted}")
        made: Parameter = self.kind(value)
        return made

    def _within(self, value: float) -> bool:
        if not math.isfinite(value) and not (self.infinite and value == math.inf):
            return False
        low = value > self.minimum if "low" in self.open else value >= self.minimum
        high = value < self.maximum if "high" in self.open else value <= self.maximum
        return low and high and (self.kind is float or value == int(value))

    @property
    def wanted(self) -> str:
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return " or ".join(self.words) or "text"
        ends = []
        if self.minimum > -math.inf:
            ends.append(f"{'above' if 'low' in self.open else 'at least'} {self.minimum:g}")
        if self.maximum < math.inf:
            ends.append(f"{'below' if 'high' in self.open else 'at most'} {self.maximum:g}")
        what = "whole " if self.kind is int else "" if self.infinite else "finite "
        return f"a {what}number {' and '.join(ends)}".rstrip()


def _is(*default: Any, absent: bool = False, **rule: Any) -> Any:
    """A field with its rule, and a ``default`` if one is given. ``absent``: the field is no parameter when it is None."""
    known = {"rule": Rule(**rule), "absent": absent}
    return field(default=default[0], metadata=known) if default else field(metadata=known)


def number(*default: float | None, **rule: Any) -> Any:
    """A field that is a number, with its ``Rule``, and a ``default`` if one is given."""
    return _is(*default, kind=float, **rule)


def whole(*default: int | None, **rule: Any) -> Any:
    """A field that is a whole number."""
    return _is(*default, kind=int, **rule)


def word(*default: str | None, **rule: Any) -> Any:
    """A field that is a text: one of ``words``, if they are given."""
    return _is(*default, kind=str, **rule)


def flag(*default: bool) -> Any:
    """A field that is true or false."""
    return _is(*default, kind=bool)


def rules(kind: Any) -> dict[str, Field[Any]]:
    """The fields of ``kind`` that have a rule, by name."""
    return {one.name: one for one in fields(kind) if "rule" in one.metadata}


def settle(made: Any, owner: str) -> dict[str, Parameter]:
    """Check every field with a rule and set it to its plain value. Returns these values without the absent ones.

    ``made`` may be frozen. Raises ``InputError``, which names ``owner``, for a value that breaks its rule.
    """
    told: dict[str, Parameter] = {}
    for name, one in rules(made).items():
        value = one.metadata["rule"].checked(owner, name, getattr(made, name))
        object.__setattr__(made, name, value)
        if value is not None or not one.metadata["absent"]:
            told[name] = value
    return told
