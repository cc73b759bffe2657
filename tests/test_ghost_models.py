"""GHOST with models that it cannot search as they are: half precision, and weights that stay on disk."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from rasura.core.rng import generator
from rasura.ghost.defense import ghost
from rasura.ghost.models import searchable
from rasura.ghost.table import ShadowSettings
from rasura.runs.ghost_obfuscator import GhostObfuscator
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny, tokenizer_folder
from rasura.victims.loading import load
from rasura.victims.on_disk import is_stored
from rasura.victims.step import step

SMALL = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None)
HALF = [torch.bfloat16, torch.float16]


def test_a_model_that_can_be_searched_is_not_copied() -> None:
    for dtype in (torch.float32, torch.float64):
        model = tiny("bert", "classification").to(dtype)
        assert searchable(model) is model


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("family", "task"), [("bert", "classification"), ("llama", "causal")])
def test_half_precision_gets_the_substitutes_of_the_same_weights_in_float32(
    family: str, task: str, dtype: torch.dtype
) -> None:
    model = tiny(family, task).to(dtype).train()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    batch = batch_of([[CLS, 40, 41, 9, 50, SEP], [CLS, 60, 61, SEP]], task)
    part, rows = ghost(shadows=SMALL), []
    for one in (model, copy.deepcopy(model).float()):
        done, _ = part.apply(batch, part.init((one, VOCABULARY)), generator(0))
        rows.append(done.input_ids)
    assert torch.equal(*rows) and not torch.equal(rows[0], batch.input_ids)
    after = dict(model.named_parameters())
    assert model.training and all(p.requires_grad and p.dtype == dtype for p in after.values())
    assert all(torch.equal(p, before[n]) for n, p in after.items())


@pytest.mark.parametrize("dtype", HALF)
def test_a_step_in_half_precision_sends_the_gradient_of_the_substitutes(dtype: torch.dtype) -> None:
    model, batch = tiny("bert", "classification").to(dtype), batch_of([[CLS, 40, 41, 9, 50, SEP]], "classification")
    part = ghost(shadows=SMALL)
    hidden, _ = part.apply(batch, part.init((model, VOCABULARY)), generator(0))
    sent, plain = (
        step(model, some, defense, task="classification", vocabulary=VOCABULARY, rng=generator(0)).message.gradients
        for some, defense in ((batch, (part,)), (hidden, ()))
    )
    assert sent and all(torch.equal(g, plain[n]) and torch.isfinite(g).all() for n, g in sent.items())


def test_texts_of_a_model_in_half_precision_and_of_one_on_disk(tmp_path: Path) -> None:
    folder = tokenizer_folder(tiny("llama", "causal").to(torch.bfloat16), tmp_path / "model")
    stored, whole = (load(folder, "causal", on_disk=on_disk) for on_disk in (True, False))
    assert is_stored(stored.model) and searchable(stored.model) is stored.model
    rows = {"text": ["w40 w41 the w50", "w60 w61"]}
    wanted = GhostObfuscator(whole, shadows=SMALL)(rows)
    assert GhostObfuscator(stored, shadows=SMALL)(rows)["input_ids"] == wanted["input_ids"]
    whole.model.to(torch.bfloat16)
    assert GhostObfuscator(whole, shadows=SMALL)(rows) == wanted
