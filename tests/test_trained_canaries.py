"""`rasura train --gradient-canaries N`: a measured lower bound beside each stated epsilon, interrupted or not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from audit_setting import model_folder
from commands import rasura_command
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from training_setting import fine_tuning, notes

import rasura
from rasura.accounting import Ledger, Run
from rasura.core.errors import InputError
from rasura.core.interfaces import made
from rasura.core.mechanisms import DpSgd
from rasura.core.rounding import above
from rasura.defenses.dp_sgd import dp_sgd
from rasura.registry import parse_defense
from rasura.runs.canary_result import measured
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.victims.recipe import Recipe

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

__all__ = ["model_folder"]

RECIPE = Recipe(epochs=3, batch_size=4, learning_rate=1e-3, keep="last", patience=9)


def planned(folder: Path, model: Path, *defenses: str, **options: Any) -> TrainPlan:
    return TrainPlan(
        str(notes(folder)), model=str(model), defenses=defenses, recipe=RECIPE, gradient_canaries=200, **options
    )  # fmt: skip


@pytest.mark.slow
def test_the_bound_stands_beside_what_was_stated(tmp_path: Path, model_folder: Path) -> None:
    plan = planned(tmp_path, model_folder, "none", "dp-sgd:1.0", "frozen-blocks:1+dp-sgd:1.0")
    results = list(Training(plan, tmp_path / "run").run())
    assert "canaries" not in results[0]
    for one in results[1:]:
        found = one["canaries"]
        assert found["stated"] == one["privacy"]["epsilon"] and not found["refuted"]
        assert found["bound"]["canaries"] == 200 and found["bound"]["delta"] == one["privacy"]["delta"]
        assert f"Stated: {above(found['stated'])}" in found["statement"]
    # Read again, not measured again.
    assert list(Training(plan, tmp_path / "run").run()) == results


def test_a_guarantee_that_is_false_is_refuted_in_every_place(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    less = dp_sgd(1e-6)
    wrong = (made(less.stage, DpSgd(8.0), less.init, less.apply),)  # says a multiplier of 8, and draws next to no noise
    monkeypatch.setattr(TrainPlan, "parts", property(lambda self: {"dp-sgd:8": wrong}))
    words = [
        "train", notes(tmp_path), "--model", model_folder, "--defense", "dp-sgd:8", "--gradient-canaries", "400", "--delta",
        "1e-5", "--epochs", "10", "--keep", "last", "--patience", "20", "--out", tmp_path / "run",
    ]  # fmt: skip
    done = rasura_command(*words)
    assert done.returncode == 3, done.stderr
    said = " ".join(done.stdout.split())
    assert "canaries refute it" in said and "it is refuted." in said
    kept = json.loads((tmp_path / "run" / "dp-sgd-8-0" / "result.json").read_text())
    assert kept["canaries"]["refuted"] and any("refute" in line for line in kept["privacy"]["warnings"])
    spent = rasura_command("account", "--ledger", tmp_path / "run" / "dp-sgd-8-0" / "result.json")
    assert "canaries refute it" in " ".join(spent.stdout.split())
    again = rasura_command(*words, "--json")
    assert again.returncode == 3 and json.loads(again.stdout)[0]["canaries"]["refuted"]


@pytest.mark.slow
def test_an_interrupted_training_goes_on_with_its_canaries(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(done: int, total: int, told: Mapping[str, float]) -> None:
        if done > 3:  # behind the first epoch; the fourth release is in no model that is kept
            raise Stopped

    def run(canaries: Any) -> Any:
        ledger = Ledger([p.mechanism for p in parse_defense("dp-sgd:1.0")], Run(10, 4, 3, 1e-3))
        return fine_tuning(tmp_path, "dp-sgd:1.0", poisson=True, secret=True, ledger=ledger, canaries=canaries)

    first, second = rasura.GradientCanaries(50), rasura.GradientCanaries(50)
    with pytest.raises(Stopped):
        run(first).run(stop)
    resumed = run(second)
    resumed.run()
    assert first.releases == 4 and second.releases == 9 == resumed.ledger.releases
    assert second.included.tolist() == first.included.tolist()
    assert second.measure(resumed.ledger).stated == resumed.ledger.epsilon
    path = str(tmp_path / "last.safetensors")
    with safe_open(path, framework="pt") as file:
        about = {k: v for k, v in file.metadata().items() if k != "canaries"}
    save_file(load_file(path), path, metadata=about)
    with pytest.raises(InputError, match="has no canaries, so they did not see its releases"):
        run(rasura.GradientCanaries(50)).run()


@pytest.mark.slow
def test_persons_and_canaries_together(tmp_path: Path, model_folder: Path) -> None:
    rows = [json.loads(line) for line in notes(tmp_path, count=24).read_text().splitlines()]
    path = tmp_path / "whose.jsonl"
    path.write_text("".join(json.dumps({**row, "author": f"a{k % 6}"}) + "\n" for k, row in enumerate(rows)))
    plan = TrainPlan(
        str(path), model=str(model_folder), defenses=("dp-sgd:1.0",), recipe=RECIPE, gradient_canaries=50, unit="author"
    )
    (found,) = Training(plan, tmp_path / "run").run()
    assert "each person" in found["privacy"]["statement"] and found["canaries"]["stated"] == found["privacy"]["epsilon"]


def test_what_takes_no_canaries_is_refused(tmp_path: Path) -> None:
    for defenses in (("none",), ("directional:100",), ("gaussian:0.1", "bf16"), ("dp-sgd:1.0+accumulate:50",)):
        with pytest.raises(InputError, match="gradient canaries need dp-sgd"):
            TrainPlan("notes.jsonl", defenses=defenses, gradient_canaries=100).checked()
    for number in (5, -1):
        with pytest.raises(InputError, match=f"{number} gradient canaries; expected at least 20"):
            TrainPlan("notes.jsonl", defenses=("dp-sgd:1.0",), gradient_canaries=number).checked()
    ledger = Ledger([p.mechanism for p in parse_defense("dp-sgd:1.0")], Run(10, 4, 3, 1e-3))
    with pytest.raises(InputError, match="saw no release"):
        measured(rasura.GradientCanaries(50), ledger)
