"""Data and gradients of a training loop that is protected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from rasura.testing.tiny import tiny

DATA: Any = [{"input_ids": [1, 40 + k % 9, 3, 41, 2], "attention_mask": [1] * 5, "labels": k % 2} for k in range(24)]


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {k: torch.tensor([r[k] for r in rows]) for k in rows[0]}


class Linear(nn.Module):
    """A linear classifier on ``width`` given features."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = nn.Linear(width, 2)

    def forward(self, features: Tensor, labels: Tensor) -> ModelOutput:
        logits = self.head(features)
        return ModelOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def plain_gradients(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    model = tiny("bert", "classification", num_labels=2)
    model(**batch).loss.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
