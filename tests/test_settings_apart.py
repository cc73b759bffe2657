"""No figure of a headline, a summary or an assessment is of several settings together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit_setting import model_folder, plan_for
from rows import GUESS, MANY, METRIC, READ, column, record, sentences, stored

from rasura.report.assessment import assessment, markdown
from rasura.report.findings import findings, summarise
from rasura.report.head import Made
from rasura.report.page import render, write_report
from rasura.report.pooled import pooled
from rasura.report.terminal import summary
from rasura.runs.audit import audit

__all__ = ["model_folder"]

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


def test_a_setting_where_an_attack_gave_up_is_not_the_one_where_it_read() -> None:
    blind = {METRIC: {"per_record": [0.3]}}
    own = [record("span", "none", note=k, blind=blind, status="failed", batch_size=1, scores={}) for k in range(NOTES)]
    read = batches("span", "none", 2, 0.2, confidence="verified")
    entry = findings([*own, *read]).matrix["span", "none"]
    assert entry.setting == ("honest-server", 2) and entry.mark == "20" and entry.verified == entry.notes == NOTES
    more = batches("span", "none", 1, 0.9, confidence="verified")
    assert findings([*read, *more]).matrix["span", "none"].verified == NOTES, "those of the setting alone"


def test_a_protection_under_which_every_attack_gave_up_is_not_said_to_have_been_read() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [None] * MANY, "failed")]
    page = render(stored(rows), {"attacks": ["span"], "defenses": ["none", "dropout:0.1"]})
    assert page.count("No attack gave a guess that can be scored, which counts as guessing") == 1
    assert page.count("span read ") == 1


def test_threat_models_are_apart_too_and_one_setting_alone_is_not_named() -> None:
    weaker = batches("span", "none", 1, 0.1, threat="honest-server")
    stronger = batches("span", "none", 1, 0.9, threat="with-labels")
    said = " ".join(findings([*weaker, *stronger]).sentence)
    assert "read back 90 %" in said and "under with-labels at batch size 1" in said
    assert "most was read under" not in " ".join(findings(weaker).sentence)


def test_the_matrix_of_a_summary_says_of_which_setting_it_is() -> None:
    told = summarise([*SIZES, *(r for n, v in ((1, 0.1), (2, 0.1), (4, 0.6)) for r in batches("span", "bf16", n, v))])
    (open_, behind) = told["matrix"]
    assert (open_["level"]["mean"], open_["threat"], open_["batch_size"]) == (1.0, "honest-server", 1)
    assert (behind["level"]["mean"], behind["batch_size"], behind["notes"]) == (pytest.approx(0.6), 4, NOTES)
    assert (told["highest_risk"], told["without_risk"]) == (None, ["bf16"]), "no attack was shown to work at batch size 2"
    (told,) = [summarise([r for r in [*SIZES, *batches("span", "bf16", 1, 0.6)] if r["batch_size"] == 1])]
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


def labelled(size: int, right: float, guess: float | None, **more: Any) -> list[dict[str, Any]]:
    """Updates of ``size`` of which an attack names this share of labels, and no text."""
    name = "label_accuracy"
    known = {} if guess is None else {name: {"per_record": [guess] * size}}
    blind = {METRIC: {"per_record": [GUESS / size] * size}, **known}
    scores = {name: {"per_record": [1.0] * round(right * size) + [0.0] * (size - round(right * size))}}
    own = {"batch_size": size, "scores": scores, "blind": blind, **more}
    return [record("labels", note=k, examples=[*range(k, k + size)], **own) for k in range(0, NOTES, size)]


def test_attacks_that_name_labels_alone_have_no_figure_in_any_setting() -> None:
    rows = [*labelled(1, 1.0, 0.5), *labelled(2, 0.5, 0.25), *batches("span", "none", 2, 0.6)]
    found = findings(rows)
    labels = found.matrix["labels", "none"]
    assert (labels.level, labels.mark, labels.labels) == (None, "labels", 6) and found.best["none"].attack == "span"
    assert found.best["none"].setting == ("honest-server", 2) and found.blind is not None and found.blind.mean == GUESS / 2


def test_a_text_that_cannot_be_scored_counts_in_no_setting() -> None:
    def without(r: dict[str, Any], side: str) -> dict[str, Any]:
        found = {name: zip(r["examples"], one["per_record"]) for name, one in r[side].items()}
        return {name: {"per_record": [None if n == 3 else v for n, v in pairs]} for name, pairs in found.items()}

    rows = [*SIZES, *batches("tag", "none", 1, 0.5)]
    rows = [{**r, "blind": without(r, "blind"), "scores": without(r, "scores")} for r in rows]
    found = findings(rows)
    assert found.matrix["span", "none"].notes == NOTES - 1 == found.matrix["tag", "none"].notes
    assert found.matrix["span", "none"].coverage is None and found.without_a_figure == (1, NOTES)
    assert found.blind == pooled([GUESS] * (NOTES - 1)) and "1 of 4 notes could not be scored" in " ".join(found.sentence)


def test_labels_are_of_the_setting_where_most_were_named() -> None:
    gave_up = {"status": "failed", "scores": {}}
    behind = [*labelled(1, 1.0, None, defense="bf16", **gave_up), *labelled(4, 0.0, None, defense="bf16", **gave_up)]
    rows = [*labelled(1, 1.0, 0.5), *labelled(2, 0.5, 0.25), *behind]
    told, other = summarise(rows)["labels"]
    assert told == {
        "attack": "labels", "column": "none", "whole": 4, "updates": 4, "silent": 0, "right": 1.0,
        "guess": 0.5, "threat": "honest-server", "batch_size": 1,
    }  # fmt: skip
    assert (other["right"], other["guess"], other["batch_size"], other["updates"]) == (None, 0.5, 1, 4)
    assert findings(rows).sentence[-2:] == (
        "Labels with no protection: labels named every label of 4 of 4 updates, 100 % of the labels. Naming the most "
        "frequent class every time: 50 %.",
        "Most labels were named under honest-server at batch size 1.",
    )
    assert findings(rows[:4]).sentence[-1].startswith("Labels with no protection: labels named every label of 4 of 4")


def test_a_guess_at_labels_that_was_not_scored_is_unknown() -> None:
    rows = [*labelled(1, 1.0, 0.5), *labelled(4, 0.0, None, defense="bf16", status="failed", scores={})]
    none, other = findings(rows).labels
    assert (none.column, none.guess) == ("none", 0.5) and (other.column, other.right, other.guess) == ("bf16", None, None)
    said = findings([r | {"defense": "bf16" if r["defense"] == "none" else "none"} for r in rows]).sentence
    assert said[-2].startswith("Labels behind bf16: labels named every label of 4 of 4"), "where guessing is known"


def test_examples_are_of_the_setting_of_the_one_that_was_read_most() -> None:
    def read(size: int, *found: float) -> list[dict[str, Any]]:
        texts = [[{"sent": "", "read": "", "words": [], "score": score}] for score in found]
        return [record("span", value=0.5, note=k, recovered=one, batch_size=size) for k, one in enumerate(texts)]

    rows = [*read(1, 0.1, 0.2, 0.3), *read(8, 0.9, 0.5, 0.8)]
    found = findings(rows)
    assert [(e["score"], e["batch_size"]) for e in found.evidence] == [(0.9, 8), (0.8, 8), (0.5, 8)]
    assert found.evidence[0]["threat"] == "honest-server"


def test_the_terminal_says_that_its_figures_are_of_one_setting_each() -> None:
    said = "each figure: the threat model and batch size where the attack read most"
    several, one = (str(summary(findings(rows)).renderables[3].caption) for rows in (SIZES, READ))  # type: ignore[union-attr]
    assert said in several and said not in one


@pytest.mark.slow
def test_the_page_says_of_which_setting_labels_and_examples_are(tmp_path: Path, model_folder: Path) -> None:
    list(audit(plan_for(model_folder, attacks=("span", "labels"), defenses=("none",), batch_sizes=(1, 2)), out=tmp_path))
    for language, labels, examples in (
        ("en", "where the attack named most labels.", "The examples are of one setting: honest-server, batch size"),
        (
            "de",
            "bei denen der Angriff die meisten Labels nannte.",
            "aus einer Einstellung: honest-server, Batchgröße",
        ),
        ("fr", "où l'attaque a nommé le plus d'étiquettes.", "sont d'un seul cadre : honest-server, lots de taille"),
    ):
        page = sentences(write_report(tmp_path, language=language).read_text(encoding="utf-8"))
        assert labels in page and examples in page


def test_an_assessment_says_which_attempts_named_labels_alone() -> None:
    rows = [{**r, "data": "d"} for r in (*READ[:4], *labelled(1, 1.0, 0.5))]
    plan = {"model": "m", "task": "classification", "attacks": ["span"], "limit": 4, "data": "notes.jsonl"}
    said = markdown(assessment(findings(rows), plan, rows, Made(), ["x"]))
    assert (
        "| labels | of 4 attempts 0 gave a guess, 0 gave up, 0 crashed, 0 did not apply; 4 named labels and no text |"
        in said
    )
    mixed = [{**r, "data": "d"} for r in (*labelled(1, 1.0, 0.5), record("labels", note=9, status="failed"))]
    told = markdown(assessment(findings(mixed), plan, mixed, Made(), ["x"]))
    assert "of 5 attempts 0 gave a guess, 1 gave up, 0 crashed, 0 did not apply; 4 named labels and no text" in told
    assert "| span | of 4 attempts 4 gave a guess, 0 gave up, 0 crashed, 0 did not apply |" in said
