"""Verdicts fail closed: what was not measured is never said to be stopped. Plain Records, no model."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from rows import GUESS, MANY, METRIC, READ, column, of, record, runs

from rasura.core.interfaces import InputError, NotSent
from rasura.core.options import names_of
from rasura.core.values import Task
from rasura.metrics.intervals import mean_interval
from rasura.registry import ATTACKS, DEFENSES, adversaries
from rasura.report.findings import findings, summarise
from rasura.report.gate import ABOVE_LIMIT, NOT_JUDGED, gate
from rasura.report.missing import HOLDS_WITHIN
from rasura.report.pooled import Level, pooled, texts_needed
from rasura.report.readings import reading
from rasura.report.scores import NAMED, NAMED_BLIND, gave_up, notes_of, scored
from rasura.report.verdicts import (
    ABOVE,
    NOT_MEASURED,
    NOT_TOLD,
    READS,
    WORDS,
    Verdict,
    plain,
    verdict,
)

# --- words


def test_one_text_read_nearly_whole_is_a_breach_whatever_the_others_did() -> None:
    found = of(column("span", "bf16", [0.9, *[GUESS] * 20]), "bf16")
    assert (found.word, found.whole, found.n, found.attack) == (READS, 1, 21, "span")
    assert found.says == "reads (span: 1 of 21 notes nearly whole)"
    assert of(column("span", "bf16", [0.89, *[GUESS] * 20]), "bf16").word == NOT_MEASURED
    assert of([record("span", "bf16", 0.95, blind={METRIC: {"per_record": [0.7]}})], "bf16").word == NOT_MEASURED, (
        "guessing came as near"
    )
    assert of([record("span", "bf16", 0.95, blind={METRIC: {"per_record": [0.64]}})], "bf16").word == READS


def test_verified_texts_are_read_unless_guessing_scores_as_much() -> None:
    assert of([record("span", "bf16", 0.5, confidence="verified")], "bf16").word == READS
    assert of([record("span", "bf16", GUESS, confidence="verified")], "bf16").word == NOT_MEASURED
    assert of([record("span", "bf16", 0.4, confidence="span")], "bf16").word == NOT_MEASURED


def test_more_than_half_by_the_interval_is_read() -> None:
    most = of(column("span", "bf16", [0.7] * 30), "bf16")
    assert (most.word, most.whole) == (READS, 0) and most.says == "reads (span: 70 %, guessing 20 %, n = 30)"
    some_of_it = of(column("span", "bf16", [0.5] * 30), "bf16")
    assert some_of_it.word == ABOVE and some_of_it.says == "above guessing (span: 50 %, guessing 20 %, n = 30)"
    guessable = [{**r, "blind": {METRIC: {"per_record": [0.7]}}} for r in column("span", "bf16", [0.7] * 30)]
    assert of(guessable, "bf16").word == NOT_MEASURED


def test_above_guessing_is_judged_by_the_difference_on_the_same_text() -> None:
    # Scores and guesses vary far more between texts than between the two on one text.
    rows = [
        record("span", "bf16", g + 0.1, note=k, blind={METRIC: {"per_record": [g]}}) for k, g in enumerate([0.0, 0.8] * 200)
    ]
    assert of(rows, "bf16").word == ABOVE
    assert of(rows[:4], "bf16").word == NOT_MEASURED


def test_a_sure_guess_far_above_guessing_at_one_text_is_above_guessing() -> None:
    def behind(value: float, confidence: str, status: str = "ok", n: int = 1) -> Verdict:
        rows = [record("span", "fp16", value, note=k, confidence=confidence, status=status) for k in range(n)]
        return of([*column("span", "none", [1.0] * n), *rows], "fp16")

    assert [behind(0.85, word).word for word in ("verified", "span", "matched", "none")] == [
        READS,
        ABOVE,
        NOT_TOLD,
        NOT_TOLD,
    ]
    assert behind(0.85, "span").says == "above guessing (span: 85 %, guessing 20 %, n = 1)"
    assert behind(GUESS + 0.2, "span").word == NOT_TOLD, "a word or two may be chance"
    told = behind(0.85, "matched", n=2)
    assert told.says.startswith("not told from guessing (n = 2, span read 85 %, upper bound 100 %, guessing 20 %; too few")
    assert "read" not in behind(0.3, "matched", n=2).says


def test_a_sure_guess_at_one_text_of_many_makes_no_yardstick() -> None:
    rows = [record("span", "none", 0.85 if k == 0 else 0.0, note=k, confidence="span") for k in range(MANY)]
    found = of([*rows, *column("span", "fp16", [0.0] * MANY)], "fp16")
    assert found.word == NOT_MEASURED and not found.holds


def test_not_told_from_guessing_needs_a_yardstick_and_says_n_and_the_bound() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
    found = of(rows, "dropout:0.1")
    assert (found.word, found.n, found.counted, found.missing) == (NOT_TOLD, MANY, ("span",), ())
    high = mean_interval([GUESS] * MANY)[2]
    assert found.upper == high
    assert found.says == f"not told from guessing (n = 60, upper bound {math.ceil(100 * high)} %, guessing 20 %)"
    assert found.holds and found.meets(0.3) and not found.meets(0.2)


def test_few_texts_are_never_enough_to_say_that_it_holds() -> None:
    need = texts_needed(HOLDS_WITHIN)
    for n in (1, 4, need - 1, need):
        rows = [*column("span", "none", [1.0] * n), *column("span", "dropout:0.1", [GUESS] * n)]
        found = of(rows, "dropout:0.1")
        assert found.word == NOT_TOLD and found.holds == (n == need)
        assert ("which takes 39" in found.says) == (n < need)
    spread = [0.0, 0.4] * 20
    rows = [*column("span", "none", [1.0] * 40), *column("span", "dropout:0.1", spread)]
    assert not of(rows, "dropout:0.1").holds
    assert of(rows, "dropout:0.1").says.endswith("too few or too uncertain to conclude that it holds)")


@pytest.mark.parametrize("limit", [0.01, 0.05, 0.1, 0.2, 0.5, 0.9])
def test_the_number_of_texts_that_a_bound_needs(limit: float) -> None:
    need = texts_needed(limit)
    assert mean_interval([0.0] * need)[2] <= limit < mean_interval([0.0] * (need - 1))[2]
    assert need >= math.ceil(math.log(0.025) / math.log1p(-limit)), "no interval of 95 % does with fewer"


def test_a_tiny_limit_is_told_how_many_texts_it_takes_at_least() -> None:
    assert texts_needed(1e-9) == math.ceil(math.log(0.025) / math.log1p(-1e-9)), "no list of so many is made"


# --- what does not count


def test_a_column_of_crashes_is_not_measured() -> None:
    rows = [
        *column("blind", "none", [GUESS] * 4), *column("span", "none", [1.0] * 4),
        *column("blind", "frozen-embeddings", [GUESS] * 4), *column("span", "frozen-embeddings", [None] * 4, "crashed"),
    ]  # fmt: skip
    found = of(rows, "frozen-embeddings")
    assert found.word == NOT_MEASURED and found.upper is None and found.risk is None
    assert found.says == (
        "not measured: of the attacks that work without protection, span crashed on 4 of 4; against an adversary who "
        "knows it: span crashed on 4 of 4"
    )
    unknown = [{**r, "scores": {}, "status": "crashed"} if r["attack"] == "span" else r for r in rows]
    assert {of(unknown, d).word for d in ("none", "frozen-embeddings")} == {NOT_MEASURED}
    said = findings(unknown)
    assert "holds against" not in said.recommendation and said.sentence[0].startswith("No attack on the updates")


def blank(attack: str, defense: str, note: int, status: str = "ok") -> dict[str, Any]:
    """A text that cannot be scored: neither guessing nor the attack has a value."""
    nothing = {METRIC: {"per_record": [None]}}
    scores = nothing if status == "ok" else {}
    return record(attack, defense, note=note, status=status, scores=scores, blind=nothing, confidence="verified")


def test_texts_that_cannot_be_scored_count_nowhere_and_are_told() -> None:
    rows = [*column("span", "none", [1.0] * 20), *column("span", "bf16", [GUESS] * 20)]
    more = [blank("span", d, k, s) for d in ("none", "bf16") for k, s in ((20, "ok"), (21, "failed"), (22, "crashed"))]
    both = [{**r, "batch_size": 2, "batch": 0, "examples": [0, 20], "scores": {METRIC: {"per_record": [1.0, None]}},
             "blind": {METRIC: {"per_record": [GUESS, None]}}} for r in rows[:1]]  # fmt: skip
    assert of([*rows, *more], "none") == of(rows, "none") and of([*rows, *more], "bf16") == of(rows, "bf16")
    assert of([*rows, *more], "bf16").n == 20 and of(both, "none").n == 1 and of(both, "none").whole == 1
    found = findings([*rows, *more])
    assert "3 of 23 notes could not be scored and do not count: the tokenizer knows no word of them." in found.sentence
    assert summarise([*rows, *more])["not_scored"] == 3 and not any("scored" in line for line in findings(rows).sentence)
    assert found.matrix["span", "none"].notes == 20 and found.matrix["span", "none"].mark == "100"
    alone = of(more, "bf16")
    assert (alone.word, alone.n, alone.missing[0]) == (NOT_MEASURED, 0, "none of the notes can be scored")
    assert not alone.holds and "No attack on the updates gave a guess at the notes" in findings(more).sentence[0]


def test_a_text_that_an_attack_scored_is_never_left_out() -> None:
    odd = record("span", "bf16", 1.0, note=20, blind={METRIC: {"per_record": [None]}})
    rows = [*column("span", "none", [1.0] * 21), *column("span", "bf16", [GUESS] * 20), odd]
    assert of(rows, "bf16").word == NOT_MEASURED and of(rows, "bf16").n == 21


def test_all_that_is_missing_is_told() -> None:
    names = ("span", "tag")
    rows = [r for a in names for r in (*column(a, "none", [1.0] * 2), *column(a, "cloak:3+gaussian", [None] * 2, "crashed"))]
    assert of(rows, "cloak:3+gaussian").missing == (
        "of the attacks that work without protection, span crashed on 2 of 2, tag crashed on 2 of 2",
        "against an adversary who knows it: no attack knows cloak; add --attack pursuit,lamp-weighted",
    )
    rows = [*portfolio("none", [1.0], "tag", "tag"), *portfolio("accumulate:9", [None], "span,embedding-rows,tag")]
    assert of(rows, "accumulate:9").missing == (
        "against an adversary who knows it: results without protection are missing for embedding-rows, span; "
        "add --attack embedding-rows,span",
    )
    noise = [*portfolio("none", [1.0], "span", "span"), *portfolio("gaussian:1", [None], "span,pursuit")]
    assert of(noise, "gaussian:1").missing[-1] == (
        "against an adversary who knows it: results without protection are missing for pursuit; "
        "add --attack lamp-weighted,pursuit"
    )


def test_an_attack_that_does_not_apply_did_not_try() -> None:
    rows = [
        *column("embedding-rows", "none", [1.0] * MANY), *column("pursuit", "none", [1.0] * MANY),
        *column("embedding-rows", "dp-sgd:0.01", [None] * MANY, "not_applicable"),
    ]  # fmt: skip
    found = of(rows, "dp-sgd:0.01")
    assert found.word == NOT_MEASURED and "embedding-rows does not apply to 60 of 60" in found.says
    assert "against an adversary who knows it: add --attack pursuit,lamp-weighted" in found.says


def test_where_nothing_was_sent_text_is_missing_and_no_attack() -> None:
    why = str(NotSent("the texts hold 3 different tokens, but accumulate waits for 9"))
    waiting = [{**r, "reason": why} for r in column("span", "accumulate:9", [None] * 2, "not_applicable")]
    rows = [*column("span", "none", [1.0] * 2), *waiting]
    assert of(rows, "accumulate:9").says == f"not measured: {why}; pass more texts (--limit)"
    sent = record("span", "accumulate:9", 1.0, note=2)
    assert of([*rows, record("span", value=1.0, note=2), sent], "accumulate:9").word == READS


def test_noise_on_which_only_rows_were_tried_is_not_said_to_hold() -> None:
    rows = column("embedding-rows", "none", [1.0] * MANY)
    rows += column("embedding-rows", "dp-sgd:0.01", [None] * MANY, "failed")
    found = of(rows, "dp-sgd:0.01")
    assert found.says == "not measured against an adversary who knows it: add --attack pursuit,lamp-weighted"
    assert "No verdict on dp-sgd:0.01: not measured against" in findings(rows).recommendation


def test_what_is_hardly_read_without_protection_shows_nothing_of_one() -> None:
    # Notes of which the model's tokenizer knows a word in twelve: whatever stops nothing is within the limit, too.
    rows = [*column("span", "none", [GUESS + 0.08] * 200), *column("span", "dropout:0.1", [GUESS] * 200)]
    assert of(rows, "none").word == ABOVE
    found = of(rows, "dropout:0.1")
    assert found.says == "not measured: no attack of this run reads more than 10 % above guessing without protection"
    assert not found.holds and not found.meets(0.5)
    enough = [
        *column("embedding-rows", "none", [GUESS + 0.2] * 200),
        *column("embedding-rows", "dropout:0.1", [GUESS] * 200),
    ]
    assert of([*rows, *enough], "dropout:0.1").holds


def test_blind_alone_says_nothing() -> None:
    rows = [*column("blind", "none", [1.0] * MANY), *column("blind", "dropout:0.1", [GUESS] * MANY)]
    for defense in ("none", "dropout:0.1"):
        found = of(rows, defense)
        assert found.word == NOT_MEASURED and found.risk is None
        assert found.missing[0] == "no attack was run that looks for notes in the data sent"
    assert findings(rows).best == {} and summarise(rows)["highest_risk"] is None


def test_without_the_baseline_nobody_was_seen_to_work() -> None:
    assert of(column("span", "dropout:0.1", [GUESS] * MANY), "dropout:0.1").missing == (
        "the run has no column without protection, so no attack was shown to work",
        "against an adversary who knows it: span was not shown to work without protection either",
    )


def test_an_attack_that_reads_nothing_anywhere_is_no_yardstick() -> None:
    rows = [*column("span", "none", [GUESS] * MANY), *column("span", "bf16", [0.0] * MANY)]
    assert of(rows, "bf16").says == "not measured: no attack of this run was shown to work without protection"
    assert of(rows, "none").word == NOT_MEASURED


@pytest.mark.parametrize("read", [0, 1, 2, 4])
def test_a_yardstick_reads_half_of_the_texts_or_is_above_guessing(read: int) -> None:
    values = [1.0] * read + [GUESS] * (4 - read)
    rows = [*column("span", "none", values), *column("span", "bf16", [GUESS] * 4)]
    assert of(rows, "bf16").word == (NOT_TOLD if read >= 2 else NOT_MEASURED)


def test_a_yardstick_is_above_guessing_by_the_interval() -> None:
    rows = [*column("span", "none", [0.6] * MANY), *column("span", "bf16", [GUESS] * MANY)]
    assert of(rows, "bf16").counted == ("span",)


@pytest.mark.parametrize("column_of", ["none", "bf16"])
def test_a_yardstick_ran_on_every_note(column_of: str) -> None:
    rows = [*column("span", "none", [1.0] * 3), *column("span", "bf16", [GUESS] * 3), *column("tag", "bf16", [GUESS] * 3)]
    assert of(rows, "bf16").word == NOT_TOLD
    for status in ("crashed", "not_applicable"):
        broken = [
            {**r, "status": status, "scores": {}} if (r["attack"], r["defense"], r["batch"]) == ("span", column_of, 1) else r
            for r in rows
        ]
        assert of(broken, "bf16").word == NOT_MEASURED
    gone = [r for r in rows if (r["attack"], r["defense"], r["batch"]) != ("span", column_of, 1)]
    assert of(gone, "bf16").word == NOT_MEASURED
    blank = [{**r, "scores": {METRIC: {"per_record": [math.nan]}}} if r["attack"] == "span" else r for r in rows]
    assert of(blank, "bf16").word == NOT_MEASURED, "a score that is not there"
    other = [{**r, "scores": {"rouge1": {"per_record": [GUESS]}}} if r["attack"] == "span" else r for r in rows]
    assert of(other, "bf16").word == NOT_MEASURED, "a score of something else"


def test_giving_up_is_guessing_only_for_a_yardstick() -> None:
    for status in ("failed", "ok"):  # an empty guess names nothing either
        rows = [*READ, *column("span", "dropout:0.1", [None] * MANY, status)]
        found = of(rows, "dropout:0.1")
        assert found.word == NOT_TOLD and found.risk == pytest.approx(GUESS)
        assert of([{**r, "attack": "tag"} for r in rows if r["defense"] != "none"], "dropout:0.1").word == NOT_MEASURED


def test_another_update_threat_or_batch_size_is_no_baseline() -> None:
    rows = column("span", "dropout:0.1", [GUESS] * MANY)
    for change in ({"threat": "with-labels"}, {"batch_size": 2}):
        assert of([*rows, *({**r, **change} for r in READ)], "dropout:0.1").word == NOT_MEASURED
    local = findings([*rows, *({**r, "update": "fedavg-sgd:4"} for r in READ)])
    assert local.verdicts["dropout:0.1"].word == NOT_MEASURED
    assert local.columns == ("dropout:0.1", "fedavg-sgd:4")
    same = [{**r, "update": "fedavg-sgd:4"} for r in rows]
    told = findings([*same, *({**r, "update": "fedavg-sgd:4"} for r in READ), *READ])
    assert told.verdicts["dropout:0.1, fedavg-sgd:4"].word == NOT_TOLD
    assert told.baseline == ("none", "fedavg-sgd:4") and told.judged == ("dropout:0.1, fedavg-sgd:4",)


def test_other_texts_are_no_baseline() -> None:
    rows = column("span", "dropout:0.1", [GUESS] * 5)
    assert of([*rows, *READ[:5]], "dropout:0.1").word == NOT_TOLD
    assert of([*rows, *READ[:4]], "dropout:0.1").word == NOT_MEASURED


def test_threats_and_batch_sizes_are_judged_apart_and_the_worst_stands() -> None:
    quiet, read = column("span", "dropout:0.1", [GUESS] * MANY), column("span", "dropout:0.1", [0.5] * MANY)
    wider = {"batch_size": 2, "threat": "with-labels"}
    rows = [*READ, *({**r, **wider} for r in READ), *quiet]
    for other, word in ((quiet, NOT_TOLD), (read, ABOVE), (column("span", "dropout:0.1", [None], "crashed"), NOT_MEASURED)):
        found = of([*rows, *({**r, **wider} for r in other)], "dropout:0.1")
        assert found.word == word and (found.upper or 0) >= mean_interval([GUESS] * MANY)[2]
    few = of([*rows, *({**r, **wider} for r in quiet[:3])], "dropout:0.1")
    assert (few.word, few.n, few.holds) == (NOT_TOLD, 3, False)


def test_of_several_columns_the_worst_speaks_and_every_figure_is_the_highest() -> None:
    def of_all(*columns: list[dict[str, Any]]) -> Verdict:
        rows = [r | {"batch_size": k} for k, some_of_it in enumerate(columns) for r in (*some_of_it, *READ)]
        return of(rows, "bf16")

    above, crashed = column("span", "bf16", [0.5] * MANY), column("span", "bf16", [None], "crashed")
    guessable = [r | {"blind": {METRIC: {"per_record": [0.7]}}} for r in column("span", "bf16", [0.7] * 3)]
    one, two, three = (of_all(some_of_it) for some_of_it in (above, guessable, crashed))
    assert [v.word for v in (one, two, three)] == [ABOVE, NOT_TOLD, NOT_MEASURED] and three.missing and not one.missing
    assert two.risk is not None and one.risk is not None and two.risk > one.risk
    for columns in ((above, guessable, crashed), (crashed, above, guessable)):
        assert of_all(*columns) == replace(one, missing=three.missing, risk=two.risk, upper=two.upper, excess=two.excess)
    few = of_all(column("span", "bf16", [GUESS] * MANY), column("span", "bf16", [0.1] * 3))
    assert (few.word, few.n, few.risk) == (NOT_TOLD, 3, pytest.approx(GUESS)), "the column of the fewest bounds it"
    twice = (above, column("tag", "bf16", [0.6] * MANY))
    assert of_all(*twice).attack == of_all(*twice[::-1]).attack == "tag", "of equal words, who read more"
    unknown = column("tag", "bf16", [GUESS] * 3)
    for pair in ((crashed, unknown), (unknown, crashed)):
        found = of_all(*pair)
        assert (found.word, found.attack, found.n) == (NOT_MEASURED, "tag", 3) and len(found.missing) == 2


def test_the_words_of_several_columns_never_give_one_attack_the_figure_of_another() -> None:
    """The worst column is where tag read; in the other one span scored more, which anybody could guess there."""
    tag = [r | {"batch_size": 1} for r in column("tag", "bf16", [0.5] * MANY)]
    easy = {"batch_size": 2, "blind": {METRIC: {"per_record": [0.7]}}}
    span = [r | easy for r in column("span", "bf16", [0.7] * MANY)]
    baseline = [r | {"batch_size": k} for k in (1, 2) for r in (*READ, *column("tag", "none", [1.0] * MANY))]
    found = of([*baseline, *tag, *span], "bf16")
    assert (found.word, found.attack, found.risk) == (ABOVE, "tag", pytest.approx(0.7))
    assert found.says == "above guessing (tag: 50 %, guessing 20 %, n = 60)"
    (said,) = gate({"bf16": found}, 0.4).says
    assert said == "bf16: tag read 50 %, above --fail-above 40 %"
    assert gate({"bf16": found}, 0.6).exit == NOT_JUDGED


@pytest.mark.parametrize(("images", "many"), [(False, "notes"), (True, "images")])
def test_a_protection_of_which_nothing_was_run(images: bool, many: str) -> None:
    found = verdict("bf16", [], READ, METRIC, images=images)
    assert found == Verdict(NOT_MEASURED, "bf16", 0, missing=("nothing was run",), many=many)
    assert found.says == "not measured: nothing was run"


def test_a_verdict_in_plain_values() -> None:
    found = of([*READ, *column("span", "dropout:0.1", [GUESS] * MANY)], "dropout:0.1")
    assert found.to_dict() == {
        "verdict": NOT_TOLD, "says": found.says, "n": MANY, "draws": MANY, "risk": found.risk, "upper": found.upper,
        "excess": found.excess, "holds": True, "counted": ["span"], "missing": [],
    }  # fmt: skip
    crashed = of([*READ, *column("span", "dropout:0.1", [None], "crashed")], "dropout:0.1")
    assert crashed.to_dict()["missing"] == list(crashed.missing) and len(crashed.missing) == 2
    assert (crashed.attack, crashed.whole, crashed.guess) == ("", 0, pooled([GUESS]))


def test_notes_that_are_proven_stay_read_where_the_same_attack_names_every_word_of_others() -> None:
    """Fifteen notes at which it named the whole vocabulary hid five that it had proven: «not measured»."""

    def named(rows: list[dict[str, Any]], shares: Sequence[float]) -> list[dict[str, Any]]:
        told = ({NAMED: [share], NAMED_BLIND: [0.3]} for share in shares)
        return [{**r, "details": some} for r, some in zip(rows, told, strict=True)]

    shares = [*[1.0] * 5, *[0.01] * 15]
    rows = named(column("span", "fp16", [1.0] * 20), shares)
    rows = [{**r, "confidence": "verified" if k < 5 else "none"} for k, r in enumerate(rows)]
    base = column("span", "none", [1.0] * 20)
    found = of([*base, *rows], "fp16")
    assert (found.word, found.whole) == (READS, 5) and found.missing
    assert found.risk == pytest.approx((5 + 15 * GUESS) / 20), "elsewhere it counts as guessing"
    assert gate({"fp16": found}, 0.9).exit == ABOVE_LIMIT
    alone = of([*base, *named(column("span", "fp16", [1.0] * 20), [0.01] * 20)], "fp16")
    assert alone.word == NOT_MEASURED and alone.read is None


def test_an_attack_that_names_every_word_at_one_batch_size_keeps_its_figure_at_the_other() -> None:
    """The page gave 25 % of a weaker attack beside the verdict that every note was read; without one, it crashed."""
    proven = [{**r, "confidence": "verified"} for d in ("none", "fp16") for r in column("span", d, [1.0] * 20)]
    four = [
        {**r, "batch_size": 4, "details": {NAMED: [0.01], NAMED_BLIND: [0.3]} if d == "fp16" else {}}
        for d in ("none", "fp16") for r in column("span", d, [1.0] * 20)
    ]  # fmt: skip
    weak = [r for d in ("none", "fp16") for r in column("tag", d, [0.25] * 20)]
    for rows in ([*proven, *four], [*proven, *four, *weak]):
        found = findings(rows)
        entry = found.best["fp16"]
        assert found.verdicts["fp16"].word == READS and entry.attack == "span" and entry.level is not None
        assert entry.level.mean == 1.0 and "100 %" in found.recommendation


# --- texts count once


def test_seeds_and_repeated_texts_add_no_texts() -> None:
    twice = [*column("span", "bf16", [0.5] * 6), *({**r, "seed": 1} for r in column("span", "bf16", [GUESS] * 6))]
    found = of(twice, "bf16")
    assert found.n == 6 and found.risk == pytest.approx(0.35)
    same = [{**r, "examples": [0]} for r in column("span", "bf16", [0.4, 0.6, 0.5])]
    assert of(same, "bf16").n == 1 and of(same, "bf16").risk == pytest.approx(0.5)
    assert of([{**r, "seed": 1} if r["batch"] == 2 else r for r in same], "bf16").n == 1


def test_a_batch_holds_several_texts_and_each_counts() -> None:
    both = record("span", "bf16", examples=[0, 1], scores={METRIC: {"per_record": [1.0, 0.1]}},
                  blind={METRIC: {"per_record": [0.1, 0.1]}})  # fmt: skip
    assert scored(both, METRIC) == [(0, 1.0, 0.1), (1, 0.1, 0.1)]
    assert of([both], "bf16").whole == 1 and of([both], "bf16").n == 2
    short = {**both, "scores": {METRIC: {"per_record": [1.0]}}}
    assert scored(short, METRIC) == [], "nobody knows whose score it is"
    half = {**both, "scores": {METRIC: {"per_record": [1.0, None]}}}
    assert scored(half, METRIC) == [(0, 1.0, 0.1)] and of([half], "bf16").word == READS
    assert not reading("span", [half], {(0, 0): (0, 1)}, METRIC).complete
    below = {**both, "scores": {METRIC: {"per_record": [-0.5, 1.5]}}}
    assert [v for _, v, _ in scored(below, METRIC)] == [0.0, 1.0], "shares, whatever a similarity may be"


def test_records_that_do_not_say_what_they_hold_are_refused() -> None:
    old = record("span")
    del old["examples"]
    with pytest.raises(InputError, match="older version"):
        notes_of(old)


def test_an_interval_of_three_equal_texts_is_none() -> None:
    level = pooled([1.0, 1.0, 1.0])
    assert level is not None and level.high == 1.0 and level.low < 0.3, "three texts leave much open"
    assert level.text == "100 % (95 %: 28 to 100, n = 3)" and pooled([None, math.nan]) is None
    mixed = pooled([0.5, None, -0.5], (-1.0, 1.0))
    assert mixed == Level(*mean_interval([0.5, -0.5], low=-1), 0.5, 2)
    free = pooled([30.0, 10.0], None)
    assert free is not None and (free.mean, free.worst, free.n) == (20.0, 30.0, 2) and math.isnan(free.low)


@pytest.mark.parametrize(("status", "values", "gives_up"), [
    ("failed", None, True), ("ok", None, True), ("ok", 0.1, False), ("crashed", None, False),
    ("not_applicable", None, False),
])  # fmt: skip
def test_who_gives_up(status: str, values: float | None, gives_up: bool) -> None:
    assert gave_up(record("span", value=values, status=status)) is gives_up


# --- who knows a protection


def test_every_protection_names_the_attacks_that_know_it() -> None:
    def knowing(defense: str, task: Task = "classification") -> tuple[tuple[str, ...], tuple[str, ...]]:
        found = adversaries(defense, task=task)
        return found.attacks, found.unknown

    assert {a for spec in DEFENSES.values() for a in spec.known_by or ()} <= set(ATTACKS)
    assert all(knowing(spec.example)[1] == ((n,) if spec.known_by is None else ()) for n, spec in DEFENSES.items())
    assert knowing("gaussian:0.1+pruning:0.9") == (("pursuit", "lamp-weighted", "span", "mask-positions"), ())
    assert knowing("frozen-embeddings+accumulate:1.0d") == (("span",), ()), "no embedding's gradient, no bag from it"
    assert knowing("accumulate:9") == (("embedding-rows", "span"), ()) and knowing("none") == ((), ())
    assert knowing("frozen-embeddings+sealing:grad=0.1") == (("span",), ())
    assert knowing("gaussian:0.1", "causal") == (("pursuit",), ()), "gradient matching reads no decoder"
    assert knowing("dp-ftrl:1", "causal") == (("pursuit",), ())
    own = [
        adversaries(f"frozen-embeddings{more}", task="causal", own_output=True).attacks for more in ("", "+sealing:grad=0.1")
    ]
    assert own == [("span", "embedding-rows"), ("span", "embedding-rows", "mask-positions")], "its rows belong to tokens"
    assert knowing("cloak:3+none") == ((), ("cloak",))
    assert knowing("gaussian:0.1", "vision") == ((), ("gaussian",)) and knowing("fp16", "vision") == ((), ())
    assert adversaries("pruning:0.9").protection_readers == ("mask-positions",)
    assert names_of("dp-sgd:1.0/clip=0.5 + directional/blocks=parameters") == ("dp-sgd", "directional")
    assert plain("none") and not plain("none+bf16") and not plain("bf16")


def test_a_protection_that_nobody_knows_is_not_measured() -> None:
    cases = (("cloak:3", False, "no attack knows cloak"), ("gaussian:1", True, "no attack on images knows gaussian"))
    for defense, images, why in cases:
        known_by = asdict(adversaries(defense, task="vision" if images else "classification"))
        rows = [{**r, "known_by": known_by} for r in column("span", defense, [GUESS] * MANY)]
        found = verdict(defense, rows, READ, METRIC, images=images)
        assert found.word == NOT_MEASURED and why in found.says


def test_a_record_that_does_not_say_who_knows_the_protection_measures_nothing() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
    assert of(rows, "dropout:0.1").word == NOT_TOLD
    del rows[-1]["known_by"]
    assert of(rows, "dropout:0.1").word == NOT_MEASURED and "no attack knows dropout" in of(rows, "dropout:0.1").says


def test_who_knows_it_must_be_seen_to_work_or_be_made_for_it() -> None:
    noise = [*READ, *column("span", "gaussian:1", [None] * MANY, "failed")]
    for attack in ("pursuit", "lamp-weighted"):
        noise += [*column(attack, "none", [0.9] * MANY), *column(attack, "gaussian:1", [GUESS] * MANY)]
    assert of(noise, "gaussian:1").word == NOT_TOLD
    open_ = ("lamp-weighted", "none")
    deaf = [{**r, "scores": {METRIC: {"per_record": [GUESS]}}} if (r["attack"], r["defense"]) == open_ else r for r in noise]
    assert of(deaf, "gaussian:1").says == (
        "not measured against an adversary who knows it: lamp-weighted was not shown to work without protection either"
    )
    pruned = [*READ, *column("span", "pruning:0.9", [GUESS] * MANY)]
    masks = column("mask-positions", "pruning:0.9", [None] * MANY, "failed")
    assert of(pruned, "pruning:0.9").says == "not measured against an adversary who knows it: add --attack mask-positions"
    assert of([*pruned, *masks], "pruning:0.9").word == NOT_TOLD, "without a mask there is nothing for it to read"
    assert of([*pruned, *masks[1:]], "pruning:0.9").word == NOT_MEASURED


def test_what_was_read_is_said_whoever_is_missing() -> None:
    found = of([*READ, *column("span", "gaussian:1", [1.0, *[GUESS] * 59])], "gaussian:1")
    assert found.word == READS and found.missing and not found.meets(0.99) and not found.holds


# --- the portfolio


def portfolio(defense: str, values: Sequence[float | None], ran: str, winner: str = "", **more: Any) -> list[dict[str, Any]]:
    details = {"ran": ran, **({"attack": winner} if winner else {})}
    return [{**r, "details": details, **more} for r in column("best", defense, values, "failed")]


def test_the_portfolio_counts_for_what_it_ran() -> None:
    behind = portfolio("frozen-embeddings", [None] * 4, "span,span-matching")
    plain_rows = column("span", "none", [1.0] * 4)
    assert of([*plain_rows, *behind], "frozen-embeddings").counted == ("span",)
    assert of([*plain_rows, *behind], "frozen-embeddings").word == NOT_TOLD
    unsuited = portfolio("frozen-embeddings", [None] * 4, "span-matching")
    assert of([*plain_rows, *unsuited], "frozen-embeddings").word == NOT_MEASURED
    once = [*behind[:3], *unsuited[3:]]
    assert of([*plain_rows, *once], "frozen-embeddings").word == NOT_MEASURED, "not on every note"
    shared = [*column("span", "frozen-embeddings", [GUESS] * 2), *behind[2:]]
    assert of([*plain_rows, *shared], "frozen-embeddings").word == NOT_TOLD, "by itself on two, by the portfolio on two"
    silent = [{**r, "details": {}} for r in behind]
    assert of([*plain_rows, *silent], "frozen-embeddings").word == NOT_MEASURED, "nobody knows what it ran"
    for winner in ("", "best"):
        kept = portfolio("none", [1.0] * 4, "span", winner)
        assert of([*kept, *portfolio("bf16", [None] * 4, "span,,best")], "bf16").word == NOT_MEASURED, "nor whose guess"
    crashed = [{**r, "status": "crashed"} for r in behind]
    assert of([*plain_rows, *crashed], "frozen-embeddings").word == NOT_MEASURED


def test_the_portfolio_is_no_yardstick_by_a_member_that_cannot_try_here() -> None:
    without = portfolio("none", [1.0] * 4, "embedding-rows", "embedding-rows")
    assert of(without, "none").word == READS
    for ran, word in (("span", NOT_MEASURED), ("embedding-rows", NOT_TOLD)):
        assert of([*without, *portfolio("bf16", [None] * 4, ran)], "bf16").word == word
    found = of([*without, *portfolio("frozen-embeddings", [None] * 4, "embedding-rows,span")], "frozen-embeddings")
    assert found.says.endswith("results without protection are missing for span; add --attack span")
    by_turns = [*without[:2], *portfolio("none", [1.0] * 4, "embedding-rows,span", "span")[2:]]
    found = of([*by_turns, *portfolio("frozen-embeddings", [None] * 4, "span")], "frozen-embeddings")
    assert found.word == NOT_MEASURED, "span was seen on half of the notes only"


# --- laws


@settings(max_examples=150, deadline=None)
@given(runs())
def test_without_a_yardstick_nothing_is_told_but_what_was_read(rows: list[dict[str, Any]]) -> None:
    readable = {r["attack"] for r in rows if r["defense"] == "none" and r["attack"] != "blind" and not gave_up(r)
                and r["status"] == "ok"}  # fmt: skip
    for defense in ("bf16", "dropout:0.1", "gaussian:1"):
        found = of(rows, defense)
        assert found.word in WORDS
        if found.word == NOT_TOLD:
            assert set(found.counted) <= readable and found.counted and defense != "gaussian:1"
        if not readable:
            assert found.word != NOT_TOLD
            assert not found.meets(0.999)
    alone = [r for r in rows if r["attack"] == "blind"]
    for defense in ("none", "bf16", "gaussian:1"):
        assert of(alone, defense).word == NOT_MEASURED


@settings(max_examples=150, deadline=None)
@given(runs(), some.sampled_from(["none", "bf16", "dropout:0.1"]), some.sampled_from(["span", "tag", "best"]),
       some.integers(0, 3))  # fmt: skip
def test_a_crash_never_improves_a_verdict(rows: list[dict[str, Any]], where: str, attack: str, note: int) -> None:
    more = [*rows, record(attack, where, note=note, status="crashed")]
    for defense in ("none", "bf16", "dropout:0.1", "gaussian:1"):
        before, after = of(rows, defense), of(more, defense)
        assert WORDS.index(after.word) <= WORDS.index(before.word)
        assert before.holds or not after.holds
        assert before.meets(0.9) or not after.meets(0.9)


# --- on models


@pytest.mark.slow
def test_no_family_of_models_gets_a_verdict_without_a_yardstick() -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "verdicts.py"
    options = ["--family", "bert,electra,xlnet", "--limit", "1"]
    done = subprocess.run([sys.executable, str(script), *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'Holds': 0. Without a yardstick: 0" in done.stdout and "Refused at load: xlnet (" in done.stdout
    assert done.stdout.count("| bert | R |") == done.stdout.count("| electra | R |") == 1


def test_words_among_those_of_other_texts_are_not_a_text_nearly_whole() -> None:
    def read(own: float | None) -> list[dict[str, Any]]:
        precision = {} if own is None else {"token_precision": {"per_record": [own]}}
        scores = {METRIC: {"per_record": [1.0]}, **precision}
        return [record("embedding-rows", note=k, scores=scores, details={NAMED: [1.0]}) for k in range(MANY)]

    mixed = of(read(0.02), "none")
    assert mixed.word == READS and (mixed.whole, mixed.mixed) == (MANY, MANY)
    assert mixed.says == f"reads (embedding-rows: nearly all words of {MANY} of {MANY} notes, among those of others)"
    for own in (0.5, None):
        assert of(read(own), "none").says == f"reads (embedding-rows: {MANY} of {MANY} notes nearly whole)"
    some = of([*read(0.02)[1:], *read(1.0)[:1]], "none")
    assert some.says == f"reads (embedding-rows: 1 of {MANY} notes nearly whole)"
