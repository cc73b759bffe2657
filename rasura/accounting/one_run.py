"""A lower bound of epsilon from one run: guesses which of many canaries were in the training (one-run auditing).

Each canary is in the training or not by a fair coin of its own. Someone who sees what the training releases guesses for some
of them and abstains for the others. A training that is (epsilon, delta)-private limits how many guesses are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from rasura.accounting.gaussian import gaussian_epsilon
from rasura.core.errors import InputError

LARGEST = 50.0
"""Epsilons above it are not distinguished; a bound never exceeds it."""


@dataclass(frozen=True)
class LowerBound:
    """What one run shows: with ``confidence``, the training is not (e, ``delta``)-private for any e below ``epsilon``.

    ``epsilon`` is 0 where the guesses show nothing. ``right`` of ``guesses`` were right, among ``canaries``.
    """

    epsilon: float
    delta: float
    confidence: float
    canaries: int
    guesses: int
    right: int


def one_run_p_value(epsilon: float, delta: float, canaries: int, guesses: int, right: int) -> float:
    """At most this is the probability of ``right`` or more right guesses, if the training is (epsilon, delta)-private.

    With W binomial of ``guesses`` trials at ``e^epsilon / (1 + e^epsilon)``: ``P[W >= right] + 2 delta canaries`` times the
    largest ``P[right - i <= W < right] / i`` over i (Steinke, Nasr and Jagielski 2023, theorem 5.2). Neighbouring data sets
    differ in one canary, added or removed. The number of guesses must not depend on which of them are right. Raises
    ``InputError`` for invalid values.
    """
    if canaries < 1 or not 0 <= right <= guesses <= canaries:
        raise InputError(
            f"canaries: {right} right of {guesses} guesses on {canaries} canaries; expected numbers in this order"
        )
    if not 0 <= epsilon < math.inf or not 0 <= delta < 1:
        raise InputError(f"canaries: epsilon {epsilon} and delta {delta}; expected at least 0, and delta below 1")
    from scipy.stats import binom

    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, chance))
    if not right or not delta:
        return min(1.0, tail)
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
    steepest = float((below / np.arange(1, right + 1)).max())
    return min(1.0, tail + 2 * delta * canaries * steepest)


def one_run_bound(canaries: int, guesses: int, right: int, delta: float = 0.0, confidence: float = 0.95) -> LowerBound:
    """The largest epsilon that ``one_run_p_value`` refutes at ``confidence``; 0 if it refutes none.

    It exceeds the true epsilon in at most 1 - ``confidence`` of all runs, the coins included. That holds for one number of
    guesses, which is chosen before the coins are looked at; choosing the best of several bounds voids it. Raises
    ``InputError`` for invalid values.
    """
    level = _level(confidence)

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(epsilon, delta, canaries, guesses, right) <= level

    return LowerBound(_largest(refuted), delta, confidence, canaries, guesses, right)


def gaussian_run_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float = 0.95) -> LowerBound:
    """As ``one_run_bound``, for a training that hides a canary as one release with Gaussian noise does.

    A larger bound under a stronger assumption: the trade-off between the two errors of telling whether a canary is there is
    that of Gaussian noise. This holds exactly for full batches with Gaussian noise. With sampling it holds only in the limit
    of many steps, so that the bound is an estimate there. ``epsilon`` is that of the refuted Gaussian mechanism at ``delta``
    (Mahloujifar, Melis and Chaudhuri 2024, algorithm 3 with 2 choices for each canary).
    """
    level = _level(confidence)
    one_run_p_value(0.0, delta, canaries, guesses, right)  # the checks of its values

    def refuted(ratio: float) -> bool:
        # Weights of outcomes with more right guesses than i: of their right guesses, and of their wrong ones.
        known, other = level * right / canaries, level * (guesses - right) / canaries
        for i in range(right - 1, -1, -1):
            needed = max(other, float(ndtr(ndtri(min(known, 1.0)) - ratio)))
            known, other = known + i / (guesses - i) * (needed - other), needed
        return known + other >= guesses / canaries

    ratio = _largest(refuted)
    # The epsilon of a ratio is rounded up by a billionth, and this is a lower bound.
    return LowerBound(gaussian_epsilon(ratio, delta) * (1 - 1e-8), delta, confidence, canaries, guesses, right)


def _level(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise InputError(f"canaries: confidence is {confidence}; expected above 0 and below 1")
    return 1 - confidence


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest value up to ``LARGEST`` that is refuted, to a millionth; 0 if 0 is not."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, LARGEST
    if refuted(high):
        return high
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def right_guesses(scores: NDArray[np.float64], included: NDArray[np.bool_], guesses: int) -> int:
    """How many of ``guesses`` are right: half for the highest ``scores`` (in), half for the lowest (out).

    ``scores`` ``(canaries,)``: larger where a canary seems to be in the training; ``included`` ``(canaries,)``: the coins.
    Equal scores are guessed in their order, which the coins do not depend on. Raises ``InputError`` for scores that are not
    finite, for other shapes, and unless ``guesses`` is even and at most the number of canaries.
    """
    values, coins = np.asarray(scores, np.float64), np.asarray(included)
    if values.ndim != 1 or values.shape != coins.shape or coins.dtype != np.bool_:
        raise InputError(f"canaries: scores {values.shape} and coins {coins.shape} of {coins.dtype}; expected one of each")
    if not bool(np.isfinite(values).all()):
        raise InputError(
            f"canaries: {int((~np.isfinite(values)).sum())} scores are not finite, so no guess can rest on them"
        )
    if guesses % 2 or not 2 <= guesses <= len(values):
        raise InputError(f"canaries: {guesses} guesses on {len(values)} canaries; expected an even number up to it")
    order = np.argsort(values, kind="stable")
    half = guesses // 2
    return int(coins[order[-half:]].sum() + (~coins[order[:half]]).sum())
