"""Gradients of a tiny model in float64, as gradient matching sees them."""

from __future__ import annotations

import torch
from torch import Tensor

from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.testing.tiny import CLS, SEP, tiny
from rasura.victims.step import gradients


def observed_of(text: list[int]) -> tuple[Factoriser, dict[str, Tensor], Tensor, Tensor]:
    """A factoriser, the gradient of ``text``, and two other candidates with their mask."""
    model = tiny("bert", "classification", hidden=16).double().requires_grad_(False)
    ids = torch.tensor([text])
    mask = torch.ones_like(ids)
    target, _ = gradients(tiny("bert", "classification", hidden=16).double(), {"input_ids": ids, "attention_mask": mask,
                                                                       "labels": torch.tensor([1])})  # fmt: skip
    factoriser = Factoriser(model, list(target))
    others = torch.stack([ids, torch.tensor([[CLS, 43, 44, SEP]])])
    e = model.get_input_embeddings().weight[others]  # type: ignore[operator,union-attr]
    return factoriser, factoriser.observed(target), e.requires_grad_(True), mask
