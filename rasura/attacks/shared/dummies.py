"""Dummy texts that an optimisation moves: the tokenizer's own tokens in place, the token table, and the way back to ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rasura.core.values import Vocabulary


def ordinary_ids(vocabulary: Vocabulary) -> Tensor:
    """All ids that are neither special nor unused."""
    barred = vocabulary.special_ids | vocabulary.unused_ids
    return torch.tensor([i for i in range(vocabulary.size) if i not in barred])


def token_table(model: nn.Module, vocabulary: Vocabulary) -> Tensor:
    """What ``model`` makes of every id before positions, ``(vocabulary, hidden)``; asked for: Gemma scales its rows."""
    embedding = model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model
    with torch.no_grad():
        table: Tensor = embedding(torch.arange(vocabulary.size, device=next(model.parameters()).device))
    return table


def template(
    vocabulary: Vocabulary, lengths: Sequence[int] | Tensor, width: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Ids with the tokenizer's own tokens in place, the attention mask, and which positions are free (bool).

    All ``(..., batch, width)``, for texts of ``lengths`` ``(..., batch)`` tokens, special ones included; ``width`` is the
    longest of them where it is not given.
    """
    ends = torch.as_tensor(lengths)[..., None]
    place = torch.arange(int(ends.max()) if width is None else width)
    prefix, suffix = vocabulary.prefix, vocabulary.suffix
    real = place < ends
    ids = torch.full(real.shape, vocabulary.pad_id or 0)
    for k, token in enumerate(prefix):
        ids[..., k] = token
    for k, token in enumerate(suffix):
        ids = torch.where(place == ends - len(suffix) + k, token, ids)
    return ids, real.long(), (place >= len(prefix)) & (place < ends - len(suffix))


def nearest_tokens(e: Tensor, table: Tensor, ordinary: Tensor, k: int) -> Tensor:
    """The ``k`` ids of ``ordinary`` whose embeddings have the largest cosine with ``e`` ``(..., hidden)``: ``(..., k)``."""
    # The table is neither copied nor scaled, which would take longer than the product.
    alike = nn.functional.normalize(e, dim=-1) @ table.T / torch.linalg.vector_norm(table, dim=1).clamp_min(1e-12)
    return ordinary[alike[..., ordinary].topk(k, dim=-1).indices]
