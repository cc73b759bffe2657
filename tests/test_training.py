"""Fine-tuning through the step: against a plain loop, behind defenses, interrupted, and as a person runs it."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import model_folder
from commands import rasura_command, refused, refused_process
from safetensors.torch import load_file
from training_setting import RECIPE, figures, fine_tuning, notes, rows, stopped
from training_setting import text as text_number
from transformers import AutoModelForSequenceClassification, get_scheduler

from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.data.text import load_examples
from rasura.metrics.utility import causal, classification
from rasura.registry import parse_defense
from rasura.runs.candidates import _labelled
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.testing.tiny import VOCABULARY, tiny
from rasura.victims.batching import batches, joined, split
from rasura.victims.loading import load
from rasura.victims.outputs import nats
from rasura.victims.protected_rows import protected
from rasura.victims.recipe import Recipe
from rasura.victims.train import FineTuning

__all__ = ["model_folder"]

LINEAR = replace(RECIPE, schedule="linear", warmup=1 / 3)


def test_batches_join_and_split_back() -> None:
    for task in ("classification", "causal"):
        some = rows(task)
        whole = joined(some, 0)
        assert whole.lengths == tuple(r.lengths[0] for r in some)
        again = split(whole)
        assert all(torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels) for a, b in zip(some, again))
        if task == "causal":
            assert bool((whole.labels[whole.attention_mask == 0] == -100).all())


def test_batches_hold_every_text_once_and_those_of_like_length() -> None:
    lengths = torch.randint(3, 60, (1000,), generator=generator(0)).tolist()
    found = batches(lengths, 32, generator(1))
    assert sorted(k for part in found for k in part) == list(range(1000))
    assert all(len(part) <= 32 for part in found) and found != batches(lengths, 32, generator(2))
    padded = sum(len(part) * max(lengths[k] for k in part) for part in found)
    assert padded < 1.15 * sum(lengths)


@pytest.mark.parametrize("recipe", [RECIPE, LINEAR], ids=["constant", "linear"])
def test_training_equals_the_plain_loop(recipe: Recipe, tmp_path: Path) -> None:
    run = fine_tuning(tmp_path, recipe=recipe)
    history = run.run()
    model = tiny("bert", "classification", num_labels=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=RECIPE.weight_decay)
    kind = "constant" if recipe is RECIPE else "linear"
    schedule = get_scheduler(kind, optimizer, num_warmup_steps=3, num_training_steps=9)
    best: tuple[float, dict[str, Any]] = (-1.0, {})
    some = rows()
    for epoch in range(3):
        for part in batches([r.lengths[0] for r in some], 4, generator(5, "order", epoch)):
            optimizer.zero_grad()
            model(**joined([some[k] for k in part], 0).inputs()).loss.backward()
            optimizer.step()
            schedule.step()
        accuracy = figures(model, some)["accuracy"]
        if accuracy > best[0]:
            best = (accuracy, {n: p.detach().clone() for n, p in model.named_parameters()})
    assert history.epoch == 3 and history.best == best[0]
    assert all(torch.allclose(p, best[1][n], atol=1e-6) for n, p in run.model.named_parameters())


@pytest.mark.parametrize("defense", ["frozen-embeddings+dropout:0.1", "gaussian:0.001", "pruning:0.5", "sign"])
def test_every_defense_trains_through_the_step(defense: str, tmp_path: Path) -> None:
    run = fine_tuning(tmp_path, defense)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run.run()
    changed = {n for n, p in run.model.named_parameters() if not torch.equal(p, before[n])}
    embeddings = {n for n in before if "embeddings" in n}
    assert changed and bool(changed & embeddings) == ("frozen" not in defense)


@pytest.mark.parametrize("defense", ["dropout:0.1", "dp-sgd:0.5/clip=0.001/quantile=0.5"])
def test_an_interrupted_training_ends_as_an_uninterrupted_one(tmp_path: Path, defense: str) -> None:
    whole = fine_tuning(tmp_path / "whole", defense, recipe=LINEAR)
    wanted = whole.run()

    heard = stopped(fine_tuning(tmp_path / "cut", defense, recipe=LINEAR), after=8)  # inside the third epoch
    cut = fine_tuning(tmp_path / "cut", defense, seed=3, recipe=LINEAR)
    found = cut.run(lambda *told: heard.append(told))
    assert vars(found) == vars(wanted)
    batches_done = [*range(1, 9), 7, 8, 9]
    assert heard == [(k, 9, (wanted.epochs or [])[(k - 1) // 3 - 1] if k > 3 else {}) for k in batches_done]
    theirs = dict(cut.model.named_parameters())
    assert all(torch.equal(p, theirs[n]) for n, p in whole.model.named_parameters())


def test_a_state_that_no_resumed_training_could_read_is_refused(tmp_path: Path) -> None:
    run = fine_tuning(tmp_path)
    run.kept = {"state": torch.ones(1)}
    with pytest.raises(InputError, match="keeps a Tensor from step to step; expected numbers"):
        run._book({"accuracy": 0.5})


@pytest.mark.parametrize(("keep", "stays"), [("best", 0.7), ("last", 0.6)])
def test_patience_ends_the_training_and_the_epoch_to_keep_stays(tmp_path: Path, keep: Any, stays: float) -> None:
    values = iter([0.5, 0.7, 0.6, 0.6, 0.9])
    weights = {}

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        value = next(values)
        weights[value] = {n: p.detach().clone() for n, p in model.named_parameters()}
        return {"accuracy": value}

    model = tiny("bert", "classification", num_labels=2)
    run = FineTuning(
        model, rows(), (), Recipe(epochs=9, batch_size=4, patience=2, learning_rate=1e-3, keep=keep), tmp_path,
        task="classification", vocabulary=VOCABULARY, evaluate=evaluate, watched="accuracy", higher=True,
    )  # fmt: skip
    history = run.run()
    assert (history.epoch, history.best_epoch, history.best) == (4, 2, 0.7)
    assert all(torch.equal(p, weights[stays][n]) for n, p in model.named_parameters())


def test_data_are_protected_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rasura.ghost.defense import ghost
    from rasura.ghost.table import ShadowSettings

    model = tiny("gpt2", "causal")
    defense = (ghost(shadows=ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None)),)
    monkeypatch.setattr("rasura.victims.protected_rows.CHUNK", 4)
    some = rows("causal")
    hidden = protected(some, defense, model, VOCABULARY, tmp_path, 0)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    for old, new in zip(some, hidden):
        assert old.lengths == new.lengths and torch.equal(new.labels, new.input_ids)
        assert not bool((old.input_ids == new.input_ids)[:, 1:-1].any())
    monkeypatch.setattr(torch.nn.Module, "__call__", lambda *a, **k: pytest.fail("protected anew"))
    again = protected(some, defense, model, VOCABULARY, tmp_path, 0)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(hidden, again))


def test_figures_of_utility() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    found = classification(logits, [0, 1, 0, 1])
    assert found["accuracy"] == 0.5 and found["mcc"] == 0 and found["f1"] == pytest.approx(0.5)
    with warnings.catch_warnings(action="error"):
        assert classification(logits[:1], [0])["mcc"] == classification(logits[1:3], [1, 1])["mcc"] == 0
    assert causal(6.0, 3) == {"loss": 2.0, "perplexity": pytest.approx(7.389056)}
    model, some = tiny("gpt2", "causal"), rows("causal", 3)
    total, tokens = nats(model, some, 0)
    one_by_one = [model(**r.inputs()).loss.item() * (r.lengths[0] - 1) for r in some]
    assert total == pytest.approx(sum(one_by_one), rel=1e-4) and tokens == sum(r.lengths[0] - 1 for r in some)


# --- as a person runs it


def test_the_command_trains_behind_several_defenses_and_resumes(tmp_path: Path, model_folder: Path) -> None:
    options = ["train", notes(tmp_path), "--test", notes(tmp_path, "test.jsonl", 6, 20), "--model", model_folder]
    options += ["--epochs", "2", "--batch-size", "4", "--out", tmp_path / "run", "--json"]
    done = rasura_command(*options, "--defense", "none,gaussian:0.01")
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert (first["defense"], second["defense"]) == ("none", "gaussian:0.01")
    assert first["n_test"] == 6 and first["tested_on"] == "test" and len(first["history"]) == first["epochs"]
    assert set(first["after"]) == {"accuracy", "f1", "mcc", "loss"} and second["mechanism"][0]["name"] == "gaussian"
    weights = tmp_path / "run" / "none-0" / "model" / "model.safetensors"
    assert load_file(weights) and (weights.parent / "tokenizer.json").exists()
    again = json.loads(rasura_command(*options, "--defense", "none,gaussian:0.01,sign").stdout)
    assert again[:2] == [first, second] and again[2]["defense"] == "sign"
    assert "other settings, data or weights" in refused(*options, "--learning-rate", "0.1")
    assert first["majority"] == 0.5, "every text has both labels, so that nothing can be learned"
    shown = rasura_command(*options[:-1], "--defense", "none,gaussian:0.01").stdout
    assert "No training is told from chance: this compares nothing" in shown and " to " in shown


def test_ids_that_a_protection_chose_are_trained_on(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "hidden.jsonl"
    words = load(
        model_folder, "classification"
    ).vocabulary  # the text is that of the tokens, as ``rasura protect`` writes it
    hidden = [{"text": words.text([1, 7 + k, 7, 2]), "label": k % 2, "input_ids": [1, 7 + k, 7, 2]} for k in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in hidden))
    prepared = Training(TrainPlan(str(path), model=str(model_folder), holdout=0.2), tmp_path / "run")
    assert sorted(r.ids(0) for r in [*prepared.rows, *prepared.held]) == [(1, 7 + k, 7, 2) for k in range(6)]
    (tmp_path / "bad.csv").write_text("text,label,input_ids\nwords,0,1 2 x\n")
    with pytest.raises(InputError, match="not whole numbers"):
        load_examples(tmp_path / "bad.csv")
    path.write_text(2 * (json.dumps({"text": "a", "label": 0, "input_ids": [10**7]}) + "\n"))
    with pytest.raises(InputError, match="outside the model"):
        Training(TrainPlan(str(path), model=str(model_folder)), tmp_path / "other")


def test_a_defense_is_parsed_once_and_handed_on(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rasura.runs import train_plan

    read: list[str] = []
    parse = parse_defense
    monkeypatch.setattr(train_plan, "parse_defense", lambda text: read.append(text) or parse(text))
    path = notes(tmp_path)
    plan = TrainPlan(
        str(path), model=str(model_folder), defenses=("none", "gaussian:0.001"), seeds=2, recipe=Recipe(epochs=1)
    )
    assert len(list(Training(plan, tmp_path / "run").run())) == 4
    assert read == ["none", "gaussian:0.001"]


@pytest.mark.slow
def test_bad_training_input_is_refused_in_one_line(tmp_path: Path, model_folder: Path) -> None:
    data, common = notes(tmp_path), ("--model", model_folder, "--out", tmp_path / "run")
    assert "unknown defense" in refused("train", data, *common, "--defense", "ghst")
    assert "holdout" in refused("train", data, *common, "--holdout", "1.5")
    assert "learning rate" in refused("train", data, *common, "--learning-rate", "0")
    assert "constant, linear or cosine" in refused("train", data, *common, "--schedule", "step")
    assert "warmup is 1.0" in refused("train", data, *common, "--schedule", "linear", "--warmup", "1")
    assert "the schedule linear or cosine" in refused("train", data, *common, "--warmup", "0.1")
    assert "expected a full local training" in refused("train", data, *common, "--update", "fedavg-sgd:4")
    assert "also pass their rank" in refused("train", data, *common, "--targets", "all")
    for option, value in (
        ("--precision", "bf16"), ("--keep", "best"), ("--epochs", "20"), ("--lora", "4"), ("--targets", "attention"),
        ("--adapter-dropout", "0.1"),
    ):  # fmt: skip
        said = refused("train", data, *common, "--update", "local:epochs=1", option, value)
        assert f"{option} would be ignored" in said, "also where it is the default"
    assert "--limit would be ignored" in refused("train", data, *common, "--update", "local:examples=8", "--limit", "4")
    assert "too few" in refused_process("train", notes(tmp_path, "one.jsonl", 1), *common)
    assert "unknown task" in refused("train", data, *common, "--task", "vision")


def test_adapters_are_trained_alone_and_saved_as_adapters(tmp_path: Path, model_folder: Path) -> None:
    pytest.importorskip("peft")
    recipe = Recipe(epochs=1, batch_size=4, learning_rate=1e-2)
    plan = TrainPlan(str(notes(tmp_path)), model=str(model_folder), lora=2, recipe=recipe)
    (result,) = Training(plan, tmp_path / "run").run()
    saved = load_file(tmp_path / "run" / "none-0" / "model" / "adapter_model.safetensors")
    assert any("lora_B" in n and bool(w.any()) for n, w in saved.items())
    assert all("lora" in n or "classifier" in n for n in saved) and result["lora"] == 2


def test_training_an_adapter_prints_no_warning_that_is_for_programmers(tmp_path: Path, model_folder: Path) -> None:
    pytest.importorskip("peft")
    asked = ("--model", model_folder, "--lora", "2", "--epochs", "1", "--out", tmp_path / "run")
    done = rasura_command("train", notes(tmp_path), *asked)
    assert done.returncode == 0 and "Warning" not in done.stderr, done.stderr


@pytest.mark.parametrize("lora", [0, 2])
def test_a_trained_model_names_its_classes_an_adapter_too(tmp_path: Path, model_folder: Path, lora: int) -> None:
    pytest.importorskip("peft")
    rows = [{"text": text_number(k), "label": ("bad", "good")[k % 2]} for k in range(12)]
    data, others = tmp_path / "named.jsonl", tmp_path / "others.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    others.write_text("".join(json.dumps(row) + "\n" for row in rows if row["label"] == "good"))
    plan = TrainPlan(str(data), model=str(model_folder), lora=lora, recipe=Recipe(epochs=1, batch_size=4))
    list(Training(plan, tmp_path / "run").run())
    trained = str(tmp_path / "run" / "none-0" / "model")
    assert {e.label for e in load_examples(others, model=trained)} == {1}, "good is the second class of the trained model"
    victim = load(trained, "classification")
    assert victim.num_labels == 2 and {e.label for e in _labelled(others, victim)} == {1}
    assert AutoModelForSequenceClassification.from_pretrained(trained).num_labels == 2


def test_an_adapter_without_names_has_those_of_its_base(tmp_path: Path) -> None:
    base, adapter, data = tmp_path / "base", tmp_path / "adapter", tmp_path / "good.jsonl"
    for folder, name, content in (
        (base, "config.json", {"id2label": {"0": "bad", "1": "good"}}),
        (adapter, "adapter_config.json", {"base_model_name_or_path": str(base)}),
    ):
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))
    data.write_text(json.dumps({"text": "Alpha met Bravo .", "label": "good"}) + "\n")
    assert [e.label for e in load_examples(data, model=str(adapter))] == [1]


def test_passes_in_bfloat16_train_weights_in_float32(tmp_path: Path) -> None:
    run = fine_tuning(tmp_path)
    run.recipe = Recipe(epochs=1, batch_size=4, learning_rate=1e-3, precision="bf16", seed=5)
    before = {n: p.detach().clone() for n, p in run.model.named_parameters()}
    run.run()
    changed = dict(run.model.named_parameters())
    assert all(p.dtype == torch.float32 for p in changed.values())
    assert any(not torch.equal(p, before[n]) for n, p in changed.items())
