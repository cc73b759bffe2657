"""Span behind SGD's weight decay: the decay fills row spaces, and one factor of the weights takes it away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.decay import decay_of, less_decay
from rasura.attacks.updates.span.rows import row_space
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Observation, Transcript
from rasura.registry import parse_update
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.step import step

TEXT = [CLS, 40, 41, 42, 43, 44, SEP]
UPDATE = "local:batch=0/optimizer=sgd/decay=0.05/lr=0.1/clip=1"


def sent(family: str, update: str, task: str) -> Transcript:
    model = tiny(family, task, hidden=64)
    batch = batch_of([TEXT], task, [1])
    return step(model, batch, (), task=task, vocabulary=VOCABULARY, rng=generator(0, "step"), local=parse_update(update)[0])  # type: ignore[arg-type]


def found(seen: Observation) -> tuple[tuple[int, ...], ...]:
    return Span()(seen, rng=generator(0), budget=Budget("quick")).tokens


@pytest.mark.parametrize(("family", "task"), [("bert", "classification"), ("llama", "causal"), ("gpt2", "causal")])
def test_one_step_with_decay_and_a_clip_is_read_and_proven(family: str, task: str) -> None:
    seen = observe(sent(family, UPDATE, task), HONEST_SERVER)
    guess = Span()(seen, rng=generator(0), budget=Budget("quick"))
    assert guess.confidence == "verified" and guess.tokens == (tuple(TEXT),)


def test_a_captured_file_is_read_without_a_statement() -> None:
    seen = observe(sent("llama", UPDATE, "causal"), HONEST_SERVER)
    message = replace(seen.message, gradients={n: -0.003 * g for n, g in seen.gradients.items()}, sign="unknown")
    captured = replace(
        seen, message=message, granted={g: v for g, v in seen.granted.items() if g.name in ("MODEL", "BASE_MODEL")}
    )
    assert found(captured)[0][: len(TEXT) - 1] == tuple(TEXT[:-1])
    assert torch.equal(less_decay(seen).gradients["model.norm.weight"], seen.gradients["model.norm.weight"])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.double)


@pytest.mark.parametrize("outputs", [48, 80])
def test_the_factor_is_found_beside_a_gradient_of_few_directions_and_nowhere_else(outputs: int) -> None:
    weights, few = noise(outputs, 48), noise(outputs, 9, seed=1) @ noise(9, 48, seed=2)
    for size in (1e-4, 1.0, -30.0):
        told = decay_of(few + size * weights, weights)
        assert told is not None and told == pytest.approx(size, rel=1e-6)
    for change in (few, noise(outputs, 48, seed=3), few + noise(outputs, 48, seed=3), torch.zeros(outputs, 48).double()):
        assert decay_of(change, weights) is None


def test_a_real_decoder_shows_the_inputs_that_it_shows_without_decay(shared: Path) -> None:
    victim = load(shared / "models" / "stories260K-hf", "causal")
    name = "model.layers.0.self_attn.q_proj.weight"
    ids = torch.tensor([victim.vocabulary.encode("Once upon a time there was a dog.")])
    weight = victim.model.get_parameter(name)
    (gradient,) = torch.autograd.grad(victim.model(input_ids=ids, labels=ids).loss, [weight])
    old = weight.detach().double()
    ranks = []
    for decay in (0.0, 0.01, 0.1):
        change = (old.float() - 0.01 * (gradient + decay * old.float())).double() - old
        factor = decay_of(change, old)
        assert (factor is None) == (decay == 0.0)
        space = row_space([change - (factor or 0.0) * old])
        ranks.append(None if space is None else space.rank)
    assert ranks == [7, 7, 7]
