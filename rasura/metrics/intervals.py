"""Intervals of 95 % with guaranteed coverage at every n: for means, fractions and areas under a ROC curve.

None of them uses a normal limit or resampling. A bootstrap of three equal values is a single point, and never covers a mean
elsewhere; these intervals are as wide as three values require.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rasura.core.errors import InputError

Array = NDArray[np.float64]

STEPS = 45
"""Halvings until an end of an interval is found. What is left lies outside the true end, so coverage is never lost."""

BETS = 8
"""Bets of different courage that the capital is spread over; each twice as bold as the one before, with half its share."""

ROUNDING = 1e-6
"""Values this far outside their range, in widths of the range, are taken for its end: what rounding does to a cosine."""

SLACK = 1e-12
"""How far a mean must lie below a share to count as below: more than sums of binomial terms err."""


def _checked(level: float) -> float:
    if not 0 < level < 1:
        raise ValueError(f"the level is {level}; expected a fraction between 0 and 1, such as 0.95")
    return level


def proportion_interval(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The interval of a probability from ``hits`` in ``n`` independent trials (Clopper and Pearson 1934).

    Each end is wrong with a probability of at most ``(1 - level) / 2``, at every n and every probability. Raises
    ``ValueError`` for hits that are not among 0 to n, or no trial.

    No hit in ten trials does not show that the probability is zero:

    >>> low, high = proportion_interval(0, 10)
    >>> low, round(high, 3)
    (0.0, 0.308)
    """
    from scipy.stats import beta

    if n < 1 or not 0 <= hits <= n:
        raise ValueError(f"{hits} hits of {n} trials; expected at least one trial, and hits from 0 to the number of trials")
    tail = (1 - _checked(level)) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits, n - hits + 1))
    high = 1.0 if hits == n else float(beta.ppf(1 - tail, hits + 1, n - hits))
    return low, high


def mean_interval(
    values: Sequence[float], *, low: float = 0.0, high: float = 1.0, level: float = 0.95
) -> tuple[float, float, float]:
    """The mean of ``values`` and an interval of their expectation, by betting (Waudby-Smith and Ramdas 2024).

    ``values`` are independent draws with the same expectation, each in ``[low, high]``, from any distribution. NaN values (a
    metric that does not apply) are left out; ``(nan, nan, nan)`` without others. Raises ``ValueError`` for a value outside.

    To test an expectation m, a gambler starts with 1 and bets against it: ``K(m) = sum_j w_j prod_i (1 + b_j (x_i - m))``.
    No bet can lose more than is there, and if m is right none gains on average, so by Markov's inequality ``K(m)`` reaches
    ``2 / (1 - level)`` with a chance of at most ``(1 - level) / 2``. The interval is every m at which neither who bets on
    more nor who bets on less becomes that rich. It covers at every n, for every law in the range.

    Differs from the paper, which bets on one value after another, by what came before: the bets here are fixed by n and
    level alone (a spread over bets is the paper's diversified betting). So the order of the values does not count, nothing
    is drawn, and the mean is always inside, since a product of ``1 + b (x_i - mean)`` is at most 1. Values that are all 0
    or 1 get the same interval as others: to choose Clopper and Pearson's once the values are seen could lose coverage.
    Where the law is known beforehand to be 0 or 1, ``proportion_interval`` is narrower.

    >>> [round(x, 2) for x in mean_interval([0.1, 0.3, 0.2, 0.4])]
    [0.25, 0.06, 0.73]
    """
    scaled = _scaled(np.array([v for v in values if not math.isnan(v)], dtype=np.float64), low, high)
    if not scaled.size:
        return math.nan, math.nan, math.nan
    ends = mean_intervals(scaled[None], level)
    mean = math.fsum(scaled) / len(scaled)
    # The ends are found in another order of sums than the mean, so rounding could put them a bit past it.
    first, last = min(float(ends[0][0]), mean), max(float(ends[1][0]), mean)
    width = high - low
    return low + width * mean, low + width * first, high - width * (1 - last)


