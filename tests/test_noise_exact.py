"""DP-SGD, DirDP-SGD, normalised gradients and noise on a whole gradient, entry by entry against their formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from dp_setting import ROWS as LONG
from dp_setting import examples
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.rng import generator, laplace, normal
from rasura.core.values import Message, Stage
from rasura.defenses import directional as directional_module
from rasura.defenses.directional import directional
from rasura.defenses.dp_sgd import NOISES, dp_sgd, normalised_gaussian
from rasura.defenses.noise import gaussian_noise, laplace_noise, visible_norm
from rasura.defenses.von_mises_fisher import summed, summed_by_draws
from rasura.registry import parse_defense
from rasura.testing.tiny import VOCABULARY, batch_for, tiny
from rasura.victims.step import step

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


def test_noise_is_added_in_float64_before_the_sum_is_rounded() -> None:
    found = applied(dp_sgd(1.5, 2.0), ROWS.float())["a"]
    wanted = applied(dp_sgd(1.5, 2.0), ROWS.float().double())["a"]
    assert found.dtype == torch.float32 and torch.allclose(found, wanted.float(), rtol=1e-6)


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


def test_a_clip_below_one_and_gradients_below_one() -> None:
    small = ROWS[1:2]  # norm .5, sum of absolute values .7
    for noise, size in (("gaussian", 0.5), ("laplace", 0.7)):
        found = applied(dp_sgd(1.5, 0.25, noise), small)
        unit = drawn({"a": (2,), "b": (2, 1)}, noise)
        wanted = torch.tensor([[0.3], [0.4]], dtype=torch.float64) * 0.25 / size + 0.375 * unit["b"]
        assert torch.allclose(found["b"], wanted, rtol=1e-14, atol=0)
    message = Message({"a": torch.tensor([0.3, 0.4])})
    clear, _ = gaussian_noise(0.0, 0.25).apply(message, None, generator(1))
    assert torch.allclose(clear.gradients["a"], torch.tensor([0.15, 0.2]), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_noise_on_a_whole_gradient_is_the_one_that_its_seed_draws(dtype: torch.dtype) -> None:
    shapes = {"a": (4, 3), "b": (5,)}
    message = Message({n: torch.full(shape, 0.5, dtype=dtype) for n, shape in shapes.items()})
    for make, draw in (
        (gaussian_noise, lambda shape, rng: normal(shape, rng, torch.float32)),
        (laplace_noise, lambda shape, rng: laplace(shape, rng).float()),
    ):
        found, _ = make(0.5, 100.0).apply(message, None, generator(2))
        rng = generator(2)
        for name, gradient in message.gradients.items():
            wanted = gradient + (draw(shapes[name], rng) * 0.5).to(dtype)
            assert found.gradients[name].dtype == dtype and torch.equal(found.gradients[name], wanted)


def test_no_noise_takes_nothing_from_the_generator() -> None:
    rng = generator(3)
    gaussian_noise(0.0, 1.0).apply(sent(), None, rng)
    assert torch.equal(normal((3,), rng), normal((3,), generator(3)))


@pytest.mark.parametrize("make", [dp_sgd, normalised_gaussian, directional, gaussian_noise, laplace_noise])
def test_they_keep_no_state(make: Any) -> None:
    assert make(1.0).init(None) is None and make(1.0).undo is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: dp_sgd(0), "dp-sgd: sigma is 0; expected a finite number above 0"),
        (lambda: dp_sgd(1, math.inf), "dp-sgd: clip is inf; expected a finite number above 0"),
        (lambda: normalised_gaussian(-1), "normalised: sigma is -1; expected a finite number above 0"),
        (lambda: directional(0.0), "directional: kappa is 0.0; expected a finite number above 0"),
        (lambda: directional(1.0, "layers"), "directional: blocks is 'layers'; expected whole or parameters"),
        (lambda: gaussian_noise(-0.5), "gaussian: sigma is -0.5; expected a number 0 or more"),
        (lambda: gaussian_noise(math.inf), "gaussian: sigma is infinite; expected a finite number"),
        (lambda: laplace_noise(math.nan), "laplace: scale is nan; expected a number 0 or more"),
        (lambda: laplace_noise(1, 0), "laplace: clip is 0; expected a number above 0 (float('inf') for no clipping)"),
        (lambda: gaussian_noise(0, -2), "gaussian: clip is -2; expected a number above 0 (float('inf') for no clipping)"),
        (lambda: parse_defense("dp-sgd:1/clip=x"), "dp-sgd: clip is 'x'; expected a value like 1.0"),
        (
            lambda: parse_defense("dp-sgd:1/clip=1,noise=x"),
            "dp-sgd: clip is '1,noise=x'; expected a value like 1.0; '/' stands between two settings",
        ),
        (lambda: parse_defense("dp-sgd:x"), "dp-sgd: sigma is 'x'; expected a value like 1.0"),
        (
            lambda: parse_defense("dp-sgd:1/kappa=2"),
            "dp-sgd has no option 'kappa'; known: sigma, clip, noise, quantile, per",
        ),
        (lambda: parse_defense("directional:x"), "directional: kappa is 'x'; expected a value like 1000000.0"),
        (lambda: parse_defense("directional:1/clip=2"), "directional has no option 'clip'; known: kappa, blocks"),
    ],
)
def test_a_refusal_names_the_protection_the_figure_and_what_was_expected(make: Any, says: str) -> None:
    with pytest.raises(InputError) as refused:
        make()
    assert str(refused.value) == says


def test_the_usual_clip_is_one_and_a_given_one_is_told() -> None:
    for make in (dp_sgd, gaussian_noise, laplace_noise):
        assert make(0.1).mechanism.parameters["clip"] == 1.0 and make(0.1, 3.0).mechanism.parameters["clip"] == 3.0
    assert directional(2.0).mechanism.parameters == {"kappa": 2.0, "blocks": "whole"}
    assert directional(2.0).stage is Stage.AGGREGATE and directional(2.0).mechanism.name == "directional"


def test_a_float32_gradient_of_zero_stays_zero_where_it_is_normalised() -> None:
    # One over the least norm that is allowed is endless in float32, and endless times zero is no number.
    found = applied(normalised_gaussian(0.5), ROWS[2:3].float())
    unit = drawn({"a": (2,), "b": (2, 1)}, "gaussian")
    assert all(torch.equal(found[n], (0.5 * unit[n]).float()) for n in ("a", "b"))


# --- DirDP-SGD


def around(rows: Tensor, kappa: float, blocks: str, together: bool) -> Tensor:
    """The mean of one draw around each row's direction, in the order of the draws of ``applied``."""
    rng, count, parts = generator(4), len(rows), [rows] if blocks == "whole" else [rows[:, :2], rows[:, 2:]]
    units = [part / part.norm(dim=1, keepdim=True) for part in parts]
    shares = [part.shape[1] / rows.shape[1] for part in parts]
    if together:
        sums = [summed(part, kappa * share, rng) for part, share in zip(units, shares)]
    else:
        sums = [torch.zeros(part.shape[1], dtype=rows.dtype) for part in units]
        for row, k in itertools.product(range(count), range(len(parts))):
            drawn = summed_by_draws(units[k][row : row + 1], kappa * shares[k], rng)
            assert drawn is not None
            sums[k] += drawn
    return torch.cat([part * math.sqrt(share) for part, share in zip(sums, shares)]) / count


