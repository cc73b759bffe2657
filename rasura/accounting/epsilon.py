"""Epsilon of repeated, sampled releases with Gaussian or Laplace noise, and the noise that a target epsilon asks for.

PLD (privacy loss distributions) by default, RDP as a cross-check, and ``paper``, the accountant that most papers used: RDP
on Opacus' grid of orders, whose large epsilons are artefacts of a grid that starts at 1.1. This module alone imports
dp_accounting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from rasura.errors import InputError, MissingExtra

Accountant = Literal["pld", "rdp", "paper"]
ACCOUNTANTS = ("pld", "rdp", "paper")

LEAST_SIGMA = 1e-3
"""Below it epsilon is said to be infinite: it is a million and more after a single step."""

PAPER_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
ORDERS = (*(1 + 10 ** (-4 + k / 15) for k in range(60)), *(2 + k / 10 for k in range(1, 90)), *range(12, 64), 128, 256, 512)


def checked_delta(delta: float) -> float:
    """``delta`` if it is a probability above 0 and below 1."""
    if not 0 < delta < 1:
        raise InputError(f"accounting: delta is {delta}; expected above 0 and below 1, less than 1 / number of texts")
    return delta


@contextmanager
def _library() -> Iterator[Any]:
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError:
        raise MissingExtra("epsilon needs dp-accounting; pip install 'rasura[dp]'") from None
    assert pld is not None and rdp is not None  # they are attributes of the package from here on
    # It tells of every order that it leaves out, which only makes the bound larger.
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield dp_accounting
    finally:
        log.setLevel(level)


@lru_cache(256)
def epsilon(
    sigma: float, rate: float, steps: int, delta: float, *, by: Accountant = "pld", noise: str = "gaussian"
) -> float:
    """Epsilon of ``steps`` releases with noise multiplier ``sigma``, each text in each with probability ``rate``.

    Neighbours differ in one text that is there or not. Never below the true value by ``pld`` and ``rdp``. Laplace noise is
    known to ``pld`` alone. Raises ``InputError`` for values that cannot be.
    """
    if not 0 < sigma < math.inf:
        raise InputError(f"accounting: sigma is {sigma}; expected a finite number above 0")
    if not 0 < rate <= 1 or steps < 1:
        raise InputError(f"accounting: rate {rate}, {steps} steps; expected a rate above 0 and at most 1, at least 1 step")
    checked_delta(delta)
    if by not in ACCOUNTANTS:
        raise InputError(f"unknown accountant {by!r}; known: {', '.join(ACCOUNTANTS)}")
    if noise == "laplace" and by != "pld":
        raise InputError(f"the accountant {by} knows Gaussian noise only; use pld")
    if sigma < LEAST_SIGMA:
        return math.inf
    if by == "paper":
        return _by_orders(sigma, rate, steps, delta, PAPER_ORDERS)
    found = math.inf
    for less in (0.0, 1e-4, 1e-3, 1e-2):
        # The library's numbers overflow at single points. Less noise never has a smaller epsilon: a bound, too.
        found = _by_library(sigma * (1 - less), rate, steps, delta, by, noise)
        if math.isfinite(found):
            return found
    return found if noise == "laplace" else _by_orders(sigma, rate, steps, delta, ORDERS)


def _by_library(
    sigma: float, rate: float, steps: int, delta: float, by: Accountant, noise: str, digits: float | None = None
) -> float:
    with _library() as library:
        one = library.LaplaceDpEvent(sigma) if noise == "laplace" else library.GaussianDpEvent(sigma)
        event = library.SelfComposedDpEvent(library.PoissonSampledDpEvent(rate, one) if rate < 1 else one, steps)

        if by == "rdp":
            accountant = library.rdp.RdpAccountant(ORDERS)
            accountant.compose(event)
            return float(accountant.get_epsilon(delta))

        def by_loss(width: float) -> float:
            accountant = library.pld.PLDAccountant(value_discretization_interval=width)
            try:
                with np.errstate(all="ignore"):
                    accountant.compose(event)
                    return float(accountant.get_epsilon(delta))
            except OverflowError:
                return math.inf

        # The loss is rounded up to a grid: fine enough for four digits, not so fine that large losses fill the memory.
        if digits is not None:
            return by_loss(digits)
        about = steps / sigma if noise == "laplace" else _by_orders(sigma, rate, steps, delta, ORDERS)
        found = by_loss(max(1e-4, about / 1e4))
        return found if about < 1.5 * found else by_loss(max(1e-4, found / 1e5))


def _by_orders(sigma: float, rate: float, steps: int, delta: float, orders: Sequence[float]) -> float:
    """Epsilon of the sampled Gaussian mechanism by RDP on a grid of orders (Mironov et al. 2019).

    By quadrature: dp_accounting leaves out low orders whose series is slow, and so has another epsilon than Opacus.
    """
    best = math.inf
    for order in orders:
        # At order a the integrand is a row of bells of width sigma between 0 and a.
        x = np.arange(-12 * sigma, order + 12 * sigma, sigma / 8)
        ratio = (2 * x - 1) / (2 * sigma**2)
        mixed = np.logaddexp(math.log1p(-rate), math.log(rate) + ratio) if rate < 1 else ratio
        logs = order * mixed - x**2 / (2 * sigma**2)
        top = float(logs.max())
        moment = top + math.log(float(np.exp(logs - top).sum()) / 8) - 0.5 * math.log(2 * math.pi)
        best = min(best, converted(order, steps * max(moment, 0.0) / (order - 1), delta))
    return best


def converted(order: float, spent: float, delta: float) -> float:
    """Epsilon at ``delta`` of a Renyi divergence ``spent`` (Canonne, Kamath, Steinke 2020, prop. 12)."""
    return max(0.0, spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def sigma_for(
    target: float, rate: float, steps: int, delta: float, *, by: Accountant = "pld", noise: str = "gaussian"
) -> float:
    """The least noise multiplier, to a thousandth, with at most ``target`` epsilon: never less privacy than asked."""
    if not 0 < target < math.inf:
        raise InputError(f"accounting: the target epsilon is {target}; expected a finite number above 0")

    epsilon(1.0, rate, steps, delta, by="pld" if noise == "laplace" else "paper", noise=noise)  # says what cannot be
    if by == "paper":
        return _as_opacus(lambda sigma: epsilon(sigma, rate, steps, delta, by=by), target)

    def spent(sigma: float) -> float:
        return _by_library(sigma, rate, steps, delta, by, noise, max(1e-4, target / 1e4))

    # RDP is quick and asks for somewhat more noise than is needed.
    high = steps / target if noise == "laplace" else _least(lambda s: _by_orders(s, rate, steps, delta, ORDERS), target)
    low = high
    while spent(low) <= target:
        low, high = 0.8 * low, low
    while spent(high) > target:
        low, high = high, 1.05 * high
    while high - low > 5e-4 * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def _least(spent: Callable[[float], float], target: float) -> float:
    low, high = 1e-3, 1e5
    if spent(high) > target:
        raise InputError(f"no noise up to {high:.0f} gives epsilon {target}; ask for a larger epsilon or a larger delta")
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def _as_opacus(spent: Callable[[float], float], target: float) -> float:
    """Opacus' search: halving from 20 on, until epsilon is within .01 of the target; that slack is part of its figures."""
    low, high = 0.0, 20.0
    while (reached := spent(high)) > target:
        high *= 2
        if high > 1e6:
            raise InputError(f"no noise up to 1e6 gives epsilon {target}; ask for a larger epsilon or a larger delta")
    while target - reached > 0.01 and high - low > 1e-6 * high:
        middle = (low + high) / 2
        found = spent(middle)
        if found < target:
            high, reached = middle, found
        else:
            low = middle
    return high
