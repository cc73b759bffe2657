"""A clip for each layer: whatever a text's gradient is, it moves the sum by at most the whole clip."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from private_setting import DATA, collate
from torch import Tensor
from torch.utils.data import DataLoader

import rasura
from rasura.accounting import Ledger, Run, epsilon
from rasura.core.errors import InputError
from rasura.core.layers import layers_of
from rasura.core.mechanisms import typed
from rasura.core.rng import generator
from rasura.defenses.dp_sgd import described, dp_sgd
from rasura.testing.tiny import tiny
from rasura.victims.per_example import as_one, by_owner, fault
from rasura.victims.step import message_for

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

CLIP = 0.05
QUIET = dp_sgd(1e-12, CLIP, per="layer")


def gradients_of(model: Any, rows: list[int]) -> dict[str, Tensor]:
    model.zero_grad()
    model(**collate([DATA[k] for k in rows])).loss.backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def clipped_by_hand(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Layer by layer, one after the other: the parameters of a module are a layer."""
    modules = {n.rpartition(".")[0] for n in found}
    out: dict[str, Tensor] = {}
    for module in modules:
        own = [n for n in found if n.rpartition(".")[0] == module]
        norm = math.sqrt(sum(float(found[n].double().square().sum()) for n in own))
        out |= {n: found[n].double() * min(1.0, CLIP / math.sqrt(len(modules)) / max(norm, 1e-300)) for n in own}
    return out


@pytest.mark.parametrize("most", [None, 2])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_sum_is_that_of_gradients_clipped_by_hand(family: str, most: int | None) -> None:
    """GPT-2 ties its embeddings to its head: one weight, one layer, two uses."""
    task: Any = "classification" if family == "bert" else "causal"
    model: Any = tiny(family, task)
    batch = collate(DATA[:5]) if task == "classification" else {k: v for k, v in collate(DATA[:5]).items() if k != "labels"}
    if task == "causal":
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    assert fault(model, batch) is None
    message, _, _ = message_for(model, batch, 5, (QUIET,), generator(0), expected=1, most=most)
    total: dict[str, Any] = {}
    for k in range(5):
        model.zero_grad()
        model(**{n: v[k : k + 1] for n, v in batch.items()}).loss.backward()
        one = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        for name, g in clipped_by_hand(one).items():
            total[name] = total.get(name, 0) + g
    assert set(message.gradients) == set(total)
    for name, g in total.items():
        assert torch.allclose(message.gradients[name].double(), g, atol=2e-6), name


def test_persons_are_clipped_by_layer_as_one() -> None:
    model: Any = tiny("bert", "classification", num_labels=2)
    batch = collate([DATA[k] for k in (0, 3, 1)])
    message, _, _ = message_for(model, batch, 3, (QUIET,), generator(0), expected=1, counts=[2, 1])
    first, second = clipped_by_hand(gradients_of(model, [0, 3])), clipped_by_hand(gradients_of(model, [1]))
    for name, g in message.gradients.items():
        assert torch.allclose(g.double(), first[name] + second[name], atol=2e-6), name


def drawn(seed: int, sizes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """A gradient whose layers differ by many orders of magnitude; some are zero."""
    rng = generator(seed)
    scales = 10 ** (12 * torch.rand(len(sizes), generator=rng, dtype=torch.float64) - 6)
    scales[seed % len(sizes)] = 0
    return {n: s * torch.randn(shape, generator=rng, dtype=torch.float64) for (n, shape), s in zip(sizes.items(), scales)}


def test_one_example_more_moves_the_sum_by_at_most_the_clip() -> None:
    """The sensitivity law, for gradients of any size in any layer, and reached where all layers are clipped."""
    sizes = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (5,), "c.0.weight": (2, 2), "d": (1,)}
    reached = 0.0
    for seed in range(300):
        alone = QUIET.apply(as_one(drawn(seed, sizes)), None, generator(0))[0]
        moved = math.sqrt(sum(float(g.square().sum()) for g in alone.values()))
        assert moved <= CLIP * (1 + 1e-9)
        rows = [drawn(seed + k, sizes) for k in range(3)]
        without, there = (
            QUIET.apply(by_owner(_listed(some), [1] * len(some)), None, generator(0))[0] for some in (rows[1:], rows)
        )
        change = math.sqrt(sum(float((3 * there[n] - 2 * without[n]).square().sum()) for n in sizes))
        assert change <= CLIP * (1 + 1e-9)
        reached = max(reached, moved)
    loud = {n: torch.full(shape, 1e6, dtype=torch.float64) for n, shape in sizes.items()}
    whole = QUIET.apply(as_one(loud), None, generator(0))[0]
    assert math.sqrt(sum(float(g.square().sum()) for g in whole.values())) == pytest.approx(CLIP, rel=1e-9)
    assert reached > 0.5 * CLIP


