"""Figures of a guarantee in words: rounded to the side on which the statement stays true."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal


def above(value: float, digits: int = 4) -> str:
    """``value`` with ``digits`` significant digits, not below it: what is guaranteed at most."""
    return _rounded(value, digits, ROUND_CEILING)


def below(value: float, digits: int = 3) -> str:
    """``value`` with ``digits`` significant digits, not above it: what was shown at least."""
    return _rounded(value, digits, ROUND_FLOOR)


def percent(share: float, places: int = 0) -> float:
    """``share`` in percent, to the nearest with ``places`` decimals. 0 and 100 stand for exactly none and all."""
    exact, step = _exact(share), Decimal(1).scaleb(-places)
    near = exact.quantize(step, ROUND_HALF_EVEN)
    if near != exact and near in (0, 100):
        near += step if exact > near else -step
    return float(near)


def percent_above(share: float, places: int = 0) -> float:
    """``share`` in percent with ``places`` decimals, not below it: an upper end."""
    return float(_exact(share).quantize(Decimal(1).scaleb(-places), ROUND_CEILING))


def percent_below(share: float, places: int = 0) -> float:
    """``share`` in percent with ``places`` decimals, not above it: a lower end."""
    return float(_exact(share).quantize(Decimal(1).scaleb(-places), ROUND_FLOOR))


def _exact(share: float) -> Decimal:
    # Sums of floats end in noise: .07 that reads 0.07000000000000001 is 7 %.
    return 100 * Decimal(repr(round(float(share), 12)))


def _rounded(value: float, digits: int, how: str) -> str:
    # The shortest decimal that reads as this number: 1e-5 stays 1e-05.
    return f"{float(Context(digits, how).create_decimal(repr(float(value)))):.{digits}g}"
