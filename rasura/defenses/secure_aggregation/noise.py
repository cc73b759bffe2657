"""Noise inside a sum: each client adds discrete Gaussian noise to its whole steps (Kairouz, Liu and Steinke 2021).

The sampler is exact (Canonne, Kamath and Steinke 2020, Algorithms 1 to 3): it compares whole numbers that come from the
operating system's randomness, and uses no floating-point arithmetic. The deviation is a whole number of steps. What
the noise of all clients together guarantees: ``rasura.accounting.distributed``.

Departure from the paper: there is no random rotation, and rounding is to the nearest step. Where that makes the norm larger
than the clip, the update is made smaller first, so the norm of what is sent never exceeds the clip.
"""

from __future__ import annotations

import math
import os

import numpy as np
from numpy.typing import NDArray

from rasura.core.errors import InputError

NORM = 1 << 16
"""Steps of the clip: the largest Euclidean norm of a client's update is ``NORM`` steps."""

MOST_SIGMA = 1 << 20
"""Largest deviation of one client's noise, in steps; larger ones could overflow 64 bits."""

AT_ONCE = 1 << 18


TAIL = 40
"""Deviations of noise for which an encoding must have room. A larger draw is less likely than ``exp(-800)`` an entry; the
client then refuses the round."""


def sigma_of(multiplier: float, noisy: int, half: int) -> int:
    """The deviation of one client's noise, in steps, so that ``noisy`` clients together have ``multiplier`` times the clip.

    ``half``: the largest number of steps that the encoding can send. Raises ``InputError`` for a multiplier that is not
    above 0, for no client with noise, and for noise that the encoding has no room for.
    """
    if not 0 < multiplier < math.inf or noisy < 1:
        raise InputError(f"noise of {multiplier} times the clip by {noisy} clients; expected both above 0")
    sigma = math.ceil(multiplier * NORM / math.sqrt(noisy))
    if NORM + TAIL * sigma > half or sigma > MOST_SIGMA:
        most = (half - NORM) // TAIL * math.sqrt(noisy) / NORM
        raise InputError(f"noise of {multiplier} times the clip by {noisy} clients; there is room for {most:.3g} times")
    return sigma


def clipped(values: NDArray[np.float64], clip: float) -> NDArray[np.int32]:
    """``values`` ``(n,)`` in steps of ``clip / NORM``, with a Euclidean norm of at most ``NORM`` steps, exactly.

    Raises ``InputError`` for values that are not finite numbers, and for a clip that is not above 0.
    """
    if not np.isfinite(values).all() or not 0 < clip < math.inf:
        raise InputError(f"a clip of {clip} and values that may not be finite numbers; nothing is sent")
    largest = float(np.abs(values).max(initial=0.0))
    norm = largest * math.sqrt(float(np.square(values / largest).sum())) if largest > 0 else 0.0
    factor = NORM / max(clip, norm)
    scaled = values * factor
    for shrunk in (1.0, 0.9999, 0.999, 0.99, 0.0):
        # Rounding to the nearest step may make the norm larger; rounding towards zero never does.
        found = (np.rint(scaled * shrunk) if shrunk else np.trunc(scaled * (1 - 1e-9))).astype(np.int64)
        if int(np.square(found).sum()) <= NORM * NORM:
            return found.astype(np.int32)
    raise InputError("the norm of the update cannot be computed; nothing is sent")


def discrete_gaussian(count: int, sigma: int) -> NDArray[np.int64]:
    """``count`` draws with probability proportional to ``exp(-x**2 / (2 * sigma**2))`` for every whole number x."""
    if isinstance(sigma, bool) or not isinstance(sigma, int) or not 1 <= sigma <= MOST_SIGMA:
        raise InputError(f"noise of {sigma!r} steps; expected a whole number from 1 to {MOST_SIGMA}")
    parts = [_drawn(min(AT_ONCE, count - start), sigma) for start in range(0, count, AT_ONCE)]
    return np.concatenate([np.empty(0, np.int64), *parts])


def _drawn(count: int, sigma: int) -> NDArray[np.int64]:
    found, missing = np.empty(count, np.int64), np.arange(count)
    while len(missing):
        proposed = _discrete_laplace(len(missing), sigma)
        distance = np.abs(proposed) - sigma
        kept = _exp_minus((distance * distance).astype(np.uint64), 2 * sigma * sigma)
        found[missing[kept]] = proposed[kept]
        missing = missing[~kept]
    return found


def _discrete_laplace(count: int, scale: int) -> NDArray[np.int64]:
    """Draws with probability proportional to ``exp(-|x| / scale)``."""
    found, missing = np.empty(count, np.int64), np.arange(count)
    while len(missing):
        rest = _below(np.full(len(missing), scale, np.uint64))
        kept = _exp_minus(rest, scale)
        size = rest.astype(np.int64) + scale * _geometric(len(missing))
        negative = _below(np.full(len(missing), 2, np.uint64)) == 1
        kept &= ~(negative & (size == 0))
        found[missing[kept]] = np.where(negative, -size, size)[kept]
        missing = missing[~kept]
    return found


def _geometric(count: int) -> NDArray[np.int64]:
    """How often in a row a coin of probability 1/e shows heads."""
    found, running = np.zeros(count, np.int64), np.arange(count)
    while len(running):
        running = running[_exp_minus(np.ones(len(running), np.uint64), 1)]
        found[running] += 1
    return found


def _exp_minus(above: NDArray[np.uint64], below: int) -> NDArray[np.bool_]:
    """True with probability ``exp(-above / below)``, for each."""
    whole, rest = (above // np.uint64(below)).astype(np.int64), above % np.uint64(below)
    found = _exp_minus_fraction(rest, below)
    left = np.flatnonzero(found & (whole > 0))
    while len(left):
        heads = _exp_minus_fraction(np.ones(len(left), np.uint64), 1)
        found[left[~heads]] = False
        whole[left] -= 1
        left = left[heads & (whole[left] > 0)]
    return found


def _exp_minus_fraction(above: NDArray[np.uint64], below: int) -> NDArray[np.bool_]:
    """The same where ``above <= below``: the parity of how long coins of ``above / (k * below)`` show heads."""
    found, running, k = np.zeros(len(above), bool), np.arange(len(above)), 1
    while len(running):
        heads = _below(np.full(len(running), k * below, np.uint64)) < above[running]
        found[running[~heads]] = k % 2 == 1
        running, k = running[heads], k + 1
    return found


def _below(bounds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A uniform whole number from 0 to below each bound."""
    drawn = _words(len(bounds))
    # Numbers of the last, incomplete turn would be likelier.
    fair = np.iinfo(np.uint64).max - np.iinfo(np.uint64).max % bounds
    while (again := np.flatnonzero(drawn >= fair)).size:
        drawn[again] = _words(again.size)
    return drawn % bounds


def _words(count: int) -> NDArray[np.uint64]:
    return np.frombuffer(os.urandom(8 * count), np.uint64).copy()