def _listed(rows: list[dict[str, Tensor]]) -> Any:
    return type(as_one(rows[0]))(lambda: rows[0], lambda: iter(rows), len(rows), as_one(rows[0]).weighted)


def test_layers_depend_on_names_alone() -> None:
    assert layers_of(["a.weight", "b.weight", "a.bias", "c"]) == [["a.weight", "a.bias"], ["b.weight"], ["c"]]
    assert layers_of([]) == []


def test_it_is_accounted_as_the_whole_clip() -> None:
    made = described("1.1/clip=0.5/per=layer").mechanism
    assert made.parameters == {"sigma": 1.1, "clip": 0.5, "noise": "gaussian", "per": "layer"} and typed(made) == made
    assert "per" not in described("1.1").mechanism.parameters
    ledger = Ledger([made], Run(100, 10, 2, 1e-3))
    assert ledger.planned.epsilon == pytest.approx(epsilon(1.1, 0.1, 20, 1e-3))
    for text in ("1.0/per=layer/noise=laplace", "1.0/per=layer/quantile=0.5", "1.0/per=head"):
        with pytest.raises(InputError, match="per"):
            described(text)


def test_noise_is_that_of_the_whole_clip() -> None:
    model: Any = tiny("bert", "classification", num_labels=2)
    empty = {k: v[:0] for k, v in collate(DATA[:1]).items()}
    message, _, _ = message_for(model, empty, 0, (dp_sgd(2.0, 0.5, per="layer"),), generator(0), expected=4)
    noise = torch.cat([g.reshape(-1) for g in message.gradients.values()])
    assert float(noise.double().std()) == pytest.approx(2.0 * 0.5 / 4, rel=0.02)


@pytest.mark.slow
def test_a_loop_spends_what_it_says_and_canaries_see_it() -> None:
    model: Any = tiny("bert", "classification", num_labels=2)
    canaries = rasura.GradientCanaries(100)
    loader: Any = DataLoader(DATA, 12, collate_fn=collate)
    model, _, loader, ledger = rasura.protect_training(
        model, None, loader, "dp-sgd:clip=0.1/per=layer", target_epsilon=8.0, epochs=2, canaries=canaries
    )
    for _ in range(2):
        for batch in loader:
            model(**batch).loss.backward()
    assert ledger.releases == canaries.releases == 4 and 7.9 < ledger.epsilon <= 8
    assert not canaries.measure(ledger).refuted
    with pytest.raises(InputError, match="one clip for the length of a whole gradient"):
        rasura.diagnose_training(
            tiny("bert", "classification"), collate(DATA[:4]), "dp-sgd:1.0/per=layer", examples=24, batch_size=4, public=True
        )


def test_a_canary_reaches_the_clip_of_its_layer() -> None:
    shapes = {"a.weight": (40,), "b.weight": (40,), "b.bias": (40,), "c.weight": (40,)}
    canaries = rasura.GradientCanaries(60)
    canaries.included[:] = True
    zeros = {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}
    joined, released = canaries.joined((QUIET,), rasura.accounting.Draw("poisson", 1.0), shapes)
    found = joined[0].apply(as_one(zeros), None, generator(0))[0]
    released()
    entries = torch.cat([g.reshape(-1) for g in found.values()]).abs()
    assert int((entries > 1e-9).sum()) == 60
    assert torch.allclose(
        entries[entries > 1e-9] * 61, torch.full((60,), CLIP / math.sqrt(3), dtype=torch.float64), rtol=1e-6
    )
