"""What continuous integration and trackers are told: the same as the report, and never a text."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from audit_setting import TEXTS, model_folder
from commands import rasura_command, refused
from rows import GUESS, MANY, column

from rasura.integrations import trackers
from rasura.report.findings import findings
from rasura.report.machine import judgements, tracked, write_junit, write_sarif
from rasura.runs.reading import ReadResult

__all__ = ["model_folder"]

ROOT = Path(__file__).resolve().parents[1]
READ = column("span", "none", [1.0] * MANY)
ROWS = [
    *READ, *column("span", "bf16", [1.0] * MANY), *column("span", "dropout:0.1", [0.0] * MANY),
    *column("span", "ghost", [GUESS] * MANY),
]  # fmt: skip
"""bf16 is read, dropout is not, and of ghost the attack that knows it is missing."""


def cases(path: Path) -> dict[str, str]:
    """Each test case with what it is: passed, failure or error."""
    found = {}
    for case in ET.parse(path).getroot().iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error")]
        found[str(case.get("name"))] = kinds[0] if kinds else "passed"
    return found


@pytest.mark.parametrize("limit", [0.5, None])
def test_what_was_not_judged_is_an_error_and_never_passes(limit: float | None, tmp_path: Path) -> None:
    found = findings(ROWS)
    write_junit(tmp_path / "junit.xml", found, limit, 1.5)
    assert cases(tmp_path / "junit.xml") == {"bf16": "failure", "dropout:0.1": "passed", "ghost": "error"}
    (suite,) = ET.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("3", "1", "1")
    write_sarif(tmp_path / "out.sarif", found, limit, {"data": "my notes.csv", "model": "minilm"}, "0.1.0")
    (run,) = json.loads((tmp_path / "out.sarif").read_text(encoding="utf-8"))["runs"]
    assert [r["ruleId"] for r in run["results"]] == ["text-recovered", "not-judged"]
    assert {r["ruleId"] for r in run["results"]} <= {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    place = run["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert place == "my%20notes.csv" and run["results"][0]["message"]["text"].startswith("bf16: ")


def test_too_few_examples_and_an_empty_run_do_not_pass(tmp_path: Path) -> None:
    few = [*column("span", "none", [1.0] * 2), *column("span", "dropout:0.1", [0.0] * 2)]
    for limit in (0.5, None):
        assert [o.code for o in judgements(findings(few), limit)] == [4]
        write_junit(tmp_path / "junit.xml", findings([]), limit, 0.0)
        assert cases(tmp_path / "junit.xml") == {"run": "error"}


def test_a_tracker_keeps_figures_and_no_texts() -> None:
    words, figures = tracked(findings(ROWS), {"texts": ["a secret"], "attacks": ["blind", "span"], "data": None, "seed": 0})
    assert words["attacks"] == "blind,span" and words["seed"] == "0" and "texts" not in words and "data" not in words
    assert words["verdict bf16"] == findings(ROWS).verdicts["bf16"].says != "reads", "with what it rests on"
    private = {"data": "/home/anna/hiv_clinic/notes.csv", "model": "/srv/anna/model", "reference": "news.csv"}
    assert {n: tracked(findings(ROWS), private)[0][n] for n in private} == {
        "data": "notes.csv", "model": "model", "reference": "news.csv"
    }  # fmt: skip
    assert figures["risk bf16"] == 1.0 and figures["examples bf16"] == MANY


def test_of_the_file_of_a_protection_only_the_name_goes_out(tmp_path: Path) -> None:
    folders = [f'custext+:epsilon=1/vectors="/home/{who}/oncology/words.vec"/size=5' for who in ("dr.brandt", "dr.lem")]
    found = findings([*READ, *column("span", folders[0], [1.0] * MANY), *column("span", folders[1], [0.0] * MANY)])
    words, figures = tracked(found, {"protections": folders, "file of a protection": dict.fromkeys(folders, "ab12")})
    write_junit(tmp_path / "junit.xml", found, None, 1.5)
    write_sarif(tmp_path / "out.sarif", found, None, {"data": "notes.csv"}, "0.1.0")
    told = f"{words} {figures} {(tmp_path / 'junit.xml').read_text()} {(tmp_path / 'out.sarif').read_text()}"
    assert not any(private in told for private in ("dr.brandt", "dr.lem", "oncology"))
    short = "custext+:epsilon=1/vectors=words.vec/size=5"
    assert words["protections"] == f"{short},{short} (2)"
    assert figures[f"risk {short}"] == 1.0 and figures[f"examples {short} (2)"] == MANY
    assert cases(tmp_path / "junit.xml") == {short: "failure", f"{short} (2)": "error"}


def run(folder: Path, model: Path, *more: object) -> Any:
    words = [word for text in TEXTS[:2] for word in ("--text", text)]
    common = ("--model", model, "--attack", "span", "--defense", "bf16", "--budget", "quick", "--out", folder / "run")
    return rasura_command("audit", *words, *common, *more)


@pytest.mark.slow
def test_the_files_are_written_beside_the_report(tmp_path: Path, model_folder: Path) -> None:
    files = ("--junit", tmp_path / "junit.xml", "--sarif", tmp_path / "out.sarif")
    done = run(tmp_path, model_folder, *files, "--fail-above", "0.5")
    assert done.returncode == 3, done.stderr
    assert cases(tmp_path / "junit.xml") == {"bf16": "failure"}
    assert not any(text in (tmp_path / name).read_text() for text in TEXTS for name in ("junit.xml", "out.sarif"))
    missing = ("--junit", tmp_path / "missing" / "junit.xml")
    assert run(tmp_path, model_folder, *missing, "--fail-above", "0.5").returncode == 3, "the gate goes first"
    nowhere = run(tmp_path, model_folder, *missing)
    assert nowhere.returncode == 2 and "cannot be written" in nowhere.stderr


@pytest.mark.parametrize("tracker", trackers.TRACKERS)
def test_a_tracker_that_is_not_installed_is_refused_before_anything_runs(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    assert f"rasura[{tracker}]" in refused("audit", f"--{tracker}", "notes", "--out", tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_hide_the_result(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(trackers, "ready", lambda name: None)
    monkeypatch.setattr(trackers, "log", away)
    done = run(tmp_path, model_folder, "--mlflow", "notes")
    assert done.returncode == 2 and "mlflow did not take the results (ConnectionError: no network)" in done.stderr
    assert (tmp_path / "run" / "report.html").is_file() and "report:" in done.stdout

    def silent(*given: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(trackers, "log", silent)
    done = run(tmp_path, model_folder, "--mlflow", "notes")
    assert done.returncode == 2 and "mlflow did not take the results (TimeoutError)" in done.stderr


@pytest.mark.skipif(find_spec("mlflow") is None, reason="MLflow is not installed (rasura[mlflow])")
def test_mlflow_keeps_the_run_offline(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions ask for a database otherwise
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    done = run(tmp_path, model_folder, "--mlflow", "notes")
    assert done.returncode == 0, done.stderr
    (kept,) = mlflow.search_runs(experiment_names=["notes"], output_format="list")
    assert kept.data.metrics["risk bf16"] == 1.0 and kept.data.params["verdict bf16"].startswith("reads (")
    assert no_text_in(tmp_path / "mlruns")


@pytest.mark.skipif(find_spec("wandb") is None, reason="Weights & Biases is not installed (rasura[wandb])")
def test_wandb_keeps_the_run_offline(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "kept"))
    (tmp_path / "kept").mkdir()
    done = run(tmp_path, model_folder, "--wandb", "notes")
    assert done.returncode == 0, done.stderr
    wandb.teardown()  # as at the end of the command, which waits until all is written
    (file,) = (tmp_path / "kept").rglob("*.wandb")
    assert b"risk bf16" in file.read_bytes() and no_text_in(tmp_path / "kept")


def test_a_notebook_shows_what_was_read_and_runs_none_of_it() -> None:
    found = ReadResult("ok", "", "span", ("<script>a & b",), "verified", seconds=1.25)
    shown = found._repr_html_()
    assert "<li>&lt;script&gt;a &amp; b</li>" in shown and "<p>verified by span in 1.2 s</p>" in shown
    assert "no proof" in replace(found, confidence="matched")._repr_html_() and "no proof" not in shown
    assert "nothing was recovered: no &lt;row&gt; space" in ReadResult("failed", "no <row> space", "span")._repr_html_()


def no_text_in(folder: Path) -> bool:
    files = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert files
    return not any(text.encode() in file for text in TEXTS for file in files)


def test_the_example_workflow_runs_a_command_that_the_command_line_takes(tmp_path: Path) -> None:
    workflow = (ROOT / "examples" / "ci" / "rasura.yml").read_text(encoding="utf-8")
    steps = yaml.safe_load(workflow)["jobs"]["audit"]["steps"]
    (command,) = [s["run"] for s in steps if s.get("run", "").startswith("rasura audit")]
    words = command.replace("\\\n", " ").split()
    assert "does not exist" in refused(*words[1:], "--out", tmp_path / "x") and {"--junit", "--sarif"} <= set(words)
    assert workflow in (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
