"""How well members were told from others: AUC, true positives at few false ones, privacy leakage, with intervals.

``scores`` are one a candidate, the higher the likelier a member; ``members`` says who is one. An AUC of .5 is guessing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rasura.errors import InputError

Array = np.ndarray


@dataclass(frozen=True)
class Rate:
    """A figure in [0, 1] with its 95 % interval, and the number of texts behind it."""

    mean: float
    low: float
    high: float
    n: int


def _parted(scores: Sequence[float], members: Sequence[bool]) -> tuple[Array, Array]:
    values, inside = np.asarray(scores, dtype=float), np.asarray(members, dtype=bool)
    if values.shape != inside.shape or values.ndim != 1:
        raise InputError(f"{values.size} scores for {inside.size} candidates; expected one score a candidate")
    if np.isnan(values).any():
        raise InputError("a score is not a number; expected a figure for every candidate")
    if inside.all() or not inside.any():
        raise InputError(f"{inside.sum()} of {inside.size} candidates are members; expected members and others")
    return values[inside], values[~inside]


def clopper_pearson(hits: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The exact binomial interval of ``hits`` out of ``n`` (Clopper and Pearson 1934): never narrower than ``level``."""
    from scipy.stats import beta

    tail = (1 - level) / 2
    low = 0.0 if hits == 0 else float(beta.ppf(tail, hits, n - hits + 1))
    high = 1.0 if hits == n else float(beta.ppf(1 - tail, hits + 1, n - hits))
    return low, high


def auc(scores: Sequence[float], members: Sequence[bool]) -> Rate:
    """The chance that a member scores above another text, ties counted half, with DeLong's interval (1988)."""
    inside, outside = _parted(scores, members)
    # Placements: of each text, the share of the other side that it beats.
    low, high = np.sort(outside), np.sort(inside)
    wins = (np.searchsorted(low, inside, "left") + np.searchsorted(low, inside, "right")) / (2 * len(outside))
    lost = 1 - (np.searchsorted(high, outside, "left") + np.searchsorted(high, outside, "right")) / (2 * len(inside))
    mean = float(wins.mean())
    variance = sum(float(p.var(ddof=1)) / len(p) if len(p) > 1 else 0.25 for p in (wins, lost))
    half = 1.959964 * math.sqrt(variance)
    return Rate(mean, max(0.0, mean - half), min(1.0, mean + half), len(inside) + len(outside))


def needed(fpr: float) -> int:
    """How many members, and how many others, it takes to see a false positive rate of ``fpr``."""
    if not 0 < fpr < 1:
        raise InputError(f"the false positive rate is {fpr}; expected a share between 0 and 1, as 0.01")
    return math.ceil(1 / fpr - 1e-9)


def tpr_at(scores: Sequence[float], members: Sequence[bool], fpr: float) -> Rate:
    """The share of members found where at most ``fpr`` of the others are taken for members (Clopper-Pearson).

    Texts that tie at the threshold are not taken. The interval is that of the members, the threshold taken as it is. Raises
    ``InputError`` with the number needed when there are fewer than ``1 / fpr`` members or others.
    """
    inside, outside = _parted(scores, members)
    least = needed(fpr)
    if min(len(inside), len(outside)) < least:
        raise InputError(
            f"{len(inside)} members and {len(outside)} others are too few for a false positive rate of {fpr:g}; "
            f"it needs {least} of each"
        )
    threshold = np.sort(outside)[::-1][math.floor(fpr * len(outside) + 1e-9)]
    hits = int((inside > threshold).sum())
    return Rate(hits / len(inside), *clopper_pearson(hits, len(inside)), len(inside))


def roc(scores: Sequence[float], members: Sequence[bool]) -> tuple[Array, Array]:
    """False and true positive rates at every threshold, from (0, 0) to (1, 1)."""
    inside, outside = _parted(scores, members)
    thresholds = np.unique(np.concatenate([inside, outside]))[::-1]
    false, true = (1 - np.searchsorted(np.sort(side), thresholds, "left") / len(side) for side in (outside, inside))
    return np.concatenate([[0.0], false]), np.concatenate([[0.0], true])


def leakage(scores: Sequence[float], members: Sequence[bool]) -> tuple[float, float]:
    """Privacy leakage, the greatest TPR minus FPR (Jayaraman and Evans 2019), and what guessing stays below 19 times in 20.

    A maximum over thresholds is above 0 by chance: it is the statistic of Kolmogorov and Smirnov, whose 5 % point is the
    second figure.
    """
    inside, outside = _parted(scores, members)
    false, true = roc(scores, members)
    chance = 1.358 * math.sqrt((len(inside) + len(outside)) / (len(inside) * len(outside)))
    return float((true - false).max()), min(1.0, chance)


def auc_bound(epsilon: float, delta: float = 0.0) -> float:
    """The greatest AUC that (epsilon, delta) differential privacy permits: ``e^eps / (1 + e^eps)`` where delta is 0.

    The area under the curve that meets ``TPR <= e^eps FPR + delta`` and its mirror image everywhere (Kairouz et al. 2015).
    """
    if not epsilon >= 0 or not 0 <= delta < 1:
        raise InputError(f"epsilon is {epsilon} and delta {delta}; expected epsilon 0 or more and delta from 0 to below 1")
    odds = math.exp(-epsilon)  # e^-eps, which never overflows
    corner = (1 - delta) * odds / (1 + odds)  # the FPR where the two lines meet; the TPR there is 1 - corner
    return delta + (delta + 1 - corner) * corner / 2 + (2 - corner) * (1 - delta - corner) / 2


def split_check(texts: Sequence[str], members: Sequence[bool], seed: int = 0) -> Rate:
    """The AUC of telling members from others by their words alone, the model not asked: it should be .5.

    A logistic regression on counted words and pairs of words that is shown who is a member, judged on fifths that it was not
    shown. No adversary: a check of how the texts were chosen. Above .5, attacks need not look at the model to succeed.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline

    inside = np.asarray(members, dtype=bool)
    parts = min(5, int(inside.sum()), int((~inside).sum()))
    if parts < 2:
        raise InputError("fewer than two members or others; expected at least two of each")
    words = TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\w+|[^\w\s]", sublinear_tf=True)
    folds = StratifiedKFold(parts, shuffle=True, random_state=seed)
    judge = make_pipeline(words, LogisticRegression(C=10.0))
    return auc(cross_val_predict(judge, list(texts), inside, cv=folds, method="decision_function"), members)
