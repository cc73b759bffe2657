"""Means with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def bootstrap(
    values: Sequence[float], *, seed: int = 0, level: float = 0.95, draws: int = 2000
) -> tuple[float, float, float]:
    """Mean and percentile bootstrap interval of ``values``; NaN values (a metric that does not apply) are left out.

    ``(nan, nan, nan)`` without values. With one value the interval is that value: it says nothing, so show n beside it.
    """
    kept = np.array([v for v in values if not np.isnan(v)])
    if not len(kept):
        return float("nan"), float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    means = kept[rng.integers(0, len(kept), (draws, len(kept)))].mean(1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(kept.mean()), float(low), float(high)
