"""The gate: exit codes, and what is said of each column that did not pass. Plain Records, no model."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from rows import GUESS, MANY, READ, column, runs

from rasura.core.interfaces import InputError
from rasura.report.findings import findings
from rasura.report.gate import ABOVE_LIMIT, NOT_JUDGED, PASSED, ROUNDING, gate, judged
from rasura.report.pooled import Level, texts_needed
from rasura.report.verdicts import ABOVE, NOT_MEASURED, NOT_TOLD, READS, Verdict


def of_gate(rows: list[dict[str, Any]], limit: float) -> Any:
    return gate(findings(rows).verdicts, limit)


def test_the_gate_judges_protections_and_the_baseline_only_if_alone() -> None:
    quiet = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
    passed = of_gate(quiet, 0.4)
    assert (passed.exit, passed.judged, passed.says) == (0, ("dropout:0.1",), ())
    alone = of_gate(READ, 0.4)
    assert (alone.exit, alone.judged) == (3, ("none",))
    assert alone.says == ("none: span read 100 %, above --fail-above 40 %",)
    assert judged({}) == {} and gate({}, 0.4).exit == 4


def test_the_gate_says_3_before_4_and_names_each_column() -> None:
    rows = [
        *READ, *column("span", "bf16", [0.5] * MANY), *column("span", "gaussian:1", [None] * MANY, "crashed"),
        *column("span", "dropout:0.1", [GUESS] * MANY),
    ]  # fmt: skip
    found = of_gate(rows, 0.4)
    assert found.exit == 3 and len(found.says) == 2
    assert found.says[0] == "bf16: span read 50 %, above --fail-above 40 %"
    assert found.says[1].startswith("gaussian:1: not judged against --fail-above 40 %: not measured: of the attacks")
    assert of_gate([r for r in rows if r["defense"] != "bf16"], 0.4).exit == 4
    assert of_gate(rows, 0.5).exit == 4, "at the limit is not above, and the bound is"


def test_the_gate_says_how_many_texts_it_takes() -> None:
    rows = [*READ[:4], *column("span", "dropout:0.1", [GUESS] * 4)]
    found = of_gate(rows, 0.5)
    assert found.exit == 4
    (line,) = found.says
    assert line == (
        "dropout:0.1: not judged against --fail-above 50 %: 4 notes do not rule out a risk of up to 69.9 %; at least "
        f"{texts_needed(0.5)} are needed, and roughly 12 for scores like these"
    )
    assert of_gate([*READ, *column("span", "dropout:0.1", [GUESS] * MANY)], 0.5).exit == 0
    below = of_gate([*READ, *column("span", "dropout:0.1", [0.0] * MANY)], 0.1)
    assert below.exit == 4 and "guessing alone scores 20 %, so no protection can pass" in below.says[0]
    silent = of_gate([*READ, *column("span", "dropout:0.1", [None] * MANY, "failed")], 0.1)
    assert silent.exit == 4 and "guessing alone scores 20 %" in silent.says[0], "who gave up read nothing"
    above = of_gate([*READ, *column("span", "dropout:0.1", [GUESS + 0.05] * MANY)], 0.1)
    assert above.exit == 3 and above.says[0].endswith("(guessing alone scores 20 %, so no protection can pass)")


@pytest.mark.parametrize("limit", [math.nan, -0.1, 0.0, 1.0, 20.0, math.inf])
def test_a_limit_that_nothing_is_above_is_refused(limit: float) -> None:
    with pytest.raises(InputError, match="expected a fraction above 0 and below 1"):
        gate({}, limit)


@settings(max_examples=100, deadline=None)
@given(runs(), some.sampled_from([0.3, 0.9]))
def test_the_gate_passes_only_what_was_measured(rows: list[dict[str, Any]], limit: float) -> None:
    found = findings(rows)
    outcome = gate(found.verdicts, limit)
    if outcome.exit == 0:
        assert outcome.judged
        for name in outcome.judged:
            v = found.verdicts[name]
            assert v.word != NOT_MEASURED and not v.missing and v.upper is not None and v.upper <= limit


# --- one column


def level(mean: float) -> Level:
    return Level(mean, mean, mean, mean, 60)


def judgement(v: Verdict, limit: float = 0.4) -> tuple[int, str]:
    outcome = gate({"x": v}, limit)
    assert outcome.judged == ("x",) and len(outcome.says) == (outcome.exit != PASSED)
    return outcome.exit, "".join(outcome.says)


@pytest.mark.parametrize(("v", "said"), [
    (Verdict(ABOVE, "bf16", 60, 0.5, 0.6, attack="span"), "x: span read 50 %, above --fail-above 40 %"),
    (Verdict(NOT_MEASURED, "bf16", 60, 0.5, 0.6, attack="span", missing=("no",)),
     "x: span read 50 %, above --fail-above 40 %"),
    (Verdict(ABOVE, "bf16", 60, 0.5, 0.6, attack="span", guess=level(0.4)), "x: span read 50 %, above --fail-above 40 %"),
    (Verdict(ABOVE, "bf16", 60, 0.9, 0.95, attack="span", guess=level(0.8)),
     "x: span read 90 %, above --fail-above 40 % (guessing alone scores 80 %, so no protection can pass)"),
])  # fmt: skip
def test_what_was_read_above_the_limit_and_above_guessing_fails(v: Verdict, said: str) -> None:
    assert judgement(v) == (ABOVE_LIMIT, said)


@pytest.mark.parametrize(("v", "why"), [
    (Verdict(NOT_TOLD, "bf16", 60), "not measured: no attack gave a result"),
    (Verdict(NOT_TOLD, "bf16", 60, risk=0.1), "not measured: no attack gave a result"),
    (Verdict(NOT_MEASURED, "bf16", 60, 0.1, 0.2, missing=("this", "that")), "not measured: this; that"),
    (Verdict(NOT_MEASURED, "bf16", 60, None, None, missing=("this",)), "not measured: this"),
    (Verdict(NOT_TOLD, "bf16", 60, 0.8, 0.9, guess=level(0.8)), "guessing alone scores 80 %, so no protection can pass"),
    (Verdict(NOT_TOLD, "bf16", 60, 0.4, 0.5, guess=level(0.4)), "guessing alone scores 40 %, so no protection can pass"),
    (Verdict(NOT_TOLD, "bf16", 60, 0.8 + ROUNDING, 0.9, guess=level(0.8)),
     "guessing alone scores 80 %, so no protection can pass"),
    (Verdict(NOT_TOLD, "bf16", 60, 0.4, 0.5), "60 notes do not rule out a risk of up to 50 %; at least 8 are needed, and "
     "roughly 8 for scores like these"),
    (Verdict(NOT_TOLD, "bf16", 60, 0.2, 0.5, many="images"), "60 images do not rule out a risk of up to 50 %; at least 8 "
     "are needed, and roughly 135 for scores like these"),
    (Verdict(NOT_TOLD, "bf16", 2, 0.1, 0.41), "2 notes do not rule out a risk of up to 41 %; at least 8 are needed, and "
     "roughly 8 for scores like these"),
])  # fmt: skip
def test_what_could_not_be_judged_says_why(v: Verdict, why: str) -> None:
    assert judgement(v) == (NOT_JUDGED, f"x: not judged against --fail-above 40 %: {why}")


def test_the_bound_at_the_limit_passes() -> None:
    assert judgement(Verdict(NOT_TOLD, "bf16", 60, 0.1, 0.4)) == (PASSED, "")
    assert judgement(Verdict(ABOVE, "bf16", 60, 0.3, 0.4, guess=level(0.1))) == (PASSED, "")
    whole = Verdict(READS, "bf16", 60, 0.1, 0.2, whole=1, attack="span")
    code, says = judgement(whole)
    assert code == ABOVE_LIMIT and "1 of 60 notes nearly whole" in says and says.endswith("which no limit allows")
    empty = gate({}, 0.4)
    assert (empty.exit, empty.judged) == (NOT_JUDGED, ())
    assert empty.says == ("nothing to judge against --fail-above 40 %: the run contains no protection and no baseline",)


def test_the_limit_is_said_as_it_was_given() -> None:
    said = gate({"x": Verdict(NOT_TOLD, "bf16", 60)}, 0.125).says
    assert said == ("x: not judged against --fail-above 12.5 %: not measured: no attack gave a result",)
    assert texts_needed(0.4) == 8
