"""Sums of clipped and of normalised gradients: one text more moves them by at most a clip, in half precision as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rasura.core.exact import CACHED, exact, norm
from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.core.values import PerExample
from rasura.defenses.dp_ftrl import dp_ftrl
from rasura.defenses.dp_sgd import dp_sgd, normalised_gaussian
from rasura.defenses.von_mises_fisher import unit
from rasura.testing.tiny import VOCABULARY, batch_for, tiny
from rasura.victims.per_example import as_one, by_owner, per_example
from rasura.victims.step import message_for, step

pytest.importorskip("opacus")
TEXTS = 384
HALVES = ["autocast", "weights", "loop"]


class Custom(nn.Module):
    """A layer of one weight a feature, for which there is no rule of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Net(nn.Module):
    """Features through layers of several kinds into two classes. ``flat``: a weight is used outside its layer."""

    def __init__(self, width: int = 24, *, flat: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scaled, self.first, self.normed, self.head = (
            Custom(width), nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, 2),
        )  # fmt: skip
        self.flat = flat

    def forward(self, features: Tensor, labels: Tensor) -> ModelOutput:
        hidden = self.normed(torch.tanh(self.first(self.scaled(features.to(self.head.weight.dtype)))))
        hidden = hidden @ self.first.weight if self.flat else hidden
        logits = self.head(hidden)
        return ModelOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def of(count: int, how: str, *, tokens: bool = False) -> PerExample:
    """``count`` like texts in bfloat16: by autocast, or in the weights, or through the loop over single texts."""
    noise = torch.randn((TEXTS + 1, 24), generator=generator(1))
    features = (torch.ones(24) + 0.3 * noise)[:count]
    model = Net(flat=how == "loop")
    model = model if how == "autocast" else model.to(torch.bfloat16)
    inputs = {"features": features, "labels": torch.ones(count, dtype=torch.long)}
    return per_example(model, inputs, count, mean=dict, told=lambda loss: None)


def running(how: str) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16) if how == "autocast" else nullcontext()


def clipped(norms: Tensor) -> Tensor:
    return (0.1 / norms.clamp_min(1e-300)).clamp(max=1)


def moved(total: Callable[[int], Any]) -> float:
    """How far one text more moves the sum."""
    without, joined = total(TEXTS), total(TEXTS + 1)
    assert {g.dtype for g in joined.values()} == {torch.float32}
    return math.sqrt(sum(float((joined[n].double() - without[n].double()).square().sum()) for n in joined))


@pytest.mark.slow
@pytest.mark.parametrize("how", HALVES)
def test_one_text_more_moves_the_sum_by_a_clip_at_most(how: str) -> None:
    with running(how):
        assert moved(lambda count: of(count, how).weighted(clipped)) <= 0.1 * 1.001
        assert moved(lambda count: by_owner(of(count, how), [1] * count).weighted(clipped)) <= 0.1 * 1.001


@pytest.mark.parametrize("how", HALVES)
def test_a_text_is_clipped_to_the_clip_in_all_and_in_each_layer(how: str) -> None:
    with running(how):
        for features in torch.randn((4, 24), generator=generator(2)):
            model = Net(flat=how == "loop")
            model = model if how == "autocast" else model.to(torch.bfloat16)
            inputs = {"features": features[None], "labels": torch.ones(1, dtype=torch.long)}
            examples = per_example(model, inputs, 1, mean=dict, told=lambda loss: None)
            found = examples.weighted(clipped)
            assert math.sqrt(sum(float(g.double().square().sum()) for g in found.values())) <= 0.1 * (1 + 1e-5)
            layers = examples.weighted(clipped, True)
            for name in ("scaled", "first", "normed", "head"):
                own = sum(float(g.double().square().sum()) for n, g in layers.items() if n.startswith(name))
                assert math.sqrt(own) <= 0.1 * (1 + 1e-5), name


@pytest.mark.parametrize("defense", [dp_sgd(1.0), dp_ftrl(1.0, 1), dp_sgd(1.0, noise="laplace"), normalised_gaussian(1.0)])
def test_a_step_in_half_precision_is_rounded_after_the_noise(defense: Any) -> None:
    model = tiny("bert", "classification").bfloat16()
    known: Any = {"task": "classification", "vocabulary": VOCABULARY}
    found = step(model, batch_for("classification", 4), (defense,), rng=generator(0), expected=4, **known).message
    assert {g.dtype for g in found.gradients.values()} == {torch.bfloat16}
    batch = batch_for("classification", 4).inputs()
    types: list[torch.dtype] = []

    def apply(examples: PerExample, state: Any, rng: Any) -> Any:
        total, after = defense.apply(examples, state, rng)
        types.extend(g.dtype for g in total.values())
        return total, after

    from dataclasses import replace

    message_for(model, batch, 4, (replace(defense, apply=apply),), generator(0))
    assert set(types) == {torch.float32}


