"""`rasura train --unit COLUMN`: persons are drawn, clipped, counted and held out with all of their texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from audit_setting import model_folder
from commands import rasura_command
from training_setting import fine_tuning, text

from rasura.accounting import Ledger, Run, epsilon
from rasura.accounting.ledger import counted
from rasura.core.errors import InputError
from rasura.data.columns import Columns
from rasura.data.text import data_hash, load_examples
from rasura.registry import parse_defense
from rasura.runs.train_plan import TrainPlan
from rasura.runs.trained import folder_of
from rasura.runs.training import Training
from rasura.victims import train
from rasura.victims.recipe import Recipe
from rasura.victims.step import step

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

__all__ = ["model_folder"]

OWNERS = [0, 1, 2, 1, 3, 1, 0, 2, 4, 4]
"""Five persons with one to three of the ten texts of ``training_setting``, in mixed order."""

RECIPE = Recipe(epochs=2, batch_size=2, learning_rate=1e-3, keep="last", patience=9)


def written(folder: Path, rows: Sequence[dict[str, Any]]) -> str:
    path = folder / "notes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def notes(folder: Path, count: int = 24) -> str:
    rows = [{"text": text(k), "label": k % 2, "author": f"a{k * k % 7}"} for k in range(count)]
    return written(folder, rows)


@pytest.mark.slow
def test_whole_persons_are_drawn_and_aggregated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, list[int]]] = []
    own = step

    def watched(model: Any, batch: Any, *rest: Any, **options: Any) -> Any:
        seen.append((len(batch), options["counts"]))
        assert options["expected"] == 2
        return own(model, batch, *rest, **options)

    monkeypatch.setattr(train, "step", watched)
    made = Ledger([p.mechanism for p in parse_defense("dp-sgd:1.0")], Run(5, 2, 3, 1e-3, unit="person"))
    private = fine_tuning(tmp_path, "dp-sgd:1.0", poisson=True, secret=True, ledger=made, owners=OWNERS)
    private.recipe = Recipe(epochs=3, batch_size=2)
    private.run()
    assert len(seen) == 9 and all(texts == sum(counts) for texts, counts in seen)
    assert {count for _, counts in seen for count in counts} <= {OWNERS.count(k) for k in range(5)}
    ((release, number),) = made.runs
    assert number == 9 and release.rate == 0.4
    with pytest.raises(InputError, match="Poisson sampling alone"):
        fine_tuning(tmp_path / "other", "none", owners=OWNERS)


@pytest.mark.slow
def test_the_guarantee_is_for_persons_and_they_are_held_out_whole(tmp_path: Path, model_folder: Path) -> None:
    plan = TrainPlan(
        notes(tmp_path), model=str(model_folder), defenses=("none", "dp-sgd"), target_epsilon=8.0, recipe=RECIPE,
        unit="author", holdout=0.25,
    )  # fmt: skip
    training = Training(plan, tmp_path / "run")
    authors = [f"a{k * k % 7}" for k in range(24)]
    kept, held = ({authors[k] for k in training.parted[part]} for part in ("trained", "held_out"))
    assert not kept & held and len(kept) == 3 and len(held) == 1
    plain, private = training.run()
    sigma = private["mechanism"][0]["parameters"]["sigma"]
    spent = private["privacy"]
    assert "for each person" in spent["statement"] and spent["neighbours"] == "all texts of one person are there or not"
    assert spent["epsilon"] == pytest.approx(epsilon(sigma, 2 / 3, 4, 0.1 / 3)) and 7.9 < spent["epsilon"] <= 8
    assert private["unit"]["column"] == "author" and private["unit"]["persons"] == 3
    assert private["ledger"]["unit"] == "person" and private["ledger"]["examples"] == 3
    assert "unit" not in plain and "epsilon" not in plain["privacy"]
    assert "each person" in counted(tmp_path / "run" / folder_of(private["defense"], 0) / "result.json").statement


def test_the_command_says_what_a_person_is(tmp_path: Path, model_folder: Path) -> None:
    words = ["train", notes(tmp_path), "--model", str(model_folder), "--defense", "dp-sgd:1.0", "--epochs", "1"]
    done = rasura_command(*words, "--unit", "author", "--out", tmp_path / "run")
    said = " ".join(done.stdout.split())
    assert done.returncode == 0 and "for each person" in said
    assert "all texts with one value of the column author: 3 persons" in said


def test_what_protects_no_person_is_refused(tmp_path: Path, model_folder: Path) -> None:
    data = notes(tmp_path)
    for defenses in (
        ("none",),
        ("gaussian:0.1",),
        ("none", "directional:100"),
        ("dp-sgd:1.0", "bf16"),
        ("dp-sgd:1.0+ghost",),
    ):
        with pytest.raises(InputError, match="which alone protect persons"):
            TrainPlan(data, defenses=defenses, unit="author").checked()
    with pytest.raises(InputError, match="which alone protect persons"):
        TrainPlan(data, defenses=("obfuslm:k=10",), service=True, unit="author").checked()
    made = TrainPlan(data, model=str(model_folder), defenses=("dp-sgd:1.0",), unit="writer")
    with pytest.raises(InputError, match=r"no column 'writer'.*not known whose each row is"):
        Training(made, tmp_path / "run")


@pytest.mark.parametrize("nobody", [None, "", "  ", True, 1.5, float("nan"), ["a"]])
def test_a_row_without_a_person_is_refused(tmp_path: Path, nobody: Any) -> None:
    rows: list[dict[str, Any]] = [{"text": "one", "author": "a"}, {"text": "two", "author": nobody}]
    with pytest.raises(InputError, match="row 2: the column author names no person"):
        load_examples(written(tmp_path, rows), columns=Columns(unit="author"))
    with pytest.raises(InputError, match="row 2: the column author names no person"):
        load_examples(written(tmp_path, [rows[0], {"text": "two"}]), columns=Columns(unit="author"))


def test_a_name_is_one_person_however_it_is_written(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "one", "author": 7}, {"text": "two", "author": " 7 "}]
    found = load_examples(written(tmp_path, rows), columns=Columns(unit="author"))
    assert [e.unit for e in found] == ["7", "7"]
    table = tmp_path / "notes.csv"
    table.write_text("text,author\none,7\ntwo,8\n")
    assert [e.unit for e in load_examples(table, columns=Columns(unit="author"))] == ["7", "8"]
    plain = load_examples(table)
    assert [e.unit for e in plain] == [None, None]
    assert data_hash(plain) != data_hash(load_examples(table, columns=Columns(unit="author")))
