"""Epsilon of repeated, sampled releases with Gaussian or Laplace noise, and the noise needed for a target epsilon.

PLD (privacy loss distributions) by default, RDP as a cross-check, and ``paper``, the accountant of most papers: RDP on
Opacus' grid of orders. Its large epsilons are artefacts of a grid that starts at 1.1. Only this module imports
dp_accounting.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from rasura.accounting.limits import MAX_LOSSES, MAX_PLD_STEPS, MIN_PLD_DELTA
from rasura.core.errors import InputError, MissingExtra

Accountant = Literal["pld", "rdp", "paper"]
ACCOUNTANTS = ("pld", "rdp", "paper")
NOISES = ("gaussian", "laplace")

MAX_TARGET = 10_000
"""The largest epsilon for which noise is sought; by the accountant ``paper``, whose figures grow so large by its grid alone,
``MAX_NOMINAL``."""

MAX_NOMINAL = 1_000_000

MIN_SIGMA = 1e-3
"""Below this noise multiplier no epsilon is computed: it would exceed a million after a single step."""

MAX_SIGMA = 1e100
"""Above this noise multiplier no epsilon is computed: its square would be too large for a float."""

ROUNDING = 1e-13
"""Added to the logarithm of a moment, absolutely and relatively, so that rounding never brings a bound below the true
value."""

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
        from dp_accounting import pld
    except ImportError:
        raise MissingExtra("epsilon needs dp-accounting; pip install 'rasura[dp]'") from None
    assert pld is not None  # it is an attribute of the package from here on
    # It tells of every order that it leaves out, which only makes the bound larger.
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield dp_accounting
    finally:
        log.setLevel(level)


class Sampled(NamedTuple):
    """``steps`` releases with noise multiplier ``sigma``, each text in each with probability ``rate``."""

    sigma: float
    rate: float
    steps: int
    noise: str = "gaussian"

    def checked(self) -> Sampled:
        """These figures. Raises ``InputError`` if they are invalid."""
        if not 0 < self.sigma < math.inf:
            raise InputError(f"accounting: sigma is {self.sigma}; expected a finite number above 0")
        if self.sigma < MIN_SIGMA:
            raise InputError(
                f"accounting: sigma {self.sigma:.3g} is too small for any guarantee; expected {MIN_SIGMA} or more"
            )
        if self.sigma > MAX_SIGMA:
            raise InputError(f"accounting: sigma is {self.sigma:.3g}; expected at most {MAX_SIGMA:.0e}")
        if not 0 < self.rate <= 1 or not 1 <= self.steps < math.inf:
            raise InputError(
                f"accounting: rate {self.rate}, {self.steps} steps; expected a rate above 0 and at most 1, at least 1 step"
            )
        if self.noise not in NOISES:
            raise InputError(f"accounting: unknown noise {self.noise!r}; known: {', '.join(NOISES)}")
        return self


def pure_of_laplace(part: Sampled) -> float:
    """Epsilon at delta 0 of one sampled release with Laplace noise."""
    unseen = math.log1p(-part.rate) if part.rate < 1 else -math.inf
    return float(np.logaddexp(unseen, math.log(part.rate) + 1 / part.sigma))


def finite(what: str, value: float) -> float:
    """``value`` if it is finite. Otherwise raises ``InputError``, since no guarantee can rest on it."""
    if not math.isfinite(value):
        raise InputError(f"accounting: {what} is {value}, so nothing is guaranteed; use more noise or fewer steps")
    return value


def epsilon(
    sigma: float, rate: float, steps: int, delta: float, *, by: Accountant = "pld", noise: str = "gaussian"
) -> float:
    """Epsilon of ``steps`` releases with noise multiplier ``sigma``, each text in each with probability ``rate``.

    Neighbouring data sets differ in one text, added or removed. With ``pld`` and ``rdp`` the result is never below the true
    value. For that, ``pld`` is ``rdp`` at a delta below ``MIN_PLD_DELTA``, and above ``MAX_PLD_STEPS`` for the time. Only
    ``pld`` takes Laplace noise. Raises ``InputError`` for invalid values, and if no finite number was found.
    """
    return composed_epsilon((Sampled(sigma, rate, steps, noise),), delta, by=by)


@lru_cache(256)
def composed_epsilon(parts: tuple[Sampled, ...], delta: float, *, by: Accountant = "pld") -> float:
    """Epsilon of all ``parts`` in sequence, computed as in ``epsilon``."""
    if not parts:
        raise InputError("accounting: there is no release; expected at least one")
    for part in parts:
        part.checked()
    checked_delta(delta)
    if by not in ACCOUNTANTS:
        raise InputError(f"unknown accountant {by!r}; known: {', '.join(ACCOUNTANTS)}")
    gaussian = all(part.noise == "gaussian" for part in parts)
    if not gaussian and by != "pld":
        raise InputError(f"the accountant {by} supports only Gaussian noise; use pld")
    if by != "pld":
        return finite("epsilon", _by_orders(parts, delta, PAPER_ORDERS if by == "paper" else ORDERS))
    if _by_orders_only(parts, delta):
        return finite("epsilon", _by_orders(parts, delta, ORDERS))
    for less in (0.0, 1e-4, 1e-3, 1e-2):
        # The library's numbers overflow at single points. Less noise never has a smaller epsilon: a bound, too.
        found = _by_library(tuple(p._replace(sigma=p.sigma * (1 - less)) for p in parts), delta)
        if math.isfinite(found):
            return found
    return finite("epsilon", _by_orders(parts, delta, ORDERS))


def _by_orders_only(parts: Sequence[Sampled], delta: float) -> bool:
    return delta < MIN_PLD_DELTA or sum(part.steps for part in parts) > MAX_PLD_STEPS


def _by_library(parts: Sequence[Sampled], delta: float, digits: float | None = None) -> float:
    with _library() as library:

        def event(part: Sampled) -> Any:
            one = library.LaplaceDpEvent(part.sigma) if part.noise == "laplace" else library.GaussianDpEvent(part.sigma)
            return library.SelfComposedDpEvent(
                library.PoissonSampledDpEvent(part.rate, one) if part.rate < 1 else one, part.steps
            )

        events = [event(part) for part in parts]
        # What the library keeps of a Gaussian ends some ten standard deviations out. Laplace losses end at their epsilon.
        widest = max(1 / p.sigma if p.noise == "laplace" else 0.5 / p.sigma**2 + 10 / p.sigma for p in parts)

        def by_loss(width: float) -> float:
            width = max(width, widest / MAX_LOSSES)
            accountant = library.pld.PLDAccountant(value_discretization_interval=width)
            try:
                with np.errstate(all="ignore"):
                    for one in events:
                        accountant.compose(one)
                    found = float(accountant.get_epsilon(delta))
            except OverflowError:
                return math.inf
            return math.inf if math.isnan(found) else found

        # The loss is rounded up to a grid: fine enough for four digits, not so fine that large losses fill the memory.
        if digits is not None:
            return by_loss(digits)
        laplace = [part for part in parts if part.noise == "laplace"]
        others = [part for part in parts if part.noise != "laplace"]
        about = sum(part.steps / part.sigma for part in laplace) + (_by_orders(others, delta, ORDERS) if others else 0.0)
        found = by_loss(max(1e-4, about / 1e4))
        return found if about < 1.5 * found else by_loss(max(1e-4, found / 1e5))


def _by_orders(parts: Sequence[Sampled], delta: float, orders: Sequence[float]) -> float:
    """Epsilon of sampled mechanisms by RDP on a grid of rising orders (Mironov et al. 2019)."""
    found = math.inf
    for order in orders:
        spent = sum(part.steps * _of_part(part, order) for part in parts)
        found = min(found, converted(order, spent, delta))
        # A divergence does not fall with its order, so no larger order gives less than this, and the largest cost most.
        if spent + math.log1p(-1 / order) - math.log(order) / (order - 1) > found * (1 + 1e-9):
            break
    if any(part.noise != "laplace" for part in parts):
        return found
    return min(found, sum(part.steps * pure_of_laplace(part) for part in parts) * (1 + ROUNDING))


def _of_part(part: Sampled, order: float) -> float:
    """A bound on the Renyi divergence of ``order`` of one release. Laplace noise of pure epsilon e has at most e, and no
    more than ``order * e**2 / 2`` (Bun and Steinke 2016, proposition 3.3)."""
    if part.noise != "laplace":
        return _divergence(part.sigma, part.rate, order)
    pure = pure_of_laplace(part)
    return min(pure, order * pure**2 / 2) * (1 + ROUNDING) + ROUNDING


def _divergence(sigma: float, rate: float, order: float) -> float:
    """The Renyi divergence of ``order`` of one sampled release.

    By quadrature: fast, and right for all orders; dp_accounting leaves out orders whose series converges slowly.
    """
    # At order a the integrand is a row of bells of width sigma between 0 and a.
    x = np.arange(-12 * sigma, order + 12 * sigma, sigma / 8)
    ratio = (2 * x - 1) / (2 * sigma**2)
    mixed = np.logaddexp(math.log1p(-rate), math.log(rate) + ratio) if rate < 1 else ratio
    logs = order * mixed - x**2 / (2 * sigma**2)
    top = float(logs.max())
    moment = top + math.log(float(np.exp(logs - top).sum()) / 8) - 0.5 * math.log(2 * math.pi)
    return (max(0.0, finite("a moment", moment)) * (1 + ROUNDING) + ROUNDING) / (order - 1)


def converted(order: float, spent: float, delta: float) -> float:
    """Epsilon at ``delta`` of a Renyi divergence ``spent`` (Canonne, Kamath, Steinke 2020, prop. 12)."""
    if math.isnan(spent) or spent < 0 or not 1 < order < math.inf:
        raise InputError(f"accounting: a divergence of {spent} at order {order}; expected at least 0, at an order above 1")
    return max(0.0, spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


@lru_cache(256)
def sigma_for(
    target: float, rate: float, steps: int, delta: float, *, by: Accountant = "pld", noise: str = "gaussian"
) -> float:
    """The smallest noise multiplier, to a thousandth, with an epsilon of at most ``target``: never less privacy than
    requested."""
    most = MAX_NOMINAL if by == "paper" else MAX_TARGET
    if not 0 < target <= most:
        raise InputError(
            f"accounting: the target epsilon is {target}; expected above 0 and at most {most}: more bounds nothing"
        )

    epsilon(1.0, rate, steps, delta, by="paper" if (by, noise) == ("pld", "gaussian") else by, noise=noise)  # what cannot be
    if by == "paper":
        return _as_opacus(lambda sigma: math.inf if sigma < MIN_SIGMA else epsilon(sigma, rate, steps, delta, by=by), target)

    def spent(sigma: float, digits: float) -> float:
        part = (Sampled(sigma, rate, steps, noise),)
        by_orders = by == "rdp" or _by_orders_only(part, delta)
        return _by_orders(part, delta, ORDERS) if by_orders else _by_library(part, delta, digits)

    # RDP is quick and asks for somewhat more noise than is needed.
    if noise == "laplace":
        high = steps / target
    else:
        high = _least(lambda s: _by_orders((Sampled(s, rate, steps),), delta, ORDERS), target)
    # On a coarse grid first, which asks for a little more noise than a fine one, and takes a tenth of the time.
    for digits, less in ((max(1e-3, target / 1e3), 0.5), (max(1e-4, target / 1e4), 0.999)):
        low = high
        while low > MIN_SIGMA and spent(low, digits) <= target:
            low, high = max(MIN_SIGMA, less * low), low
        while spent(high, digits) > target:
            low, high = high, 1.05 * high
        while high - low > 5e-4 * high:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if spent(middle, digits) <= target else (middle, high)
    return high


def _least(spent: Callable[[float], float], target: float) -> float:
    low, high = 1e-3, 1e5
    if spent(high) > target:
        raise InputError(
            f"no noise up to {high:.0f} is shown to give epsilon {target}; choose a larger epsilon or a larger delta"
        )
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
            raise InputError(f"no noise up to 1e6 gives epsilon {target}; choose a larger epsilon or a larger delta")
    while target - reached > 0.01 and high - low > 1e-6 * high:
        middle = (low + high) / 2
        found = spent(middle)
        if found < target:
            high, reached = middle, found
        else:
            low = middle
    return high
