"""Whether texts go together is decided from the model: one text cannot change how the gradients of others are computed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.testing.tiny import CLS, SEP, batch_of, tiny
from rasura.victims.per_example import by_owner, fault, in_parts, per_example
from rasura.victims.together import Together
from rasura.victims.trial_texts import same, trial_batches

pytest.importorskip("opacus")
CLIP = 0.01
FAMILIES = (
    "bert", "roberta", "distilbert", "electra", "mpnet", "albert", "modernbert", "deberta-v2", "t5", "gpt2", "llama", "opt",
    "gpt-neox", "bloom", "mpt", "qwen2", "gemma2", "phi", "mixtral",
)  # fmt: skip
GO_TOGETHER = ("bert", "roberta", "distilbert", "gpt2", "llama", "electra", "albert", "modernbert", "gpt-neox", "bloom",
    "mpt", "mistral", "qwen2", "qwen3", "phi", "phi3", "smollm3")  # fmt: skip


class Penalised(nn.Module):
    """A classifier of mean word vectors, padding included, with an L2 term on its head in the loss."""

    def __init__(self, penalty: float, *, half: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.penalty, self.words, self.first, self.head = penalty, nn.Embedding(300, 32), nn.Linear(32, 64), nn.Linear(64, 3)
        if half:
            self.words = self.words.bfloat16().requires_grad_(False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> ModelOutput:
        logits = self.head(torch.tanh(self.first(self.words(input_ids).float())).mean(1))
        loss = nn.functional.cross_entropy(logits, labels) + self.penalty * self.head.weight.square().sum()
        return ModelOutput(loss=loss, logits=logits)


def texts(*lengths: int) -> list[list[int]]:
    rng = generator(len(lengths), "texts")
    return [[CLS, *torch.randint(3, 300, (n,), generator=rng).tolist(), SEP] for n in lengths]


def total(model: nn.Module, rows: list[list[int]], task: str, by_layer: bool = False, most: int = 64) -> Any:
    inputs = batch_of(rows, task, [k % 3 for k in range(len(rows))]).inputs()

    def weigh(norms: Tensor) -> Tensor:
        clip = CLIP / math.sqrt(len(norms)) if by_layer else CLIP
        return (clip / norms.clamp_min(1e-300)).clamp(max=1)

    return in_parts(model, inputs, len(rows), most, mean=dict, told=lambda loss: None).weighted(weigh, by_layer)


def length(entries: Any, less: Any = None) -> float:
    """In clips."""
    parts = (g.double() - (0 if less is None else less[n].double()) for n, g in entries.items())
    return math.sqrt(sum(float(g.square().sum()) for g in parts)) / CLIP


@pytest.mark.parametrize(("penalty", "half"), [(5e-4, False), (1e-2, True), (1e-4, False)])
def test_a_longer_text_does_not_change_the_gradients_of_all_others(penalty: float, half: bool) -> None:
    rows = texts(*[6] * 200, 9)
    without, joined = (total(Penalised(penalty, half=half), some, "classification", most=500) for some in (rows[:-1], rows))
    model = Penalised(penalty, half=half)
    assert length(joined, without) <= 1 + 1e-5
    assert len({fault(model, batch_of(some, "classification").inputs()) for some in (rows[:-1], rows, rows[:1])}) == 1


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_text_more_moves_the_sum_by_a_clip(family: str, by_layer: bool) -> None:
    model = tiny(family, "classification")
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0 if p.dim() > 1 else 1.0)
    for lengths in ((), (6, 6, 6), (3, 9, 5)):
        rows = texts(*lengths, 20)
        less = total(model, rows[:-1], "classification", by_layer) if lengths else None
        assert length(total(model, rows, "classification", by_layer), less) <= 1 + 1e-5, lengths


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_one_text_more_of_next_tokens_with_tied_weights_moves_the_sum_by_a_clip(family: str) -> None:
    model, rows = tiny(family, "causal", tied=True), texts(6, 6, 6, 20)
    for by_layer in (False, True):
        assert length(total(model, rows[-1:], "causal", by_layer)) <= 1 + 1e-5
        less = total(model, rows[:-1], "causal", by_layer)
        assert length(total(model, rows, "causal", by_layer), less) <= 1 + 1e-5


@pytest.mark.parametrize("family", GO_TOGETHER)
def test_common_families_go_together(family: str) -> None:
    assert fault(tiny(family, "classification"), batch_of(texts(6), "classification").inputs()) is None


def test_a_tensor_that_the_rules_do_not_see_is_a_fault_however_small() -> None:
    """DeBERTa's table of relative positions, in a batch of one text."""
    inputs = batch_of(texts(6), "classification").inputs()
    model = tiny("deberta-v2", "classification")
    seen = next(Together(model, inputs, 1).each())
    assert not any("rel_embeddings" in name for name in seen) and fault(model, inputs) is not None
    small = torch.full((3,), 1e-12)
    assert not same(None, small, 1.0) and not same(small, None, 1.0)
    assert same(None, None, 1.0) and same(None, torch.zeros(3), 1.0)
    assert same(small, torch.zeros(3), 1.0), "of rounding alone"
    assert not same(torch.ones(3), 1.0001 * torch.ones(3), 10.0), "for its own size"
    assert not same(torch.full((3,), math.nan), torch.ones(3), 1.0)