@pytest.mark.parametrize("defense", [dp_sgd(1.0), dp_ftrl(1.0, 1), dp_sgd(1.0, quantile=0.5), normalised_gaussian(1.0)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_in_half_precision_is_not_released(defense: Any, dtype: torch.dtype) -> None:
    total = {"w": torch.ones(3, dtype=dtype)}

    def weighted(weigh: Any, by_layer: bool = False) -> Any:
        weigh(torch.ones(1, dtype=torch.float64))
        return total

    examples = PerExample(lambda: total, lambda: iter([total]), 1, weighted)
    state = 1.0 if "quantile" in defense.mechanism.parameters else None
    with pytest.raises(InputError, match=r"gradients of w is in b?float16.*expected float32 or float64"):
        defense.apply(examples, state, generator(0))


def test_the_update_of_a_client_in_half_precision_is_clipped_as_it_is() -> None:
    update = {"w": torch.randn(4000, generator=generator(3)).bfloat16()}
    found = as_one(update).weighted(clipped)["w"]
    assert found.dtype == torch.float32 and float(found.double().norm()) == pytest.approx(0.1, rel=1e-5)


def test_products_are_exact_whatever_the_process_says() -> None:
    before = torch.get_float32_matmul_precision()
    backend: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  (torch does not declare it)
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with exact("cpu"):
                assert not torch.is_autocast_enabled("cpu") and getattr(backend, "fp32_precision", "ieee") == "ieee"
            assert torch.is_autocast_enabled("cpu") and torch.get_float32_matmul_precision() == "medium"
            # The sum over many texts is that of their gradients, in all digits of float32.
            examples = of(TEXTS, "autocast")
            found = examples.weighted(torch.ones_like)
        each = list(examples.each())
    finally:
        torch.set_float32_matmul_precision(before)
    for n, g in found.items():
        wanted = torch.stack([one[n].double() for one in each]).sum(0)
        assert float((g.double() - wanted).norm()) <= 1e-5 * float(wanted.norm()), n


# --- gradients that are nearly zero


def contribution(model: nn.Module, inputs: Any) -> float:
    """The norm of what one text adds to the sum of ``normalised``, before the noise."""
    found: list[Any] = []
    examples = per_example(model, inputs, 1, mean=dict, told=lambda loss: None)

    def weighted(weigh: Any, by_layer: bool = False) -> Any:
        found.append(examples.weighted(weigh, by_layer))
        return found[0]

    normalised_gaussian(1.0).apply(PerExample(dict, examples.each, 1, weighted), None, generator(0))
    return math.sqrt(sum(float(g.double().square().sum()) for g in found[0].values()))


@pytest.mark.parametrize("margin", [0, 30, 46, 50, 54, 60, 68])
def test_a_text_that_the_model_is_certain_of_adds_norm_one(margin: int) -> None:
    model, batch = tiny("bert", "classification", num_labels=2), batch_for("classification", 1).inputs()
    bias: Any = model.classifier.bias  # type: ignore[union-attr]
    with torch.no_grad():
        bias[int(batch["labels"][0])] += margin
    assert contribution(model, batch) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("margin", [72, 80, 90, 100, 103, 120])
def test_a_gradient_too_small_to_be_scaled_adds_at_most_norm_one(margin: int) -> None:
    model, batch = tiny("bert", "classification", num_labels=2), batch_for("classification", 1).inputs()
    bias: Any = model.classifier.bias  # type: ignore[union-attr]
    with torch.no_grad():
        bias[int(batch["labels"][0])] += margin
    assert contribution(model, batch) <= 1.0001


def test_positions_that_cancel_each_other_do_not_lose_the_norm() -> None:
    # The gradient of the weight is what is left of a sum of products that are ten thousand times as large.
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.head = nn.Linear(64, 64, bias=False), nn.Linear(64, 2).requires_grad_(False)

        def forward(self, features: Tensor, labels: Tensor) -> ModelOutput:
            hidden = self.first(features)
            logits = self.head(hidden[:, 0] - hidden[:, 1])
            return ModelOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)

    first = torch.randn((1, 1, 64), generator=generator(5))
    moved = first + 1e-4 * torch.randn((1, 1, 64), generator=generator(6))
    inputs = {"features": torch.cat([first, moved], 1), "labels": torch.ones(1, dtype=torch.long)}
    assert contribution(Sum(), inputs) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("numbers", [[1.4e-45] * 2, [1.4e-45] * 6, [2.8e-45, 1.4e-45, 1.4e-45], [1e-42] * 10, [3e38] * 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_direction_has_norm_one_whatever_the_gradient(numbers: list[float], dtype: torch.dtype) -> None:
    vector = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    vector = vector * 1e-150 * 1e-150 if dtype == torch.float64 and numbers[0] > 1 else vector
    found = unit(vector, generator(0))
    assert found.dtype == dtype and float(found.double().norm()) == pytest.approx(1, abs=1e-6)
    assert torch.allclose(found, vector / vector.max() / (vector / vector.max()).norm(), atol=1e-6), "and its direction"
    tiny_one = unit(torch.tensor([1e-320, 0.0], dtype=torch.float64), generator(0))
    assert tiny_one.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (CACHED - 1,), (CACHED,), (2 * CACHED + 3,), (2, CACHED), (301, 700)])
def test_a_norm_in_pieces_is_that_of_all_entries(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = torch.randn(shape, generator=generator(0), dtype=torch.float64).to(dtype)
    for tensor in (whole, whole.mT if whole.ndim > 1 else whole[..., None].expand(*shape, 2)):
        expected = tensor.double().square().sum().sqrt()
        assert float(norm([tensor])) == pytest.approx(float(expected), rel=1e-13)
        assert float(norm([tensor, 3 * tensor.double()])) == pytest.approx(math.sqrt(10) * float(expected), rel=1e-13)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_keeps_what_is_not_finite(value: float) -> None:
    tensor = torch.zeros(CACHED + 2)
    tensor[-1] = value
    assert not math.isfinite(float(norm([tensor])))
    assert float(norm([torch.full((CACHED + 2,), 1e-30)])) == pytest.approx(1e-30 * math.sqrt(CACHED + 2))
