"""DP-SGD, normalised gradients and DirDP-SGD: their laws, the von Mises-Fisher sampler, and training loops behind them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_setting import ROWS, examples
from scipy import stats
from torch import Tensor
from training_setting import RECIPE, fine_tuning

from rasura.core.interfaces import InputError
from rasura.core.rng import gamma, generator, normal, secret_generator, uniform
from rasura.core.values import Gradients
from rasura.defenses import directional as directional_module
from rasura.defenses.directional import directional
from rasura.defenses.dp_ftrl import dp_ftrl
from rasura.defenses.dp_sgd import dp_sgd, normalised_gaussian
from rasura.defenses.von_mises_fisher import one_minus_cosine, summed, summed_by_draws, unit
from rasura.registry import parse_defense
from rasura.testing.tiny import VOCABULARY, batch_for, tiny
from rasura.victims.batching import drawn
from rasura.victims.step import step


def flat(gradients: Gradients) -> Tensor:
    return torch.cat([g.reshape(-1) for g in gradients.values()])


def released(defense: str | Any, rows: Tensor, seed: int = 0, expected: float | None = None) -> Tensor:
    part = parse_defense(defense)[0] if isinstance(defense, str) else defense
    return flat(part.apply(examples(rows, expected), None, generator(seed))[0])


# --- randomness


def test_draws_have_their_distribution_whether_seeded_or_secret() -> None:
    for rng in (generator(0), secret_generator()):
        assert stats.kstest(normal((20_000,), rng).numpy(), "norm").pvalue > 1e-4
        found = uniform((20_000,), rng)
        assert stats.kstest(found.numpy(), "uniform").pvalue > 1e-4 and float(found.min()) > 0 and float(found.max()) < 1
        for shape in (0.5, 1.0, 7.0, 3e5):
            draws = gamma(torch.full((5000,), shape, dtype=torch.float64), rng)
            assert stats.kstest(draws.numpy(), "gamma", (shape,)).pvalue > 1e-4
    assert not torch.equal(normal((9,), secret_generator()), normal((9,), secret_generator()))
    assert torch.equal(normal((9,), generator(1)), normal((9,), generator(1)))


# --- DP-SGD


@pytest.mark.parametrize("defense", ["dp-sgd:1e-15/clip=1e3", "dp-sgd:1e-15/clip=1e4/noise=laplace"])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_no_clipping_and_no_noise_is_the_mean_gradient(family: str, defense: str) -> None:
    model, batch = tiny(family, "classification").double(), batch_for("classification", 4)
    told: Any = {"task": "classification", "vocabulary": VOCABULARY}
    plain = step(model, batch, rng=generator(0), **told)
    private = step(model, batch, parse_defense(defense), rng=generator(0), **told)
    assert private.loss == pytest.approx(plain.loss, rel=1e-9)
    for name, gradient in plain.message.gradients.items():
        assert torch.allclose(private.message.gradients[name], gradient, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("clip", [0.5, 5.0])
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_one_text_moves_the_sum_by_the_clip_at_most(noise: str, clip: float) -> None:
    order = 2 if noise == "gaussian" else 1
    for k in range(len(ROWS)):
        without = torch.cat([ROWS[:k], ROWS[k + 1 :]])
        both = [released(dp_sgd(1.0, clip, noise), r, expected=4.0) for r in (ROWS, without)]
        moved = 4 * (both[0] - both[1]).norm(p=order)
        assert float(moved) == pytest.approx(min(clip, float(ROWS[k].norm(p=order))), rel=1e-9)
    for k in range(len(ROWS)):
        without = torch.cat([ROWS[:k], ROWS[k + 1 :]])
        both = [released(normalised_gaussian(1.0), r, expected=4.0) for r in (ROWS, without)]
        assert float(4 * (both[0] - both[1]).norm()) == pytest.approx(1.0, rel=1e-9)


def test_noise_has_the_stated_width_over_the_expected_size() -> None:
    nothing = torch.zeros((8, 40_000), dtype=torch.float64)
    for defense, law in (
        ("dp-sgd:2.0/clip=0.5", stats.norm(scale=1 / 8)),
        ("dp-sgd:2.0/clip=0.5/noise=laplace", stats.laplace(scale=1 / 8)),
        ("normalised:1.0", stats.norm(scale=1 / 8)),
    ):
        assert stats.kstest(released(defense, nothing).numpy(), law.cdf).pvalue > 1e-3
        assert torch.equal(released(defense, nothing), released(defense, nothing, expected=8.0))
        # No text came: the same noise as ever, over the size that was expected.
        assert torch.allclose(released(defense, nothing[:0], expected=8.0), released(defense, nothing))


def test_a_seed_repeats_the_noise_and_a_secret_generator_does_not() -> None:
    for defense in ("dp-sgd:1.0", "normalised:1.0", "directional:10", "directional:10/blocks=parameters"):
        assert torch.equal(released(defense, ROWS, 1), released(defense, ROWS, 1))
        assert not torch.equal(released(defense, ROWS, 1), released(defense, ROWS, 2))
        part = parse_defense(defense)[0]
        one, other = (flat(part.apply(examples(ROWS), None, secret_generator())[0]) for _ in range(2))
        assert not torch.equal(one, other) and bool(torch.isfinite(one).all())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp-sgd:0", "sigma is 0.0; expected a finite number above 0"),
        ("dp-sgd:-1", "sigma is -1.0"),
        ("dp-sgd:inf", "sigma is inf"),
        ("dp-sgd:1/clip=0", "clip is 0.0"),
        ("dp-sgd:1/noise=cauchy", "gaussian or laplace"),
        ("dp-sgd:1/kappa=2", "no option 'kappa'"),
        ("dp-sgd", "sigma is ''; expected a value like 1.0"),
        ("normalised:nan", "sigma is nan"),
        ("directional:-2", "kappa is -2.0"),
        ("directional:1e3/blocks=layers", "whole or parameters"),
        ("dp-sgd:1+directional:1e3", "both aggregate"),
    ],
)
def test_bad_settings_are_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse_defense(text)


# --- the von Mises-Fisher distribution


@pytest.mark.parametrize("dimension", [4, 100, 10_000, 1_000_000])
@pytest.mark.parametrize("kappa", [1.0, 1e3, 1e6, 1e9])
def test_cosines_have_their_density(dimension: int, kappa: float) -> None:
    t = one_minus_cosine(kappa, dimension, 2000, generator(5, dimension, int(kappa))).numpy()
    spread = t.max() - t.min()
    grid = np.linspace(max(0.0, t.min() - spread), min(2.0, t.max() + spread), 200_001)[1:-1]
    log_density = -kappa * grid + (dimension - 3) / 2 * (np.log(grid) + np.log(2 - grid))
    mass = np.cumsum(np.exp(log_density - log_density.max()))
    assert stats.kstest(t, lambda x: np.interp(x, grid, mass / mass[-1])).pvalue > 1e-3


def test_a_circle_and_a_line() -> None:
    t = one_minus_cosine(2.0, 2, 4000, generator(0)).numpy()
    angles = np.arccos(1 - t)
    assert stats.kstest(angles, lambda a: 2 * (stats.vonmises(2.0).cdf(a) - 0.5)).pvalue > 1e-3
    kept = (one_minus_cosine(0.5, 1, 20_000, generator(1)) == 0).double().mean()
    assert float(kept) == pytest.approx(1 / (1 + math.exp(-1.0)), abs=0.015)


def test_a_draw_lies_on_the_sphere_around_its_mean() -> None:
    for dimension, dtype in ((2, torch.float64), (50, torch.float64), (592_130, torch.float32)):
        mu = unit(torch.randn(dimension, generator=generator(2), dtype=dtype), generator(0))
        x = summed_by_draws([mu], 3.0 * dimension, generator(4))
        assert x is not None and float(x.norm()) == pytest.approx(1.0, abs=1e-5)
        cosine = 1 - float(one_minus_cosine(3.0 * dimension, dimension, 1, generator(4)))
        assert float(torch.dot(x, mu)) == pytest.approx(cosine, abs=1e-4)


@pytest.mark.slow
def test_the_sum_in_one_draw_has_the_law_of_the_sum_of_draws() -> None:
    """Near directions, one that stands twice, and two opposite ones; five statistics of the sum."""
    rng = generator(7)
    rows = torch.randn((6, 20), generator=rng, dtype=torch.float64)
    rows[1] = rows[0] + 0.3 * rows[1]
    rows[3], rows[4] = rows[2], -rows[5]
    rows = rows / rows.norm(dim=1, keepdim=True)
    probe = torch.randn(20, generator=rng, dtype=torch.float64)

    def statistics(draw: Any) -> np.ndarray[Any, Any]:
        found = torch.stack([draw() for _ in range(600)])
        told = [found @ rows[0], found @ rows[2], found @ probe, found.square().sum(1), found[:, 7].abs()]
        return torch.stack(told).numpy()

    one = statistics(lambda: summed(rows, 15.0, rng))
    each = statistics(lambda: summed_by_draws(rows, 15.0, rng))
    for a, b in zip(one, each):
        assert stats.ks_2samp(a, b).pvalue > 1e-3


def test_the_sum_is_right_at_both_ends_of_kappa() -> None:
    rows = torch.randn((40, 300), generator=generator(1), dtype=torch.float64)
    rows = rows / rows.norm(dim=1, keepdim=True)
    assert torch.allclose(summed(rows, 1e14, generator(0)), rows.sum(0), atol=1e-4)
    loose = summed(rows, 1e-6, generator(0))
    assert 4 < float(loose.norm()) < 9  # the root of 40: forty directions without any bias


# --- DirDP-SGD


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_without_a_direction_gets_a_uniform_one(bad: float) -> None:
    # Otherwise the release would say that such a text was in the batch.
    draws = torch.stack([unit(torch.tensor([1.0, bad, 2.0]), generator(k)) for k in range(400)])
    assert torch.allclose(draws.norm(dim=1), torch.ones(400), atol=1e-6)
    assert float(draws.mean(0).norm()) < 0.15


def test_much_concentration_is_the_mean_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (ROWS / ROWS.norm(dim=1, keepdim=True)).mean(0)
    parts = [ROWS[:, :2], ROWS[:, 2:]]
    each = [(p / p.norm(dim=1, keepdim=True)).mean(0) * math.sqrt(p.shape[1] / 22) for p in parts]
    for held in (directional_module.HELD, 0):
        monkeypatch.setattr(directional_module, "HELD", held)
        assert torch.allclose(released("directional:1e14", ROWS), whole, atol=1e-5)
        assert torch.allclose(released("directional:1e14/blocks=parameters", ROWS), torch.cat(each), atol=1e-5)


def test_a_gradient_of_zero_gives_nothing_away() -> None:
    rows = torch.cat([torch.zeros((1, 22), dtype=torch.float64), ROWS])
    for defense in ("directional:1e3", "directional:1e3/blocks=parameters", "normalised:1.0", "dp-sgd:1.0"):
        assert bool(torch.isfinite(released(defense, rows)).all())
    alone = [released("directional:1e3", rows[:1], seed) for seed in range(3)]
    assert all(float(x.norm()) == pytest.approx(1.0) for x in alone) and not torch.allclose(alone[0], alone[1])


def test_no_texts_send_no_direction() -> None:
    assert not released("directional:1e3", ROWS[:0]).any()


# --- training


def test_batches_by_chance_have_the_stated_size_and_may_be_empty() -> None:
    parts = [part for seed in range(60) for part in drawn(50, 4, generator(seed))]
    sizes = np.array([len(p) for p in parts])
    assert len(drawn(50, 4, generator(0))) == 13 and (sizes == 0).any()
    assert sizes.mean() == pytest.approx(4, abs=0.25) and sizes.var() == pytest.approx(4 * 46 / 50, rel=0.2)
    assert all(len(set(p)) == len(p) for p in parts)


@pytest.mark.parametrize("defense", ["dp-sgd:0.5", "directional:1e6", "frozen-blocks:2+normalised:0.5"])
def test_training_behind_a_guarantee(defense: str, tmp_path: Path) -> None:
    poisson = "directional" not in defense
    runs = [fine_tuning(tmp_path / str(k), defense, poisson=poisson, secret=k > 0) for k in range(3)]
    weights = []
    for run in runs:
        history = run.run()
        assert history.epoch == RECIPE.epochs and math.isfinite(history.epochs[0]["train_loss"])  # type: ignore[index]
        weights.append(torch.cat([p.detach().reshape(-1) for p in run.model.parameters()]))
        assert bool(torch.isfinite(weights[-1]).all())
    assert not torch.equal(weights[1], weights[2])


def test_directional_is_described_by_plain_figures() -> None:
    assert directional(1e3, "parameters").mechanism.parameters == {"kappa": 1e3, "blocks": "parameters"}


@pytest.mark.parametrize(("sigma", "clip"), [(1e-300, 1.0), (1e-200, 1e-200), (1e-160, 1e-160), (1e300, 1e300), (1.0, 1e39)])
def test_noise_that_float32_cannot_hold_is_refused_when_it_is_asked_for(sigma: float, clip: float) -> None:
    for made in (lambda: dp_sgd(sigma, clip), lambda: dp_sgd(sigma, clip, quantile=0.5), lambda: dp_ftrl(sigma, 2, clip)):
        with pytest.raises(InputError, match=r"times the clip .* as float32 holds it"):
            made()
    with pytest.raises(InputError, match="normalised: sigma"):
        normalised_gaussian(sigma * clip or 1e-300)
    assert dp_sgd(1e-30, 1e-7).mechanism.name == "dp-sgd" and dp_sgd(1e-300, 1e300).mechanism.name == "dp-sgd"


@pytest.mark.parametrize("kappa", ["1e101", "1e308"])
def test_a_concentration_whose_draw_would_never_end_is_refused(kappa: str) -> None:
    with pytest.raises(InputError, match=r"directional: kappa is 1e\+\d+; expected at most 1e\+100"):
        parse_defense(f"directional:{kappa}")
    with pytest.raises(InputError, match="no direction can be drawn at kappa inf"):
        one_minus_cosine(math.inf, 1000, 2, generator(0, "far"))
    assert bool(one_minus_cosine(1e100, 1000, 2, generator(0, "far")).isfinite().all())
