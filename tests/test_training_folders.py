"""Whose training a folder holds: no two protections share one, and nothing is compared that was judged on other texts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from audit_setting import model_folder
from own_setting import described
from pages_setting import training_folder
from training_setting import notes

from rasura.core.files import name_for
from rasura.core.interfaces import InputError
from rasura.defenses.compression import sign
from rasura.registry import DEFENSES
from rasura.report.promises import promises
from rasura.report.training import UNKNOWN, render_training, sides, trainings, verdict
from rasura.runs.train_plan import TrainPlan
from rasura.runs.trained import folder_of
from rasura.runs.training import Training
from rasura.victims.recipe import Recipe

__all__ = ["model_folder"]

ENGLISH, GERMAN = (f"santext+:epsilon=99/vectors={language}.txt" for language in ("EN", "DE"))


def plan_for(folder: Path, model: Path, **more: object) -> TrainPlan:
    recipe = Recipe(epochs=1, batch_size=4, learning_rate=1e-3)
    return replace(TrainPlan(str(notes(folder)), model=str(model), recipe=recipe, holdout=0.3), **more)  # type: ignore[arg-type]


def test_a_name_stays_where_it_can_be_read_back_and_no_two_texts_share_one() -> None:
    kept = {"none": "none", "frozen-embeddings": "frozen-embeddings", "dp-sgd:1.0": "dp-sgd-1.0",
            "frozen-blocks:1+dp-sgd:8": "frozen-blocks-1+dp-sgd-8"}  # fmt: skip
    assert {text: name_for(text) for text in kept} == kept
    alike = [ENGLISH, GERMAN, ENGLISH.lower(), "dp-sgd:1", "dp-sgd-1", "dp-sgd/1", "dp_sgd:1", "a:b", "a/b", "a-b", "A-b",
             "gaussian:1e-05", "gaussian:1e:05", "a" * 300, "a" * 301, "a" * 300 + ":1"]  # fmt: skip
    names = [name_for(text) for text in alike]
    assert len({name.lower() for name in names}) == len(alike)
    assert all(len(name) < 200 and "/" not in name for name in names)


def test_two_protections_whose_names_differ_in_capitals_have_their_own_trainings(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("EN.txt", "DE.txt"):
        lines = (f"w{k} {k % 7} {k % 5} {len(file) + k % 3}\n" for k in range(275))
        (tmp_path / file).write_text("".join(lines))
    names = (ENGLISH, GERMAN)
    training = Training(plan_for(tmp_path, model_folder, defenses=names, service=True), tmp_path / "run")
    results = list(training.run())
    assert tuple(r["defense"] for r in results) == names
    for name, result in zip(names, results):
        assert result["mechanism"][0]["parameters"]["vectors"] == name.rpartition("=")[2]
    assert list(training.run()) == results
    again = plan_for(tmp_path, model_folder, defenses=(*names, "none"), service=True)
    assert list(Training(again, tmp_path / "run").run())[:2] == results
    with (tmp_path / "EN.txt").open("a") as words:
        words.write("w275 1 2 3\n")
    with pytest.raises(InputError, match=r"a file of santext.*EN.txt has changed since the run began"):
        training.service(ENGLISH, training.victim(0), 0)
    with pytest.raises(
        InputError, match=r"under santext.*EN.txt with another content of its file, or other code; choose another --out"
    ):
        Training(again, tmp_path / "run")
    assert [r["defense"] for r in Training(replace(again, defenses=(GERMAN,)), tmp_path / "run").run()] == [GERMAN]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"target_epsilon": 3.0, "delta": 1e-3}])
def test_a_protection_that_is_named_twice_is_trained_and_told_once(
    tmp_path: Path, model_folder: Path, more: dict[str, float]
) -> None:
    pytest.importorskip("dp_accounting")
    names = ("dp-sgd",) * 2 if more else ("none", "dp-sgd:1.0", "none", "dp-sgd:1.0")
    results = list(Training(plan_for(tmp_path, model_folder, defenses=names, **more), tmp_path / "run").run())
    assert len(results) == len({r["defense"] for r in results}) == len(set(names))
    assert all("together" not in line for side in sides(results) for line in promises(side.results))


def test_a_training_is_not_read_as_that_of_other_code(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halved(times: int) -> None:
        made = replace(sign(), mechanism=described(f"{times}"))
        monkeypatch.setitem(DEFENSES.specs, "halved", replace(DEFENSES["sign"], name="halved", make=lambda: made))

    def trained(*names: str) -> list[str]:
        plan = plan_for(tmp_path, model_folder, defenses=names)
        return [r["mechanism"][0]["name"] for r in Training(plan, tmp_path / "run").run() if r["defense"] == "halved"]

    monkeypatch.setitem(DEFENSES.specs, "halved-twice", replace(DEFENSES["sign"], name="halved-twice"))
    assert trained("halved-twice") == []
    halved(1)
    assert trained("none", "halved") == trained("halved") == ["1"], "a name that begins another is another training"
    halved(2)
    with pytest.raises(InputError, match="a training under halved with another content of its file, or other code"):
        trained("none", "halved")
    assert trained("none") == []


def test_two_trainings_at_once_need_two_folders(tmp_path: Path, model_folder: Path) -> None:
    """One would go on from the epochs of the other, whose releases its ledger has not counted."""
    plan = plan_for(tmp_path, model_folder, defenses=("none", "dp-sgd:1.0"))
    first, second = (Training(plan, tmp_path / "run").run() for _ in range(2))
    begun = next(first)
    with pytest.raises(InputError, match="being written by another run; wait for it, or choose another name"):
        next(second)
    results = [begun, *first]
    assert list(Training(plan, tmp_path / "run").run()) == results


def test_the_result_of_another_training_is_refused(tmp_path: Path, model_folder: Path) -> None:
    training = Training(plan_for(tmp_path, model_folder, service=True), tmp_path / "run")
    (result,) = training.run()
    file = tmp_path / "run" / folder_of("none", 0) / "result.json"
    for field, value in (("defense", "sign"), ("seed", 1), ("test", "other"), ("test", None)):
        file.write_text(json.dumps({**result, field: value}))
        with pytest.raises(InputError, match="holds the result of another training"):
            list(training.run())
        victim = training.victim(0)
        with pytest.raises(InputError, match="holds the result of another training"):
            training.trained_service(training.service("none", victim, 0), "none", 0)
    file.unlink()
    with pytest.raises(InputError, match="no finished training"):
        training.trained_service(training.service("none", victim, 0), "none", 0)


def test_other_test_texts_need_another_folder(tmp_path: Path, model_folder: Path) -> None:
    test = notes(tmp_path, "test.jsonl", 6)
    plan = plan_for(tmp_path, model_folder, test=str(test))
    (result,) = Training(plan, tmp_path / "run").run()
    assert Training(plan, tmp_path / "run").about["test"] == result["test"] != result["data"]
    notes(tmp_path, "test.jsonl", 8)
    with pytest.raises(InputError, match="other settings, data or weights"):
        Training(replace(plan, defenses=("none", "frozen-embeddings")), tmp_path / "run")


def test_what_was_judged_on_other_texts_is_not_compared(tmp_path: Path) -> None:
    folder = training_folder(tmp_path)
    file = folder / "gaussian-0.001-0" / "result.json"
    made = json.loads(file.read_text())
    for other in ("e15e", None):
        file.write_text(json.dumps({**made, "test": other}))
        found = {side.name: side for side in sides(trainings(folder)[1])}
        word, says = verdict(found["gaussian:0.001"], found["none"])
        assert word == UNKNOWN and "may have been judged on other texts" in says and "costs" not in says
        assert "gaussian:0.001 makes the model less accurate" not in render_training(folder)
    file.write_text(json.dumps(made))
    assert "gaussian:0.001 makes the model less accurate" in render_training(folder)
