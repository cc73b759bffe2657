"""LAMP with gradients weighed by their signal: exact without noise, and what noise alone gives counts for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from matching_setting import observed_of
from torch import nn

from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.judging import deviation_of
from rasura.attacks.updates.gradient_matching.objective import Distance, clear_squares, soft_cross_entropy
from rasura.attacks.updates.gradient_matching.presets import lamp_weighted
from rasura.core.interfaces import AttackFailed, Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Grant, Observation
from rasura.registry import parse_defense
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.step import step


def seen_behind(defense: str) -> Observation:
    batch = batch_of([[CLS, 40, 41, 42, SEP]], "classification", [1])
    sent = step(
        tiny("bert", "classification"), batch, parse_defense(defense), task="classification", vocabulary=VOCABULARY,
        rng=generator(0, "step"),
    )  # fmt: skip
    return observe(sent, HONEST_SERVER)


def test_weights_by_signal_change_nothing_without_noise() -> None:
    factoriser, observed, e, mask = observed_of([CLS, 40, 41, SEP])
    onehot = nn.functional.one_hot(torch.tensor([[1]]), 3).double().expand(2, -1, -1)
    found = factoriser(e, mask, lambda z: soft_cross_entropy(z, onehot), graph=False)
    assert torch.allclose(Distance(observed, "weighted")(found), Distance(observed, "cosine")(found))


def test_a_gradient_of_noise_alone_is_left_out_and_the_others_count_by_their_signal() -> None:
    factoriser, observed, e, mask = observed_of([CLS, 40, 41, SEP])
    deviation = 0.05 * max(float(g.square().mean().sqrt()) for g in observed.values())
    rng = generator(0)
    noisy = {n: g + deviation * torch.randn(g.shape, generator=rng, dtype=g.dtype) for n, g in observed.items()}
    clear = clear_squares(noisy, {}, deviation)
    assert 0 < len(clear) < len(noisy), "some have less signal than their noise varies by"
    for name, square in clear.items():
        count, true = observed[name].numel(), observed[name].square().sum()
        varies = float((2 * count * deviation**4 + 4 * true * deviation**2).sqrt())
        assert abs(float(square - true)) < 5 * varies
    none = {n: deviation * torch.randn(g.shape, generator=rng, dtype=g.dtype) for n, g in observed.items()}
    assert len(clear_squares(none, {}, deviation)) <= 1, "about one in a thousand of them by chance"
    onehot = nn.functional.one_hot(torch.tensor([[1]]), 3).double().expand(2, -1, -1)
    found = factoriser(e, mask, lambda z: soft_cross_entropy(z, onehot), graph=False)
    right, wrong = Distance(noisy, "weighted", deviation=deviation, free=4 * 16)(found).tolist()
    assert right < 0.5 * wrong
    # Behind a mask what is hidden is neither signal nor noise.
    half = {n: torch.arange(g.numel()).view(g.shape) % 2 == 0 for n, g in noisy.items()}
    for name, square in clear_squares(noisy, half, deviation).items():
        assert torch.isclose(square, (noisy[name] * half[name]).square().sum() - int(half[name].sum()) * deviation**2)


@pytest.mark.parametrize("told", [True, False])
def test_noise_is_as_announced_or_else_as_the_gradients_show_it(told: bool) -> None:
    seen = seen_behind("gaussian:0.01")
    seen = seen if told else replace(seen, granted={**seen.granted, Grant.MECHANISM: ()})
    observed = Factoriser(seen.model, list(seen.gradients)).observed(seen.gradients)
    assert deviation_of(seen, observed) == pytest.approx(0.01, rel=1e-9 if told else 0.2)


def test_noise_that_covers_everything_is_a_failure_in_words() -> None:
    seen = seen_behind("gaussian:100")
    with pytest.raises(AttackFailed, match="noise covers every gradient"):
        lamp_weighted()(seen, rng=generator(0), budget=Budget("quick"))
