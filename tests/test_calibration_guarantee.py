"""The guarantee that a calibration states: that of the training which its command runs, with what this does not cover."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from audit_setting import model_folder
from pages_setting import calibration_result
from training_setting import notes, text
from typer.testing import CliRunner

from rasura.cli import app
from rasura.cli.calibrate import _print
from rasura.core.errors import InputError
from rasura.registry import parse_defense
from rasura.report.commands import applied
from rasura.runs.audit_data import different, load_data
from rasura.runs.calibration import Calibration
from rasura.runs.calibration_plan import CalibrationPlan
from rasura.runs.plans import Plan
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.victims.loading import load
from rasura.victims.recipe import Recipe

pytest.importorskip("dp_accounting")

__all__ = ["model_folder"]

RECIPE = Recipe(epochs=2, batch_size=3, learning_rate=1e-3, patience=2)
SETTING = "dp-sgd:1.0"


def prepared(folder: Path, model: Path, setting: str = SETTING, recipe: Recipe = RECIPE, **more: Any) -> Calibration:
    """A calibration that could have found ``setting``. ``more``: fields of the plan or of its audit."""
    fields = {name: more.pop(name) for name in ("utility", "train", "train_limit", "at_most") if name in more}
    audited: dict[str, Any] = {"limit": 4, "attacks": ("span",), "defenses": (setting.partition(":")[0],), **more}
    made = Calibration(CalibrationPlan(Plan(str(model), **audited), recipe=recipe, **fields), folder)
    made.defenses[setting] = parse_defense(setting)
    return made


def command(made: Calibration, setting: str = SETTING) -> list[str]:
    """The words of the command that applies ``setting``."""
    return shlex.split(applied(setting, made.plan.canonical(), made._told_training())[0])[1:]


def not_computed(made: Calibration, folder: Path) -> str:
    """Why the guarantee of ``SETTING`` is not computed, which is why its command refuses to train."""
    stated = made._guarantee(SETTING)
    made.close()
    refused = CliRunner().invoke(app, [*command(made), "--out", str(folder)])
    assert stated["statement"] == f"not computed: {refused.exception}" and "epsilon" not in stated
    return str(stated["statement"])


def with_copies(folder: Path) -> Path:
    """Thirty texts, twelve of them in three rows each."""
    path = notes(folder)
    numbers = [*range(12), *range(12), *range(30)]
    path.write_text("".join(json.dumps({"text": text(k), "label": k % 2}) + "\n" for k in numbers))
    return path


@pytest.mark.parametrize(("utility", "limit"), [(None, 30), ("accuracy", None)])
def test_what_the_training_does_not_cover_is_said_beside_its_guarantee(
    model_folder: Path, tmp_path: Path, utility: str | None, limit: int | None
) -> None:
    """Of texts in three rows each it was said that each has (epsilon, delta), and nothing of texts held out nor of what the
    model was trained on before. The command of the same setting said all three."""
    data = with_copies(tmp_path)
    first = Training(TrainPlan(str(data), model=str(model_folder), recipe=RECIPE), tmp_path / "first")
    list(first.run())
    model = tmp_path / "first" / "none-0" / "model"
    made = prepared(tmp_path / "found", model, data=str(data), utility=utility, train_limit=limit)
    stated = made._guarantee(SETTING)
    made.close()
    done = CliRunner().invoke(app, [*command(made), "--out", str(tmp_path / "trained"), "--json"])
    (promised,) = [row["privacy"] for row in json.loads(done.stdout) if row["defense"] == SETTING]
    assert (stated["epsilon"], stated["delta"]) == (pytest.approx(promised["epsilon"]), promised["delta"])
    assert stated["warnings"] == promised["warnings"]
    copies, held, before = stated["warnings"]
    assert "different training texts stand in several" in copies and "held out of notes.jsonl" in held
    assert "was itself trained by rasura train, under none" in before


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        ({}, {"updates": ("local:lora=2/targets=all/dropout=0.1",)}),
        ({}, {"updates": ("lora:2",), "num_labels": 3, "train_limit": 10}),
        ({"keep": "last", "schedule": "linear", "warmup": 0.1, "optimizer": "sgd", "seed": 3, "physical_batch_size": 2}, {}),
        ({"batch_size": 32, "learning_rate": 1e-4}, {"truncate": True, "max_length": 8}),
    ],
)
def test_the_command_trains_what_the_guarantee_and_the_cost_are_for(
    model_folder: Path, tmp_path: Path, changed: dict[str, Any], more: dict[str, Any]
) -> None:
    """The command left out which layers have adapters: it had twice the epsilon that was stated."""
    pytest.importorskip("peft")
    setting, recipe = "directional:3000", Recipe(**{**vars(RECIPE), **changed})
    found, trained = tmp_path / "found", tmp_path / "trained"
    made = prepared(found, model_folder, setting, recipe, data=str(notes(tmp_path)), utility="accuracy", **more)
    stated = made._guarantee(setting)
    made.close()
    done = CliRunner().invoke(app, [*command(made, setting), "--out", str(trained), "--json"])
    assert (trained / "plan.json").read_text() == (found / "utility" / "plan.json").read_text()
    (planned,) = [row["planned"] for row in json.loads(done.stdout) if row["defense"] == setting]
    assert (stated["epsilon"], stated["statement"]) == (planned["epsilon"], planned["statement"])


def test_a_recipe_that_no_command_trains_by_is_refused(model_folder: Path, tmp_path: Path) -> None:
    recipe = Recipe(**{**vars(RECIPE), "weight_decay": 0.0, "accumulate": 2})
    with pytest.raises(InputError, match="the recipe sets weight_decay, accumulate, which no option of rasura train does"):
        prepared(tmp_path / "found", model_folder, recipe=recipe, data=str(notes(tmp_path)))


def test_texts_of_the_command_line_are_looked_at_too(model_folder: Path, tmp_path: Path) -> None:
    texts = tuple(text(9 if k == 1 else k % 2) for k in range(6))  # the second one is held out
    made = prepared(tmp_path / "found", model_folder, texts=texts, limit=6, task="classification")
    stated = made._guarantee(SETTING)
    made.close()
    assert stated["examples"] == 5 and "2 different training texts stand in several, one in 3." in stated["warnings"][-2]
    assert "the 1 texts held out of notes.jsonl" in stated["warnings"][-1], "the file that the command names"


def test_a_guarantee_of_a_training_that_would_be_refused_is_not_computed(model_folder: Path, tmp_path: Path) -> None:
    """Only the first rows are audited. Of a later one that is too long, only the training would have said so."""
    data = notes(tmp_path)
    with data.open("a") as file:
        file.write(json.dumps({"text": "w1 " * 600, "label": 0}) + "\n")
    made = prepared(tmp_path / "found", model_folder, data=str(data))
    assert "tokens" in not_computed(made, tmp_path / "trained")


def test_a_guarantee_is_not_computed_where_nothing_is_left_to_judge_the_training_on(
    model_folder: Path, tmp_path: Path
) -> None:
    data = notes(tmp_path)
    data.write_text("".join(json.dumps({"text": text(k % 2), "label": k % 2}) + "\n" for k in range(30)))
    made = prepared(tmp_path / "found", model_folder, data=str(data))
    assert "remove repeated texts" in not_computed(made, tmp_path / "trained")


def test_the_terminal_says_what_a_guarantee_does_not_cover(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = calibration_result()
    result |= {"recommendation": "Use gaussian:1."}
    stated = {"statement": "(2.5, 0.001)-privacy", "warnings": ["the copies", "the texts held out"]}
    result["families"][0]["guarantee"] |= stated
    _print(result, tmp_path / "report.html")
    said = capsys.readouterr().out
    assert "gaussian: (2.5, 0.001)-privacy" in said
    assert "gaussian: the copies\n" in said and "gaussian: the texts held out\n" in said


def test_all_texts_of_a_search_count_as_seen(model_folder: Path) -> None:
    """Texts beyond the last whole 256 counted as never searched, and the check on other texts could take them again."""
    texts = tuple(f"w{20 + k // 20} w{50 + k % 20}" for k in range(300))
    plan = Plan(str(model_folder), texts=texts, limit=300, attacks=("span",), defenses=("none",))
    victim = load(model_folder, "classification")
    assert len(different(load_data(plan), plan, victim)) == 300
