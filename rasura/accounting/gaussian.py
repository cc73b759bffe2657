"""Epsilon of Gaussian noise without sampling, exact to rounding at every size: tiny noise has an epsilon as well."""

from __future__ import annotations

import math

from scipy.special import log_ndtr

from rasura.accounting.epsilon import Sampled, checked_delta, composed_epsilon, finite
from rasura.core.errors import InputError

MIN_SAMPLED_SIGMA = 0.1
"""Below this noise multiplier sampling is not counted: the grid of losses would not fit into memory."""

MARGIN = 1e-9
"""Relative amount added to an epsilon, so that rounding never brings it below the true value."""


def gaussian_epsilon(ratio: float, delta: float) -> float:
    """Epsilon of the Gaussian mechanism whose sensitivity is ``ratio`` times the deviation of its noise.

    The smallest epsilon with ``Phi(r / 2 - e / r) - exp(e) Phi(-r / 2 - e / r) <= delta`` (Balle and Wang 2018, theorem 8),
    in logarithms, so that it holds for any ``ratio``; never below the true value. ``steps`` releases without sampling are
    one at ``ratio * sqrt(steps)``. Raises ``InputError`` for invalid values, and if no finite number was found.
    """
    checked_delta(delta)
    if not 0 <= ratio < math.inf:
        raise InputError(f"accounting: sensitivity over noise is {ratio}; expected a finite number, at least 0")
    if not ratio:
        return 0.0

    def kept(epsilon: float) -> bool:
        first = float(log_ndtr(ratio / 2 - epsilon / ratio))
        second = epsilon + float(log_ndtr(-ratio / 2 - epsilon / ratio))
        if second >= first:  # their difference is lost to rounding
            return first <= math.log(delta)
        return first + math.log1p(-math.exp(second - first)) <= math.log(delta)

    low, high = 0.0, max(1e-6, ratio * ratio)
    if kept(0.0):
        return 0.0
    while not kept(high):
        low, high = high, 2 * high
        finite("epsilon", high)
    while high - low > 1e-10 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if kept(middle) else (middle, high)
    return finite("epsilon", high * (1 + MARGIN))


def sampled_epsilon(sigma: float, rate: float, steps: int, delta: float) -> float:
    """Epsilon of ``steps`` releases with noise multiplier ``sigma``, each unit in each with probability ``rate``.

    One unit is added or removed. Sampling is counted from ``MIN_SAMPLED_SIGMA`` on; below, the figure is that without
    sampling, which is never smaller. Raises ``InputError`` for invalid values.
    """
    if not 0 < sigma < math.inf:
        raise InputError(f"accounting: sigma is {sigma}; expected a finite number above 0")
    if not 0 < rate <= 1 or not 1 <= steps < math.inf:
        raise InputError(f"accounting: rate {rate}, {steps} steps; expected a rate above 0 and at most 1, at least 1 step")
    everywhere = gaussian_epsilon(math.sqrt(steps) / sigma, delta)
    if rate == 1 or sigma < MIN_SAMPLED_SIGMA:
        return everywhere
    return min(everywhere, composed_epsilon((Sampled(sigma, rate, steps),), delta))
