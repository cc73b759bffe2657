"""The audit of a model service and its training, alone and in studies: exact laws, resumption, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, model_folder
from commands import rasura_command, refused
from study_setting import notes, study_folder
from typer.testing import CliRunner

from rasura import registry
from rasura.cli import app
from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.interfaces import Budget, InputError
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.registry.services import parse_service_protection
from rasura.report.page import write_report
from rasura.runs.scoring import fractions_of
from rasura.runs.service_plan import ServicePlan
from rasura.runs.services import ServiceAudit, audit_service
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.studies.files import load_study, prepared
from rasura.studies.metric_values import keyed_level
from rasura.studies.plots import of_service
from rasura.testing.tiny import SEP, tiny, tokenizer_folder
from rasura.victims.recipe import Recipe

__all__ = ["model_folder"]


SERVICE = """
title = "Four"
source = "A paper, Table 4"
differs = ["everything"]
metrics = ["top1"]

[service]
data = "notes.jsonl"
reference = "more.jsonl"
protections = ["none", "obfuslm:k=1", "sentinellms:times=2", "dp-forward:epsilon=1"]
attacks = ["blind", "knn", "preimage"]
limit = 2

[[figures]]
protection = "obfuslm:k=1"
attack = "knn"
paper = "12.3"
"""


@pytest.mark.slow
def test_a_study_of_a_service_resumes_and_sets_the_paper_s_figure_beside_ours(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_folder(tmp_path, SERVICE.replace("[service]", f'[service]\nmodel = "{model_folder}"'))
    monkeypatch.chdir(tmp_path)
    for name, texts in (("notes", TEXTS), ("more", [f"{t} w9 w8" for t in TEXTS])):
        notes(tmp_path / f"{name}.jsonl", texts)
    results = tmp_path / "studies" / "RESULTS.md"
    assert CliRunner().invoke(app, ["study", "one", "--data", str(tmp_path)], catch_exceptions=False).exit_code == 0
    rows = {tuple(line.strip("| ").split(" | ")[:2]): line for line in results.read_text().splitlines() if " | " in line}
    assert "](plots/" not in results.read_text()  # no protection at two strengths, so no curve
    # A permuted table's rows are the public ones: the nearest names them; noise hides them.
    assert "| 100.0 |" in rows["obfuslm:k=1", "knn"] and rows["obfuslm:k=1", "knn"].endswith("| 12.3 |")
    assert "| 100.0 |" in rows["none", "knn"] and "| 100.0" not in rows["dp-forward:epsilon=1", "knn"]
    assert ("none", "preimage") not in rows and "- preimage:" in results.read_text()  # there is nothing to turn round
    kept = written(tmp_path / "runs")
    first = results.read_text()
    arguments = ["study", "one", "--data", str(tmp_path)]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert results.read_text() == first and written(tmp_path / "runs") == kept
    few = CliRunner().invoke(app, [*arguments, "--limit", "99", "--out", "other"])
    assert isinstance(few.exception, InputError) and "expected at least 99" in str(few.exception)


def test_curves_are_named_by_what_tells_them_apart(tmp_path: Path) -> None:
    three = '"obfuslm:k=1/epsilon=0.1", "obfuslm:k=1/epsilon=3.0", "obfuslm:k=5/epsilon=0.1",'
    body = SERVICE.replace('"none", "obfuslm:k=1",', three).split("[[figures]]")[0]
    study = load_study("one", study_folder(tmp_path, body))
    plan = prepared(study, data=str(tmp_path))
    assert isinstance(plan, ServicePlan)
    heights = zip(plan.protections, (0.1, 0.9, 0.3))
    rows: list[dict[str, Any]] = [
        {"defense": p, "attack": "knn", "update": "uploaded", "status": "ok", "scores": {"top1": {"per_record": [0.5, y]}}}
        for p, y in heights
    ]
    figure = of_service(study, plan, rows)
    assert figure is not None and [c.name for c in figure.curves] == ["knn"]
    assert [round(p[1], 6) for p in figure.curves[0].points] == [30.0, 70.0]
    keys = [
        {**r, "scores": {"top1": {"per_record": [y + step for y in (0.1, 0.2, 0.3, 0.4, 0.5)]}}}
        for r in rows
        for step in (0, 0.5)
    ]
    figure = of_service(study, plan, keys)
    assert figure is not None
    (_, mean, *shown), *_ = figure.curves[0].points
    assert (mean, *shown) == keyed_level(keys[:2], "top1"), "over keys and texts"
    rows.append({**rows[2], "defense": "obfuslm:k=5/epsilon=3.0"})
    figure = of_service(study, plan, rows)
    assert figure is not None
    assert [c.name for c in figure.curves] == ["knn, obfuslm:k=1/epsilon", "knn, obfuslm:k=5/epsilon"]


TRAINED = """
title = "Two"
source = "A paper, Table 2"
differs = ["everything"]
metrics = ["accuracy", "loss", "top1"]

