"""Models without an attention mask: padding is as long as the longest text of a batch, and must not change a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers.utils import ModelOutput

import rasura
from rasura.core.errors import InputError

pytest.importorskip("opacus")
pytest.importorskip("dp_accounting")

LENGTHS = [2, 7, 3, 5, 4, 2]
ROWS: Any = [{"words": torch.arange(1, n + 1) + k, "labels": k % 2} for k, n in enumerate(LENGTHS)]
EVEN: Any = [{"words": torch.arange(1, 5) + k, "labels": k % 2} for k in range(6)]


class Pooled(nn.Module):
    """A classifier of the mean of its tokens; ``aware``: of those that are not 0."""

    def __init__(self, aware: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.aware, self.words, self.head = aware, nn.Embedding(20, 6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor, labels: Tensor) -> ModelOutput:
        there = (tokens != 0)[..., None] if self.aware else torch.ones_like(tokens)[..., None]
        hidden = torch.tanh(self.words(tokens)) * there
        logits = self.head(hidden.sum(1) / there.sum(1))
        return ModelOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def padded(rows: list[Any], *, left: bool = False, length: int = 0) -> dict[str, Tensor]:
    """Padded with 0 to the longest row, on either side, and at least to ``length``."""
    words = [row["words"].flip(0) if left else row["words"] for row in rows]
    made = pad_sequence([*words, torch.zeros(length, dtype=torch.long)], batch_first=True)[: len(rows)]
    return {"tokens": made.flip(1) if left else made, "labels": torch.tensor([row["labels"] for row in rows])}


def trained(model: nn.Module, rows: Any, collate: Callable[..., Any], defense: str) -> int:
    """The number of releases of two batches."""
    loader: Any = DataLoader(rows, 3, collate_fn=collate)
    done = rasura.protect_training(model, None, loader, defense, seed=1)
    for batch in done.loader:
        model.zero_grad()
        model(**batch).loss.backward()
    return done.ledger.releases


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "dp-ftrl:1.0/band=2"])
@pytest.mark.parametrize("left", [False, True])
def test_padding_that_changes_a_gradient_is_refused(defense: str, left: bool) -> None:
    def collate(rows: list[Any]) -> dict[str, Tensor]:
        return padded(rows, left=left)

    with pytest.raises(InputError, match=r"no attention_mask, and padding changes the gradient of a text: tokens of row"):
        trained(Pooled(aware=False), ROWS, collate, defense)
    assert trained(Pooled(aware=True), ROWS, collate, defense) == 2


def test_rows_of_one_length_are_not_padded_whatever_sets_it() -> None:
    assert trained(Pooled(aware=False), EVEN, padded, "dp-sgd:1.0") == 2
    assert trained(Pooled(aware=False), ROWS, lambda rows: padded(rows, length=9), "dp-sgd:1.0") == 2


def test_rows_that_are_cut_to_the_shortest_are_refused() -> None:
    def shortest(rows: list[Any]) -> dict[str, Tensor]:
        made = padded(rows)
        return made | {"tokens": made["tokens"][:, : min(len(row["words"]) for row in rows)]}

    with pytest.raises(InputError, match="no attention_mask, and padding changes"):
        trained(Pooled(aware=True), ROWS, shortest, "dp-sgd:1.0")
