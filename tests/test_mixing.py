"""What would let a text change the gradients of other texts: padding without a mask, and layers that mix texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.utils import ModelOutput

import rasura
from rasura.core.interfaces import InputError
from rasura.testing.tiny import batch_for, tiny
from rasura.victims.per_example import fault, per_example

pytest.importorskip("opacus")
LENGTHS = (3, 4, 9, 5, 7, 3, 12, 6)


def rows(lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    return [{"input_ids": [1, *range(50 + k, 48 + k + n), 2], "labels": k % 2} for k, n in enumerate(lengths)]


def padded(texts: list[dict[str, Any]], *, mask: bool = False, left: bool = False, labels: int | None = None) -> Any:
    """A batch padded with token 0, to its longest text. ``labels``: of the next tokens, with this number on padding."""
    longest = max(len(t["input_ids"]) for t in texts)

    def filled(of: list[int], fill: int) -> list[int]:
        rest = [fill] * (longest - len(of))
        return rest + of if left else of + rest

    ids = torch.tensor([filled(t["input_ids"], 0) for t in texts])
    out = {"input_ids": ids, "labels": torch.tensor([t["labels"] for t in texts])}
    if labels is not None:
        out["labels"] = torch.tensor([filled(t["input_ids"], labels) for t in texts])
    if mask:
        out["attention_mask"] = torch.tensor([filled([1] * len(t["input_ids"]), 0) for t in texts])
    return out


def trained(model: nn.Module, texts: Any, collate: Callable[[Any], Any], defense: str = "dp-sgd:1.0") -> Any:
    protected = rasura.protect_training(model, None, DataLoader(texts, 4, collate_fn=collate), defense, seed=0)
    for batch in protected.loader:
        protected.model(**batch).loss.backward()
    return protected.ledger


def clipped(norms: Tensor) -> Tensor:
    return (0.1 / norms.clamp_min(1e-300)).clamp(max=1)


def total(model: nn.Module, batch: Any) -> Any:
    return per_example(model, batch, len(batch["labels"]), mean=dict, told=lambda loss: None).weighted(clipped)


def moved(model: nn.Module, less: Any, more: Any) -> float:
    """How many clips one text more moves the sum."""
    one, other = total(model, less), total(model, more)
    return math.sqrt(sum(float((one[n].double() - other[n].double()).square().sum()) for n in one)) / 0.1


# --- padding


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "dp-ftrl:1.0/band=2", "directional:1e3"])
def test_a_padded_batch_without_a_mask_is_refused_before_a_release(defense: str) -> None:
    model = tiny("bert", "classification", num_labels=2)
    with pytest.raises(InputError, match=r"no attention_mask.*pass the tokenizer's attention_mask"):
        trained(model, rows(), padded, defense)
    ledger = trained(tiny("bert", "classification", num_labels=2), rows(), lambda some: padded(some, mask=True), defense)
    assert ledger.releases == 2


def test_padding_with_another_token_than_the_models_own_is_refused_as_well() -> None:
    model = tiny("bert", "classification", num_labels=2)
    model.config.pad_token_id = 7  # type: ignore[union-attr]
    with pytest.raises(InputError, match="no attention_mask"):
        trained(model, rows(), padded)


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "dp-ftrl:1.0/band=2"])
def test_texts_of_one_length_need_no_mask(defense: str) -> None:
    assert trained(tiny("bert", "classification", num_labels=2), rows((5,) * 8), padded, defense).releases == 2
    assert trained(tiny("gpt2", "causal"), rows((5,) * 8), lambda some: padded(some, labels=0), defense).releases == 2


def test_a_padding_token_without_a_mask_is_refused_wherever_texts_are_clipped() -> None:
    model = tiny("bert", "classification", num_labels=2)
    assert model.config.pad_token_id == 0  # type: ignore[union-attr]
    with pytest.raises(InputError, match="no attention_mask"):
        total(model, padded(rows()))


def test_a_loss_on_padding_is_refused() -> None:
    with pytest.raises(InputError, match=r"a loss on padding.*set the labels to -100"):
        trained(tiny("gpt2", "causal"), rows(), lambda some: padded(some, mask=True, labels=3))
    assert trained(tiny("gpt2", "causal"), rows(), lambda some: padded(some, mask=True, labels=-100)).releases == 2


def without_padding(model: nn.Module, less: list[dict[str, Any]], more: list[dict[str, Any]], **how: Any) -> None:
    batches = [padded(some, mask=True, **how) for some in (less, more)]
    assert batches[0]["input_ids"].shape[1] < batches[1]["input_ids"].shape[1], "the longer text pads the others"
    assert moved(model, *batches) <= 1.001


def test_a_model_that_reads_padding_in_spite_of_the_mask_goes_one_by_one_without_it() -> None:
    model = Mixing(lambda m, x: x, masked=False).train()
    batch = padded(rows(), mask=True)
    assert "reads padding" in str(fault(model, batch))
    model.drop.p = 0.0
    without_padding(model, rows((3, 4, 5)), rows((3, 4, 5, 30)))


def test_positions_counted_from_padding_on_the_left_go_one_by_one_without_it() -> None:
    without_padding(tiny("gpt2", "causal"), rows((3, 4, 5)), rows((3, 4, 5, 30)), left=True, labels=-100)


def test_padding_is_tried_before_a_batch_has_any() -> None:
    model = Mixing(lambda m, x: x, masked=False).train()
    even, uneven = padded(rows((5,) * 4), mask=True), padded(rows((3, 4, 5, 9)), mask=True)
    assert "reads padding" in str(fault(model, even)) and fault(model, even) == fault(model, uneven)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3", "roberta"])
def test_the_id_that_a_batch_is_padded_with_changes_no_gradient(family: str, left: bool) -> None:
    """A classifier on a decoder finds the last token by the padding id of its config, whatever the mask says."""
    model, some = tiny(family, "classification", num_labels=2), rows((4, 5, 6) * 10)
    batches = [padded(texts, mask=True, left=left) for texts in (some, [*some, *rows((30,))])]
    own = [total(model, batch) for batch in batches]
    for batch in batches:
        batch["input_ids"] = torch.where(batch["attention_mask"] == 0, 3, batch["input_ids"])
    assert moved(model, *batches) <= 1.001
    for batch, expected in zip(batches, own, strict=True):
        assert all(torch.equal(g, expected[n]) for n, g in total(model, batch).items())


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("length", [4, 12])
def test_target_sequences_are_refused_at_the_first_batch(length: int, wrapped: bool) -> None:
    """Their padding is not that of the texts, also where both have one length."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, **inputs: Tensor) -> Any:
            return self.inner(**inputs)

    config = transformers.T5Config(
        vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model: nn.Module = transformers.T5ForConditionalGeneration(config)
    batch = {**padded(rows((3, 12)), mask=True), "labels": torch.full((2, length), 5)}
    for refused in (batch, {**batch, "labels": torch.zeros(2), "decoder_input_ids": batch["labels"]}):
        with pytest.raises(InputError, match="target sequences for a decoder beside its encoder"):
            total(Wrapped() if wrapped else model, refused)


def test_several_labels_for_a_text_are_no_labels_of_its_tokens() -> None:
    """Also where the longest text has as many tokens as there are classes."""
    config = transformers.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=9,
        problem_type="multi_label_classification",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config).eval()
    batches = [padded(rows(lengths), mask=True) for lengths in ((3, 4, 9), (3, 4, 9, 30))]
    assert batches[0]["input_ids"].shape == (3, 9)
    for batch in batches:
        batch["labels"] = torch.eye(9)[: len(batch["labels"])]
    assert moved(model, *batches) <= 1.001


