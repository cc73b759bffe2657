"""No guarantee is stated for a protection of one's own, whatever its mechanism is called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import model_folder
from private_setting import DATA, collate
from torch.utils.data import DataLoader
from training_setting import RECIPE, notes

import rasura
from rasura.core.interfaces import Defense, InputError, Transform
from rasura.core.noise_mechanisms import DpFtrl, DpSgd
from rasura.core.values import Mechanism, Stage
from rasura.defenses.compose import mean
from rasura.defenses.dp_ftrl import dp_ftrl
from rasura.defenses.dp_sgd import dp_sgd
from rasura.registry import DEFENSES, parse_defense
from rasura.runs.private import ProtectedTraining
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.testing.tiny import tiny

__all__ = ["model_folder"]

pytest.importorskip("dp_accounting")


def loop(defense: str | Defense) -> ProtectedTraining:
    model = tiny("bert", "classification", num_labels=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return rasura.protect_training(model, optimizer, DataLoader(DATA, 2, shuffle=True, collate_fn=collate), defense)


def plain(known: Mechanism) -> Transform[Any, Any, Any]:
    """The plain mean, described as ``known``."""
    return Transform(Stage.AGGREGATE, known, lambda _: None, lambda examples, state, rng: (examples.mean(), None))


def unchanged(name: str) -> Transform[Any, Any, Any]:
    """A part of the model's stage that is described by ``name``."""
    return Transform(Stage.MODEL, Mechanism(name, Stage.MODEL), lambda _: None, lambda model, state, rng: (model, None))


@pytest.mark.parametrize(
    "defense",
    [
        (plain(DpSgd(sigma=1.0)),),
        (plain(DpFtrl(sigma=1.0, band=2)),),
        (replace(dp_sgd(1e-6), mechanism=DpSgd(sigma=1.0)),),
        (replace(dp_sgd(1.0), apply=mean().apply),),
        (unchanged("none"), dp_sgd(1.0)),
        (unchanged("pruning"), dp_sgd(1.0)),
        (dp_sgd(1.0), replace(parse_defense("pruning:0.5")[0], apply=lambda message, *_: (message, None))),
    ],
    ids=["mean", "mean-in-order", "less-noise", "another-step", "none", "pruning", "another-pruning"],
)
def test_a_loop_under_a_method_of_ones_own_has_no_guarantee(defense: Defense) -> None:
    model, optimizer, loader, ledger = loop(defense)
    assert optimizer is not None
    batch = next(iter(loader))
    model(**batch).loss.backward()
    optimizer.step()
    for found in (ledger.planned, ledger.spent()):
        assert found.epsilon is None and found.otherwise is None
        assert found.statement.startswith("no formal guarantee: nothing is proven for ") and "of your own" in found.statement
    assert ledger.releases == 1
    with pytest.raises(InputError, match="of your own"):
        _ = ledger.epsilon


def test_what_rasura_makes_keeps_its_guarantee() -> None:
    for defense in ("frozen-embeddings+dp-sgd:1.0+fp16", (dp_sgd(1.0),), parse_defense("normalised:1.0")):
        assert loop(defense).ledger.planned.epsilon is not None


@pytest.mark.parametrize("name", DEFENSES)
def test_every_registered_protection_is_known_by_its_name(name: str) -> None:
    for part in parse_defense(DEFENSES[name].example):
        assert part.counted is part.mechanism


def test_a_second_aggregation_does_not_replace_the_first() -> None:
    """The first one alone acted: a plain mean, with the guarantee of the second."""
    with pytest.raises(InputError, match="mean"):
        loop((mean(), dp_sgd(1.0)))


def test_correlated_noise_is_refused_beside_a_method_of_ones_own() -> None:
    with pytest.raises(InputError, match="only where its guarantee holds"):
        loop((unchanged("none"), dp_ftrl(1.0, 2)))


def test_a_training_by_name_has_no_guarantee_under_a_plug_in(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(DEFENSES["dp-sgd"], name="plugged", make=lambda: plain(DpSgd(sigma=1.0)), parameter=None)
    monkeypatch.setitem(DEFENSES.specs, "plugged", spec)
    plan = TrainPlan(str(notes(tmp_path)), model=str(model_folder), defenses=("none", "plugged"), recipe=RECIPE)
    list(Training(plan, tmp_path / "run").run())
    results = [json.loads(p.read_text()) for p in (tmp_path / "run").rglob("result.json")]
    (found,) = [r for r in results if r["defense"] == "plugged"]
    assert "epsilon" not in found["planned"] and "own-dp-sgd" in found["planned"]["statement"]
    assert all("epsilon" not in epoch for epoch in found["history"])


def test_a_ledger_of_a_method_of_ones_own_does_not_continue_with_a_proven_one() -> None:
    state: Mapping[str, Any] = loop((plain(DpSgd(sigma=1.0)),)).ledger.state_dict()
    ledger = loop("dp-sgd:1.0").ledger
    with pytest.raises(InputError):
        ledger.load_state_dict(state)
