"""Epsilon of directional privacy: draws from the von Mises-Fisher distribution around each text's direction (DirDP).

Everything follows from the mean cosine of a draw with its direction, a ratio of two Bessel functions. It is the derivative
of the log normaliser, so divergences are averages of it: sums of positive numbers without cancellation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rasura.accounting.epsilon import ORDERS, checked_delta, converted
from rasura.core.errors import InputError

Floats = NDArray[np.float64]

GRID = (*ORDERS, *(2.0**k for k in range(10, 31)))
"""Orders over which the smallest epsilon is taken."""

TERMS = 14
"""Of the series at large orders: the rest is below 1e-16 of it where order and concentration together reach LARGE."""

LARGE = 64.0

NODES = 12
"""Of the quadrature in a panel of length 1 in log t: the nearest pole lies pi / 2 away, so that it is right to 1e-15."""

MARGIN = 1e-9
"""Relative amount added to an epsilon, so that rounding never brings it below the true value."""


def log_normaliser(kappa: float, dimension: int) -> float:
    """Log C_d(kappa) less its value at kappa 0, C_d being the constant of the von Mises-Fisher density; right to 1e-12."""
    _checked(kappa, dimension)
    if not kappa:
        return 0.0
    nodes, weights = np.polynomial.legendre.leggauss(3 * NODES)
    # Around 0 the poles are at least max(1, order) away from the real axis.
    near = min(kappa, max(1.0, dimension / 2 - 1))
    total = float(weights @ mean_cosine(near / 2 * (1 + nodes), dimension)) * near / 2
    if kappa > near:
        total += near * float(_areas(near, np.array([math.log(kappa / near)]), dimension)[0])
    return -total


def renyi_divergence(order: float, kappa: float, dimension: int) -> float:
    """The Renyi divergence of order ``order`` between two opposite von Mises-Fisher distributions, the worst case when a
    text is replaced.

    Twice ``kappa`` times the mean of ``mean_cosine`` between ``kappa`` and ``(2 * order - 1) * kappa``; to 1e-11 of itself,
    and not below the true value. Raises ``InputError`` unless ``order`` is above 1 and ``kappa`` at least 0, both finite.
    """
    return float(_divergences(np.array([order]), kappa, dimension)[0])


def directional_epsilon(kappa: float, sizes: Sequence[int], releases: int, delta: float) -> float:
    """Epsilon of ``releases`` draws around a text's directions, one for each block of ``sizes`` entries with its part of
    ``kappa``: the minimum of RDP over all orders and of the pure guarantee. Neighbouring data sets differ in one replaced
    text.

    Never below the true value. Raises ``InputError`` for invalid values, and if a figure is not finite.
    """
    if not 0 < kappa < math.inf:
        raise InputError(f"accounting: kappa is {kappa}; expected a finite number above 0")
    if releases < 1 or not sizes or min(sizes) < 1:
        raise InputError(f"accounting: {releases} releases of blocks {list(sizes)[:4]}; expected at least one of each")
    checked_delta(delta)
    counts: dict[int, int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    orders = np.array(GRID)
    spent = np.zeros(len(orders))
    for size, count in counts.items():
        spent += releases * count * _divergences(orders, kappa * (size / sum(sizes)), size)
    found = [_finite("epsilon", 2 * kappa * releases)]
    for order, one in zip(GRID, spent.tolist()):
        found.append(converted(order, one, delta) * (1 + MARGIN))
    return min(found)


def mean_cosine(kappa: Floats, dimension: int) -> Floats:
    """The mean cosine of a draw with its direction, ``I_(v+1)(kappa) / I_v(kappa)`` at v = ``dimension / 2 - 1``.

    ``kappa`` ``(n,)`` above 0; right to 1e-14 of itself for every dimension and size. Orders too low for the series begin
    further up and come down by ``r_v = 1 / (2 (v + 1) / kappa + r_(v+1))``, which takes errors off.
    """
    order = dimension / 2 - 1
    steps = max(0, math.ceil(LARGE - order))
    ratio = _series(order + steps, kappa)
    for above in range(steps, 0, -1):
        ratio = 1 / (2 * (order + above) / kappa + ratio)
    return ratio


@cache
def _coefficients() -> tuple[Floats, ...]:
    """Of c_1(q) / q to c_TERMS(q) / q, the highest power first.

    ``w = t I_v'(t) / I_v(t)`` solves ``t w' + w^2 = v^2 + t^2``. With ``s^2 = v^2 + t^2`` and ``q = t^2 / s^2`` it is the
    sum of ``c_j(q) s^(1 - j)``, ``c_0 = 1``, whose other terms the equation gives (DLMF 10.41 in another form).
    """
    found: list[list[Fraction]] = [[Fraction(1)]]
    for m in range(1, TERMS + 1):
        total = [Fraction(0)] * (m + 1)
        for i in range(1, m):
            for a, one in enumerate(found[i]):
                for b, other in enumerate(found[m - i]):
                    total[a + b] += one * other
        for power, c in enumerate(found[m - 1]):
            # 2 q (1 - q) c' + (2 - m) q c
            total[power] += 2 * power * c
            total[power + 1] += (2 - m - 2 * power) * c
        found.append([-c / 2 for c in total])
    return tuple(np.array([float(a) for a in reversed(c[1:])]) for c in found[1:])


def _series(order: float, t: Floats) -> Floats:
    """``I_(order+1)(t) / I_order(t)``, as ``(w - order) / t`` with the difference taken term by term."""
    s = np.hypot(order, t)
    share = t / s
    q = share * share
    total = np.zeros_like(t)
    for c in reversed(_coefficients()):
        total = (total + np.polyval(c, q)) / s
    ratio: Floats = t / (s + order) + share * total
    return ratio


def _areas(start: float, ends: Floats, dimension: int) -> Floats:
    """The integrals of ``mean_cosine`` from ``start`` to ``start * exp(end)`` over ``start``, for rising ``ends``."""
    edges = np.concatenate([[0.0], ends])
    panels = np.maximum(1, np.ceil(np.diff(edges))).astype(int)
    cuts = np.concatenate([np.linspace(a, b, n + 1)[:-1] for a, b, n in zip(edges, edges[1:], panels)] + [edges[-1:]])
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    half = np.diff(cuts)[:, None] / 2
    places = cuts[:-1, None] + half * (1 + nodes)
    grown = np.exp(places)
    values = mean_cosine((start * grown).ravel(), dimension).reshape(grown.shape) * grown
    each = (values * weights).sum(1) * half[:, 0]
    out: Floats = each.cumsum()[panels.cumsum() - 1]
    return out


def _divergences(orders: Floats, kappa: float, dimension: int) -> Floats:
    """``renyi_divergence`` for rising ``orders``."""
    _checked(kappa, dimension)
    if not bool((np.isfinite(orders) & (orders > 1)).all()):
        raise InputError(f"accounting: orders {orders.tolist()[:4]}; expected finite numbers above 1")
    _finite("kappa times the order", 2 * float(orders.max()) * kappa)
    if not kappa:
        return np.zeros(len(orders))
    areas = _areas(kappa, np.log1p(2 * (orders - 1)), dimension)
    # The privacy loss of a draw is at most 2 kappa.
    out: Floats = np.minimum(kappa * areas / (orders - 1) * (1 + MARGIN / 100), 2 * kappa)
    for one in out.tolist():
        _finite("a divergence", one)
    return out


def _checked(kappa: float, dimension: int) -> None:
    if not 0 <= kappa < math.inf or dimension < 1:
        raise InputError(
            f"accounting: kappa {kappa} in {dimension} dimensions; expected a finite number, at least 1 dimension"
        )


def _finite(what: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise InputError(f"accounting: {what} is {value}, so nothing is guaranteed; choose other values")
    return value
