"""Records beside the results of a study: another machine goes on from them, for the same weights and cells alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers
from audit_setting import model_folder
from study_setting import study_folder
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.errors import InputError
from rasura.studies.kept import facts_of, keep, kept

__all__ = ["model_folder"]

BODY = """
title = "One"
source = "A paper, Table 1"
differs = ["everything"]
metrics = ["rouge1", "position_exact"]

[plan]
data = "notes.csv"
attacks = ["blind", "span"]
defenses = ["none", "fp16"]
batch_sizes = [1]
limit = 2
budget = "quick"
"""


@pytest.fixture
def place(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a study, in which commands run; gives the file of its records."""
    study_folder(tmp_path, BODY.replace("[plan]", f'[plan]\nmodel = "{model_folder}"'))
    (tmp_path / "notes.csv").write_text("text,label\nw40 the w41,0\nthe w50 w51,1\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "studies" / "records" / "one.jsonl"


def run(*more: str) -> str:
    """Run the study from nothing but what stands beside its results, and return the results."""
    shutil.rmtree("runs", ignore_errors=True)
    assert CliRunner().invoke(app, ["study", "one", *more], catch_exceptions=False).exit_code == 0
    return Path("studies/RESULTS.md").read_text(encoding="utf-8")


def stated(path: Path) -> dict[str, Any]:
    """What the first line of ``path`` says of the model."""
    return facts_of(json.loads(path.read_text(encoding="utf-8").splitlines()[0]))


def marked(path: Path) -> None:
    """Give every kept cell a time that no run takes."""
    head, *rows = map(json.loads, path.read_text().splitlines())
    lines = [head, *({**row, "cpu_seconds": 4321.0} for row in rows)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_study_goes_on_from_the_records_beside_its_results(place: Path) -> None:
    first = run("--defense", "none")
    assert len(place.read_text().splitlines()) == 1 + 4
    marked(place)
    again = run()
    told = [line for line in again.splitlines() if line.startswith(("| span", "| blind"))]
    assert ["| 4321 |" in line for line in told] == [True, True, False, False]
    assert len(place.read_text().splitlines()) == 1 + 8
    assert [line.split(" | ")[3:6] for line in told[:2]] == [
        line.split(" | ")[3:6] for line in first.splitlines() if line.startswith(("| span", "| blind"))
    ]
    run("--defense", "fp16")
    assert len(place.read_text().splitlines()) == 1 + 8


@pytest.mark.slow
def test_a_study_takes_the_cells_that_another_study_has_run(place: Path) -> None:
    run()
    marked(place)
    two = place.parent.parent / "two.toml"
    two.write_text((place.parent.parent / "one.toml").read_text().replace('["blind", "span"]', '["blind", "dager"]'))
    assert CliRunner().invoke(app, ["study", "two"], catch_exceptions=False).exit_code == 0
    head, *rows = map(json.loads, (place.parent / "two.jsonl").read_text().splitlines())
    seconds = {({**head["common"], **row}["attack"]): {**head["common"], **row}["cpu_seconds"] for row in rows}
    assert seconds["blind"] == 4321.0 and seconds["dager"] != 4321.0


@pytest.mark.slow
def test_records_without_a_metric_that_is_asked_for_are_made_anew(place: Path) -> None:
    run()
    marked(place)
    study = Path("studies/one.toml")
    study.write_text(study.read_text().replace('"rouge1", ', '"rouge1", "rouge2", '))
    assert "4321" not in run()
    marked(place)
    assert "4321" in run()


@pytest.mark.slow
def test_a_cell_that_crashed_is_run_again(place: Path) -> None:
    run()
    model = stated(place)
    done = [record.to_dict() for record in kept(place, model)]
    broken = {**done[0], "status": "crashed", "reason": "RuntimeError in step", "scores": {}}
    place.unlink()
    keep(place, model, model, [broken, *done[1:]], ("rouge1", "position_exact"))
    assert {record.key for record in kept(place, model)} == {r["key"] for r in done[1:]}
    assert "crashed" not in place.read_text() and "| 0 / 0 / 0 of" in run()


@pytest.mark.slow
def test_nothing_that_was_read_is_kept(place: Path) -> None:
    run()
    text = place.read_text()
    assert "w40" not in text and "w51" not in text and not {"recovered", "details"} & set(json.loads(text.splitlines()[1]))


@pytest.mark.slow
def test_records_of_other_weights_or_texts_are_not_taken(place: Path) -> None:
    run()
    marked(place)
    head, *rows = place.read_text().splitlines()
    place.write_text("\n".join([json.dumps({**json.loads(head), "model": "other"}), *rows]) + "\n")
    assert "4321" not in run()
    marked(place)
    assert "4321" in run()
    Path("notes.csv").write_text("text,label\nw42 the w41,0\nthe w50 w51,1\n", encoding="utf-8")
    assert "4321" not in run()


def test_records_of_another_tokenizer_or_configuration_are_not_taken(place: Path, model_folder: Path) -> None:
    """With the same weights in a folder of the same name, no cell ran, and the figures were those of the other model."""
    copied = Path(shutil.copytree(model_folder, Path("copied") / model_folder.name))
    run("--defense", "none")
    marked(place)
    assert "4321" in run("--defense", "none", "--model", str(copied)), "it is the same model"
    config = copied / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_act": "relu"}))
    assert "4321" not in run("--defense", "none", "--model", str(copied))
    assert stated(place)["configuration of the model"]["hidden_act"] == '"relu"'
    shutil.copytree(model_folder, copied, dirs_exist_ok=True)
    run("--defense", "none")
    marked(place)
    words = (copied / "vocab.txt").read_text().replace("w40\nw41\n", "w41\nw40\n")
    (copied / "vocab.txt").write_text(words)
    transformers.BertTokenizerFast(vocab=str(copied / "vocab.txt")).save_pretrained(copied)
    assert "4321" not in run("--defense", "none", "--model", str(copied))


@pytest.mark.slow
def test_records_of_an_older_version_are_taken_and_never_said_to_be_more(place: Path) -> None:
    run("--defense", "none")
    weights = stated(place)["model"]
    head, *rows = map(json.loads, place.read_text().splitlines())
    older = {"model": weights, "metrics": head["metrics"], "common": head["common"]}
    place.write_text("".join(json.dumps(row) + "\n" for row in (older, *rows)))
    marked(place)
    shutil.rmtree("runs")
    ended = CliRunner().invoke(app, ["study", "one"], catch_exceptions=False)
    assert "4321" in Path("studies/RESULTS.md").read_text(encoding="utf-8")
    assert "of those that do not, the weights alone were compared" in " ".join(ended.stderr.split())
    assert len(place.read_text().splitlines()) == 1 + 8 and stated(place) == {"model": weights}
    study = Path("studies/one.toml")
    study.with_name("two.toml").write_text(study.read_text())
    shutil.move(place, place.with_name("three.jsonl"))
    assert CliRunner().invoke(app, ["study", "two"], catch_exceptions=False).exit_code == 0
    assert stated(place.with_name("two.jsonl")) == {"model": weights}, "its cells are those of the older file"


@pytest.mark.slow
def test_a_study_says_that_none_of_the_records_beside_it_are_of_this_run(place: Path) -> None:
    for options, told in (((), False), (("--budget", "default"), True), ((), False)):
        shutil.rmtree("runs", ignore_errors=True)
        ended = CliRunner().invoke(app, ["study", "one", "--defense", "none", *options], catch_exceptions=False)
        assert ended.exit_code == 0 and ("no cell in" in ended.stderr) is told


@pytest.mark.parametrize("change", ["{", '{"model": 1}', "[]", None])
def test_damaged_records_are_refused(place: Path, change: str | None) -> None:
    run()
    head, row, *rest = place.read_text().splitlines()
    wrong = (
        row.replace('"status": "failed"', '"status": "fine"').replace('"attack"', '"attacks"') if change is None else change
    )
    place.write_text("\n".join([head, wrong, *rest]) + "\n")
    with pytest.raises(InputError, match="damaged"):
        list(kept(place, facts_of(json.loads(head))))
    place.unlink()
    assert list(kept(place, {"model": "any"})) == []
