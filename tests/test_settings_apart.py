"""No figure of a headline, a summary or an assessment is of several settings together. Plain Records, no model."""

from __future__ import annotations

from typing import Any

import pytest
from rows import GUESS, METRIC, READ, column, record

from rasura.report.assessment import assessment, markdown
from rasura.report.findings import findings, summarise
from rasura.report.head import Made
from rasura.report.readings import pooled

NOTES = 4


def batches(attack: str, defense: str, size: int, value: float | None, **more: Any) -> list[dict[str, Any]]:
    """The notes in updates of ``size``, of each of which the attack reads ``value``; without one it gave up."""
    own = {"status": "failed" if value is None else "ok", "batch_size": size, **more}
    blind = {METRIC: {"per_record": [GUESS / size] * size}}
    return [
        record(attack, defense, note=k, examples=[*range(k, k + size)], blind=blind,
               scores={} if value is None else {METRIC: {"per_record": [value] * size}}, **own)
        for k in range(0, NOTES, size)
    ]  # fmt: skip


SIZES = [*batches("span", "none", 1, 1.0), *batches("span", "none", 2, None), *batches("span", "none", 4, 0.1)]


def test_the_headline_is_of_the_setting_where_most_was_read() -> None:
    found = findings(SIZES)
    whole, guess = pooled([1.0] * NOTES), pooled([GUESS] * NOTES)
    assert whole is not None and guess is not None
    assert found.sentence == (
        f"From one update of a single note with no protection, the server read back {whole.text} of the words.",
        "Of the threat models and batch sizes of this run, most was read under honest-server at batch size 1.",
        f"Guessing without the update: {guess.text}.",
    )
    entry = found.matrix["span", "none"]
    assert entry.level == whole and entry.setting == ("honest-server", 1) and (entry.cells, entry.gave_up) == (7, 2)
    assert found.blind == guess and entry.blind == pytest.approx(GUESS)


def test_threat_models_are_apart_too_and_one_setting_alone_is_not_named() -> None:
    weaker = batches("span", "none", 1, 0.1, threat="honest-server")
    stronger = batches("span", "none", 1, 0.9, threat="with-labels")
    said = " ".join(findings([*weaker, *stronger]).sentence)
    assert "read back 90 %" in said and "under with-labels at batch size 1" in said
    assert "most was read under" not in " ".join(findings(weaker).sentence)


def test_the_matrix_of_a_summary_says_of_which_setting_it_is() -> None:
    told = summarise([*SIZES, *batches("span", "bf16", 1, 0.1), *batches("span", "bf16", 4, 0.6)])
    (open_, behind) = told["matrix"]
    assert (open_["level"]["mean"], open_["threat"], open_["batch_size"]) == (1.0, "honest-server", 1)
    assert (behind["level"]["mean"], behind["batch_size"], behind["notes"]) == (pytest.approx(0.6), 4, NOTES)
    assert told["highest_risk"] == pytest.approx(0.6)


def test_what_is_recommended_names_the_worst_setting_of_each_protection() -> None:
    rows = [*SIZES, *batches("span", "bf16", 1, 1.0), *batches("span", "bf16", 4, 0.1), *batches("span", "bf16", 2, 0.1)]
    rows += [r for size in (1, 2, 4) for r in batches("span", "fp16", size, 0.95)]
    assert "Least was recovered under fp16: 95 %" in findings(rows).recommendation


def test_there_is_no_highest_risk_where_a_judged_column_has_none() -> None:
    rows = [*READ[:3], *column("span", "bf16", [0.25] * 3), *column("span", "fp16", [None] * 3, "crashed")]
    told = summarise(rows)
    assert told["judged"] == ["bf16", "fp16"] and told["highest_risk"] is None and told["without_risk"] == ["fp16"]
    part = [
        *READ[:3],
        *column("span", "bf16", [0.25] * 3),
        *({**r, "batch_size": 2} for r in column("span", "bf16", [None], "crashed")),
    ]
    assert summarise(part)["highest_risk"] is None and summarise(part)["without_risk"] == ["bf16"]
    assert summarise(rows[:6])["highest_risk"] == pytest.approx(0.25) and summarise(rows[:6])["without_risk"] == []


def test_an_assessment_says_how_each_attack_ended() -> None:
    rows = [
        *READ[:3],
        *column("flaky", "none", [None] * 3, "crashed"),
        *column("tag", "none", [GUESS, None, None], "failed"),
    ]
    rows += column("dlg", "none", [None] * 3, "not_applicable")
    rows = [{**r, "data": "d"} for r in rows]
    plan = {"model": "m", "task": "classification", "attacks": ["span"], "limit": 3, "data": "notes.jsonl"}
    said = markdown(assessment(findings(rows), plan, rows, Made(), ["x"]))
    for attack, ended in (("span", (3, 0, 0, 0)), ("flaky", (0, 0, 3, 0)), ("tag", (1, 2, 0, 0)), ("dlg", (0, 0, 0, 3))):
        told = "of 3 attempts {} gave a guess, {} gave up, {} crashed, {} did not apply".format(*ended)
        assert f"| {attack} | {told} |" in said