@pytest.mark.parametrize("left", [False, True])
def test_a_text_without_a_token_is_refused_before_a_release(left: bool) -> None:
    """Attention over a row of padding is uniform over the width of the batch, so the longest text would change it."""
    some: Any = [*rows((4, 5, 6)), {"input_ids": [], "labels": 1}]
    model = tiny("distilbert", "classification", num_labels=2)
    with pytest.raises(InputError, match=r"text 4 of 4 in this batch has no token.*out of the data set"):
        total(model, padded(some, mask=True, left=left))
    protected = rasura.protect_training(
        model, None, DataLoader(some, 4, collate_fn=lambda rows: padded(rows, mask=True, left=left)), "dp-sgd:1.0", seed=0
    )
    (batch,) = protected.loader
    with pytest.raises(InputError, match="has no token"):
        protected.model(**batch)
    assert protected.ledger.releases == 0


def test_a_text_of_padding_ids_behind_padding_is_refused() -> None:
    """No id of it is another one, so a classifier on a decoder reads the first place, which is padding."""
    model, some = tiny("llama", "classification", num_labels=2), [*rows((4, 5)), {"input_ids": [0, 0], "labels": 1}]
    with pytest.raises(InputError, match="text 3 of 3 in this batch has no token"):
        total(model, padded(some, mask=True, left=True))
    batches = [padded(texts, mask=True) for texts in ([some[-1]] * 20, [*[some[-1]] * 20, *rows((30,))])]
    assert moved(model, *batches) <= 1.001, "behind it, padding is left out"


