"""Scores pooled over examples: their mean with its interval. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, lru_cache

from rasura.core.rounding import percent, percent_above, percent_below
from rasura.metrics.intervals import crossed_interval, mean_interval, mean_or_interval
from rasura.report.language import tell

COUNTED = 10_000
"""Up to so many draws, how many a limit needs is counted exactly."""


@dataclass(frozen=True)
class Level:
    """A pooled score: mean, ends of its 95 % interval (NaN for a metric without a range), worst case, number of examples.
    ``updates``: in how many groups these were sent, each of which the interval counts once; 0 where it counts examples."""

    mean: float
    low: float
    high: float
    worst: float
    n: int
    updates: int = 0

    @property
    def text(self) -> str:
        """In whole percent with its interval."""
        mean, low, high = percent(self.mean), percent_below(self.low), percent_above(self.high)
        n = in_updates(self.n, self.updates)
        return tell("{mean:.0f} % (95 %: {low:.0f} to {high:.0f}, n = {n})", mean=mean, low=low, high=high, n=n)


def in_updates(n: int, updates: int) -> str:
    """``n`` examples, with the number of ``updates`` that hold them where these are fewer."""
    if not 0 < updates < n:
        return str(n)
    return tell("{n} in 1 update", n=n) if updates == 1 else tell("{n} in {updates} updates", n=n, updates=updates)


@cache
def texts_needed(limit: float) -> int:
    """Independent draws, of texts or of updates, that it takes at least until the interval of a mean can end at or below
    ``limit``: none of them read at all. No interval with 95 % coverage does with fewer than ``log(.025) / log(1 - limit)``;
    above ``COUNTED``, that is given."""
    few, many = 0, math.ceil(math.log(0.025) / math.log1p(-limit))
    if many > COUNTED:
        return many
    while mean_interval([0.0] * many)[2] > limit:
        few, many = many, 2 * many
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if mean_interval([0.0] * middle)[2] > limit else (few, middle)
    return many


_kept = lru_cache(maxsize=4096)(mean_or_interval)


def interval(values: Iterable[float], bounds: tuple[float, float] | None = (0.0, 1.0)) -> tuple[float, float, float]:
    """``mean_or_interval`` of values within ``bounds``. Kept, since a report asks for the same several times."""
    return _kept(tuple(sorted(values)), bounds)


@lru_cache(maxsize=4096)
def crossed(values: tuple[tuple[float, ...], ...], bounds: tuple[float, float]) -> tuple[float, float, float]:
    """``crossed_interval`` of values within ``bounds``, a row for each key. Kept, as those of ``interval``."""
    return crossed_interval(values, low=bounds[0], high=bounds[1])


def share(value: float) -> float:
    """``value`` in [0, 1]: a similarity below 0 reads nothing."""
    return min(1.0, max(0.0, value))


def pooled(values: Iterable[float | None], bounds: tuple[float, float] | None = (0.0, 1.0)) -> Level | None:
    """The mean of ``values``, one an example, with an interval that covers at every n; null (not measured) is left out.

    ``bounds``: the range of the metric; None where it has none, and then there is no interval.
    """
    kept = [float(v) for v in values if v is not None and v == v]
    if not kept:
        return None
    return Level(*interval(kept, bounds), max(kept), len(kept))
