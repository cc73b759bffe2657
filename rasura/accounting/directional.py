"""Epsilon of directional privacy: draws from the von Mises-Fisher distribution around each text's direction (DirDP)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rasura.accounting.epsilon import ORDERS, checked_delta, converted
from rasura.errors import InputError


def log_normaliser(kappa: float, dimension: int) -> float:
    """log C_d(kappa) less its value at kappa 0, C_d being the constant of the von Mises-Fisher density.

    By the uniform expansion of the Bessel function (DLMF 10.41.3), written so that nothing cancels; below 60 dimensions by
    the function itself.
    """
    nu = dimension / 2 - 1
    if dimension == 1:
        return -(abs(kappa) + math.log1p(math.exp(-2 * abs(kappa))) - math.log(2))
    if kappa == 0 or kappa * kappa < 1e-8 * dimension:
        return -kappa * kappa / (2 * dimension)
    if dimension < 60:
        from scipy import special

        log_bessel = math.log(float(special.ive(nu, kappa))) + kappa
        return nu * math.log(kappa / 2) - math.lgamma(nu + 1) - log_bessel
    z = kappa / nu
    r = math.hypot(1, z)
    p, beyond = 1 / r, z * z / (1 + r)
    first = (3 * p - 5 * p**3) / 24
    second = (81 * p**2 - 462 * p**4 + 385 * p**6) / 1152
    third = (30375 * p**3 - 369603 * p**5 + 765765 * p**7 - 425425 * p**9) / 414720

    def series(a: float, b: float, c: float) -> float:
        return math.log1p(a / nu + b / nu**2 + c / nu**3)

    at_zero = series(-1 / 12, 1 / 288, 139 / 51840)
    return nu * (math.log1p(beyond / 2) - beyond) + 0.5 * math.log(r) - series(first, second, third) + at_zero


def renyi_divergence(order: float, kappa: float, dimension: int) -> float:
    """Of order ``order`` between two opposite von Mises-Fisher distributions, the worst case for a text that is replaced."""
    return (log_normaliser(kappa, dimension) - log_normaliser((2 * order - 1) * kappa, dimension)) / (order - 1)


def directional_epsilon(kappa: float, sizes: Sequence[int], releases: int, delta: float) -> float:
    """Epsilon of ``releases`` draws around a text's directions, one for each block of ``sizes`` entries with its share of
    ``kappa``; the least of RDP over all orders and of the pure guarantee. Neighbours differ in one text that is replaced."""
    if not 0 < kappa < math.inf:
        raise InputError(f"accounting: kappa is {kappa}; expected a finite number above 0")
    if releases < 1 or not sizes or min(sizes) < 1:
        raise InputError(f"accounting: {releases} releases of blocks {list(sizes)[:4]}; expected at least one of each")
    checked_delta(delta)
    counts: dict[int, int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    share = kappa / sum(sizes)
    best = 2 * kappa * releases
    for order in (*ORDERS, *(2**k for k in range(10, 31))):
        spent = releases * sum(n * renyi_divergence(order, share * size, size) for size, n in counts.items())
        best = min(best, converted(order, spent, delta))
    return best
