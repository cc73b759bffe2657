"""Dummy texts that an optimisation moves: the tokenizer's own tokens in place, the token table, and the way back to ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rasura.values import Vocabulary


def ordinary_ids(vocabulary: Vocabulary) -> Tensor:
    """All ids that are neither special nor unused."""
    barred = vocabulary.special_ids | vocabulary.unused_ids
    return torch.tensor([i for i in range(vocabulary.size) if i not in barred])


def token_table(model: nn.Module, vocabulary: Vocabulary) -> Tensor:
    """What ``model`` makes of every id before positions, ``(vocabulary, hidden)``; asked for: Gemma scales its rows."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model
    with torch.no_grad():
        table: Tensor = embedding(torch.arange(vocabulary.size))
    return table


def template(vocabulary: Vocabulary, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Ids with the tokenizer's own tokens in place, the attention mask, and which positions are free (bool).

    All ``(batch, longest)``, for texts of ``lengths`` tokens, special ones included.
    """
    prefix, suffix = vocabulary.prefix, vocabulary.suffix
    ids = torch.full((len(lengths), max(lengths)), vocabulary.pad_id or 0)
    mask, free = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
    for row, n in enumerate(lengths):
        ids[row, : len(prefix)] = torch.tensor(prefix, dtype=torch.long)
        ids[row, n - len(suffix) : n] = torch.tensor(suffix, dtype=torch.long)
        free[row, len(prefix) : n - len(suffix)] = True
        mask[row, :n] = 1
    return ids, mask, free


def nearest_tokens(e: Tensor, table: Tensor, ordinary: Tensor, k: int) -> Tensor:
    """The ``k`` ids of ``ordinary`` whose embeddings have the largest cosine with ``e`` ``(..., hidden)``: ``(..., k)``."""
    rows = nn.functional.normalize(table[ordinary], dim=1)
    return ordinary[(nn.functional.normalize(e, dim=-1) @ rows.T).topk(k, dim=-1).indices]
