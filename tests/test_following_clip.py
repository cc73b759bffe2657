"""A clip that follows a quantile of the norms: its privacy cost, its noise, and where it goes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from private_setting import DATA, collate
from torch import Tensor
from torch.utils.data import DataLoader

import rasura
from rasura.core.errors import InputError
from rasura.core.following import of_count, of_sum
from rasura.core.mechanisms import DpSgd, mechanism
from rasura.core.rng import generator
from rasura.core.values import PerExample
from rasura.defenses.dp_sgd import described, dp_sgd
from rasura.registry import parse_defense
from rasura.testing.tiny import tiny


def batch(norms: list[float], width: int = 50, expected: float | None = None) -> PerExample:
    """Gradients of these norms, all along the first entry."""
    rows = [{"w": torch.nn.functional.pad(torch.tensor([norm]), (0, width - 1))} for norm in norms]

    def weighted(weigh: Any, by_layer: bool = False) -> dict[str, Tensor]:
        weights = weigh(torch.tensor(norms, dtype=torch.float64))
        return {"w": sum((float(v) * r["w"] for v, r in zip(weights, rows)), torch.zeros(width))}

    return PerExample(lambda: rows[0], lambda: iter(rows), len(rows), weighted, expected)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0])
@pytest.mark.parametrize("texts", [1, 30, 4000])
def test_both_releases_cost_what_one_costs(sigma: float, texts: float) -> None:
    """One Gaussian release of the vector (sum over its noise, centred count over its noise): the norm that a text adds."""
    longest = math.hypot(1 / of_sum(sigma, texts), 0.5 / of_count(sigma, texts))
    assert longest == pytest.approx(1 / sigma, rel=1e-12) and of_sum(sigma, texts) <= 1.033 * sigma


def test_a_step_is_that_of_the_algorithm() -> None:
    part = dp_sgd(1e-9, 2.0, quantile=0.4)
    state = part.init(None)
    assert state == 2.0
    norms = [0.5, 1.0, 3.0, 40.0, 2.0]
    wide = of_count(1e-9, 5)
    found = [part.apply(batch(norms), state, generator(seed)) for seed in range(400)]
    assert float(found[0][0]["w"][0]) == pytest.approx((0.5 + 1 + 2 + 2 + 2) / 5)
    # Three of five are below: the clip shrinks by the rate times .6 less .4, and by the noise.
    logs = torch.tensor([math.log(after / 2.0) for _, after in found])
    assert float(logs.mean()) == pytest.approx(-0.2 * (0.6 - 0.4), abs=5 * 0.2 * wide / 5 / 20)
    assert float(logs.std()) == pytest.approx(0.2 * wide / 5, rel=0.15)


def test_the_noise_on_the_sum_is_larger_by_what_the_count_costs() -> None:
    part = dp_sgd(3.0, 0.5, quantile=0.5)
    gradients, _ = part.apply(batch([0.1], 40_000), 0.5, generator(0))
    assert float(gradients["w"].std()) == pytest.approx(of_sum(3.0, 1) * 0.5, rel=0.02)
    assert part.mechanism.noise_per_entry(1) == pytest.approx(of_sum(3.0, 1) * 0.5)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_clip_goes_to_the_quantile_from_both_sides() -> None:
    rng = generator(0)
    for start in (0.01, 100.0):
        part, clip = dp_sgd(0.5, start, quantile=0.7), start
        for _ in range(150):
            norms = torch.exp(torch.randn(500, generator=rng)).tolist()
            _, clip = part.apply(batch(norms, 2, expected=500), clip, rng)
        assert clip == pytest.approx(math.exp(0.524), rel=0.15)  # the .7 quantile of a log-normal


def test_an_empty_batch_has_noise_as_well() -> None:
    found, clip = dp_sgd(1.0, 2.0, quantile=0.5).apply(batch([], expected=10), 2.0, generator(0))
    assert float(found["w"].std()) == pytest.approx(0.2, rel=0.4) and clip != 2.0


def test_what_it_is_called() -> None:
    (part,) = parse_defense("dp-sgd:2.0/clip=0.1/quantile=0.5")
    assert part.mechanism == DpSgd(2.0, 0.1, quantile=0.5) == mechanism("dp-sgd", part.mechanism.parameters)
    assert "quantile" not in described("2.0").mechanism.parameters
    for wrong in ("2.0/quantile=0", "2.0/quantile=1", "2.0/quantile=nan", "2.0/quantile=0.5/noise=laplace"):
        with pytest.raises(InputError):
            described(wrong)


@pytest.mark.slow
def test_a_training_keeps_its_clip_and_counts_as_before() -> None:
    pytest.importorskip("dp_accounting")
    pytest.importorskip("opacus")
    model: Any = tiny("bert", "classification", num_labels=2)
    loader = DataLoader(DATA, 12, collate_fn=collate)
    canaries = rasura.GradientCanaries(100)
    _, _, drawn, ledger = rasura.protect_training(
        model, None, loader, "dp-sgd:2.0/clip=1e-6/quantile=0.5", epochs=3, canaries=canaries
    )
    sizes = []
    for _ in range(3):
        for rows in drawn:
            if ledger.releases == 6:
                break
            model.zero_grad()
            loss = model(**rows).loss
            with pytest.raises(InputError, match="had no backward pass"):
                model(**rows)
            loss.backward()
            sizes.append(max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None))
    assert sizes[0] < 1e-4 and sizes[-1] > 1.2 * sizes[0]  # all norms are above the first clip
    plain = rasura.Ledger([DpSgd(2.0)], ledger.run)
    assert ledger.planned.epsilon == plain.planned.epsilon == ledger.epsilon
    bounds = canaries.measure(ledger)
    assert bounds.stated == ledger.epsilon and not bounds.refuted
