"""Labels that an attack names have a score and a place in the report of their own, and no verdict on texts rests on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from audit_setting import TEXTS, model_folder
from rows import GUESS, MANY, METRIC, READ, column, of, record, sentences

from rasura.core.values import Message, Transcript
from rasura.metrics.labels import label_hits
from rasura.report.findings import findings, summarise
from rasura.report.page import write_report
from rasura.report.scores import gave_up
from rasura.report.terminal import summary
from rasura.report.verdicts import NOT_MEASURED
from rasura.runs.audit import audit
from rasura.runs.scoring import label_scores
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny

__all__ = ["model_folder"]
NAME = "label_accuracy"


def named(*hits: float, defense: str = "none", attack: str = "labels", note: int = 0, guess: float = 0.0) -> dict[str, Any]:
    """An attack on one update that named labels, of which ``hits`` were right, and no text."""
    notes = [note + k for k in range(len(hits))]
    blind = {METRIC: {"per_record": [GUESS] * len(hits)}, NAME: {"per_record": [guess] * len(hits)}}
    scores = {NAME: {"per_record": list(hits)}}
    more: dict[str, Any] = {"examples": notes, "batch_size": len(hits), "scores": scores, "blind": blind}
    return record(attack, defense, note=note, **more)


@pytest.mark.parametrize(
    ("read", "labels", "hits"),
    [
        ((2,), (2,), [1.0]), ((1,), (2,), [0.0]), ((0, 1, 1), (1, 0, 1), [1.0, 1.0, 1.0]),
        ((0, 0, 1), (0, 1, 1), [1.0, 1.0, 0.0]), ((1,), (1, 1), [1.0, 0.0]), ((), (0, 1), [0.0, 0.0]), ((0, 1), (1,), [0.0]),
    ],
)  # fmt: skip
def test_labels_are_compared_as_a_bag(read: tuple[int, ...], labels: tuple[int, ...], hits: list[float]) -> None:
    assert label_hits(read, labels) == hits


def test_a_causal_model_has_no_labels_to_read() -> None:
    model, batch = tiny("gpt2", "causal"), batch_of([[CLS, 40, 41, SEP]], "causal")
    truth = Transcript(batch, model, Message({}), (), 0.0, "causal", VOCABULARY)
    assert label_scores((40,), truth) == {} == label_scores(None, truth)


@pytest.mark.slow
def test_an_audit_scores_the_labels_and_says_so_in_the_report(tmp_path: Path, model_folder: Path) -> None:
    made = list(
        audit(out=tmp_path, model=model_folder, data=TEXTS, attacks=["blind", "labels", "idlg"], defenses=["gaussian:0.1"])
    )
    labels = [r.to_dict() for r in made if r.attack == "labels" and r.defense == "none"]
    assert [r["scores"][NAME]["mean"] for r in labels] == [1.0, 1.0, 1.0] and not any(map(gave_up, labels))
    assert [r["blind"][NAME]["mean"] for r in labels] == [1.0, 0.0, 1.0], "the class of two of the three texts"
    assert all(set(r["scores"]) == {NAME} for r in labels)
    page = sentences(write_report(tmp_path).read_text(encoding="utf-8"))
    said = "named every label of 3 of 3 updates, 100 % of the labels. Naming the most frequent class every time: 67 %."
    assert f"Labels with no protection: idlg {said}" in page and "Labels that were read" in page
    note = sentences((tmp_path / "notes" / "1.html").read_text(encoding="utf-8"))
    assert "named labels, no text: 1 of 1 labels of the update" in note and "gave up" not in note.split("gaussian")[0]


@pytest.mark.slow
def test_labels_that_the_threat_model_grants_are_not_read(tmp_path: Path, model_folder: Path) -> None:
    from audit_setting import plan_for

    plan = plan_for(model_folder, threats=("honest-server", "with-labels"), attacks=("span", "labels"), defenses=("none",))
    made = {(r.attack, r.threat): r for r in audit(plan, out=tmp_path)}
    assert made["span", "honest-server"].scores[NAME]["mean"] == 1.0 and made["labels", "with-labels"].scores[NAME]
    span = made["span", "with-labels"]
    assert span.confidence == "verified" and NAME not in {*span.scores, *span.blind}


def test_an_attack_that_names_labels_alone_is_none_on_the_texts() -> None:
    alone = [r for k in range(MANY) for r in (record("blind", value=GUESS, note=k), named(1.0, note=k))]
    found = findings(alone)
    assert found.best == {} and found.verdicts["none"].word == NOT_MEASURED and found.verdicts["none"].attack == ""
    assert found.verdicts["none"].missing == ("no attack was run that looks for notes in the data sent",)
    assert found.gave_up == 0 and found.matrix["labels", "none"].mark == "labels" and "·" not in found.matrix.values()
    # Where it gave up, it is no attack on texts either.
    mixed = [*alone, record("labels", note=MANY, status="failed")]
    assert findings(mixed).best == {} and findings(mixed).matrix["labels", "none"].level is None
    hidden = [*column("labels", "bf16", [None] * MANY, "failed"), *column("span", "bf16", [GUESS] * MANY)]
    texts = [*READ, *column("span", "bf16", [GUESS] * MANY)]
    with_labels, without = of([*texts, *alone, *hidden], "bf16"), of(texts, "bf16")
    assert with_labels.says == without.says and with_labels.holds == without.holds and with_labels.counted == ("span",)
    assert findings([*READ, *alone]).best["none"].attack == "span"


def test_labels_have_figures_of_their_own_with_guessing_beside_them() -> None:
    rows = [
        named(1.0, 1.0, guess=1.0), named(1.0, 0.0, note=2, guess=0.0), named(1.0, 1.0, note=4, guess=0.5),
        *(record("labels", "bf16", note=k, status="failed", examples=[k, k + 1], batch_size=2) for k in (0, 2)),
        record("labels", "bf16", note=4, status="crashed", examples=[4, 5], batch_size=2), *READ,
    ]  # fmt: skip
    none, other = summarise(rows)["labels"]
    same = {"attack": "labels", "guess": 0.5, "threat": "honest-server", "batch_size": 2}
    assert none == {**same, "column": "none", "whole": 2, "updates": 3, "silent": 0, "right": 5 / 6}
    assert other == {**same, "column": "bf16", "whole": 0, "updates": 2, "silent": 2, "right": None}, (
        "it gave up, which is no share"
    )
    assert findings(rows).sentence[-2:] == (
        "Labels with no protection: labels named every label of 2 of 3 updates, 83 % of the labels. Naming the most "
        "frequent class every time: 50 %.",
        "Most labels were named under honest-server at batch size 2.",
    )
    some = [*rows[:3], record("labels", note=6, status="failed", examples=[6, 7], batch_size=2), *READ]
    said = findings(some).sentence[-3:-1]
    assert "every label of 2 of 4 updates, 62 % of" in said[0] and said[1] == "On 1 of them, it named none."
    assert summarise(READ)["labels"] == [] and "Labels" not in " ".join(findings(READ).sentence)
    assert "labels: names labels and no text" in str(summary(findings(rows)).renderables[3].caption)  # type: ignore[union-attr]
