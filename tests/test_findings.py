"""What is said of a run: the matrix, the sentence, the recommendation. Plain Records, no model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from rows import GUESS, MANY, METRIC, READ, column, record, stored

from rasura.core.records import LABELS
from rasura.report.assessment import assessment, markdown
from rasura.report.findings import findings, summarise
from rasura.report.head import Made
from rasura.report.matrix import IMAGES, TEXTS, Entry, Price
from rasura.report.page import render
from rasura.report.pooled import pooled
from rasura.report.terminal import summary
from rasura.report.verdicts import NOT_MEASURED, NOT_TOLD, READS


def test_a_cell_says_of_how_many_notes_it_speaks() -> None:
    rows = [*READ[:3], *column("span", "pruning:0.9", [1.0, None, None], "not_applicable"),
            *column("tag", "pruning:0.9", [None] * 3, "failed"), *column("dlg", "pruning:0.9", [None] * 3, "crashed"),
            *column("grab", "pruning:0.9", [None] * 3, "not_applicable")]  # fmt: skip
    found = findings(rows)
    assert found.matrix["span", "pruning:0.9"].coverage == (1, 3) and found.matrix["span", "none"].coverage is None
    marks = [found.matrix[a, "pruning:0.9"].mark for a in ("span", "tag", "dlg", "grab")]
    assert marks == ["100", "·", "!", "–"] and (found.gave_up, found.crashed) == (3, 3)
    assert found.verdicts["pruning:0.9"].word == READS
    level = found.matrix["span", "none"].level
    assert level is not None and level.low < 0.3 < level.high == 1.0


def text_of(rows: list[dict[str, Any]]) -> str:
    from rich.console import Console

    console = Console(width=400)
    with console.capture() as shown:
        console.print(summary(findings(rows)))
    return shown.get()


def test_every_door_uses_the_same_words() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY), *column("span", "gaussian:1", [None] * MANY, "failed")]
    found, told, shown = findings(rows), summarise(rows), text_of(rows)
    assert {name: v.word for name, v in found.verdicts.items()} == {
        "none": READS, "dropout:0.1": NOT_TOLD, "gaussian:1": NOT_MEASURED,
    }  # fmt: skip
    for name, v in found.verdicts.items():
        assert v.says in shown and told["verdicts"][name]["says"] == v.says and told["verdicts"][name]["verdict"] == v.word
    assert told["judged"] == ["dropout:0.1", "gaussian:1"] and "none (baseline)" in shown
    assert told["highest_risk"] is None and told["without_risk"] == ["gaussian:1"]
    assert summarise(rows[: 2 * MANY])["highest_risk"] == pytest.approx(GUESS)


def test_a_recommendation_says_holds_only_of_what_does() -> None:
    quiet = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
    assert "Of the settings tested, dropout:0.1 holds against the attacks of this run" in findings(quiet).recommendation
    few = [r for r in quiet if r["batch"] < 4]
    said = findings(few).recommendation
    assert "holds against" not in said and "dropout:0.1: not told from guessing (n = 4" in said
    both = [*quiet, *column("span", "bf16", [GUESS + 0.02] * MANY)]
    assert findings(both).verdicts["bf16"].holds
    assert "dropout:0.1 holds" in findings(both).recommendation, "of two, the one that is read less"
    assert findings(READ).recommendation.startswith("No protection was tested. Without one: reads (span: 60 of 60")
    assert "no records" in findings([]).recommendation


def test_advice_speaks_only_of_what_was_measured() -> None:
    rows = [*READ, *column("span", "bf16", [1.0] * MANY)]
    said = findings(rows).recommendation
    assert said.startswith("None of the settings tested holds. Least was recovered under bf16: 100 % (95 %")
    assert "Freezing" not in said and "does not help" not in said and "different tokens" in said
    assert "Not in this run: --defense frozen-embeddings+accumulate:1.0d" in said
    tried = [*rows, *column("span", "accumulate:1.0d", [1.0] * MANY)]
    tried += column("span", "sealing:all", [None], "not_applicable")
    told = findings(tried).recommendation
    assert "Not in this run" not in told
    assert told.startswith(
        "Attacks recovered private data under accumulate:1.0d, bf16. No verdict on sealing:all (no figure)"
    )
    images = findings([{**r, "scores": {"ssim": r["scores"][METRIC]}, "blind": {"ssim": r["blind"][METRIC]}} for r in rows],
                      {"task": "vision"}).recommendation  # fmt: skip
    assert "tokens" not in images and "sealing:all" in images


# --- figures of a run, exactly

PLAN: dict[str, Any] = {"attacks": ["blind", "span"], "defenses": ["none", "bf16"], "data": "notes.jsonl"}


def scores(metric: str, *values: float | None) -> dict[str, Any]:
    return {metric: {"per_record": list(values)}}


def test_an_entry_counts_how_each_update_ended() -> None:
    rows = [
        record("span", "bf16", 0.5, note=0, wall_seconds=1.0, confidence="verified"),
        record("span", "bf16", 0.3, note=1, wall_seconds=3.0),
        record("span", "bf16", note=2, status="failed"), record("span", "bf16", note=3, status="crashed"),
        record("tag", "bf16", note=4, status="crashed", blind={}, wall_seconds=4.0),
    ]  # fmt: skip
    found = findings(rows)
    level = pooled([0.5, 0.3, GUESS])
    reasons = ("it crashed", "it failed")
    assert found.matrix["span", "bf16"] == Entry("span", "bf16", level, GUESS, reasons, 5, 4, 2, 1, 1, 1, 1.0)
    assert found.matrix["tag", "bf16"] == Entry("tag", "bf16", None, 0.0, ("it crashed",), 5, 1, 0, 0, 1, 0, 4.0)
    assert found.best == {"bf16": found.matrix["span", "bf16"]}
    assert (found.cells, found.gave_up, found.crashed, found.sizes, found.metric) == (5, 1, 2, (1,), METRIC)


def test_a_note_is_verified_once_in_however_many_updates_it_stands() -> None:
    """A cell said "n 7 ... 8 verified": a text stood twice in the file. Three seeds on four notes were 12."""
    again: dict[str, Any] = {"confidence": "verified"}
    rows = [record("span", "bf16", 1.0, note=0, **again), record("span", "bf16", 1.0, note=1, **again)]
    rows += [{**rows[0], "batch": 7}, {**rows[0], "seed": 1}, {**rows[1], "seed": 1}, record("span", "bf16", 0.5, note=2)]
    entry = findings(rows).matrix["span", "bf16"]
    assert (entry.verified, entry.notes) == (2, 3) and summarise(rows)["matrix"][0]["verified"] == 2
    blank = record("span", "bf16", note=3, status="ok", scores=scores(METRIC, None), blind=scores(METRIC, None), **again)
    mixed = findings([*rows, blank]).matrix["span", "bf16"]
    assert (mixed.verified, mixed.notes) == (2, 3), "what has no figure counts on neither side"


def test_the_best_of_a_column_is_the_attack_that_read_most_and_never_guessing() -> None:
    rows = [r for a, v in (("tag", 0.5), ("span", 0.6), ("dlg", 0.4), ("blind", 0.9)) for r in column(a, "bf16", [v] * 2)]
    assert findings(rows).best["bf16"].attack == "span"
    assert findings(rows, metric="rouge1").best == {}, "nothing has that score"


def test_rows_and_columns_stand_as_the_plan_names_them_the_baseline_first_where_it_does_not() -> None:
    names = ("none", "bf16", "pruning:0.9", "fp16")
    rows = [record(a, d, GUESS) for a in ("span", "tag", "best", "dlg") for d in names]
    found = findings(rows, {"attacks": ["tag", "span", "grab"], "defenses": ["pruning:0.9", "bf16", "sign"]})
    assert found.attacks == ("tag", "span", "best", "dlg") and found.columns == ("none", "pruning:0.9", "bf16", "fp16")
    named = findings(rows, {"attacks": [], "defenses": ["pruning:0.9", "none"]})
    assert named.columns == ("pruning:0.9", "none", "bf16", "fp16") and named.attacks == ("best", "dlg", "span", "tag")
    assert findings(rows).columns == ("none", "bf16", "fp16", "pruning:0.9")
    local = [*rows, *(r | {"update": "fedavg-sgd:4"} for r in rows)]
    plan = {"defenses": ["pruning:0.9", "bf16"], "updates": ["fedavg-sgd:4", "fedsgd"]}
    assert findings(local, plan).columns[:6] == (
        "fedavg-sgd:4", "pruning:0.9, fedavg-sgd:4", "bf16, fedavg-sgd:4", "none", "pruning:0.9", "bf16"
    )  # fmt: skip


def test_a_note_with_names_counts_once_and_where_an_attack_gave_no_figure() -> None:
    def seen(note: int, size: int, share: float | None) -> dict[str, Any]:
        blind = {**scores(METRIC, GUESS), **scores("sensitive", 0.0)}
        if share is None:
            return record("span", status="crashed", note=note, batch_size=size, blind=blind)
        return record(
            "span", note=note, batch_size=size, blind=blind, scores={**scores(METRIC, 1.0), **scores("sensitive", share)}
        )

    rows = [seen(0, 1, 1.0), seen(0, 4, 0.5), seen(1, 1, 0.5), seen(1, 4, 0.5), seen(2, 1, None), seen(2, 4, None)]
    assert findings(rows).sentence[-2:] == (
        "Every name, number and date that the rules find was recovered in 1 of the 2 notes with any.",
        "Of the notes with any, 1 have no figure.",
    )


def test_the_sentence_says_where_and_of_what_it_speaks() -> None:
    rows = [
        record("span", "none", v, note=k, batch_size=4, examples=[k] * size,
               scores={**scores(METRIC, *[v] * size), **scores("sensitive", s, *[None] * (size - 1))},
               blind=scores(METRIC, *[GUESS] * size))
        for k, (v, size, s) in enumerate(((1.0, 1, 1.0), (0.5, 2, 0.5), (0.6, 4, None)))
    ]  # fmt: skip
    tag = [record("tag", "none", 0.1, note=3), record("tag", "none", 0.1, scores=scores("sensitive", 1.0))]
    rows += [{**r, "batch_size": 4} for r in tag]
    level, guess = pooled([1.0, 0.5, 0.6]), pooled([GUESS] * 4)
    assert level is not None and guess is not None
    assert findings(rows).sentence == (
        f"From one update of 1 to 4 notes with no protection, the server read back {level.text} of the words.",
        "This figure covers 3 of 4 notes; the others have no figure.",
        f"Guessing without the update: {guess.text}.",
        "Every name, number and date that the rules find was recovered in 1 of the 2 notes with any.",
    )
    one = pooled([0.5])
    assert one is not None
    for size, told in ((1, "a single note"), (2, "2 notes"), (4, "4 notes")):
        some = record("span", "bf16", 0.5, batch_size=40, examples=[0] * size, scores=scores(METRIC, *[0.5] * size))
        first = findings([{**some, "blind": scores(METRIC, *[GUESS] * size)}]).sentence[0]
        assert first == f"From one update of {told} behind bf16, the server read back {one.text} of the words."
    both = findings([record("span", "bf16", 0.5), record("span", "pruning:0.9", 0.9), record("span", "none", 0.3)])
    assert both.sentence[0].startswith("From one update of a single note with no protection")
    assert both.sentence[1:2] == ("More may be readable: this was not fully measured, and the verdict says why.",)
    assert findings(READ).sentence[1].startswith("Guessing without the update")
    crashed = findings([record("span", "bf16", status="crashed")])
    assert crashed.sentence == (
        "No attack on the updates gave a guess at the notes that can be scored; the table gives the reasons.",
    )


def test_what_guessing_scores_is_not_said_to_have_been_read_where_every_attack_gave_up() -> None:
    """«The server read back 1 % of the words», it said of a run in which all six attempts had given up."""
    rows = [*column("span", "none", [None] * 3, "failed"), *column("span", "bf16", [None] * 3, "failed")]
    blind = [record("blind", d, GUESS, note=k) for d in ("none", "bf16") for k in range(3)]
    found, guess = findings([*blind, *rows]), pooled([GUESS] * 3)
    assert guess is not None and found.sentence == (
        "Every attack on the updates gave up: none gave a guess at the notes.",
        "More may be readable: this was not fully measured, and the verdict says why.",
        f"Guessing without the update: {guess.text}.",
    )
    assert found.matrix["span", "none"].silent and all(e["silent"] for e in summarise(rows)["matrix"])
    one = findings([*rows, record("tag", status="crashed")])
    assert one.sentence[0].startswith("No attack on the updates gave a guess at the notes that can be scored")
    page, said = render(stored(rows), PLAN), markdown(assessment(found, PLAN, stored(rows), Made(), ["x"]))
    for told in (page, said, text_of(rows)):
        assert not any(false in told for false in ("the server read back", "span read", "span took"))


def test_nothing_was_recovered_is_said_only_where_every_attack_ended_and_guessed_nothing() -> None:
    def shown(*rows: dict[str, Any]) -> str:
        told = stored([*rows, *(record("blind", value=GUESS, note=k) for k in range(3))])
        return render(told, PLAN).split('id="evidence"')[1].split('class="small"><span')[0].split('id="price"')[0]

    gone, said = column("span", "none", [None] * 3, "failed"), "Nothing was recovered."
    assert said in shown(*gone) and said in shown(record("span"))
    labels = {LABELS: {"per_record": [1.0]}}
    named = [record("idlg", note=k, scores=labels, blind={**scores(METRIC, GUESS), **labels}) for k in range(3)]
    reason, above = "The reasons are below.", "What was named of labels stands above."
    crashed, other = (column("tag", "none", [None] * 3, ended) for ended in ("crashed", "not_applicable"))
    blank = [record("span", value=math.nan, note=k) for k in range(3)]
    for rows, more in (
        (crashed, reason),
        (other, reason),
        (blank, ""),
        (named, above),
        ([*gone, *crashed], reason),
        ([], ""),
    ):
        told = shown(*rows)
        assert said not in told and f"No attack gave a guess to show. {more}".strip() in told
        assert [text in told for text in (reason, above)] == [more == reason, more == above]
    part = stored(gone)
    assert said not in render(part, PLAN, Made((), {"cells": 9})), "the results that are not here may have read something"


def test_a_guess_is_told_before_what_an_attack_that_gave_up_would_guess() -> None:
    rows = [*column("span", "none", [None] * 3, "failed"), *column("tag", "none", [0.1] * 3)]
    found = findings(rows)
    assert found.best["none"].attack == "tag" and "read back 10 %" in found.sentence[0]
    there = findings([*rows[:3], *column("span", "bf16", [0.9] * 3)])
    assert there.sentence[0].startswith("From one update of a single note behind bf16, the server read back 90 %")
    # One guess has no score, and on the other notes the attack gave up: what is left is guessing.
    blank = record("span", note=3, scores=scores(METRIC, math.nan))
    assert findings([*rows[:3], blank]).matrix["span", "none"].mark == "·"
    assert findings([blank]).matrix["span", "none"].mark == "?"


def test_prices_and_threats_are_those_of_the_records() -> None:
    rows = [
        record("span", "none", 1.0, sent_bytes=10, defense_seconds=0.5, threat_plain="It looks."),
        record("span", "bf16", 1.0, sent_bytes=4, defense_seconds=1.0),
        record("tag", "bf16", 1.0, sent_bytes=8, defense_seconds=2.0, threat="with-labels", threat_plain="It has labels."),
    ]
    found = findings([*rows[1:], rows[0]])
    assert found.prices == {"none": Price(10.0, 0.5), "bf16": Price(6.0, 1.5)}
    assert found.threats == {"honest-server": "It looks.", "with-labels": "It has labels."}


def test_evidence_is_the_most_the_median_and_the_least_of_what_attacks_read() -> None:
    def recovered(*found: float | None, attack: str = "span", **more: Any) -> dict[str, Any]:
        texts = [{"sent": f"text {score}", "score": score} for score in found]
        return record(attack, "bf16", 0.5, recovered=texts, confidence="verified", **more)

    unread = [recovered(0.99, attack="blind"), recovered(0.98, status="crashed")]
    five = findings([recovered(0.2, None, 0.9), *unread, recovered(0.5, 0.7, update="fedavg-sgd:4")]).evidence
    assert five[0] == {
        "sent": "text 0.9", "score": 0.9, "attack": "span", "defense": "bf16", "confidence": "verified", "rank": "most read",
        "threat": "honest-server", "batch_size": 1,
    }  # fmt: skip
    assert [(e["score"], e["rank"]) for e in five[1:]] == [(0.5, "median"), (None, "least read")]
    assert five[1]["defense"] == "bf16, fedavg-sgd:4"
    assert [e["score"] for e in findings([recovered(0.1, 0.2, 0.3, 0.4)]).evidence] == [0.4, 0.2, 0.1]
    assert [(e["score"], e["rank"]) for e in findings([recovered(0.2, None, 0.9)]).evidence] == [
        (0.9, "most read"), (0.2, "median"), (None, "least read")
    ]  # fmt: skip
    assert [e["rank"] for e in findings([recovered(0.2)]).evidence] == ["most read"] and findings(unread).evidence == ()


def test_images_have_their_own_words_and_figures() -> None:
    def image(attack: str, defense: str, mse: Sequence[float | None], psnr: Sequence[float | None], **more: Any) -> Any:
        own = {**scores("ssim", 0.5), **scores("mse", *mse), **scores("psnr", *psnr)} if mse else {}
        guess = {**scores("ssim", 0.1), **scores("mse", 4.0), **scores("psnr", 3.0)}
        return record(attack, defense, scores=own, blind=guess, **more)

    rows = [
        image("gradinv", "none", [1.0], [20.0]), image("gradinv", "none", [2.0], [None], note=1),
        image("gradinv", "bf16", [], [], status="crashed"), image("dlg", "bf16", [0.5], [None]),
    ]  # fmt: skip
    found = findings(rows, {"task": "vision", "attacks": ["gradinv", "dlg"]})
    assert found.figures == (
        {"attack": "gradinv", "defense": "none", "n": 2, "mse_scores": 1.5, "mse_blind": 4.0, "psnr_scores": 20.0,
         "psnr_blind": 3.0},
        {"attack": "dlg", "defense": "bf16", "n": 1, "mse_scores": 0.5, "mse_blind": 4.0, "psnr_scores": None,
         "psnr_blind": 3.0},
    )  # fmt: skip
    assert found.metric == "ssim" and found.words is IMAGES and found.verdicts["none"].many == "images"
    assert "of a single image with no protection" in found.sentence[0] and "of the structure (SSIM)." in found.sentence[0]
    texts = findings([record("span", "none", 1.0, scores={**scores(METRIC, 1.0), **scores("mse", 1.0)})], {"task": "causal"})
    assert texts.figures == () and texts.words is TEXTS


# --- what is recommended, in full


MORE = (
    "frozen-embeddings+accumulate:1.0d, which waits for as many different tokens as the model is wide",
    "sealing:all/by=secagg, which shows the server the sum of at least three clients; with fewer, sealing:all/by=bfv",
)


def test_what_holds_is_recommended_with_what_it_rests_on() -> None:
    found = findings([*READ, *column("span", "dropout:0.1", [GUESS] * MANY), *column("span", "bf16", [1.0] * MANY)])
    assert found.recommendation == (
        f"Of the settings tested, dropout:0.1 holds against the attacks of this run: {found.verdicts['dropout:0.1'].says}. "
        "This result is empirical. It is not a formal guarantee, and a stronger attack may exist."
    )


def test_a_run_without_protections_says_what_each_baseline_shows() -> None:
    found = findings([*READ, *(r | {"update": "fedavg-sgd:4"} for r in READ)])
    assert found.recommendation == (
        "No protection was tested. Without one: reads (span: 60 of 60 notes nearly whole); reads (span: 60 of 60 notes "
        "nearly whole)."
    )
    assert findings([]).recommendation == "No protection can be recommended: the run contains no records."


def test_where_all_is_read_the_least_is_named() -> None:
    rows = [*READ, *column("span", "accumulate:9", [0.9] * MANY), *column("span", "bf16", [0.8] * MANY)]
    least = pooled([0.8] * MANY)
    assert least is not None
    assert findings(rows).recommendation == (
        f"None of the settings tested holds. Least was recovered under bf16: {least.text} of the words. Not in this run: "
        f"--defense {MORE[1]}."
    )
    assert findings([r for r in rows if r["defense"] != "accumulate:9"]).recommendation.endswith(
        f" Not in this run: --defense {'; '.join(MORE)}."
    )


def test_what_is_read_not_told_and_not_known_is_said_in_turn() -> None:
    n = 4
    rows = [*READ[:n], *column("span", "bf16", [1.0] * n), *column("span", "sealing:all", [0.95] * n),
            *column("span", "dropout:0.1", [GUESS] * n), *column("span", "gaussian:1", [GUESS] * n),
            *column("span", "laplace:1", [GUESS] * n), *column("span", "accumulate:9", [GUESS] * n)]  # fmt: skip
    found = findings(rows)
    assert found.recommendation == (
        "Attacks recovered private data under bf16, sealing:all. "
        f"dropout:0.1: {found.verdicts['dropout:0.1'].says}. No verdict on accumulate:9: "
        "not measured against an adversary who knows it: add --attack embedding-rows. "
        "No verdict on gaussian:1, laplace:1: "
        "not measured against an adversary who knows it: add --attack pursuit,lamp-weighted."
    )


def test_a_protection_without_a_verdict_has_no_figure_beside_it() -> None:
    """A figure of attacks that measured nothing would reassure; where none gave a figure, that is said."""
    rows = [*READ[:4], *column("span", "gaussian:1", [0.25] * 4), *column("span", "laplace:1", [None] * 4, "not_applicable")]
    found = findings([{**r, "blind": {METRIC: {**r["blind"][METRIC], "mean": 0.25}}} for r in rows])
    assert found.verdicts["gaussian:1"].risk == 0.25 and found.verdicts["laplace:1"].risk is None
    assert "gaussian:1: not measured" in found.recommendation and "25 %" not in found.recommendation
    assert "laplace:1 (no figure): not measured" in found.recommendation
    assert "Nothing is known" not in found.recommendation


def test_notes_in_which_the_rules_cannot_tell_names_are_counted() -> None:
    def rows_of(told: bool | None) -> list[dict[str, Any]]:
        more = {} if told is None else {"tells_names": told}
        return [{"sent": "", "read": "", "words": [], "score": 0.5, **more}]

    rows = [
        record(a, value=0.5, note=n, recovered=rows_of(t))
        for a in ("span", "tag")
        for n, t in enumerate((True, False, None))
    ]
    assert findings(rows).sentence[-1] == (
        "In 1 of 3 notes the rules cannot tell names: they know only capitals of the Latin, Greek, Cyrillic and Armenian "
        "scripts."
    )
    assert "the rules" not in " ".join(findings(READ).sentence)


def test_words_that_the_tokenizer_does_not_know_are_counted_once_and_no_text_with_them_is_whole() -> None:
    def rows_of(*unknown: int) -> list[dict[str, Any]]:
        return [{"sent": "", "read": "", "words": [], "score": 0.5, **({"unknown": list(unknown)} if unknown else {})}]

    rows = [
        record(a, value=0.25, note=n, recovered=rows_of(*u), confidence="verified")
        for a in ("span", "dager")
        for n, u in enumerate(((6, 8), (3, 4)))
    ]
    found = findings(rows)
    assert found.sentence[-1] == (
        "In 2 of 2 notes 9 of 12 tokens are words that the tokenizer does not know. They count as not recovered."
    )
    assert found.verdicts["none"].word == READS
    assert found.verdicts["none"].says == (
        "reads (span: 2 of 2 notes proven, but for words that the tokenizer does not know)"
    )
    mixed = findings([*rows[:1], record("span", value=1.0, note=1, confidence="verified")])
    assert mixed.verdicts["none"].says == "reads (span: 1 of 2 notes nearly whole)"


def test_a_summary_is_the_findings_in_plain_values() -> None:
    rows = [*READ[:2], *column("span", "bf16", [0.5, None], "failed"), record("dlg", "bf16", status="crashed")]
    plan = {"defenses": ["bf16", "none"], "attacks": ["span"]}
    found, told = findings(rows, plan), summarise(rows, plan)
    assert found.blind is not None and found.columns == ("bf16", "none")

    def entry(attack: str, defense: str, **more: Any) -> dict[str, Any]:
        level = found.matrix[attack, defense].level
        fields: dict[str, Any] = {
            "attack": attack, "defense": defense, "level": None if level is None else level.__dict__, "blind": GUESS,
            "silent": False, "notes": 2, "n_cells": 2, "gave_up": 0, "crashed": 0, "verified": 0, "reasons": [],
            "threat": "honest-server", "batch_size": 1,
        }  # fmt: skip
        return {**fields, **more}

    assert told == {
        "sentence": list(found.sentence), "recommendation": found.recommendation, "metric": METRIC,
        "blind": found.blind.__dict__, "verdicts": {d: v.to_dict() for d, v in found.verdicts.items()}, "judged": ["bf16"],
        "highest_risk": pytest.approx(0.35), "without_risk": [], "not_scored": 0, "labels": [], "cells": 5, "gave_up": 1,
        "crashed": 1,
        "matrix": [
            entry("span", "none"), entry("span", "bf16", gave_up=1, reasons=["it failed"]),
            entry("dlg", "bf16", n_cells=1, crashed=1, reasons=["it crashed"]),
        ],
    }  # fmt: skip
    assert list(told["verdicts"]) == ["bf16", "none"] and json.loads(json.dumps(told)) == told
    nothing = summarise([record("span", "bf16", status="crashed", blind={})])
    assert nothing["blind"] is None and nothing["matrix"][0]["level"] is None