[service]
data = "notes.jsonl"
reference = "more.jsonl"
protections = ["none", "obfuslm:k=1", "santext+:epsilon=1", "cape:depth=1"]
attacks = ["knn", "invbert"]
weights = ["uploaded", "trained"]
limit = 2

[train]
epochs = 2
batch_size = 4
holdout = 0.3
seeds = 2

[[figures]]
protection = "obfuslm:k=1"
attack = "training"
paper = "45.6"
"""


def table(path: Path) -> dict[tuple[str, ...], list[str]]:
    """The rows of a Markdown file's tables by their first three cells."""
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if " | " in line]
    return {tuple(cells[:3]): cells for cells in rows}


@pytest.mark.slow
def test_a_study_trains_a_service_and_reads_it_before_and_after(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study_folder(tmp_path, TRAINED.replace("[service]", f'[service]\nmodel = "{model_folder}"'))
    monkeypatch.chdir(tmp_path)
    for name, texts in (("notes", TEXTS), ("more", [f"{t} w{k}" for t in TEXTS for k in range(5)])):
        notes(tmp_path / f"{name}.jsonl", list(texts))
    arguments, results = ["study", "one", "--data", str(tmp_path)], tmp_path / "studies" / "RESULTS.md"
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    first, rows = results.read_text(), table(results)
    plain, permuted = rows["none", "2", rows_of(rows, "none")], rows["obfuslm:k=1", "2", rows_of(rows, "obfuslm:k=1")]
    # Other ids for the same tokens change nothing of what is learned.
    assert plain[2:4] == permuted[2:4] and permuted[-1] == "45.6"
    for protection in ("none", "obfuslm:k=1"):
        assert rows[protection, "knn", "uploaded"][3] == "100.0"
        assert float(rows[protection, "knn", "trained"][3].split(" ")[0]) > 50  # learning moved the rows a little
    assert ("cape:depth=1", "knn", "trained") in rows and ("cape:depth=1", "knn", "uploaded") not in rows
    kept = written(tmp_path / "runs")
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    assert results.read_text() == first and written(tmp_path / "runs") == kept


@pytest.mark.slow
def test_a_study_reads_uploaded_weights_behind_every_key_and_trained_ones_behind_their_own(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = (
        TRAINED.replace("seeds = 2\n", "")
        .replace('["knn", "invbert"]', '["blind", "knn"]')
        .replace("[service]", "keys = 3\n\n[service]")
    )
    study_folder(tmp_path, plan.replace("[service]", f'[service]\nmodel = "{model_folder}"'))
    monkeypatch.chdir(tmp_path)
    for name, texts in (("notes", TEXTS), ("more", [f"{t} w{k}" for t in TEXTS for k in range(5)])):
        notes(tmp_path / f"{name}.jsonl", list(texts))
    assert CliRunner().invoke(app, ["study", "one", "--data", str(tmp_path)], catch_exceptions=False).exit_code == 0
    results, place = tmp_path / "studies" / "RESULTS.md", tmp_path / "runs" / "studies" / "one"
    rows = table(results)
    assert ", 3 keys for the uploaded weights." in results.read_text()
    runs = {p.name: RunStore(p) for p in place.iterdir() if p.name != "training"}
    cells = {name: {(r["defense"], r["attack"], r["update"]) for r in store} for name, store in runs.items()}
    for store in runs.values():
        store.close()
    read = {(p, a, "uploaded") for p in ("obfuslm:k=1", "santext+:epsilon=1") for a in ("blind", "knn")}
    assert cells["key-1"] == cells["key-2"] == read
    assert cells["key-0"] == read | {("none", a, "uploaded") for a in ("blind", "knn")}
    everywhere = ("none", "obfuslm:k=1", "santext+:epsilon=1", "cape:depth=1")
    both = {(p, a, w) for p in everywhere for a in ("blind", "knn") for w in ("uploaded", "trained")}
    assert cells["trained"] == both - {("cape:depth=1", a, "uploaded") for a in ("blind", "knn")}
    # Guessing knows no key, so its interval is that of the texts alone.
    assert rows["obfuslm:k=1", "blind", "uploaded"][3] == rows["none", "blind", "uploaded"][3]
    shown = {c[:3] for c in map(tuple, rows.values())}
    assert shown >= {*cells["key-0"], *(cell for cell in cells["trained"] if cell[2] == "trained")}
    assert ("obfuslm:k=1", "knn", "uploaded, same key") in shown


def written(folder: Path) -> dict[Path, int]:
    """When each result in ``folder`` was written."""
    kept = [p for p in folder.rglob("*.json") if p.name not in ("plan.json", "rows.json")]
    return {p: p.stat().st_mtime_ns for p in (*kept, *folder.rglob("run.sqlite"))}


def rows_of(rows: dict[tuple[str, ...], list[str]], protection: str) -> str:
    """The third cell of the training's row of ``protection``."""
    return next(key[2] for key in rows if key[:2] == (protection, "2"))


@pytest.mark.slow
def test_a_service_that_generates_is_read_in_prompts_and_answers(tmp_path: Path) -> None:
    model = tokenizer_folder(tiny("llama", "causal"), tmp_path / "model")
    texts = [" ".join(f"w{20 + (7 * k + n) % 20}" for n in range(8 + k % 3)) for k in range(20)]
    notes(tmp_path / "more.jsonl", texts[4:])
    notes(tmp_path / "notes.jsonl", texts[:4])
    common: dict[str, Any] = {
        "data": str(tmp_path / "notes.jsonl"),
        "reference": str(tmp_path / "more.jsonl"),
        "model": str(model),
    }
    protections = ("none", "obfuslm:k=1", "obfuslm:k=2")
    recipe = Recipe(epochs=20, batch_size=4, learning_rate=5e-3, patience=20)
    training = Training(
        TrainPlan(common["reference"], common["data"], str(model), "causal", protections, recipe=recipe, service=True),
        tmp_path / "training",
    )
    worth = {r["defense"]: r["after"]["loss"] for r in training.run()}
    assert worth["none"] == pytest.approx(worth["obfuslm:k=1"], rel=1e-3)
    plan = ServicePlan(
        **common, task="causal", protections=protections, attacks=("blind", "knn", "era"), limit=4,
        weights=("uploaded", "trained"),
    )  # fmt: skip
    audit, store = ServiceAudit(plan, training), RunStore(tmp_path / "run", ServiceAudit(plan, training).identity)
    first = next(audit.run(store))
    assert first.attack == "client"  # interrupted here, the others still find what it answered
    assert f"1 of {len(audit.cells)} results are here" in write_report(tmp_path / "run").read_text(encoding="utf-8")
    rows = {(r.defense, r.attack, r.update): r for r in [first, *audit.run(store)]}
    assert "results are here" not in write_report(tmp_path / "run").read_text(encoding="utf-8")
    assert len(rows) == len(audit.cells) == len(store)
    plain, permuted = (rows[p, "client", "trained"] for p in ("none", "obfuslm:k=1"))
    # The client decodes what the plain model would have written, whatever ids the server saw.
    told = {p: audit._answers(partial(audit._trained, p, partial(audit._uploaded, p, 0))) for p in protections}
    assert told["none"] == told["obfuslm:k=1"] and plain.scores == permuted.scores
    for answer, ids in zip(told["none"], audit.ids):
        assert len(answer) == len(ids) - len(ids) // 2 or answer[-1] == SEP
    assert max(map(len, told["none"])) > 1
    # Nothing of them is stored: they are about as private as the second half of a text.
    assert not plain.details and not permuted.details
    exact = rows["obfuslm:k=1", "knn", "uploaded"].scores
    assert exact["top1"]["per_record"] == exact["answer_top1"]["per_record"] == [1.0] * 4
    # Whoever reads every token reads as near to the true continuation as the client.
    assert exact["continuation_rouge1"]["per_record"] == permuted.scores["continuation_rouge1"]["per_record"]
    assert set(rows["obfuslm:k=2", "era", "trained"].scores) >= {"answer_rougeL", "continuation_rougeL"}
    store.close()
    more = Training(replace(training.plan, defenses=(*protections, "sentinellms")), tmp_path / "training")
    assert list(audit_service(plan, out=tmp_path / "run", training=more)) == []  # all is done
    unprotected = replace(plan, protections=("obfuslm:k=1",))
    without = Training(replace(training.plan, defenses=("obfuslm:k=1",)), tmp_path / "training")
    with pytest.raises(InputError, match="none: attacking its trained weights needs a training under this protection"):
        ServiceAudit(unprotected, without)


class Broken:
    name = "knn"

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        if self.fault == "index":
            raise IndexError("Patient Ingrid")
        return TokenReading(tuple(torch.zeros(len(ids), 1, dtype=torch.int64) for ids in seen.ids[1:]))


@pytest.mark.parametrize(
    ("fault", "says"),
    [("index", "IndexError in __call__ (test_service_audit.py"), ("few", "ValueError in ")],
)
def test_a_broken_attack_is_a_reason_and_no_figure(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    for name, texts in (("notes", TEXTS), ("more", [f"{t} w9 w8" for t in TEXTS])):
        notes(tmp_path / f"{name}.jsonl", texts)
    plan = ServicePlan(
        str(tmp_path / "notes.jsonl"), str(tmp_path / "more.jsonl"), str(model_folder), protections=("none",),
        attacks=("knn", "blind"), limit=2,
    )  # fmt: skip
    monkeypatch.setitem(
        registry.SERVICE_ATTACKS.specs, "knn", replace(registry.SERVICE_ATTACKS["knn"], make=lambda: Broken(fault))
    )
    broken, other = audit_service(plan, out=tmp_path / "run")
    assert (broken.status, broken.scores) == ("crashed", {})
    assert says in broken.reason and "Ingrid" not in json.dumps(broken.to_dict())
    assert other.status == "ok" and other.scores["bag_f1"] == broken.blind["bag_f1"] and other.scores["bag_f1"]["n"] == 2


def test_a_figure_that_is_no_number_is_none() -> None:
    assert fractions_of("top1", [0.5, 1.0], [True, True])["mean"] == 0.75
    for values in ([0.5], [0.5, float("nan")], [0.5, float("inf")]):
        with pytest.raises(InputError, match="top1 is not a number for every text"):
            fractions_of("top1", values, [True, True])


def test_the_command_trains_behind_protections_of_a_service(tmp_path: Path, model_folder: Path) -> None:
    notes(tmp_path / "notes.jsonl", [f"{t} w{k}" for k, t in enumerate(4 * TEXTS)])
    options = ["train", tmp_path / "notes.jsonl", "--model", model_folder, "--service", "--out", tmp_path / "run"]
    options += ["--epochs", "1", "--json", "--defense"]
    done = rasura_command(*options, "none,obfuslm:k=2/epsilon=3")
    assert done.returncode == 0, done.stderr
    plain, hidden = json.loads(done.stdout)
    assert hidden["mechanism"][0]["parameters"]["epsilon"] == 3 and plain["mechanism"][0]["name"] == "none"
    assert (tmp_path / "run" / "none-0" / "served.safetensors").exists()
    assert "unknown protection of a service" in refused(*options, "ghost")
    assert "all weights" in refused(*options, "none", "--lora", "2")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("obfuslm:c=3", "did you mean|known"),
        ("obfuslm:k=x", "k is 'x'"),
        ("rot13", "unknown"),
    ],
)
def test_protections_of_a_service_that_cannot_be_are_refused(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        ServicePlan("a", "b", protections=(text,)).checked()


def vectors(path: Path, seed: int) -> None:
    numbers = torch.randn(260, 4, generator=generator(seed)).tolist()
    path.write_text("".join(f"w{k} {' '.join(f'{x:.4f}' for x in row)}\n" for k, row in enumerate(numbers, 11)))


def test_a_run_belongs_to_the_content_of_the_files_that_a_protection_reads(tmp_path: Path, model_folder: Path) -> None:
    """Another file under the same name left the old figures in place."""
    notes(tmp_path / "notes.jsonl", list(TEXTS))
    notes(tmp_path / "more.jsonl", [f"{t} w9 w8" for t in TEXTS])
    file = tmp_path / "a folder + more" / "words.vec"
    file.parent.mkdir()
    vectors(file, 1)
    name = f'santext+:epsilon=2/vectors="{file}"'
    plan = ServicePlan(
        str(tmp_path / "notes.jsonl"), str(tmp_path / "more.jsonl"), model=str(model_folder), protections=(name,),
        attacks=("knn",), limit=2,
    )  # fmt: skip
    records = list(audit_service(plan, out=tmp_path / "a"))
    assert [r.defense for r in records] == ["none", name] and records[1].status == "ok"
    assert list(audit_service(plan, out=tmp_path / "a")) == []
    page = write_report(tmp_path / "a").read_text(encoding="utf-8")
    assert registry.SERVICE_PROTECTIONS["santext+"].about in page and "what it is was" not in page, "its name ends in a plus"
    began = ServiceAudit(plan)
    vectors(file, 2)
    with pytest.raises(InputError, match=r"holds the results of another file of a protection \(fingerprint"):
        list(audit_service(plan, out=tmp_path / "a"))
    store = RunStore(tmp_path / "b", began.identity)
    with pytest.raises(InputError, match="has changed since the run began"):
        list(began.run(store))
    store.close()
    file.unlink()
    with pytest.raises(InputError, match=r"the file of santext\+ .*words.vec cannot be read \(No such file"):
        audit_service(plan, out=tmp_path / "c")


@pytest.mark.parametrize("name", ["santext+", "custext+", "madlib"])
def test_every_option_that_takes_a_file_is_known_as_one(name: str, tmp_path: Path) -> None:
    vectors(tmp_path / "words.vec", 1)
    one = parse_service_protection(f'{name}:epsilon=2/vectors="{tmp_path}/words.vec"')
    assert one.options == {"epsilon": 2.0, "vectors": f"{tmp_path}/words.vec"} and one.files.keys() == {"vectors"}
    assert parse_service_protection(f"{name}:vectors=model").files == {} == parse_service_protection(name).files
    with pytest.raises(InputError, match="one double quote is missing"):
        parse_service_protection(f'{name}:vectors="/a/b')


def test_trained_weights_without_a_training_are_refused(tmp_path: Path, model_folder: Path) -> None:
    notes(tmp_path / "notes.jsonl", list(TEXTS))
    path = str(tmp_path / "notes.jsonl")
    for changed in ({"protections": ("cape",)}, {"weights": ("trained",)}):
        with pytest.raises(InputError, match="needs a training"):
            ServiceAudit(ServicePlan(path, path, model=str(model_folder), limit=2, **changed))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="unknown weights"):
        ServicePlan(path, path, weights=("stolen",)).checked()


def test_a_service_study_has_no_other_table(tmp_path: Path) -> None:
    body = SERVICE + "\n[deviations]\ntexts = 3\n"
    with pytest.raises(InputError, match="only be combined with train"):
        load_study("one", study_folder(tmp_path, body))
