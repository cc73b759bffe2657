"""What is sent instead of one gradient: against plain training loops, and what an adversary makes of it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from update_setting import NOTE, sent_by

from rasura import registry
from rasura.attacks.updates.span import Span
from rasura.core.interfaces import Budget, InputError, Transform
from rasura.core.local import WEIGHT_DECAY, Local
from rasura.core.rng import generator
from rasura.core.updates import announced_update, changed
from rasura.core.values import Grant, Mechanism, Stage, Transcript
from rasura.defenses.compose import mean
from rasura.registry import parse_update
from rasura.runs.plans import Plan
from rasura.testing.settings import seen
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.loading import Victim, load
from rasura.victims.step import step

TEXT = [CLS, 3, 40, 41, 4, 42, 9, SEP]


def sent(update: str, defense: str = "frozen-embeddings", rows: int = 1) -> Transcript:
    local, wire = parse_update(update)
    batch = batch_of([TEXT, [CLS, 50, 3, 51, SEP]][:rows], "classification", [1, 0][:rows])
    model = tiny("bert", "classification", num_labels=2)
    whole = (*registry.parse_defense(defense), *wire)
    return step(model, batch, whole, task="classification", vocabulary=VOCABULARY, rng=generator(0), local=local)


@pytest.mark.parametrize("kind", ["fedavg-sgd", "fedavg-momentum", "fedavg-adamw"])
@pytest.mark.parametrize("steps", [1, 3])
def test_local_training_sends_what_a_plain_loop_changes(kind: str, steps: int) -> None:
    model = tiny("bert", "classification")
    inputs = batch_of([TEXT], "classification", [1]).inputs()
    names = [n for n, _ in model.named_parameters()]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    found, loss = changed(model, inputs, names, Local(kind, steps, 0.01))  # type: ignore[arg-type]
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in model.named_parameters())
    trained = copy.deepcopy(model)
    if kind != "fedavg-adamw":
        momentum = 0.9 if kind == "fedavg-momentum" else 0.0
        optimizer: torch.optim.Optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=momentum)
    else:
        optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01, weight_decay=WEIGHT_DECAY)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        out = trained(**inputs).loss
        out.backward()
        losses.append(float(out.detach()))
        optimizer.step()
    assert loss == pytest.approx(losses[0], rel=1e-6)
    after = dict(trained.named_parameters())
    for n, g in found.items():
        assert torch.allclose(g, (before[n] - after[n].detach()) / 0.01, atol=1e-4)


def test_one_step_of_sgd_sends_the_gradient() -> None:
    plain, local = sent("fedsgd").message.gradients, sent("fedavg-sgd:1:0.5").message.gradients
    assert plain.keys() == local.keys()
    for n, g in plain.items():
        assert torch.allclose(g, local[n], atol=1e-6)


@pytest.fixture(scope="module")
def minilm(minilm_path: Path) -> Victim:
    return load(minilm_path, "classification")


@pytest.mark.slow
@pytest.mark.parametrize("update", ["fedavg-sgd:4", "fedavg-sgd:16", "fedsgd+fp16", "fedavg-sgd:4+bf16"])
def test_local_steps_and_short_floats_do_not_stop_span(minilm: Victim, update: str) -> None:
    guess = Span()(sent_by(minilm, update), rng=generator(0), budget=Budget())
    assert minilm.vocabulary.text(guess.tokens[0]) == NOTE
    assert guess.confidence == ("span" if "bf16" in update else "verified")


def test_the_mechanism_tells_the_adversary_how_the_update_came_about() -> None:
    truth = sent("fedavg-adamw:3:0.001+sign")
    assert [m.name for m in truth.mechanism] == ["fedavg-adamw", "frozen-embeddings", "sign"]
    assert announced_update(seen(truth, frozenset({Grant.MECHANISM}))) == Local("fedavg-adamw", 3, 0.001)
    assert announced_update(seen(truth, frozenset())) == Local()
    assert sent("fedsgd").mechanism[0].name == "frozen-embeddings"
    for g in truth.message.gradients.values():
        assert set(torch.unique(g).tolist()) <= {-1.0, 0.0, 1.0}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fedavg:4", "did you mean fedavg-sgd"),
        ("fedavg-sgd:x", "no whole number"),
        ("fedavg-sgd:0", "at least 1 step"),
        ("fedavg-sgd:2:-1", "learning rate above 0"),
        ("fedsgd:2", "takes 0 figures"),
        ("lora", "takes 1 figure,"),
        ("fedsgd+dropout:0.1", "pass it as a defense"),
        ("fedsgd+bf15", "unknown defense"),
    ],
)
def test_a_bad_update_is_refused_with_its_name(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Plan(updates=(text,)).checked()


def test_texts_cannot_be_aggregated_one_by_one_in_local_training() -> None:
    odd = Transform(Stage.AGGREGATE, Mechanism("odd", Stage.AGGREGATE), lambda _: None, mean().apply)
    with pytest.raises(InputError, match="whole batches"):
        step(
            tiny("bert", "classification"), batch_of([TEXT], "classification"), (odd,), task="classification",
            vocabulary=VOCABULARY, rng=generator(0), local=Local("fedavg-sgd", 2, 0.01),
        )  # fmt: skip
