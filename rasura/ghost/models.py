"""The shadow table of a model, plain or in groups, and the model as GHOST computes with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.threat import adversary_copy
from rasura.core.values import Vocabulary
from rasura.core.vocabulary import tokenizer_digest
from rasura.ghost.groups import grouped
from rasura.ghost.table import (
    POLICY,
    ShadowSettings,
    ShadowTable,
    embedding_digest,
    kept_by_policy,
    read_as_written,
    search,
    token_embedding,
    usable_tokens,
)
from rasura.ghost.words import lemmas, token_texts

_MADE: dict[tuple[str, str, frozenset[int], ShadowSettings], ShadowTable] = {}


def made_for(model: nn.Module, vocabulary: Vocabulary, settings: ShadowSettings, digest: str | None = None) -> ShadowTable:
    """The shadow table of a Hugging Face ``model``; kept in memory while the program runs.

    ``digest``: that of the model's embedding, where it was just taken.
    """
    table = token_embedding(model)
    key = (digest or embedding_digest(table), tokenizer_digest(vocabulary), vocabulary.control_ids, settings)
    if key not in _MADE:
        _MADE[key] = _made(table, vocabulary, settings)
    return _MADE[key]


def searchable(model: nn.Module) -> nn.Module:
    """``model`` as GHOST computes with it: on the CPU, with embeddings in float32 or float64. A copy where it is not so."""
    own = model if all(p.device.type == "cpu" for p in model.parameters()) else adversary_copy(model)
    base: Any = getattr(own, "base_model", own)
    # Of what it returns: a model whose weights stay on disk has them in half precision, and computes in float32.
    kind = base.get_input_embeddings()(torch.tensor([0])).dtype
    return own if kind in (torch.float32, torch.float64) else adversary_copy(own).float()


def _made(table: Tensor, vocabulary: Vocabulary, settings: ShadowSettings) -> ShadowTable:
    beyond = max(0, len(table) - vocabulary.size)

    def padded(mask: Tensor) -> Tensor:
        return torch.cat([mask, torch.zeros(beyond, dtype=torch.bool)])[: len(table)]

    kept = padded(kept_by_policy(token_texts(vocabulary), settings))
    usable = padded(usable_tokens(vocabulary)) & ~kept
    names = [*lemmas(vocabulary, settings.language), *(f"\0{i}" for i in range(beyond))][: len(table)]
    allowed = padded(read_as_written(vocabulary)) if settings.round_trip else None
    found = replace(search(table, names, usable, settings, allowed), tokenizer=tokenizer_digest(vocabulary))
    found.relaxed[kept] = POLICY
    return found if settings.group == 1 else grouped(found, table, names, vocabulary)