def _scaled(values: Array, low: float, high: float) -> Array:
    """``values`` of the range ``low`` to ``high`` in [0, 1]. Raises ``ValueError`` for no range, ``InputError`` for a value
    outside."""
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"the range is {low} to {high}; expected two finite numbers, the lower one first")
    scaled: Array = (values - low) / (high - low)
    if values.size and (scaled.min() < -ROUNDING or scaled.max() > 1 + ROUNDING):
        raise InputError(
            f"a value lies outside [{low:g}, {high:g}]: the values go from {values.min():g} to {values.max():g}"
        )
    return scaled.clip(0, 1)


def mean_or_interval(
    values: Sequence[float], bounds: tuple[float, float] | None, level: float = 0.95
) -> tuple[float, float, float]:
    """``mean_interval`` of the values of a metric with the range ``bounds``.

    Without a range (None) nothing covers at every n: the mean, and NaN for both ends.
    """
    if bounds is not None:
        return mean_interval(values, low=bounds[0], high=bounds[1], level=level)
    kept = [v for v in values if not math.isnan(v)]
    return (math.fsum(kept) / len(kept) if kept else math.nan), math.nan, math.nan


PAIRINGS = 64
"""Ways to deal the texts out to the keys that ``crossed_interval`` bets on."""


def crossed_interval(
    values: Sequence[Sequence[float]], *, low: float = 0.0, high: float = 1.0, level: float = 0.95
) -> tuple[float, float, float]:
    """The mean of ``values``, a row for each key and a column for each text, and an interval of their expectation over both.

    Keys and texts are independent draws; every text was sent with every key, so the values of a row share the key and those
    of a column the text. Each value is in ``[low, high]``. Texts with a NaN are left out; ``(nan, nan, nan)`` where none is
    left. Raises ``ValueError`` for rows of unequal length and for a value outside.

    Dealt out to the keys so that no two keys have a text in common, the means of the keys are independent and have one
    expectation. So betting on them as ``mean_interval`` does is fair, and so is the average of such bets over ways to deal,
    which are fixed by the number of keys and texts alone. The interval covers at every number of keys, for every law: five
    keys that all read nothing do not say that every key holds. A bootstrap over keys and texts would: where one key in ten
    is read whole, five keys show none in 59 % of all cases, and their bootstrap is a point.

    >>> [round(x, 2) for x in crossed_interval([[0.0] * 20] * 5)]
    [0.0, 0.0, 0.52]
    """
    if not values or len({len(row) for row in values}) != 1:
        raise ValueError("expected a row of values for each key, all of one length")
    table = np.array(values, dtype=np.float64)
    scaled = _scaled(table[:, ~np.isnan(table).any(0)], low, high)
    if not scaled.size:
        return math.nan, math.nan, math.nan
    mean, threshold = math.fsum(scaled.flat) / scaled.size, math.log(2 / (1 - _checked(level)))
    dealt = _dealt(scaled)
    first, last = (min(_lower_end(rows, threshold), at) for rows, at in ((dealt, mean), (1 - dealt, 1 - mean)))
    width = high - low
    return low + width * mean, low + width * first, high - width * last


def _dealt(table: Array) -> Array:
    """Means of keys over texts of their own ``(ways, n)``, n the smaller of the numbers of keys and texts."""
    rng = np.random.default_rng(0)  # of the shape alone, never of the values
    keys, texts = table.shape
    rows = []
    for _ in range(PAIRINGS):
        hands = np.array_split(rng.permutation(texts), min(keys, texts))
        rows.append([table[key, hand].mean() for key, hand in zip(rng.permutation(keys), hands)])
    return np.array(rows)


def _lower_end(rows: Array, threshold: float) -> float:
    """The largest m found at which betting on more than m makes rich, averaged over ``rows``; 0 where there is none."""
    outside, inside = 0.0, 1.0
    for _ in range(STEPS):
        middle = max((outside + inside) / 2, float(np.finfo(np.float64).tiny))
        made = _capital(rows, np.full(len(rows), middle), threshold)
        rich = float(np.logaddexp.reduce(made)) - math.log(len(rows)) >= threshold
        outside, inside = (middle, inside) if rich else (outside, middle)
    return outside


