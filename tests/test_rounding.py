"""Figures in words: no bound is rounded to the side on which it is false, and 0 and 100 % stand for none and all."""

from __future__ import annotations

import math

import pytest

from rasura.core.rounding import above, below, percent, percent_above, percent_below
from rasura.report.gate import NOT_JUDGED, PASSED, outcomes
from rasura.report.pooled import Level
from rasura.report.verdicts import ABOVE, NOT_TOLD, Verdict


@pytest.mark.parametrize("places", [0, 1])
@pytest.mark.parametrize("share", [k / 997 for k in range(998)] + [1e-9, 1 - 1e-9, 0.1049, 0.9961, 0.0041])
def test_a_percentage_lies_between_its_bounds_and_is_0_or_100_only_where_it_is(share: float, places: int) -> None:
    low, near, high = percent_below(share, places), percent(share, places), percent_above(share, places)
    assert low <= 100 * share + 1e-9 and 100 * share - 1e-9 <= high and low <= near <= high
    assert (near == 0) == (share == 0) and (near == 100) == (share == 1)
    assert high - low <= 10**-places + 1e-9


def test_the_noise_of_a_float_is_no_percent() -> None:
    assert percent_above(0.07) == percent_above(0.1 * 0.7) == 7 and percent_below(0.29) == percent_below(1 - 0.71) == 29
    assert math.isnan(percent(math.nan)) and math.isnan(percent_above(math.nan)) and math.isnan(percent_below(math.nan))


def test_bounds_of_guarantees_keep_their_side() -> None:
    assert float(above(49.841)) >= 49.841 and float(below(3.1299)) <= 3.1299 and above(1e-5) == "1e-05"


def test_the_gate_says_no_bound_below_what_was_measured() -> None:
    measured = Verdict(NOT_TOLD, "pruning:0.9", 500, risk=0.02, upper=0.1049, excess=0.03, attack="span", counted=("span",))
    assert outcomes({"p": measured}, 0.105)["p"] == (PASSED, "p: at most 10.49 % is read, within --fail-above 10.5 %")
    code, says = outcomes({"p": measured}, 0.104)["p"]
    assert code == NOT_JUDGED and "a risk of up to 10.5 %" in says and "--fail-above 10.4 %" in says
    assert "upper bound 11 %" in measured.says
    few = Level(0.01, 0, 0.02, 0.1, 400)
    over = Verdict(ABOVE, "p", 400, risk=0.1049, upper=0.14, excess=0.1, attack="span", guess=few)
    assert outcomes({"p": over}, 0.10)["p"][1] == "p: span read 10.4 %, above --fail-above 10 %"


def test_a_share_that_is_nearly_all_or_nothing_is_not_called_so() -> None:
    assert Level(0.9961, 0.991, 0.9999, 1.0, 400).text == "99 % (95 %: 99 to 100, n = 400)"
    assert Level(0.0041, 0.0001, 0.0049, 0.3, 900).text == "1 % (95 %: 0 to 1, n = 900)"
    assert Level(1.0, 1.0, 1.0, 1.0, 9).text == "100 % (95 %: 100 to 100, n = 9)"
