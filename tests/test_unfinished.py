"""What an interrupted run, or a protection that was not measured, may not say. Plain Records, no model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rows import GUESS, MANY, METRIC, READ, column, of, stored

from rasura.core.provenance import sitting
from rasura.report.assessment import assessment, markdown
from rasura.report.findings import findings, summarise
from rasura.report.gate import NOT_JUDGED, gate
from rasura.report.head import Made
from rasura.report.language import LANGUAGES, written_in
from rasura.report.machine import judgements, tracked
from rasura.report.page import ACTIVE, REMEMBERED, found_in, not_tested, render
from rasura.report.protections import plot, protection_rows
from rasura.report.sums import curve, least, sum_rows
from rasura.report.terminal import summary
from rasura.report.verdicts import ABOVE, NOT_MEASURED, NOT_TOLD, READS

QUIET = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
PLAN: dict[str, Any] = {"attacks": ["blind", "span", "tag"], "defenses": ["none", "dropout:0.1"], "data": "notes.jsonl"}
CRASHED = [*READ, *column("tag", "none", [1.0] * MANY), *column("span", "dropout:0.1", [None] * MANY, "crashed"),
           *column("tag", "dropout:0.1", [0.0] * MANY)]  # fmt: skip
"""Behind dropout the attack that knows it crashed; another read nothing."""


# --- no figure where nothing was measured


def test_a_protection_that_was_not_measured_has_no_figure_that_reassures() -> None:
    found, told = findings(CRASHED, PLAN), summarise(CRASHED, PLAN)
    assert found.verdicts["dropout:0.1"].word == NOT_MEASURED and found.verdicts["dropout:0.1"].risk == 0.0
    assert told["highest_risk"] is None and told["without_risk"] == ["dropout:0.1"]
    one = told["verdicts"]["dropout:0.1"]
    assert (one["risk"], one["upper"], one["excess"]) == (None, None, None)
    figures = tracked(found, PLAN)[1]
    assert not {"risk dropout:0.1", "upper dropout:0.1"} & set(figures) and figures["risk none"] == 1.0
    assert "No verdict on dropout:0.1: not measured: of the attacks" in found.recommendation
    assert "%" not in found.recommendation and "no figure" not in found.recommendation


def test_no_page_shows_a_figure_beside_not_measured() -> None:
    sized = [{**r, "sent_bytes": 100 if r["defense"] == "none" else 50} for r in CRASHED]
    found, made = findings(sized, PLAN), Made()
    assert found.best["dropout:0.1"].level is not None and found.figure("dropout:0.1") is None
    assert (found.mark("none"), found.mark("dropout:0.1")) == ("100", "?")
    bare, behind = protection_rows(found, PLAN, sized, made)
    assert bare.level is not None and behind.level is None
    assert [line["dot"] is None for line in plot((bare, behind), found)["lines"]] == [False, True]
    told = stored(sized)
    row = next(line for line in markdown(assessment(found, PLAN, told, made, [])).splitlines() if "| dropout:0.1 |" in line)
    assert row.split("|")[3].strip() == "no figure"
    page = render(told, PLAN, made)
    assert (
        page.count('class="dot"') == 1 and "tag read 0 %" not in page and '<td class="c" data-name="read, %">?</td>' in page
    )
    console = Console(width=120, record=True)
    console.print(summary(found))
    last = next(line for line in console.export_text().splitlines() if "best of all" in line)
    assert "?" in last and "100" in last


@pytest.mark.parametrize(("value", "word"), [(1.0, READS), (0.5, ABOVE)])
def test_what_was_read_is_a_figure_whatever_else_is_missing(value: float, word: str) -> None:
    rows = [*CRASHED[: 3 * MANY], *column("tag", "dropout:0.1", [value] * MANY)]
    found, told = findings(rows, PLAN), summarise(rows, PLAN)
    assert found.verdicts["dropout:0.1"].word == word and found.verdicts["dropout:0.1"].missing
    assert told["highest_risk"] == pytest.approx(value) and told["without_risk"] == []
    one, figures = told["verdicts"]["dropout:0.1"], tracked(found, PLAN)[1]
    assert one["risk"] == figures["risk dropout:0.1"] == pytest.approx(value)
    assert one["upper"] is None and one["excess"] is None and "upper dropout:0.1" not in figures


# --- a setting or an attack without records


def sized(rows: list[dict[str, Any]], size: int, **more: Any) -> list[dict[str, Any]]:
    return [{**r, "batch_size": size, **more} for r in rows]


def test_a_batch_size_that_only_the_baseline_has_was_not_measured() -> None:
    assert of(QUIET, "dropout:0.1").holds
    found = of([*QUIET, *sized(READ[:1], 4)], "dropout:0.1")
    assert (found.word, found.holds, found.missing) == (NOT_MEASURED, False, ("batch size 4 was not run",))
    rows = [*QUIET, *sized(READ[:1], 4)]
    assert "holds against" not in findings(rows).recommendation
    assert gate(findings(rows).verdicts, 0.4).exit == NOT_JUDGED and summarise(rows)["without_risk"] == ["dropout:0.1"]
    threat = of([*QUIET, *sized(READ, 1, threat="with-labels")], "dropout:0.1")
    assert threat.missing == ("with-labels was not run at batch size 1",)
    read = of([*READ, *column("span", "dropout:0.1", [1.0] * MANY), *sized(READ[:1], 4)], "dropout:0.1")
    assert read.word == READS and read.missing == ("batch size 4 was not run",)
    other = [{**r, "update": "fedavg-sgd:4"} for r in sized(READ, 4)]
    assert findings([*QUIET, *other]).verdicts["dropout:0.1"].holds, "the sizes of another kind of update"


def test_an_attack_that_worked_without_protection_has_a_result_behind_it() -> None:
    tag = column("tag", "none", [1.0] * MANY)
    found = of([*QUIET, *tag], "dropout:0.1")
    assert (found.word, found.holds) == (NOT_MEASURED, False)
    assert found.says == "not measured: of the attacks that work without protection, tag has no result"
    assert gate({"dropout:0.1": found}, 0.4).exit == NOT_JUDGED
    assert of([*QUIET, *column("tag", "none", [GUESS] * MANY)], "dropout:0.1").holds, "it reads nothing anywhere"
    assert of([*QUIET, *tag, *column("tag", "dropout:0.1", [None] * MANY, "not_applicable")], "dropout:0.1").holds
    best = [{**r, "details": {"ran": "span,tag"}} for r in column("best", "dropout:0.1", [None] * MANY, "failed")]
    assert of([*QUIET, *tag, *best], "dropout:0.1").word == NOT_TOLD, "the portfolio ran it"
    kept = [{**r, "details": {"ran": "tag", "attack": "tag"}} for r in column("best", "none", [1.0] * MANY)]
    assert of([*QUIET, *kept], "dropout:0.1").missing == ("of the attacks that work without protection, best has no result",)


def test_a_sum_of_clients_without_a_yardstick_that_read_one_does_not_hold() -> None:
    def of_two(attack: str) -> list[dict[str, Any]]:
        two = {side: {METRIC: {"per_record": [GUESS] * 2}} for side in ("scores", "blind")}
        return [{**r, **two, "batch_size": 2, "examples": [2 * k, 2 * k + 1]} for k, r in
                enumerate(column(attack, "none", [GUESS] * MANY))]  # fmt: skip

    rows = [*(r for a in ("span", "tag") for r in column(a, "none", [1.0] * 2 * MANY)), *of_two("span")]
    assert least(curve([*rows, *of_two("tag")], [1, 2])) == 2
    assert least(curve(rows, [1, 2])) is None


# --- fewer results than the run has


def test_an_unfinished_run_never_says_that_a_protection_holds() -> None:
    whole, part = (Made((), {"cells": len(QUIET) + more}) for more in (0, 1))
    assert found_in(QUIET, PLAN, whole).verdicts["dropout:0.1"].holds
    assert found_in(QUIET, PLAN).recommendation == found_in(QUIET, PLAN, whole).recommendation, "an older run"
    found = found_in(QUIET, PLAN, part)
    assert "holds against" not in found.recommendation and not any(v.holds for v in found.verdicts.values())
    assert found.verdicts["dropout:0.1"].says == "not measured: the run is unfinished (120 of 121 results)"
    assert found.verdicts["none"].word == READS
    assert gate(found.verdicts, 0.4).exit == NOT_JUDGED and [o.code for o in judgements(found, None)] == [NOT_JUDGED]
    rows = protection_rows(found, PLAN, QUIET, part)
    assert not any(r.chosen for r in rows) and rows[1].step.says.startswith("Finish this run first")
    for language in LANGUAGES:
        with written_in(language):
            told = [{**r, "data": "d"} for r in QUIET]
            made = Made((sitting(),), part.about)
            said = markdown(assessment(found_in(told, PLAN, made), PLAN, told, made, not_tested(told)))
            assert said.count("121") >= 2, "in the head and in the verdict"


def test_an_interrupted_run_names_no_number_of_clients() -> None:
    def of(size: int, value: float) -> list[dict[str, Any]]:
        shares = {s: {METRIC: {"per_record": [v] * size}} for s, v in (("scores", value), ("blind", GUESS))}
        rows = enumerate(column("span", "none", [value] * (2 * MANY // size)))
        return stored(
            {**r, "batch_size": size, "examples": list(range(k * size, (k + 1) * size)), **shares} for k, r in rows
        )

    rows = [*of(1, 1.0), *of(2, GUESS)]
    for cells, held in ((len(rows), True), (len(rows) + 1, False)):
        made = Made((), {"cells": cells, "clients": [1, 2]})
        page, found = render(rows, PLAN, made), found_in(rows, PLAN, made)
        assert ("At least 2 clients" in page) == held
        assert (least(curve(rows, (1, 2), METRIC, found.unfinished)) == 2) == held
        assert [s.read for s in sum_rows(curve(rows, (1, 2), METRIC, found.unfinished))] == [
            "100 %",
            "20 %" if held else "–",
        ]


# --- active attacks


def crafted(defense: str, values: list[float | None], **more: Any) -> list[dict[str, Any]]:
    rows = column("decepticons", defense, values, "crashed")
    return [{**r, "threat": "malicious-server", "crafted": True, **more} for r in rows]


def test_active_attacks_were_tested_where_one_ended_on_all_of_every_judged_column() -> None:
    open_, behind = crafted("none", [1.0] * MANY), crafted("dropout:0.1", [GUESS] * MANY)
    nothing: list[float | None] = [None]
    assert not_tested(open_) == not_tested([*open_, *behind]) == [REMEMBERED]
    for values in (nothing * MANY, [GUESS] * (MANY - 1) + nothing):
        assert not_tested([*open_, *crafted("dropout:0.1", values)]) == [ACTIVE, REMEMBERED]
    assert not_tested([*open_, *column("span", "dropout:0.1", [GUESS])]) == [ACTIVE, REMEMBERED]
    some = not_tested([*open_, *behind, *crafted("bf16", nothing * MANY)])
    assert some == [f"{ACTIVE} under bf16", REMEMBERED]
    assert not_tested([]) == [ACTIVE, REMEMBERED]


def test_the_files_of_an_unfinished_run_say_the_same(tmp_path: Path) -> None:
    """``summary.json`` is of the same findings as the page."""
    from rasura.report.findings import summary_of

    told = summary_of(found_in(QUIET, PLAN, Made((), {"cells": 500})))
    assert told["verdicts"]["dropout:0.1"]["holds"] is False and told["without_risk"] == ["dropout:0.1"]
    assert told["highest_risk"] is None and "unfinished" in told["recommendation"]
