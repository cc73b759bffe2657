"""How well members were separated from others: AUC, true positive rate at a low false positive rate, privacy leakage, with
intervals.

``scores`` holds one score per candidate, where higher means likelier a member; ``members`` marks the members. An AUC of .5
is guessing. Intervals cover at every number of texts if members and others are independent draws of their kind, and if the
attack was fixed before it saw who is a member.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from rasura.core.errors import InputError
from rasura.metrics.intervals import pairs_interval, proportion_interval

Array = np.ndarray


@dataclass(frozen=True)
class Rate:
    """A figure with its 95 % interval and the number of texts. NaN for both ends means that there is no valid interval."""

    mean: float
    low: float
    high: float
    n: int


def _parted(scores: Sequence[float], members: Sequence[bool]) -> tuple[Array, Array]:
    values, inside = np.asarray(scores, dtype=float), np.asarray(members, dtype=bool)
    if values.shape != inside.shape or values.ndim != 1:
        raise InputError(f"{values.size} scores for {inside.size} candidates; expected one score for each")
    if np.isnan(values).any():
        raise InputError("a score is not a number; expected a figure for every candidate")
    if inside.all() or not inside.any():
        raise InputError(f"{inside.sum()} of {inside.size} candidates are members; expected members and others")
    return values[inside], values[~inside]


def _area(inside: Array, outside: Array) -> float:
    """The share of pairs in which the member is above, ties counted half."""
    low = np.sort(outside)
    wins = np.searchsorted(low, inside, "left") + np.searchsorted(low, inside, "right")
    return float(wins.sum() / (2 * len(inside) * len(outside)))


def auc(scores: Sequence[float], members: Sequence[bool]) -> Rate:
    """The chance that a member scores above another text, ties counted half, with ``pairs_interval``.

    >>> auc([0.9, 0.7, 0.8, 0.1], [True, True, False, False]).mean
    0.75
    """
    inside, outside = _parted(scores, members)
    mean = _area(inside, outside)
    return Rate(mean, *pairs_interval(mean, len(inside), len(outside)), len(inside) + len(outside))


def needed(fpr: float) -> int:
    """The number of members, and of others, needed to measure at a false positive rate of ``fpr``.

    >>> needed(0.01)
    100
    """
    if not 0 < fpr < 1:
        raise InputError(f"the false positive rate is {fpr}; expected a fraction between 0 and 1, such as 0.01")
    return math.ceil(1 / fpr - 1e-9)


def tpr_at(scores: Sequence[float], members: Sequence[bool], fpr: float) -> Rate:
    """The fraction of members found when at most ``fpr`` of the others are mistaken for members.

    Texts that tie at the threshold are not taken. The interval is of the share found at the threshold that takes ``fpr`` of
    *all* others, which few others place badly: Clopper and Pearson's of the members above a threshold that is surely high
    enough, and above one that is surely low enough (order statistics of the others). Where no threshold is, the end is 0 or
    1: 100 others cannot show which threshold takes 1 % of all. Raises ``InputError`` with the number needed when there are
    fewer than ``1 / fpr`` members or others.
    """
    inside, outside = _parted(scores, members)
    min_texts = needed(fpr)
    if min(len(inside), len(outside)) < min_texts:
        raise InputError(
            f"{len(inside)} members and {len(outside)} others are too few for a false positive rate of {fpr:g}; "
            f"it needs {min_texts} of each"
        )
    from scipy.stats import beta

    falling, n = np.sort(outside)[::-1], len(outside)
    mean = float((inside > falling[math.floor(fpr * n + 1e-9)]).mean())
    # The share of all others above the k-th of n is at most a draw from beta(k, n - k + 1), and with ties included at least
    # one. An end errs where its threshold does or its count does, a quarter of 5 % each.
    quarter = 0.0125
    places = np.arange(1, n + 1)
    above = beta.cdf(fpr, places, n - places + 1)
    high_enough, low_enough = np.flatnonzero(above >= 1 - quarter), np.flatnonzero(above <= quarter)
    low, high = 0.0, 1.0
    if len(high_enough):
        low = proportion_interval(int((inside > falling[high_enough[-1]]).sum()), len(inside), 1 - 2 * quarter)[0]
    if len(low_enough):
        high = proportion_interval(int((inside > falling[low_enough[0]]).sum()), len(inside), 1 - 2 * quarter)[1]
    return Rate(mean, min(low, mean), max(high, mean), len(inside))


def roc(scores: Sequence[float], members: Sequence[bool]) -> tuple[Array, Array]:
    """False and true positive rates at every threshold, from (0, 0) to (1, 1)."""
    inside, outside = _parted(scores, members)
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]
    false, true = (1 - np.searchsorted(np.sort(side), thresholds, "left") / len(side) for side in (outside, inside))
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def leakage(scores: Sequence[float], members: Sequence[bool], threshold: float) -> Rate:
    """Privacy leakage as the papers print it (Yeom et al. 2018): TPR minus FPR where scores above ``threshold`` are members.

    In [-1, 1], below 0 where the attack errs more than it finds. ``threshold`` is the attack's own, not chosen by these
    scores. The interval is Clopper and Pearson's of both rates at 97.5 %, so that both hold together.
    """
    inside, outside = _parted(scores, members)
    if math.isnan(threshold):
        raise InputError("the threshold is not a number; expected the score above which a text counts as a member")
    found, false = int((inside > threshold).sum()), int((outside > threshold).sum())
    true_low, true_high = proportion_interval(found, len(inside), 0.975)
    false_low, false_high = proportion_interval(false, len(outside), 0.975)
    mean = found / len(inside) - false / len(outside)
    return Rate(mean, true_low - false_high, true_high - false_low, len(inside) + len(outside))


def largest_leakage(scores: Sequence[float], members: Sequence[bool]) -> tuple[float, float]:
    """The maximum of TPR minus FPR over all thresholds (Jayaraman and Evans 2019), and the level that random guessing
    reaches.

    A maximum over thresholds is above 0 by chance. The second figure is ``coin_level`` for as many members and others: only
    a maximum *above* it shows that members were separated from others.
    """
    inside, outside = _parted(scores, members)
    false, true = roc(scores, members)
    pairs = len(inside) * len(outside)  # differences are whole multiples of 1 / pairs: one at the level is not above it
    return round(float((true - false).max()) * pairs) / pairs, coin_level(len(inside), len(outside))


COIN = 0.975
"""The share of draws in which guessing stays at or below ``coin_level``: it errs as often as one end of a 95 % interval."""

EXACT = 4_000_000
"""Pairs of a member and another text up to which ``coin_level`` is counted; above, its limit is off by less than .1 %."""


@lru_cache(maxsize=64)
def coin_level(members: int, others: int, level: float = COIN) -> float:
    """What the greatest TPR minus FPR of scores that say nothing stays at or below with a chance of ``level``.

    The law of Smirnov's one-sided statistic of two samples, by counting the orders in which ``members`` and ``others`` can
    stand, all equally likely; ties only lower it. 1 where there are too few texts for anything to be above it. Over
    ``EXACT`` pairs, the limit ``sqrt(-log(1 - level) (1 / members + 1 / others) / 2)``.
    """
    if min(members, others) < 1:
        raise InputError(f"{members} members and {others} others; expected at least one of each")
    pairs = members * others
    if pairs > EXACT:
        return min(1.0, math.sqrt(-math.log(1 - level) * (1 / members + 1 / others) / 2))
    # Differences are whole multiples of 1 / (members * others), and of the divisor that both share.
    step = math.gcd(members, others)
    low, high = -1, pairs // step
    while high - low > 1:
        middle = (low + high) // 2
        if _below(members, others, middle * step) >= level - 1e-9:  # sums of many orders, rounded
            high = middle
        else:
            low = middle
    return high * step / pairs


def _below(members: int, others: int, limit: int) -> float:
    """The share of orders in which, of every number of highest texts, i are members and j others with
    ``i / members - j / others`` at most ``limit / (members * others)``."""
    # orders[j]: in how many ways the i members and j others that rank highest can stand, divided by e^scale.
    orders, scale = np.ones(others + 1), 0.0
    for i in range(1, members + 1):
        first = max(0, -((limit - i * others) // members))  # so many others at least are among them
        orders[:first] = 0
        orders = np.cumsum(orders)  # the i-th member comes after any number of others
        orders[:first] = 0
        top = float(orders.max())
        if top == 0:
            return 0.0
        orders, scale = orders / top, scale + math.log(top)
    every = math.lgamma(members + others + 1) - math.lgamma(members + 1) - math.lgamma(others + 1)
    return float(orders[-1]) * math.exp(scale - every)


def auc_bound(epsilon: float, delta: float = 0.0) -> float:
    """The maximum AUC that (epsilon, delta) differential privacy permits: ``e^eps / (1 + e^eps)`` if delta is 0.

    The area under the curve that meets ``TPR <= e^eps FPR + delta`` and its mirror image everywhere (Kairouz et al. 2015).
    """
    if not epsilon >= 0 or not 0 <= delta < 1:
        raise InputError(f"epsilon is {epsilon} and delta {delta}; expected epsilon 0 or more and delta from 0 to below 1")
    odds = math.exp(-epsilon)  # e^-eps, which never overflows
    corner = (1 - delta) * odds / (1 + odds)  # the FPR where the two lines meet; the TPR there is 1 - corner
    return delta + (delta + 1 - corner) * corner / 2 + (2 - corner) * (1 - delta - corner) / 2


def tpr_bound(fpr: float, epsilon: float, delta: float = 0.0) -> float:
    """The maximum true positive rate at ``fpr`` that (epsilon, delta) differential privacy permits (Kairouz et al. 2015).

    >>> round(tpr_bound(0.01, 0.5), 4)
    0.0165
    """
    auc_bound(epsilon, delta)  # checks both
    odds = math.exp(-epsilon)
    # fpr / odds is e^eps fpr, which overflows at an epsilon where everything is permitted.
    first = fpr / odds + delta if odds > 0 else 1.0
    return max(0.0, min(1.0, first, 1 - odds * (1 - delta - fpr)))


def split_check(
    texts: Sequence[str | Sequence[int]], members: Sequence[bool], seed: int = 0, labels: Sequence[int] | None = None
) -> Rate:
    """The AUC of separating members from others by their words alone, without the model: it should be .5. With ``labels``,
    one for each text, by their words and labels together.

    The words of a text that is given as token ids are the ids, all that a model sees of it. Of a string they are taken as
    they are written, with case and the white space before them.

    A logistic regression on counted words and pairs of words that is shown who is a member. With ``labels``, each of them
    also counts once for every label that it stands beside: members may have other words of a label. Texts are parted into
    fifths; each but the first is judged by what the ones before it taught, and the AUC is the mean over these. No adversary:
    a check of how the texts were chosen. Above .5, attacks need not look at the model to succeed.

    If the words say nothing, .5 lies in the interval with a chance of 95 % at least: whatever was learned before, the next
    fifth's AUC has the expectation .5, so ``pairs_interval`` holds for the sum. (Judging every fifth by all the others would
    break that: each text would be judge and judged.)
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline

    from rasura.metrics.text import WORD

    def counted(number: int) -> list[str]:
        text = texts[number]
        words = re.findall(rf"\s*(?:{WORD.pattern}|\S)|\s+", text) if isinstance(text, str) else [*map(str, text)]
        found = [*words, *map(" ".join, pairwise(words))]
        return found if labels is None else [*found, *(f"{labels[number]}: {one}" for one in ("", *found))]

    inside = np.asarray(members, dtype=bool)
    parts = min(5, int(inside.sum()), int((~inside).sum()))
    if parts < 2:
        raise InputError("fewer than two members or others; expected at least two of each")
    folds = [there for _, there in StratifiedKFold(parts, shuffle=True, random_state=seed).split(inside, inside)]
    areas, sizes = [], []
    for k, there in enumerate(folds[1:], 1):
        known = np.concatenate(folds[:k])
        judge = make_pipeline(TfidfVectorizer(analyzer=counted, sublinear_tf=True), LogisticRegression(C=10.0))
        said = judge.fit(known, inside[known]).decision_function(there)
        areas.append(_area(said[inside[there]], said[~inside[there]]))
        sizes.append(int(min(inside[there].sum(), (~inside[there]).sum())))
    mean = float(np.average(areas, weights=sizes))
    return Rate(mean, *pairs_interval(mean, sum(sizes), sum(sizes)), len(texts) - len(folds[0]))