def mean_intervals(rows: Array, level: float = 0.95) -> tuple[Array, Array]:
    """The ends of ``mean_interval`` for many samples at once: ``rows`` ``(samples, n)`` with values in [0, 1]."""
    threshold = math.log(2 / (1 - _checked(level)))
    ordered = np.sort(np.asarray(rows, dtype=np.float64), axis=1)  # sums in one order, whatever the order of the values
    return _lower_ends(ordered, threshold), 1 - _lower_ends(1 - ordered[:, ::-1], threshold)


def _lower_ends(rows: Array, threshold: float) -> Array:
    """For each row the largest m found at which betting on more than m makes rich; 0 where there is none.

    The capital falls as m grows and is at most 1 at the mean, so the ends are found by halving.
    """
    outside, inside = np.zeros(len(rows)), rows.mean(1)
    for _ in range(STEPS):
        middle = np.maximum((outside + inside) / 2, np.finfo(np.float64).tiny)
        rich = _capital(rows, middle, threshold) >= threshold
        outside, inside = np.where(rich, middle, outside), np.where(rich, inside, middle)
    return outside


def _capital(rows: Array, mean: Array, threshold: float) -> Array:
    """The logarithm of what betting on more than ``mean`` ``(samples,)`` has made of 1 by each of ``rows``.

    The weakest bet is the best one for the widest law, half of the values at either end of the range: with a deviation of
    s, the best bet is about ``sqrt(2 threshold / n) / s``. No bet goes beyond ``1 / mean``, where a 0 takes all; the boldest
    one is there always.
    """
    weakest = 2 * math.sqrt(2 * threshold / rows.shape[1])
    bets = weakest * 2.0 ** np.arange(BETS)
    bets[-1] = np.inf
    shares = 0.5 ** np.arange(1, BETS + 1)
    parts = np.minimum(bets[:, None] * mean, 1)  # (bets, samples), in shares of the boldest
    gains = rows / mean[:, None] - 1
    with np.errstate(divide="ignore"):  # the logarithm of nothing left is minus infinity, as it should be
        made = np.log1p(parts[:, :, None] * gains).sum(2)
    found: Array = np.logaddexp.reduce(made + np.log(shares / shares.sum())[:, None], axis=0)
    return found


def pairs_interval(share: float, members: int, others: int, level: float = 0.95) -> tuple[float, float]:
    """The interval of an AUC: of the chance that a member scores above another text, ties counted half.

    ``share``: the AUC found, the mean over all pairs of ``members`` independent members and ``others`` independent other
    texts. Covers at every number of texts and for all laws of scores; perfect separation of 10 and 10 gives [.69, 1].

    The mean over all pairs is the mean, over all ways to pair texts off, of a mean of ``n = min(members, others)``
    independent values in [0, 1]. Hoeffding (1963, sections 4 and 5) shows that the expectation of a convex function of it is
    at most that of the same function of a binomial share of n trials. Among the functions ``max(0, x - h)``, the best one
    bounds the chance to reach ``share`` by ``(1 - level) / 2`` exactly where ``share`` is the mean of the upper
    ``(1 - level) / 2`` of that binomial law. That is the lower end; the upper end is its mirror image.
    """
    if min(members, others) < 1 or not 0 <= share <= 1:
        raise ValueError(
            f"an AUC of {share} over {members} members and {others} others; expected a fraction, and texts of both kinds"
        )
    tail, n = (1 - _checked(level)) / 2, min(members, others)
    return _lower_share(share, n, tail), 1 - _lower_share(1 - share, n, tail)


def _lower_share(share: float, n: int, tail: float) -> float:
    """The largest probability found at which the upper ``tail`` of a share of ``n`` trials has a mean below ``share``."""
    outside, inside = 0.0, share
    for _ in range(STEPS):
        middle = (outside + inside) / 2
        if _upper_mean(middle, n, tail) < share - SLACK:
            outside = middle
        else:
            inside = middle
    return outside


def _upper_mean(probability: float, n: int, tail: float) -> float:
    """The mean of the upper ``tail`` of a binomial share of ``n`` trials (its expected shortfall)."""
    from scipy.stats import binom

    at = int(binom.isf(tail, n, probability))
    above = float(binom.sf(at, n, probability))
    # The sum of k P(k) over k > at is n p P(B' >= at), B' of n - 1 trials.
    beyond = n * probability * float(binom.sf(at - 1, n - 1, probability))
    return (beyond + at * (tail - above)) / (tail * n)
