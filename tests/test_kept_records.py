"""Records beside the results of a study: another machine goes on from them, for the same weights and cells alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from audit_setting import model_folder
from study_setting import study_folder
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.errors import InputError
from rasura.studies.kept import keep, kept

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
    model = json.loads(place.read_text().splitlines()[0])["model"]
    done = [record.to_dict() for record in kept(place, model)]
    broken = {**done[0], "status": "crashed", "reason": "RuntimeError in step", "scores": {}}
    place.unlink()
    keep(place, model, [broken, *done[1:]], ("rouge1", "position_exact"))
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
        list(kept(place, json.loads(head)["model"]))
    place.unlink()
    assert list(kept(place, "any")) == []
