"""A training that freezes blocks computes their states once, and learns what it would without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from training_setting import RECIPE, figures, rows, stopped

from rasura.core.local import Adapter
from rasura.core.values import Task
from rasura.registry import parse_defense
from rasura.testing.tiny import VOCABULARY, tiny
from rasura.victims import frozen_states
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.outputs import nats, predictions
from rasura.victims.recipe import Recipe
from rasura.victims.train import FineTuning

KEPT = ("bert", "distilbert", "mpnet", "roberta", "electra", "gpt2", "llama", "qwen2", "gemma3")


def made(
    folder: Path, family: str, defense: str, task: Task = "classification", model: nn.Module | None = None, **options: Any
) -> FineTuning:
    some = rows(task)
    # Held-out texts are asked about after every epoch: one of them is trained on, and two are not.
    held = [some[0], *rows(task, 12)[10:]]
    recipe = options.pop("recipe", RECIPE)

    def judged(model: nn.Module) -> dict[str, float]:
        if task == "classification":
            return figures(model, held)
        loss, count = nats(model, held, 0)
        return {"loss": loss / count}

    watched = "accuracy" if task == "classification" else "loss"
    return FineTuning(
        tiny(family, task, num_labels=2) if model is None else model, some, parse_defense(defense), recipe, folder,
        task=task, vocabulary=VOCABULARY, evaluate=judged, watched=watched, higher=watched == "accuracy", asked=held,
        **options,
    )  # fmt: skip


def calls(run: FineTuning) -> int:
    """How often the first layer of the first block is called in a whole run."""
    lists = [m for m in run.model.modules() if isinstance(m, nn.ModuleList)]
    block = max(lists, key=lambda one: len(list(one.modules())))[0]
    first = next(m for m in block.modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D")
    found = []
    hook = first.register_forward_hook(lambda *_: found.append(1))
    run.run()
    hook.remove()
    return len(found)


def weights(run: FineTuning) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in run.trained.items()}


def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *told: Any, **options: Any) -> tuple[int, int]:
    """Calls of the first block with the states kept, and without; the two trainings end alike."""
    run = made(tmp_path / "kept", *told, **options)
    started = weights(run)
    some = calls(run)
    monkeypatch.setattr(frozen_states, "LIMIT", 0)
    plain = made(tmp_path / "plain", *told, **options)
    all_of_them = calls(plain)
    ended = weights(plain)
    assert any(not torch.equal(started[n], ended[n]) for n in started)
    for name, found in weights(run).items():
        assert torch.allclose(found, ended[name], rtol=1e-3, atol=2e-5), name
    assert run.history.epochs is not None and plain.history.epochs is not None
    for one, other in zip(run.history.epochs, plain.history.epochs, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    return some, all_of_them


@pytest.mark.parametrize("family", KEPT)
@pytest.mark.parametrize("blocks", [1, 2])
def test_frozen_blocks_are_computed_once_and_the_model_learns_the_same(
    family: str, blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, plain = both(tmp_path, monkeypatch, family, f"frozen-blocks:{blocks}")
    # One pass by autograd, four for the thirteen texts and one of a trial, in place of three epochs.
    assert kept == 6 < plain


@pytest.mark.parametrize(
    "defense", ["frozen-blocks:2+dp-sgd:0.1", "frozen-blocks:1+gaussian:0.001", "frozen-blocks:2+pruning:0.5"]
)
def test_it_holds_beside_other_protections(defense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, plain = both(tmp_path, monkeypatch, "bert", defense)
    assert kept < plain


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_it_holds_for_causal_models(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, plain = both(tmp_path, monkeypatch, family, "frozen-blocks:1", "causal")
    assert kept == 6 < plain


@pytest.mark.parametrize("family", ["albert", "deberta-v2", "modernbert", "bloom", "falcon", "xlnet", "t5"])
def test_other_families_learn_the_same_whether_states_are_kept_or_not(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both(tmp_path, monkeypatch, family, "frozen-blocks:1")


@pytest.mark.parametrize("defense", ["none", "frozen-embeddings", "frozen-blocks:1+dropout:0.1", "frozen-blocks:0"])
def test_nothing_is_kept_where_states_change(defense: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, plain = both(tmp_path, monkeypatch, "bert", defense)
    assert kept - plain in (0, 1)  # one trial tells that no block is frozen


def test_nothing_is_kept_with_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def adapted() -> nn.Module:
        return with_fresh_adapter(tiny("bert", "classification", num_labels=2), "classification", Adapter(2, "", 0.1), 0)

    run = made(tmp_path, "bert", "frozen-blocks:1", model=adapted())
    assert calls(run) > 6


def test_a_text_that_is_not_kept_is_computed(tmp_path: Path) -> None:
    model, known = tiny("bert", "classification", num_labels=2), rows()
    for parameter in model.bert.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    other = rows(count=11)[10:]
    before, others = predictions(model, known, 0), predictions(model, other, 0)
    with frozen_states.kept_states(model, known, 0, 4):
        assert torch.allclose(predictions(model, known, 0), before, atol=1e-5)
        # With other weights it shows which texts are computed: the new one, and all of a batch with it.
        with torch.no_grad():
            model.bert.encoder.layer[0].output.dense.weight.normal_()  # type: ignore[union-attr, index, operator]
        assert torch.allclose(predictions(model, known, 0), before, atol=1e-5)
        assert not torch.allclose(predictions(model, other, 0), others, atol=1e-2)
        assert not torch.allclose(predictions(model, [*known, *other], 0)[:-1], before, atol=1e-2)
    assert not torch.allclose(predictions(model, known, 0), before, atol=1e-2)
    assert not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_training_that_is_killed_goes_on_as_one_that_was_not(tmp_path: Path) -> None:
    recipe = Recipe(epochs=4, batch_size=4, learning_rate=1e-3, seed=5)
    stopped(made(tmp_path / "one", "bert", "frozen-blocks:2", recipe=recipe), 5)
    one, whole = (made(tmp_path / n, "bert", "frozen-blocks:2", recipe=recipe) for n in ("one", "whole"))
    assert one.run().epochs == whole.run().epochs
    for name, found in weights(one).items():
        assert torch.equal(found, weights(whole)[name]), name
