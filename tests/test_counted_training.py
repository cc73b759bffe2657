"""`rasura train` behind a guarantee: what it says was spent is what was drawn, interrupted or ended early."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import model_folder
from safetensors.torch import load_file, save_file
from training_setting import RECIPE, figures, fine_tuning, notes, rows, stopped

from rasura.accounting import Ledger, Run, epsilon
from rasura.accounting.ledger import counted
from rasura.core.batches import Batch
from rasura.core.files import make_private
from rasura.core.interfaces import InputError
from rasura.registry import parse_defense
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.victims import train
from rasura.victims.batching import joined
from rasura.victims.recipe import Recipe

pytest.importorskip("dp_accounting")

__all__ = ["model_folder"]


def ledger(defense: str, epochs: int = RECIPE.epochs, sampling: Any = "poisson") -> Ledger:
    """For ten texts, four a step."""
    return Ledger([p.mechanism for p in parse_defense(defense)], Run(10, 4, epochs, 1e-3, sampling))


def run(folder: Path, defense: str = "dp-sgd:1.0", epochs: int = RECIPE.epochs, **options: Any) -> Any:
    made = ledger(defense, epochs)
    return fine_tuning(folder, defense, poisson=True, secret=True, ledger=made, **options)


def test_every_step_is_counted_with_what_was_drawn(tmp_path: Path) -> None:
    private = run(tmp_path)
    private.run()
    ((release, count),) = private.ledger.runs
    assert count == 9 and release.rate == 0.4 and release.secret and release.multiplier == 1.0
    assert release.blocks == (sum(p.numel() for p in private.model.parameters()),)
    assert private.ledger.epsilon == pytest.approx(epsilon(1.0, 0.4, 9, 1e-3))


def test_a_training_does_not_go_beyond_its_plan(tmp_path: Path) -> None:
    private = run(tmp_path, epochs=1)
    with pytest.raises(InputError, match="all 3 planned releases"):
        private.run()
    assert private.ledger.releases == 3


def test_an_interrupted_training_goes_on_counting(tmp_path: Path) -> None:
    first = run(tmp_path)
    stopped(first, after=4)  # behind the first epoch; the fourth release is in no model that is kept
    assert first.ledger.releases == 4
    second = run(tmp_path)
    second.run()
    assert second.ledger.releases == 9
    path = tmp_path / "last.safetensors"
    save_file(load_file(str(path)), str(path), metadata={"history": "{}"})
    with pytest.raises(InputError, match="has no ledger, so earlier releases are unknown"):
        run(tmp_path).run()


@pytest.mark.slow
@pytest.mark.parametrize("files", [3, 4])
def test_the_epoch_to_keep_is_one_that_was_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Its weights were those of steps that no ledger has, where the run was killed between two files: with secret noise the
    epoch is another one when it is repeated."""
    values, weights = iter([0.5, 0.9, 0.4, 0.4, 0.4]), dict[float, dict[str, torch.Tensor]]()

    def judged(model: torch.nn.Module, _: Any) -> dict[str, float]:
        value = next(values)
        weights[value] = {n: p.detach().clone() for n, p in model.named_parameters()}
        return {"accuracy": value}

    written: list[Any] = []

    def killed(*about: Any) -> None:
        make_private(*about)
        written.append(about)
        if len(written) == files:
            raise KeyboardInterrupt

    monkeypatch.setattr("training_setting.figures", judged)
    monkeypatch.setattr(train, "make_private", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path).run()
    resumed = run(tmp_path)
    best = resumed.run().best
    assert best is not None and resumed.ledger.releases == 9
    assert all(torch.equal(p, weights[best][n]) for n, p in resumed.model.named_parameters())


