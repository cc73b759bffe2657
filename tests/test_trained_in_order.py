"""`rasura train` under DP-FTRL: one order for all passes, its steps, its epsilon, and an interrupted training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import model_folder
from training_setting import RECIPE, fine_tuning, notes
from typer.testing import CliRunner

from rasura.accounting import Ledger, Run
from rasura.accounting.banded import BandedPlan
from rasura.accounting.ledger import counted
from rasura.cli import app
from rasura.core.batches import Batch
from rasura.core.interfaces import InputError
from rasura.registry import parse_defense
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.victims import train
from rasura.victims.batching import joined
from rasura.victims.recipe import Recipe

pytest.importorskip("dp_accounting")

__all__ = ["model_folder"]

BAND = "dp-ftrl:1.0/band=2"


def run(folder: Path, defense: str = BAND, plan: Run | None = None, **options: Any) -> Any:
    """Ten texts, four a step, three passes."""
    wanted = Run(10, 4, RECIPE.epochs, 1e-3, "fixed") if plan is None else plan
    made = Ledger([p.mechanism for p in parse_defense(defense)], wanted)
    return fine_tuning(folder, defense, ledger=made, **{"secret": True, **options})


@pytest.mark.slow
def test_every_pass_takes_the_same_batches_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    whole = joined

    def watched(some: list[Batch], pad: int) -> Batch:
        seen.append([names[id(row)] for row in some])
        return whole(some, pad)

    monkeypatch.setattr(train, "joined", watched)
    made = run(tmp_path)
    names = {id(row): place for place, row in enumerate(made.rows)}
    made.run()
    assert [len(part) for part in seen] == [4, 4, 2] * 3 and seen[:3] == seen[3:6] == seen[6:]
    assert sorted(place for part in seen[:3] for place in part) == list(range(10))
    assert [(r.number, r.band, r.separation, count) for r, count in made.ledger.runs] == [
        (1, 2, 3, 3), (2, 2, 3, 3), (3, 2, 3, 3),
    ]  # fmt: skip
    assert made.ledger.epsilon == BandedPlan(1.0, 9, 3, 2).epsilon(1e-3)
    assert made.order.noise.drawn == 9 and all(r.secret for r, _ in made.ledger.runs)


def test_without_noise_it_is_plain_training_in_that_order(tmp_path: Path) -> None:
    recipe = replace(RECIPE, optimizer="sgd", learning_rate=0.1, keep="last")
    made = run(tmp_path / "private", "dp-ftrl:1e-12/band=3/clip=1e6", secret=False, recipe=recipe)
    made.run()
    plain = fine_tuning(tmp_path / "plain", recipe=recipe)
    for _ in range(RECIPE.epochs):
        for part in made.order.parts:
            batch = joined([plain.rows[k] for k in part], 0)
            plain.optimizer.zero_grad()
            (plain.model(**batch.inputs()).loss * len(part) / 4).backward()
            plain.optimizer.step()
    for (name, one), other in zip(made.model.named_parameters(), plain.model.parameters()):
        assert torch.allclose(one, other, atol=1e-5), name


def test_an_interrupted_training_is_refused_in_words(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(done: int, total: int, told: Mapping[str, float]) -> None:
        if done > 3:  # behind the first epoch
            raise Stopped

    with pytest.raises(Stopped):
        run(tmp_path).run(stop)
    with pytest.raises(
        InputError, match=r"last.safetensors: remove the folder to start over. a training under dp-ftrl cannot"
    ):
        run(tmp_path).run()


@pytest.mark.parametrize("recipe", [RECIPE, replace(RECIPE, epochs=6, patience=2, learning_rate=1e-9)])
def test_a_training_that_was_killed_behind_its_last_step_is_finished(tmp_path: Path, recipe: Recipe) -> None:
    """It was refused, and to start over released everything a second time."""
    plan = Run(10, 4, recipe.epochs, 1e-3, "fixed")
    first, again = (run(tmp_path, plan=plan, recipe=recipe) for _ in range(2))
    first.run()
    again.run()
    assert again.ledger.spent() == first.ledger.spent() and again.ledger.releases == first.ledger.releases > 0
    assert all(torch.equal(one, other) for one, other in zip(first.model.parameters(), again.model.parameters()))
    with pytest.raises(InputError, match=r"was drawn, and nothing was released|planned releases"):
        again._epoch(again.history.epoch)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"plan": Run(10, 5, 3, 1e-3, "fixed")}, "plans batches of 5 of 10 texts, but this training has batches of 4 of 10"),
        ({"plan": Run(9, 4, 3, 1e-3, "fixed")}, "plans batches of 4 of 9 texts, but this training has batches of 4 of 10"),
        ({"plan": Run(10, 4, 3, 1e-3, "poisson")}, "this ledger plans another training"),
        ({"plan": Run(10, 4, 3, 1e-3, "shuffled")}, "this ledger plans another training"),
        ({"poisson": True}, "found none, or Poisson sampling"),
        ({"defense": "dp-ftrl:1.0/band=2+qsgd:4"}, "dp-ftrl trains only where its guarantee holds"),
        ({"defense": "dp-ftrl:1.0/band=4"}, "the band 4 is above the 3 batches of a pass"),
    ],
)
def test_another_training_than_planned_is_refused(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        run(tmp_path, **options)
    with pytest.raises(InputError, match="counted by a ledger; found none"):
        fine_tuning(tmp_path, BAND)


def test_a_longer_training_than_planned_is_refused(tmp_path: Path) -> None:
    made = run(tmp_path, plan=Run(10, 4, 1, 1e-3, "fixed"))
    with pytest.raises(InputError, match="all 3 planned releases"):
        made.run()
    assert made.ledger.releases == 3 == made.order.noise.drawn


def test_the_command_trains_and_says_what_was_spent(tmp_path: Path, model_folder: Path) -> None:
    recipe = Recipe(epochs=2, batch_size=4, learning_rate=1e-3, keep="last")
    plan = TrainPlan(
        str(notes(tmp_path)), model=str(model_folder), defenses=("none", "dp-ftrl:band=2"), recipe=recipe, target_epsilon=8.0
    )
    plain, private = list(Training(plan, tmp_path / "run").run())
    steps, n = private["privacy"]["steps"], private["n_train"]
    assert steps == 2 * -(-n // 4) and plain["privacy"]["statement"].startswith("no formal guarantee")
    sigma = private["mechanism"][0]["parameters"]["sigma"]
    assert private["privacy"]["epsilon"] == BandedPlan(sigma, steps, steps // 2, 2).epsilon(0.1 / n) <= 8.0
    assert private["planned"]["epsilon"] == private["privacy"]["epsilon"] > 7.99
    kept = next((tmp_path / "run").glob("dp-ftrl*")) / "result.json"
    assert counted(kept).epsilon == private["privacy"]["epsilon"]
    seeded = replace(plan, defenses=(BAND,), target_epsilon=None, recipe=replace(recipe, noise="seeded"))
    (experiment,) = Training(seeded, tmp_path / "seeded").run()
    assert experiment["privacy"]["statement"].startswith("no formal guarantee for this run: the noise is seeded")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--defense", "dp-ftrl:1.0"), "dp-ftrl needs a band"),
        (("--defense", "dp-ftrl:1.0/band=9"), "the band 9 is above the 6 batches of a pass"),
        (("--defense", "ghost+dp-ftrl:1.0/band=2"), "dp-ftrl trains only where its guarantee holds"),
        (("--defense", "accumulate:4+dp-ftrl:1.0/band=2"), "dp-ftrl trains only where its guarantee holds"),
        (("--defense", BAND, "--gradient-canaries", "100"), "gradient canaries need dp-sgd or normalised"),
        (("--defense", BAND, "--unit", "label"), "the unit label needs dp-sgd or normalised"),
    ],
)
def test_the_command_refuses_before_it_trains(tmp_path: Path, model_folder: Path, words: tuple[str, ...], says: str) -> None:
    if "ghost" in words[1]:
        pytest.importorskip("simplemma")
    call = ("train", str(notes(tmp_path)), "--model", str(model_folder), "--batch-size", "2", "--out", str(tmp_path / "run"))
    found = CliRunner().invoke(app, [*call, *words])
    assert isinstance(found.exception, InputError) and says in str(found.exception)
    assert not list((tmp_path / "run").glob("*/last.safetensors"))
