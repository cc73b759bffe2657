"""DP-SGD, normalised gradients and noise on a whole gradient, entry by entry against their formulas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from test_dp import examples
from torch import Tensor

from rasura.defenses.dp_sgd import NOISES, dp_sgd, normalised_gaussian
from rasura.defenses.noise import gaussian_noise, laplace_noise, visible_norm
from rasura.interfaces import InputError
from rasura.rng import generator, laplace, normal
from rasura.values import Message, Stage

ROWS = torch.tensor(
    [[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.3, 0.4], [0.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]], dtype=torch.float64
)
"""Norms 5, .5, 0 and 2; sums of absolute values 7, .7, 0 and 2."""

BY_NORM = torch.tensor([0.6 * 2, 0.8 * 2 + 2, 0.3, 0.4], dtype=torch.float64)
"""Their sum, clipped at 2: the last one is just at the clip."""

BY_SUM = torch.tensor([6 / 7, 8 / 7 + 2, 0.3, 0.4], dtype=torch.float64)


def applied(part: Any, rows: Tensor, expected: float | None = None) -> dict[str, Tensor]:
    found, state = part.apply(examples(rows, expected), None, generator(4))
    assert state is None
    return dict(found)


def drawn(shapes: Mapping[str, tuple[int, ...]], noise: str) -> dict[str, Tensor]:
    """The noise of unit width for tensors of these shapes, in their order."""
    rng = generator(4)
    if noise == "gaussian":
        return {n: normal(shape, rng) for n, shape in shapes.items()}
    return {n: laplace(shape, rng) for n, shape in shapes.items()}


@pytest.mark.parametrize("expected", [None, 8.0])
@pytest.mark.parametrize(("noise", "total"), [("gaussian", BY_NORM), ("laplace", BY_SUM)])
def test_dp_sgd_is_the_clipped_sum_with_noise_over_the_size(noise: str, total: Tensor, expected: float | None) -> None:
    found = applied(dp_sgd(1.5, 2.0, noise), ROWS, expected)
    unit = drawn({"a": (2,), "b": (2, 1)}, noise)
    for name, clear in (("a", total[:2]), ("b", total[2:].reshape(2, 1))):
        wanted = (clear + 3.0 * unit[name]) / (expected or 4.0)
        assert torch.allclose(found[name], wanted, rtol=1e-14, atol=0), name
    assert found["a"].dtype == torch.float64 and list(found) == ["a", "b"]


def test_normalised_gradients_have_norm_one_each_and_noise() -> None:
    found = applied(normalised_gaussian(0.5), ROWS)
    unit = drawn({"a": (2,), "b": (2, 1)}, "gaussian")
    assert torch.allclose(
        found["a"], (torch.tensor([0.6, 0.8 + 1], dtype=torch.float64) + 0.5 * unit["a"]) / 4, rtol=1e-14, atol=0
    )
    assert torch.allclose(
        found["b"], (torch.tensor([[0.6], [0.8]], dtype=torch.float64) + 0.5 * unit["b"]) / 4, rtol=1e-14, atol=0
    )


@pytest.mark.parametrize("noise", NOISES)
def test_no_text_gives_noise_of_the_same_width(noise: str) -> None:
    found = applied(dp_sgd(1.5, 2.0, noise), ROWS[:0], 8.0)
    unit = drawn({"a": (2,), "b": (2, 1)}, noise)
    assert torch.allclose(found["a"], 3.0 * unit["a"] / 8, rtol=1e-14)


def test_noise_is_added_before_the_sum_is_rounded_to_half_precision() -> None:
    part = dp_sgd(1.5, 2.0)
    half = {"a": BY_NORM[:2].bfloat16()}
    rng = generator(4)
    from rasura.defenses.dp_sgd import _released

    found = _released(half, examples(ROWS), 3.0, "gaussian", rng)["a"]
    wanted = ((half["a"].double() + 3.0 * normal((2,), generator(4))) / 4).bfloat16()
    assert found.dtype == torch.bfloat16 and torch.equal(found, wanted) and part.stage is Stage.AGGREGATE


def test_what_they_say_of_themselves() -> None:
    assert dp_sgd(1.5, 2.0, "laplace").mechanism.parameters == {"sigma": 1.5, "clip": 2.0, "noise": "laplace"}
    assert dp_sgd(1).mechanism.parameters == {"sigma": 1.0, "clip": 1.0, "noise": "gaussian"}
    assert normalised_gaussian(0.5).mechanism.parameters == {"sigma": 0.5, "clip": 1.0, "noise": "gaussian"}
    names = [p.mechanism.name for p in (dp_sgd(1), normalised_gaussian(1))]
    assert names == ["dp-sgd", "normalised"] and normalised_gaussian(1).stage is Stage.AGGREGATE
    assert gaussian_noise(0.1, 2.0).mechanism.parameters == {"sigma": 0.1, "clip": 2.0}
    assert laplace_noise(0.1).mechanism.parameters == {"scale": 0.1, "clip": 1.0}
    assert gaussian_noise(0.1).stage is Stage.WIRE and laplace_noise(0.1).mechanism.name == "laplace"


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf, True, "1", None])
def test_figures_that_cannot_be_are_refused(bad: Any) -> None:
    for make in (lambda: dp_sgd(bad), lambda: dp_sgd(1.0, bad), lambda: normalised_gaussian(bad)):
        with pytest.raises(InputError, match="expected a finite number above 0"):
            make()
    with pytest.raises(InputError, match="gaussian or laplace"):
        dp_sgd(1.0, 1.0, "uniform")
    if bad == 0.0 and bad is not False:
        assert gaussian_noise(bad).mechanism.parameters["sigma"] == 0.0
    else:
        with pytest.raises(InputError, match="sigma"):
            gaussian_noise(bad)
    if bad == math.inf:
        assert gaussian_noise(0.0, bad).mechanism.parameters["clip"] == math.inf
    else:
        with pytest.raises(InputError, match="clip"):
            laplace_noise(0.1, bad)


def sent() -> Message:
    """Norm 5; of "b" one entry is not visible."""
    return Message({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0, 0.0])}, {"b": torch.tensor([True, False])})


@pytest.mark.parametrize(("clip", "factor"), [(2.5, 0.5), (5.0, 1.0), (5.1, 1.0), (math.inf, 1.0)])
def test_the_whole_gradient_is_clipped_and_hidden_entries_stay_so(clip: float, factor: float) -> None:
    assert visible_norm(sent()) == 5.0
    clear, _ = gaussian_noise(0.0, clip).apply(sent(), None, generator(1))
    assert torch.equal(clear.gradients["a"], torch.tensor([3.0 * factor, 0.0]))
    noisy, state = gaussian_noise(0.25, clip).apply(sent(), None, generator(1))
    other, _ = laplace_noise(0.25, clip).apply(sent(), None, generator(1))
    half, _ = gaussian_noise(0.125, clip).apply(sent(), None, generator(1))
    assert state is None
    for message in (noisy, other):
        assert float(message.gradients["b"][1]) == 0.0 and torch.equal(message.visible["b"], sent().visible["b"])
        assert all(bool((message.gradients[n][:1] != clear.gradients[n][:1]).all()) for n in ("a", "b"))
    for n in ("a", "b"):
        assert torch.allclose(
            noisy.gradients[n] - clear.gradients[n], 2 * (half.gradients[n] - clear.gradients[n]), atol=1e-6
        )


def test_the_width_of_noise_on_a_whole_gradient() -> None:
    nothing = Message({"a": torch.zeros(40_000)})
    gaussian, _ = gaussian_noise(0.5).apply(nothing, None, generator(1))
    other, _ = laplace_noise(0.5).apply(nothing, None, generator(1))
    assert float(gaussian.gradients["a"].std()) == pytest.approx(0.5, rel=0.02)
    assert float(other.gradients["a"].std()) == pytest.approx(0.5 * math.sqrt(2), rel=0.03)
    assert float(other.gradients["a"].abs().mean()) == pytest.approx(0.5, rel=0.03)
    for found in (gaussian, other):
        assert abs(float(found.gradients["a"].mean())) < 0.015