def test_batches_of_a_guarantee_do_not_depend_on_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of like lengths did: a text that is replaced by a longer one moved others between them, so that a pass over
    disjoint batches spent more than was said."""
    seen: list[list[tuple[int, ...]]] = []
    whole = joined

    def watched(some: list[Batch], pad: int) -> Batch:
        seen[-1].append(tuple(names[id(row)] for row in some))
        return whole(some, pad)

    data = rows()
    longer = [rows(count=12)[11], *data[1:]]
    assert longer[0].lengths > data[0].lengths
    monkeypatch.setattr(train, "joined", watched)
    for k, some in enumerate((data, longer)):
        names = {id(row): place for place, row in enumerate(some)}
        seen.append([])
        private: Any = fine_tuning(
            tmp_path / str(k), "directional:1e6", ledger=ledger("directional:1e6", sampling="shuffled")
        )
        private.rows, private.evaluate = some, lambda model: figures(model, data)
        private._epoch(0)
        assert sorted(place for part in seen[-1] for place in part) == list(range(10))
        assert private.ledger.spent().pure is None or private.ledger.passes == 1
    assert seen[0] == seen[1]


def test_what_a_training_that_ended_early_spent(tmp_path: Path, model_folder: Path) -> None:
    recipe = Recipe(epochs=4, batch_size=4, learning_rate=1e-9, patience=1)
    plan = TrainPlan(str(notes(tmp_path)), model=str(model_folder), defenses=("dp-sgd:1.0", "gaussian:0.1"), recipe=recipe)
    private, plain = list(Training(plan, tmp_path / "run").run())
    # When it ended was read off its own models, so that epsilon of the steps that it happened to make is no guarantee.
    assert private["epochs"] == 2 and private["privacy"]["steps"] == private["planned"]["steps"] == 12
    n = private["n_train"]
    assert private["privacy"]["epsilon"] == pytest.approx(epsilon(1.0, 4 / n, 12, 0.1 / n))
    assert private["privacy"]["epsilon"] == private["planned"]["epsilon"]
    assert any("6 of these were not made" in said for said in private["privacy"]["warnings"])
    kept = json.loads((tmp_path / "run" / "dp-sgd-1.0-0" / "result.json").read_text())
    assert counted(tmp_path / "run" / "dp-sgd-1.0-0" / "result.json").epsilon == kept["privacy"]["epsilon"]
    assert set(plain["privacy"]) == {"statement"} and plain["privacy"]["statement"].startswith("no formal guarantee")
    seeded = replace(plan, defenses=("dp-sgd:1.0",), recipe=replace(recipe, noise="seeded"))
    (experiment,) = Training(seeded, tmp_path / "seeded").run()
    # What a guarantee needs comes from the operating system, everything else from the seed.
    assert [r["noise"] for r in (private, plain, experiment)] == ["secure", "seeded", "seeded"]
    assert "epsilon" not in experiment["privacy"] and experiment["privacy"]["otherwise"][0] > 0
    assert experiment["privacy"]["statement"].startswith("no formal guarantee for this run: the noise is seeded")


def test_the_noise_of_a_trained_service_is_named_seeded_as_it_is(tmp_path: Path, model_folder: Path) -> None:
    recipe = Recipe(epochs=1, batch_size=4, learning_rate=1e-3)
    plan = TrainPlan(
        str(notes(tmp_path)), model=str(model_folder), defenses=("dp-forward:epsilon=8",), recipe=recipe, service=True
    )
    first, again = (next(iter(Training(plan, tmp_path / name).run())) for name in ("first", "again"))
    assert first["after"] == again["after"] and first["noise"] == again["noise"] == "seeded"


@pytest.mark.parametrize("defense", ["sealing:all", "dp-sgd:1.0+sealing:grad=0.1"])
def test_sealing_is_no_training_on_one_machine(defense: str, tmp_path: Path, model_folder: Path) -> None:
    """It zeroed every gradient without a word."""
    with pytest.raises(InputError, match="zeros and their weights would not learn"):
        Training(TrainPlan(str(notes(tmp_path)), model=str(model_folder), defenses=(defense,)), tmp_path / "run")
    with pytest.raises(InputError, match="zeros and their weights would not learn"):
        fine_tuning(tmp_path, defense)