def test_the_way_is_found_without_any_value_of_a_batch() -> None:
    model = tiny("bert", "classification")
    made = []
    for lengths in ((4,), (20, 8, 8, 3)):
        inputs = batch_of(texts(*lengths), "classification").inputs()
        made.append(list(trial_batches(model, model, inputs)))
    for (one, size), (other, count) in zip(*made, strict=True):
        assert size == count and set(one) == set(other) and all(torch.equal(one[n], other[n]) for n in one)


def test_a_batch_that_cannot_go_together_is_refused_and_does_not_go_another_way() -> None:
    class Odd(nn.Module):
        """The loss is another where a text is one word, repeated."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(300, 8), nn.Linear(8, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> ModelOutput:
            there = attention_mask[..., None]
            logits = self.head((self.words(input_ids) * there).sum(1) / there.sum(1))
            loss = nn.functional.cross_entropy(logits, labels)
            return ModelOutput(loss=loss + (input_ids == input_ids[:, :1]).all(1).any(), logits=logits)

    model, batch = Odd(), batch_of(texts(6, 6), "classification").inputs()
    odd = {**batch, "input_ids": torch.full_like(batch["input_ids"], 7)}
    for inputs in (batch, odd):
        assert fault(model, inputs) is None
    with pytest.raises(InputError, match=r"those of this batch do not: the model's loss .* is not the mean"):
        per_example(model, odd, 2, mean=dict, told=lambda loss: None).weighted(torch.ones_like)


def test_the_check_changes_neither_the_model_nor_its_half_precision() -> None:
    model = tiny("bert", "classification").bfloat16().train()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    held = [(id(p), p.dtype, p.grad, p.requires_grad) for p in model.parameters()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fault(model, batch_of(texts(6), "classification").inputs()) is None
    assert held == [(id(p), p.dtype, p.grad, p.requires_grad) for p in model.parameters()]
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())


def test_the_texts_of_persons_go_the_same_way() -> None:
    model, rows = tiny("deberta-v2", "classification"), texts(6, 6, 6, 20)

    def clipped(some: list[list[int]]) -> Any:
        inputs = batch_of(some, "classification", [0] * len(some)).inputs()
        each = per_example(model, inputs, len(some), mean=dict, told=lambda loss: None)
        return by_owner(each, [2] * (len(some) // 2)).weighted(lambda norms: (CLIP / norms).clamp(max=1))

    assert length(clipped(rows), clipped(rows[:2])) <= 1 + 1e-5
