"""What is said of a model service: verdicts, page and exit codes from its Records, and the command that makes them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from audit_setting import TEXTS, model_folder
from rich.console import Console
from study_setting import notes
from typer.testing import CliRunner

from rasura import registry
from rasura.cli import app
from rasura.core.answers import TokenReading
from rasura.core.interfaces import Budget, InputError, NotApplicable
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.core.threat import observe_service
from rasura.metrics.intervals import crossed_interval
from rasura.registry.services import parse_service_protection
from rasura.report.commands import next_step
from rasura.report.findings import summary_of
from rasura.report.gate import gate, outcomes
from rasura.report.page import render
from rasura.report.pooled import interval, texts_needed
from rasura.report.readings import reading
from rasura.report.sentence import RISK
from rasura.report.services import ANSWERS, measures, service_findings
from rasura.report.terminal import summary
from rasura.report.verdicts import ABOVE, NOT_MEASURED, NOT_TOLD, READS
from rasura.testing.services import sent

__all__ = ["model_folder"]

MANY = 60
GUESS = 0.1
HIDDEN = "obfuslm:k=4"


def record(attack: str, defense: str, value: float | None, *, status: str = "ok", **more: Any) -> dict[str, Any]:
    """All notes of a service, of each of which the attack read the share ``value``."""
    known_by = asdict(parse_service_protection(defense).adversaries)
    scores = {} if value is None else {RISK: {"per_record": [value] * MANY}}
    fields: dict[str, Any] = {
        "attack": attack, "defense": defense, "update": "uploaded", "threat": "service-operator", "batch_size": MANY,
        "seed": 0, "batch": 0, "examples": list(range(MANY)), "status": status, "confidence": "none",
        "reason": "" if status == "ok" else f"it {status}", "scores": scores,
        "blind": {RISK: {"per_record": [GUESS] * MANY}}, "details": {}, "recovered": [],
        "wall_seconds": 0.0, "threat_plain": "", "sent_bytes": 0, "defense_seconds": 0.0,
        "known_by": known_by, "versions": {}, "data": "", "device": "cpu", "schema": 3,
    }  # fmt: skip
    return {**fields, **more}


PLAN = {
    "kind": "service", "protections": [HIDDEN], "weights": ["uploaded"], "task": "classification",
    "attacks": ["blind", "knn", "decipherment", "invbert"],
    "data": "notes.jsonl", "model": "minilm", "limit": MANY, "references": 9, "seed": 0,
    "reference": "public.jsonl", "budget": "quick",
}  # fmt: skip

SEEN = [
    record("knn", "none", 1.0),
    record("invbert", "none", 0.8),
    record("decipherment", "none", None, status="not_applicable"),
]
"""What makes ``knn`` and ``invbert`` yardsticks; ``decipherment`` reads the protection itself."""

STOPPED = [*SEEN, *(record(a, HIDDEN, GUESS) for a in ("knn", "decipherment", "invbert"))]


def keyed(rows: list[dict[str, Any]], keys: int = MANY) -> list[dict[str, Any]]:
    """``rows``, in which the protection was read behind so many keys, each time the same."""
    return [{**r, "seed": key} for r in rows for key in range(keys if r["defense"] == HIDDEN else 1)]


def word(rows: list[dict[str, Any]]) -> str:
    return service_findings(rows, PLAN).verdicts[HIDDEN].word


def test_a_protection_is_not_told_from_guessing_only_if_all_who_know_it_ran() -> None:
    assert word(STOPPED) == NOT_TOLD
    for absent in ("decipherment", "invbert"):
        rows = [r for r in STOPPED if (r["attack"], r["defense"]) != (absent, HIDDEN)]
        assert word(rows) == NOT_MEASURED and f"add --attack {absent}" in service_findings(rows, PLAN).verdicts[HIDDEN].says
        for status in ("crashed", "not_applicable"):
            assert word([*rows, record(absent, HIDDEN, None, status=status)]) == NOT_MEASURED
    assert word([r for r in STOPPED if r["defense"] != "none"]) == NOT_MEASURED, "no attack was seen to work"
    assert word([*STOPPED[:-1], record("invbert", HIDDEN, math.nan)]) == NOT_MEASURED


def test_a_verdict_says_that_it_is_of_one_key_and_so_does_what_is_recommended() -> None:
    key = "behind the one key of this run where it has a key"
    for rows in (STOPPED, [*STOPPED, record("ednn", HIDDEN, 1.0)], [*STOPPED[:-1], record("invbert", HIDDEN, 0.4)]):
        found = service_findings(rows, PLAN)
        assert found.verdicts[HIDDEN].says.endswith(key) and found.verdicts[HIDDEN].to_dict()["says"].endswith(key)
        assert key not in found.verdicts["none"].says, "without a protection there is no key"
    assert not service_findings(STOPPED, PLAN).verdicts[HIDDEN].holds, "the next key may be read"
    assert "which takes 39" in service_findings(STOPPED, PLAN).verdicts[HIDDEN].says
    assert key not in service_findings(STOPPED[:-1], PLAN).verdicts[HIDDEN].says, "nothing was said for any key"


def test_a_protection_holds_behind_many_keys_alone() -> None:
    held = service_findings(keyed(STOPPED), PLAN)
    assert held.verdicts[HIDDEN].holds and "behind 60 keys. This result is empirical" in held.recommendation
    few = service_findings(keyed(STOPPED, 5), PLAN).verdicts[HIDDEN]
    assert (few.word, few.holds, few.keys) == (NOT_TOLD, False, 5)
    assert few.says.endswith("; too few keys to conclude that it holds, which takes 39), behind 5 keys")
    step = next_step(few, held, PLAN, STOPPED, {})
    assert step.says.startswith("Measure at least 39 notes, behind as many keys.")
    assert step.command.endswith("--limit 60 --seed 0 --budget quick --out runs/next --keys 39")


def test_the_interval_is_over_keys_and_texts() -> None:
    """One key in three is read whole. An interval over the texts alone would end where the mean of these three does."""
    rows = [*SEEN, *(record("knn", HIDDEN, float(key == 2), seed=key) for key in range(3))]
    found = service_findings(rows, PLAN)
    values = [[float(key == 2)] * MANY for key in range(3)]
    level = found.best[HIDDEN].level
    assert level is not None and (level.mean, level.low, level.high) == crossed_interval(values) and level.n == MANY
    assert level.high > 0.9 > interval([1 / 3] * MANY)[2]
    assert found.verdicts[HIDDEN].word == READS, "texts came back whole behind a key"
    assert [m.figures[-1][0] for m in measures(rows, found) if m.defense == HIDDEN] == [level]
    blind = [record("blind", HIDDEN, GUESS, seed=key) for key in range(3)]
    guessed = reading("blind", blind, {}, RISK).level
    assert guessed is not None and guessed.high == interval([GUESS] * MANY)[2], "guessing knows no key"


def test_a_key_behind_which_an_attack_crashed_leaves_the_verdict_open() -> None:
    rows = [
        {**r, "status": "crashed", "scores": {}} if (r["attack"], r["seed"]) == ("knn", 7) else r for r in keyed(STOPPED)
    ]
    found = service_findings(rows, PLAN).verdicts[HIDDEN]
    assert found.word == NOT_MEASURED and not found.holds and gate({HIDDEN: found}, 0.9).exit == 4


def test_a_text_without_a_value_behind_one_key_counts_behind_none() -> None:
    """It is read whole behind the others: left out behind one, it would lower the mean."""
    values = [1.0, *[0.0] * (MANY - 1)]
    rows = [record("knn", HIDDEN, 0.0, seed=key) for key in range(3)]
    for row, scored in zip(rows, (values, values, [None, *values[1:]])):
        row["scores"] = {RISK: {"per_record": scored}}
    found = reading("knn", rows, {}, RISK)
    assert found.level is not None and found.level.mean == 0 and found.whole == {0} and found.excess < 1


FEW = 8


def with_unknown(rows: list[dict[str, Any]], metric: str = RISK) -> list[dict[str, Any]]:
    """``rows``, in which the tokenizer knows a word in ``FEW`` texts alone."""

    def side(scores: dict[str, Any]) -> dict[str, Any]:
        kept = scores.get(metric, {}).get("per_record", [])[:FEW]
        return {**scores, metric: {"per_record": [*kept, *[None] * (MANY - FEW)]}} if kept else scores

    return [{**r, "scores": side(r["scores"]), "blind": side(r["blind"])} for r in rows]


def test_texts_without_a_known_word_do_not_make_a_protection_hold() -> None:
    assert service_findings(keyed(STOPPED), PLAN).verdicts[HIDDEN].holds
    rows = with_unknown(keyed(STOPPED))
    found = service_findings(rows, PLAN)
    verdict = found.verdicts[HIDDEN]
    assert (verdict.word, verdict.n, verdict.holds) == (NOT_TOLD, FEW, False) and "too few to conclude" in verdict.says
    said = "52 of 60 notes could not be scored and do not count: the tokenizer knows no word of them."
    assert said in found.sentence and summary_of(found)["not_scored"] == MANY - FEW
    console = Console(record=True, width=300)
    console.print(summary(found))
    page = " ".join(render(rows, PLAN).split())
    assert said in console.export_text() and said in page and "with 95 % intervals over 8 notes" in page


def test_answers_without_a_known_word_do_not_count_and_are_told() -> None:
    more = {ANSWERS: {"per_record": [GUESS] * MANY}}
    rows = [
        {**r, "scores": r["scores"] and {**r["scores"], **more}, "blind": {**r["blind"], **more}} for r in keyed(STOPPED)
    ]
    hidden = [r for r in rows if r["defense"] == HIDDEN]
    works = {ANSWERS: {"per_record": [1.0] * MANY}}
    plain = [{**r, "scores": r["scores"] and {**r["scores"], **works}} for r in rows if r["defense"] == "none"]
    assert service_findings([*plain, *hidden], PLAN).verdicts[HIDDEN].holds
    found = service_findings([*plain, *with_unknown(hidden, ANSWERS)], PLAN)
    assert found.verdicts[HIDDEN].n == FEW and not found.verdicts[HIDDEN].holds
    assert found.sentence[-1].startswith(f"52 of 60 answers behind {HIDDEN} could not be scored and do not count")


def test_a_text_that_comes_twice_counts_once_in_the_table_of_every_figure() -> None:
    twice = [{**r, "examples": [*range(MANY - 1), 0]} for r in STOPPED]
    figures = [m.figures[-1] for m in measures(twice, service_findings(twice, PLAN))]
    assert {level.n for pair in figures for level in pair if level} == {MANY - 1}


def test_unknown_words_inside_texts_are_told() -> None:
    row = {"sent": "", "read": "", "words": [], "score": 0.5}
    told = {**row, "unknown": [3, 4]}
    found = service_findings([{**STOPPED[0], "recovered": [told, *[row] * (MANY - 1)]}, *STOPPED[1:]], PLAN)
    assert found.sentence[-1].startswith("In 1 of 60 notes 3 of 4 tokens are words that the tokenizer does not know.")


def test_what_is_read_is_said_whatever_else_is_missing() -> None:
    assert word([record("knn", HIDDEN, 1.0)]) == READS
    assert word([*STOPPED[:-1], record("invbert", HIDDEN, 0.4)]) == ABOVE
    unknown = service_findings([*SEEN, record("knn", "madlib:epsilon=1", GUESS)], PLAN).verdicts["madlib:epsilon=1"]
    assert unknown.word == NOT_MEASURED and "no attack knows madlib" in unknown.says


def test_of_a_model_that_generates_the_worse_of_prompts_and_answers_counts() -> None:
    def both(rows: list[dict[str, Any]], answer: float) -> list[dict[str, Any]]:
        read = {ANSWERS: {"per_record": [answer] * MANY}}
        guess = {ANSWERS: {"per_record": [GUESS] * MANY}}
        return [{**r, "scores": r["scores"] and {**r["scores"], **read}, "blind": {**r["blind"], **guess}} for r in rows]

    quiet = both(STOPPED, GUESS)
    unprotected = [r for r in both(STOPPED, 1.0) if r["defense"] == "none"]
    hidden = [r for r in quiet if r["defense"] == HIDDEN]
    assert word([*unprotected, *hidden]) == NOT_TOLD
    assert word(quiet) == NOT_MEASURED, "no attack was seen to read answers"
    answered = [*unprotected, *(r for r in both(STOPPED, 1.0) if r["defense"] == HIDDEN)]
    assert word(answered) == READS
    # The figure beside the verdict is of what was asked; the one that decided is said, too.
    assert f"Of the answers behind {HIDDEN}, the operator of the service read back 100 % " in " ".join(
        service_findings(answered, PLAN).sentence
    )
    assert not any("Of the answers" in line for line in service_findings([*unprotected, *hidden], PLAN).sentence)


def test_the_operator_read_nothing_where_every_attack_gave_up() -> None:
    gone = [record(a, d, None, status="failed") for a in ("knn", "decipherment", "invbert") for d in ("none", HIDDEN)]
    found = service_findings(gone, PLAN)
    assert found.sentence[0] == "Every attack on the service gave up: none gave a guess at the notes."
    assert found.sentence[-1].startswith("Guessing without looking at the data sent: 10 %")
    assert not any("read back" in line for line in found.sentence)
    empty = [{**r, "status": "ok", "reason": ""} for r in gone]
    assert measures(empty, service_findings(empty, PLAN)) == [], "an empty guess is no figure of the attack"


def test_the_gate_judges_a_service() -> None:
    assert texts_needed(0.2) <= MANY
    held = service_findings(keyed(STOPPED), PLAN).verdicts
    assert gate(held, 0.4).exit == 0 and "is read, on average over 60 keys, within" in outcomes(held, 0.4)[HIDDEN][1]
    one = gate(service_findings(STOPPED, PLAN).verdicts, 0.4)
    assert one.exit == 4 and one.says[0].endswith("one key says nothing of another; at least 8 are needed (--keys)")
    few = gate(service_findings(keyed(STOPPED, 5), PLAN).verdicts, 0.4)
    assert few.exit == 4 and "5 keys do not rule out a risk of up to" in few.says[0]
    assert gate(service_findings([*STOPPED, record("ednn", HIDDEN, 0.5)], PLAN).verdicts, 0.4).exit == 3
    assert gate(service_findings(STOPPED[:-1], PLAN).verdicts, 0.4).exit == 4


def test_the_page_has_guessing_beside_each_figure_and_names_its_limits() -> None:
    page = " ".join(render([*STOPPED, record("mlc", HIDDEN, None, status="crashed")], PLAN).split())
    assert "Of 60 notes sent with no protection, the operator of the service read back 100 % " in page
    assert page.count("guessing 10.0") == 5 and "Guessing without looking at the data sent (blind): 10 %" in page
    assert 'mlc behind obfuslm:k=4: <span lang="en">it crashed</span>' in page
    assert "the intervals do not cover variation between keys" in page and "honest" not in page
    assert "Not in this run: --defense" not in page and "update" not in page.partition("<main>")[2]
    trained = [record("knn", HIDDEN, 1.0, update="trained")]
    assert "obfuslm:k=4, trained" in render([*STOPPED, *trained], PLAN)


@pytest.mark.parametrize("name", registry.SERVICE_PROTECTIONS)
def test_attacks_that_know_a_protection_read_behind_it(name: str) -> None:
    written = registry.SERVICE_PROTECTIONS[name].example
    for text in (
        written,
        *(f"{written}/{o}=1".replace("plus=1", "plus=true") for o in registry.SERVICE_PROTECTIONS[name].known_by_with),
    ):
        known = parse_service_protection(text).adversaries
        assert bool(known.attacks) != bool(known.unknown) or name == "none"
        seen = observe_service(sent(text), reference_text=tuple("the w20 w27 w34 w41" for _ in range(30)))
        for attack in known.attacks:
            guess = registry.service_attack(attack)(seen, rng=generator(0), budget=Budget("quick"))
            assert isinstance(guess, TokenReading)


def test_attacks_that_read_the_protection_itself_read_nothing_without_one() -> None:
    for name, spec in registry.SERVICE_ATTACKS.items():
        seen = observe_service(sent("none", spec.home[1]), reference_text=tuple("the w20 w27 w34 w41" for _ in range(30)))
        try:
            spec.make()(seen, rng=generator(0), budget=Budget("quick"))
        except NotApplicable:
            assert spec.protection, name
        else:
            assert not spec.protection, name


def test_the_command_audits_reports_and_resumes(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    notes(tmp_path / "notes.jsonl", list(TEXTS))
    notes(tmp_path / "more.jsonl", [f"{t} w9 w8" for t in TEXTS])
    command = [
        "audit",
        "notes.jsonl",
        "--service",
        "--reference",
        "more.jsonl",
        "--model",
        str(model_folder),
        "--limit",
        "2",
    ]
    command += ["--defense", "obfuslm:k=1,dp-forward:epsilon=1", "--attack", "blind,knn,mlc", "--out", "run", "--json"]
    done = CliRunner().invoke(app, [*command, "--fail-above", "0.5"], catch_exceptions=False)
    assert done.exit_code == 3, done.output
    told = json.loads(done.stdout)
    assert told["gate"]["judged"] == ["obfuslm:k=1", "dp-forward:epsilon=1"] == told["judged"]
    assert told["verdicts"]["obfuslm:k=1"]["verdict"] == READS == told["verdicts"]["none"]["verdict"]
    assert told["verdicts"]["dp-forward:epsilon=1"]["verdict"] == NOT_MEASURED
    assert "2 of 2 notes nearly whole" in (tmp_path / "run" / "report.html").read_text()
    store = RunStore("run")
    records = list(store)
    assert len(records) == 9 and {r["threat"] for r in records} == {"service-operator"}
    assert all("alpha" not in json.dumps(r).lower() for r in records), "masked unless asked for"
    store.close()
    before = (tmp_path / "run" / "records.jsonl").read_text()
    assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert CliRunner().invoke(app, ["report", "run"], catch_exceptions=False).exit_code == 0
    assert (tmp_path / "run" / "records.jsonl").read_text() == before


def test_settings_that_a_service_has_not_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "notes.jsonl")
    notes(Path(path), list(TEXTS))

    def why(*arguments: str) -> str:
        refused = CliRunner().invoke(app, ["audit", *arguments, "--service", "--out", str(tmp_path / "run")]).exception
        assert isinstance(refused, InputError)
        return str(refused)

    for more in (("--update", "fedsgd"), ("--engine", "ray"), ("--suite", "quick"), ("--text", "a b c d"), ("--truncate",)):
        assert why(path, "--reference", path, *more).startswith(f"{more[0]} cannot be used with --service")
    assert "--service needs --reference" in why(path)
    assert "--service needs FILE" in why()
    assert "unknown protection of a service" in why(path, "--reference", path, "--defense", "gaussian:1")
    assert "unknown attack on a service" in why(path, "--reference", path, "--attack", "span")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_kind_of_method_is_listed(kind: str) -> None:
    done = CliRunner().invoke(app, ["list", kind, "--json"], catch_exceptions=False)
    ours = {"minilm", "smollm2", "lenet", "cnn"} if kind == "models" else set()  # which no spec describes
    assert set(json.loads(done.stdout)) - ours == {
        n if f"{n}:X" not in done.stdout else f"{n}:X" for n in registry.KINDS[kind]
    }
