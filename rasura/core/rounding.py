"""Figures of a guarantee in words: rounded to the side on which the statement stays true."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def above(value: float, digits: int = 4) -> str:
    """``value`` with ``digits`` significant digits, not below it: what is guaranteed at most."""
    return _rounded(value, digits, ROUND_CEILING)


def below(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits, not above it: what was shown at least."""
    return _rounded(value, digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, how: str) -> str:
    # The shortest decimal that reads as this number: 1e-5 stays 1e-05.
    return f"{float(Context(digits, how).create_decimal(repr(float(value)))):.{digits}g}"
