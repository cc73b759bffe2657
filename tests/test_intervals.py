"""Intervals: what they promise is simulated, what they are for samples by hand is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from rasura.metrics.intervals import (
    ROUNDING,
    mean_interval,
    mean_intervals,
    mean_or_interval,
    pairs_interval,
    proportion_interval,
)
from rasura.registry import METRICS

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]


def bernoulli(p: float) -> Draw:
    return lambda rng, size: (rng.random(size) < p).astype(float)


def beta(a: float, b: float) -> Draw:
    return lambda rng, size: rng.beta(a, b, size)


def mixed(share: float, point: float, a: float, b: float) -> Draw:
    return lambda rng, size: np.where(rng.random(size) < share, point, rng.beta(a, b, size))


LAWS: dict[str, tuple[Draw, float]] = {
    "all 0": (lambda rng, size: np.zeros(size), 0.0),
    "all 1": (lambda rng, size: np.ones(size), 1.0),
    "all .3": (lambda rng, size: np.full(size, 0.3), 0.3),
    **{f"0 or 1, {p:g}": (bernoulli(p), p) for p in (0.01, 0.1, 0.5, 0.9, 0.99)},
    "beta(.5, .5)": (beta(0.5, 0.5), 0.5),
    "beta(2, 5)": (beta(2, 5), 2 / 7),
    "0 or beta(2, 5)": (mixed(0.7, 0, 2, 5), 0.3 * 2 / 7),
    "1 or beta(2, 5)": (mixed(0.7, 1, 2, 5), 0.7 + 0.3 * 2 / 7),
    "1 or beta(5, 2), rarely": (mixed(0.97, 1, 5, 2), 0.97 + 0.03 * 5 / 7),
    ".4 or .6": (lambda rng, size: np.where(rng.random(size) < 0.5, 0.4, 0.6), 0.5),
    ".1 or .5, rarely": (lambda rng, size: np.where(rng.random(size) < 0.1, 0.5, 0.1), 0.14),
}


def covered(draw: Draw, truth: float, n: int, samples: int) -> float:
    lows, highs = mean_intervals(draw(np.random.default_rng(n), (samples, n)))
    return float(((lows <= truth + 1e-12) & (highs >= truth - 1e-12)).mean())


@pytest.mark.parametrize("name", LAWS)
def test_few_values_cover_their_mean(name: str) -> None:
    """95 % are promised; 400 samples of an interval that keeps it stay above 92 % but once in 100."""
    for n in (2, 5, 20):
        assert covered(*LAWS[name], n, 400) >= 0.92


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_coverage(name: str) -> None:
    for n in (2, 3, 5, 10, 20, 50, 100):
        assert covered(*LAWS[name], n, 3000) >= 0.94, n


def test_coverage_of_rare_ends_is_counted_exactly() -> None:
    """Over 0 or 1 with n values there are n + 1 samples: the chance to miss is a sum, on either side at most 2.5 %."""
    for n in (1, 2, 3, 7, 15):
        ends = [mean_interval([1.0] * k + [0.0] * (n - k)) for k in range(n + 1)]
        for p in np.linspace(0, 1, 101):
            weights = binom.pmf(range(n + 1), n, p)
            above = sum(w for w, (_, low, _) in zip(weights, ends) if low > p + 1e-12)
            below = sum(w for w, (_, _, high) in zip(weights, ends) if high < p - 1e-12)
            assert max(above, below) <= 0.025 + 1e-9


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_an_interval_holds_its_mean_and_mirrors(values: list[float]) -> None:
    mean, low, high = mean_interval(values)
    assert mean == pytest.approx(sum(values) / len(values)) and 0 <= low <= mean <= high <= 1
    assert mean_interval([*values[::-1], math.nan]) == (mean, low, high), "order and what is missing do not count"
    assert mean_interval([1 - v for v in values]) == pytest.approx((1 - mean, 1 - high, 1 - low), abs=1e-9)
    shifted = mean_interval([4 * v - 3 for v in values], low=-3, high=1)
    assert shifted == pytest.approx((4 * mean - 3, 4 * low - 3, 4 * high - 3), abs=1e-9)


def test_equal_values_are_no_point() -> None:
    """Three texts read whole say little of the next; a bootstrap said 100 % to 100 %."""
    assert mean_interval([1.0] * 3) == pytest.approx((1.0, 0.2801703, 1.0), abs=1e-6)
    assert mean_interval([0.0] * 20) == pytest.approx((0.0, 0.0, 1 - 0.025 ** (1 / 20)), abs=1e-4)
    one = mean_interval([1.0])
    assert one[1] < 0.03 and one[2] == 1.0
    mean, low, high = mean_interval([0.5])
    assert mean == 0.5 and low < 0.02 and high > 0.98


@pytest.mark.parametrize("values", [[0.2, 0.9, 0.4, 0.4, 1.0, 0.0], [0.02, 0.03] * 200])
def test_figures_by_another_way_of_counting(values: list[float]) -> None:
    """The definition, summed over bets in the open: at the ends the capital is just what the level asks for."""
    level = 0.9
    _, low, high = mean_interval(values, level=level)
    threshold = math.log(2 / (1 - level))

    def capital(values: list[float], m: float) -> float:
        bets = [2 * math.sqrt(2 * threshold / len(values)) * 2**k for k in range(7)] + [math.inf]
        shares = [2.0 ** (7 - k) / 255 for k in range(8)]
        return sum(s * math.prod(1 + min(b, 1 / m) * (v - m) for v in values) for b, s in zip(bets, shares))

    assert math.log(capital(values, low)) == pytest.approx(threshold, abs=1e-9)
    assert math.log(capital([1 - v for v in values], 1 - high)) == pytest.approx(threshold, abs=1e-9)
    assert capital(values, low - 1e-6) > 2 / (1 - level) > capital(values, low + 1e-6)


def test_a_bet_that_loses_all_is_no_warning() -> None:
    with np.errstate(all="raise", under="ignore"):
        assert mean_interval([0.0, 1.0])[0] == 0.5


def test_many_samples_at_once_are_each_as_alone() -> None:
    rows: Any = np.array([[0.1, 0.7, 0.3], [1.0, 0.0, 0.9], [0.2, 0.2, 0.2]], dtype=np.float32)
    lows, highs = mean_intervals(rows)
    for row, low, high in zip(rows, lows, highs):
        assert mean_interval([float(v) for v in row])[1:] == (low, high), "short floats are counted in full"


def test_more_values_and_a_lower_level_are_narrower() -> None:
    def width(values: list[float], level: float = 0.95) -> float:
        _, low, high = mean_interval(values, level=level)
        return high - low

    some = [0.1, 0.4, 0.7, 0.2]
    assert width(some * 20) < width(some * 5) < width(some) and width(some, 0.8) < width(some) < width(some, 0.99)
    assert width([0.39, 0.41] * 25) < 0.5 * width([0.0, 0.8] * 25), "values near each other say more"
    assert width([0.0, 1.0] * 50) < 0.3 and width([0.4, 0.6] * 50) < 0.075 and width([0.0] * 100) < 0.045


def test_what_cannot_be_is_refused() -> None:
    for values, options in (([1.1], {}), ([-0.1], {}), ([math.inf], {}), ([0.5], {"low": 1.0, "high": 0.0}),
                            ([0.5], {"low": 0.5, "high": 0.5}), ([0.5], {"high": math.inf}),
                            ([0.5], {"level": 1.0}), ([0.5], {"level": 0.0})):  # fmt: skip
        with pytest.raises(ValueError, match=r"expected|outside"):
            mean_interval(values, **options)
    with pytest.raises(ValueError, match=r"outside \[0, 1\]: the values go from 0.5 to 1.2"):
        mean_interval([0.5, 1.2])
    assert mean_interval([1 + 1e-9, -1e-9]) == mean_interval([1.0, 0.0]), "what a cosine's rounding does is no fault"
    assert mean_interval([-ROUNDING, 1 + ROUNDING]) == mean_interval([0.0, 1.0])
    with pytest.raises(ValueError, match="outside"):
        mean_interval([1 + 2e-6])


def test_short_floats_are_counted_in_full() -> None:
    short: Any = [np.float32(v) for v in (0.1, 0.7, -0.3)]
    assert mean_interval(short, low=-1) == mean_interval([float(v) for v in short], low=-1)


def test_no_values_no_mean() -> None:
    assert all(math.isnan(v) for v in (*mean_interval([]), *mean_interval([math.nan])))


def test_a_metric_without_a_range_has_no_interval() -> None:
    mean, low, high = mean_or_interval([3.0, math.nan, 40.0], None)
    assert mean == 21.5 and math.isnan(low) and math.isnan(high)
    assert math.isnan(mean_or_interval([math.nan], None)[0])
    assert mean_or_interval([0.5, 0.25], (0.0, 1.0)) == mean_interval([0.5, 0.25])
    assert mean_or_interval([0.5, -0.25], (-1.0, 1.0), 0.9) == mean_interval([0.5, -0.25], low=-1, high=1, level=0.9)
    assert mean_or_interval([1.5, 0.5], (0.0, 4.0)) == mean_interval([1.5, 0.5], high=4)
    made = {n: spec.make().bounds for n, spec in METRICS.items() if n != "sentence_cosine"}
    assert {n: b for n, b in made.items() if b != (0.0, 1.0)} == {
        "lpips": None, "embedding_distance": None, "psnr": (0.0, 100.0), "ssim": (-1.0, 1.0)
    }  # fmt: skip


def test_a_share_has_the_exact_interval() -> None:
    assert proportion_interval(0, 100) == pytest.approx((0.0, 1 - 0.025 ** (1 / 100)))
    assert proportion_interval(1, 1) == pytest.approx((0.025, 1.0)) and proportion_interval(0, 1)[1] == pytest.approx(0.975)
    assert proportion_interval(7, 7) == pytest.approx((0.025 ** (1 / 7), 1.0))
    for hits, n, level in ((3, 50, 0.95), (40, 41, 0.9)):
        low, high = proportion_interval(hits, n, level)
        tail = (1 - level) / 2
        assert binom.sf(hits - 1, n, low) == pytest.approx(tail) and binom.cdf(hits, n, high) == pytest.approx(tail)
    for hits, n in ((0, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match="trials"):
            proportion_interval(hits, n)
    with pytest.raises(ValueError, match="level"):
        proportion_interval(1, 2, 1.0)


# Areas under a ROC curve


@pytest.mark.parametrize(
    ("share", "members", "others"), [(0.5, 0, 3), (0.5, 3, 0), (1.1, 3, 3), (-0.1, 3, 3), (math.nan, 3, 3)]
)
def test_an_area_that_cannot_be_is_refused(share: float, members: int, others: int) -> None:
    with pytest.raises(ValueError, match="expected a fraction, and texts of both"):
        pairs_interval(share, members, others)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.975, 1.0])
def test_one_pair_says_next_to_nothing(share: float) -> None:
    """Of one trial the upper 2.5 % have the mean ``min(1, p / .025)``: the lower end is .025 of the share."""
    assert pairs_interval(share, 1, 1) == pytest.approx((0.025 * share, 1 - 0.025 * (1 - share)), abs=1e-9)


def test_perfect_separation_is_no_point() -> None:
    assert pairs_interval(1.0, 10, 10) == pytest.approx((0.025**0.1, 1.0), abs=1e-9)
    assert pairs_interval(0.0, 3, 9) == pytest.approx((0.0, 1 - 0.025 ** (1 / 3)), abs=1e-9)
    assert pairs_interval(1.0, 5, 1)[0] == pytest.approx(0.025, abs=1e-9)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1), st.integers(1, 60), st.integers(1, 60))
def test_an_area_is_in_its_interval_which_the_smaller_side_decides(share: float, members: int, others: int) -> None:
    low, high = pairs_interval(share, members, others)
    assert 0 <= low <= share <= high <= 1 and pairs_interval(share, others, members) == (low, high)
    assert pairs_interval(1 - share, members, others) == pytest.approx((1 - high, 1 - low), abs=1e-9)
    assert pairs_interval(share, min(members, others), 1000) == (low, high)


def test_the_end_of_an_area_is_where_the_upper_tail_of_the_binomial_law_lies() -> None:
    """The definition, summed over the law: the mean of the upper 5 % of the share at the lower end is the area."""
    n, share, tail = 12, 0.7, 0.05
    low, high = pairs_interval(share, n, n, 1 - 2 * tail)
    for p, end in ((low, share), (1 - high, 1 - share)):
        left, total = tail, 0.0
        for k in range(n, -1, -1):
            taken = min(left, float(binom.pmf(k, n, p)))
            total, left = total + taken * k / n, left - taken
        assert total / tail == pytest.approx(end, abs=1e-9)


def area_of(rng: np.random.Generator, members: int, others: int, law: str) -> float:
    inside, outside = rng.normal(0, 1, (members, 1)), rng.normal(0, 1, (1, others))
    if law == "1":
        inside, outside = inside * 0 + 1, outside * 0
    elif law == ".5, in ties":
        inside, outside = inside.round(), outside.round()
    elif law == ".5, few":  # half of the members above all others, half below: the widest law there is
        inside = np.where(rng.random((members, 1)) < 0.5, 9, -9)
    elif law == ".9, few":
        inside = np.where(rng.random((members, 1)) < 0.9, 9, -9)
    elif law == ".76":
        inside = inside + 1
    return float(((inside > outside) + 0.5 * (inside == outside)).mean())


AREAS = {"1": 1.0, ".5": 0.5, ".5, in ties": 0.5, ".5, few": 0.5, ".9, few": 0.9, ".76": 0.7602500}


def area_coverage(law: str, sizes: tuple[int, int], samples: int) -> float:
    rng, found, hits = np.random.default_rng(0), {}, 0
    for _ in range(samples):
        share = area_of(rng, *sizes, law)
        if share not in found:
            found[share] = pairs_interval(share, *sizes)
        hits += found[share][0] <= AREAS[law] <= found[share][1]
    return hits / samples


@pytest.mark.slow
@pytest.mark.parametrize("law", AREAS)
def test_few_texts_cover_their_area(law: str) -> None:
    assert area_coverage(law, (10, 10), 200) >= 0.92


@pytest.mark.slow
@pytest.mark.parametrize(("law", "sizes"), product(AREAS, ((2, 2), (3, 30), (10, 10), (50, 20))))
def test_coverage_of_areas(law: str, sizes: tuple[int, int]) -> None:
    assert area_coverage(law, sizes, 2000) >= 0.94
