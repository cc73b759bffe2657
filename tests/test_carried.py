"""Parts of a model after a protected training: no new ledger starts at zero on what they hold, and on no other ground."""

from __future__ import annotations

import copy
import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from private_setting import DATA, collate
from torch import nn
from torch.utils.data import DataLoader

import rasura
from rasura.core.interfaces import InputError
from rasura.testing.tiny import tiny

pytest.importorskip("dp_accounting")

CAUSAL: Any = [{**row, "labels": row["input_ids"]} for row in DATA]
PART = r"was part of a protected training and may hold its releases, {} in all, which a new ledger would not count"


def protected(model: nn.Module, defense: str = "dp-sgd:1.0", data: Any = DATA) -> Any:
    some = [p for p in model.parameters() if p.requires_grad]
    return rasura.protect_training(model, torch.optim.SGD(some, 1.0), DataLoader(data, 24, collate_fn=collate), defense)


def trained(model: nn.Module, defense: str = "dp-sgd:1.0", data: Any = DATA) -> Any:
    """The loop after its only release."""
    private = protected(model, defense, data)
    for batch in private.loader:
        private.optimizer.zero_grad()
        private.model(**batch).loss.backward()
        private.optimizer.step()
    assert private.ledger.releases == 1
    return private


def classifier(seed: int = 0) -> Any:
    return tiny("bert", "classification", num_labels=2, seed=seed)


def adapted(model: nn.Module, **options: Any) -> Any:
    peft: Any = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, **options))


@pytest.mark.parametrize("alive", [True, False])
def test_a_trained_encoder_under_a_new_head_does_not_start_at_zero(alive: bool) -> None:
    """The guard is the old model's: with the encoder, its releases came into a training that counted from zero."""
    old, new = classifier(), classifier(1)
    new.bert = old.bert
    private = trained(old)
    if not alive:
        old.zero_grad()
        del old, private
        gc.collect()
    with pytest.raises(InputError, match=r"^bert\.embeddings\.word_embeddings\.weight " + PART.format(1)):
        protected(new)


def test_copies_of_parts_carry_what_was_released() -> None:
    old = classifier()
    private = protected(old)
    early = copy.deepcopy(old.bert)  # weights may be written into it later, as averages are
    fresh = classifier(1)
    fresh.bert = copy.deepcopy(old.bert)
    protected(fresh)  # nothing was released yet
    for batch in private.loader:
        private.model(**batch).loss.backward()
    file = io.BytesIO()
    torch.save(old.bert, file)
    file.seek(0)
    for part in (early, copy.deepcopy(old.bert), copy.deepcopy(early), torch.load(file, weights_only=False)):
        new = classifier(1)
        new.bert = part
        with pytest.raises(InputError, match=PART.format(1)):
            protected(new)


def test_a_model_around_a_protected_one_is_refused() -> None:
    private = trained(classifier())
    with pytest.raises(InputError, match="the model is already protected"):
        protected(nn.ModuleList([private.model]))
    with pytest.raises(InputError, match="the model is a copy of one that made 1 releases"):
        protected(torch.optim.swa_utils.AveragedModel(private.model))


def test_frozen_parts_that_kept_their_values_may_be_used_again() -> None:
    old = classifier()
    trained(old, "frozen-embeddings+dp-sgd:1.0")
    new = classifier(1)
    new.bert.embeddings = old.bert.embeddings
    trained(new, "frozen-embeddings+dp-sgd:1.0")
    third = classifier(2)
    third.bert.embeddings = old.bert.embeddings
    with torch.no_grad():
        old.bert.embeddings.word_embeddings.weight[5] += 1e-6
    with pytest.raises(InputError, match=r"^bert\.embeddings\.word_embeddings\.weight " + PART.format(2)):
        protected(third)


@pytest.mark.parametrize("way", ["merge_and_unload", "safe", "merge_adapter", "inner"])
def test_a_merged_adapter_does_not_start_at_zero(way: str) -> None:
    """Nothing of the merged model was guarded: what the adapter had learned began the second training."""
    private = trained(adapted(tiny("gpt2", "causal")), data=CAUSAL)
    model = private.model
    if way == "inner":
        merged = copy.deepcopy(model.base_model.model)
    elif way == "merge_adapter":
        model.merge_adapter()
        merged = model.unload()
    else:
        merged = model.merge_and_unload(safe_merge=way == "safe")
    del private, model
    gc.collect()
    merged.requires_grad_(True)
    with pytest.raises(InputError, match=r"c_attn\.\S*weight " + PART.format(1)):
        protected(merged, data=CAUSAL)
    if way != "inner":  # there, a second adapter replaces the first
        with pytest.raises(InputError, match=r"c_attn\.base_layer\.weight " + PART.format(1)):
            protected(adapted(merged), data=CAUSAL)


def test_a_base_whose_adapter_was_removed_holds_nothing() -> None:
    base = tiny("gpt2", "causal")
    for _ in range(2):
        private = trained(adapted(base), data=CAUSAL)
        base = private.model.unload()
        del private
        gc.collect()
    with torch.no_grad():
        base.get_parameter("transformer.h.1.attn.c_attn.weight")[0, 0] += 1e-6
    with pytest.raises(InputError, match=r"^base_model\.model\.transformer\.h\.1\.attn.* " + PART.format(2)):
        protected(adapted(base), data=CAUSAL)


def test_the_ways_on_that_the_refusal_names(tmp_path: Path) -> None:
    private = trained(adapted(tiny("gpt2", "causal")), data=CAUSAL)
    merged = private.model.merge_and_unload()
    new = tiny("gpt2", "causal")
    resumed = rasura.protect_training(new, None, DataLoader(CAUSAL, 8, collate_fn=collate), "dp-sgd:1.0", epochs=1)
    new.load_state_dict(merged.state_dict())
    resumed.ledger.load_state_dict(private.ledger.state_dict())
    assert resumed.ledger.releases == 1 and resumed.ledger.planned.steps == 3
    merged.save_pretrained(tmp_path)
    private.ledger.save(tmp_path / "rasura_ledger.json")
    loaded = type(merged).from_pretrained(str(tmp_path), attn_implementation="eager")
    said = protected(loaded, data=CAUSAL).ledger.spent().warnings[-1]
    assert "was itself trained by PrivateTrainer, under dp-sgd (1 releases)" in said