@pytest.mark.parametrize("looked_for", [0, 3])
def test_a_model_that_looks_for_an_id_of_its_own_goes_one_by_one_without_padding(looked_for: int) -> None:
    class Last(nn.Module):
        """A classifier that reads the last token, which it finds by an id that no config names."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.head = nn.Embedding(300, 8), nn.Linear(8, 2)

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> ModelOutput:
            last = ((input_ids != looked_for) * torch.arange(input_ids.shape[1])).argmax(1)
            logits = self.head(self.words(input_ids).cumsum(1)[torch.arange(len(last)), last])
            return ModelOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)

    some = rows((4, 5, 6) * 10)
    batches = [padded(texts, mask=True) for texts in (some, [*some, *rows((30,))])]
    for fill in (0, 3):
        for batch in batches:
            batch["input_ids"] = torch.where(batch["attention_mask"] == 0, fill, batch["input_ids"])
        model = Last()
        assert "reads padding" in str(fault(model, batches[0]))
        assert moved(model, *batches) <= 1.001


# --- mixing


class Mixing(nn.Module):
    """A classifier of mean word vectors, between which ``mix`` comes. ``masked``: padding is left out of the mean."""

    def __init__(self, mix: Callable[[Any, Tensor], Tensor], *, masked: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.masked, self.words = mix, masked, nn.Embedding(300, 8)
        self.first, self.drop, self.head = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2)
        self.words.weight.requires_grad_(False)[49] = 1e3  # a rare word

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> ModelOutput:
        there = attention_mask[..., None] if self.masked else torch.ones_like(attention_mask)[..., None]
        hidden = self.mix(self, (self.words(input_ids) * there).sum(1) / there.sum(1))
        logits = self.head(self.drop(torch.tanh(self.first(hidden))))
        return ModelOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def later(m: Any, x: Tensor) -> Tensor:
    return torch.cat([x[:1], x[1:] + x[:1]])


def last(m: Any, x: Tensor) -> Tensor:
    return torch.cat([x[:-1], x[-1:] + x[:1]]) if len(x) > 2 else x


def centred_in_training(m: Any, x: Tensor) -> Tensor:
    return x - x.mean(0) if m.training else x


@pytest.mark.parametrize("mix", [later, last, centred_in_training])
def test_rows_that_see_others_are_found_in_the_mode_of_training(mix: Any) -> None:
    model = Mixing(mix).train()
    batch = padded(rows((5,) * 8), mask=True)
    assert "mixes texts" in str(fault(model, batch))
    model.drop.p = 0.0
    extra = {"input_ids": [1, 49, 49, 49, 2], "labels": 1}
    some = rows((5,) * 8)
    assert moved(model, padded(some, mask=True), padded([extra, *some], mask=True)) <= 1.001


def test_the_check_is_made_again_when_the_mode_changes() -> None:
    model, batch = Mixing(centred_in_training).eval(), padded(rows((5,) * 8), mask=True)
    assert fault(model, batch) is None and fault(model.train(), batch) is not None
    assert fault(model.eval(), batch) is None


def test_a_layer_that_needs_several_texts_is_refused() -> None:
    def scaled(m: Any, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)

    with pytest.raises(InputError, match=r"a text alone cannot go through the model .*no text has a gradient of its own"):
        fault(Mixing(scaled).train(), padded(rows((5,) * 8), mask=True))


@pytest.mark.parametrize("family", ["bert", "gpt2", "modernbert"])
def test_dropout_of_layers_and_functions_does_not_count_as_mixing(family: str) -> None:
    model, batch = tiny(family, "classification"), batch_for("classification", 4)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    state = torch.random.get_rng_state()
    model.train()
    assert fault(model, batch.inputs()) is None
    assert torch.equal(torch.random.get_rng_state(), state) and all(m.training for m in model.modules())


def test_a_text_without_a_loss_says_nothing_of_the_others() -> None:
    model = tiny("gpt2", "causal")
    batch = padded(rows((5, 5, 5)), mask=True, labels=-100)
    batch["labels"][0] = -100
    assert fault(model, batch) is None