def joined(found: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in found.values()])


@pytest.mark.parametrize("blocks", ["whole", "parameters"])
@pytest.mark.parametrize(("held", "together"), [(6 * 22, True), (6 * 22 - 1, False)])
def test_directional_is_the_mean_draw_each_block_at_its_share_of_kappa_and_norm(
    blocks: str, held: int, together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At most as many numbers are held at once; beyond them every text's noise is drawn by itself.
    monkeypatch.setattr(directional_module, "HELD", held)
    found = applied(directional(50.0, blocks), LONG)
    assert torch.allclose(joined(found), around(LONG, 50.0, blocks, together), rtol=1e-9, atol=1e-12)
    assert [tuple(g.shape) for g in found.values()] == [(2,), (2, 10)] and list(found) == ["a", "b"]
    assert {g.dtype for g in found.values()} == {torch.float64}


@pytest.mark.parametrize("held", [2**29, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_directions_of_short_floats_are_drawn_in_float32(
    dtype: torch.dtype, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directional_module, "HELD", held)
    rows = LONG.to(dtype)
    found, wanted = applied(directional(50.0), rows), applied(directional(50.0), rows.float())
    assert all(found[n].dtype == dtype and torch.equal(found[n], wanted[n].to(dtype)) for n in ("a", "b"))


def test_a_model_in_bfloat16_is_trained_behind_directions() -> None:
    model = tiny("bert", "classification", hidden=16).bfloat16()
    told: Any = {"task": "classification", "vocabulary": VOCABULARY}
    sent_by = step(model, batch_for("classification", 2), parse_defense("directional:1e3"), rng=generator(0), **told)
    assert {g.dtype for g in sent_by.message.gradients.values()} == {torch.bfloat16}
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in sent_by.message.gradients.values()))
    assert norm == pytest.approx(math.sqrt(0.5), rel=0.1), "two directions that are almost at random"


def test_no_texts_give_zeros_of_the_same_shapes() -> None:
    found = applied(directional(50.0), LONG[:0])
    assert [tuple(g.shape) for g in found.values()] == [(2,), (2, 10)] and not joined(found).any()
