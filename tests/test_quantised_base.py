"""Private training of adapters on a base of 4-bit weights, against the gradients of single texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from private_setting import DATA, collate
from torch import nn
from torch.utils.data import DataLoader

import rasura
from rasura.testing.tiny import tiny

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")


def quantise(module: nn.Module, library: Any) -> None:
    """Every linear layer but the classifier in 4 bits."""
    for name, layer in list(module.named_children()):
        if isinstance(layer, nn.Linear) and name != "classifier":
            small = library.nn.Linear4bit(layer.in_features, layer.out_features, compute_dtype=torch.float32)
            small.load_state_dict(layer.state_dict())
            setattr(module, name, small.to("cpu"))
        else:
            quantise(layer, library)


def test_adapters_on_a_base_of_4_bits_get_the_clipped_gradients_of_single_texts() -> None:
    library: Any = pytest.importorskip("bitsandbytes", reason="4-bit weights need bitsandbytes")
    peft: Any = pytest.importorskip("peft")
    model: Any = tiny("bert", "classification", num_labels=2)
    quantise(model, library)
    assert any(p.dtype == torch.uint8 for p in model.parameters())
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS"))
    texts, clip = DATA[:4], 0.05
    expected: dict[str, torch.Tensor] = {}
    for text in texts:
        model.zero_grad()
        model(**collate([text])).loss.backward()
        own = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = sum(float(g.double().square().sum()) for g in own.values()) ** 0.5
        assert norm > clip
        for name, g in own.items():
            expected[name] = expected.get(name, torch.zeros_like(g)) + g * clip / norm / len(texts)
    model.zero_grad()
    loader = DataLoader(texts, len(texts), collate_fn=collate)
    model, _, drawn, _ = rasura.protect_training(model, None, loader, f"dp-sgd:1e-7/clip={clip}")
    for batch in drawn:
        model(**batch).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(found) == set(expected) and len(found) == 10
    for name, g in expected.items():
        torch.testing.assert_close(found[name], g, rtol=1e-4, atol=1e-7)
