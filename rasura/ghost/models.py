"""The shadow table of a model, plain or in groups."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache

import torch
from torch import Tensor, nn

from rasura.core.values import Vocabulary
from rasura.ghost.groups import grouped
from rasura.ghost.table import (
    POLICY,
    ShadowSettings,
    ShadowTable,
    embedding_digest,
    kept_by_policy,
    lemmas,
    read_as_written,
    search,
    token_embedding,
    token_texts,
    usable_tokens,
)

_MADE: dict[tuple[str, str, ShadowSettings], ShadowTable] = {}


def made_for(model: nn.Module, vocabulary: Vocabulary, settings: ShadowSettings, digest: str | None = None) -> ShadowTable:
    """The shadow table of a Hugging Face ``model``; kept in memory while the program runs.

    ``digest``: that of the model's embedding, where it was just taken.
    """
    table = token_embedding(model)
    key = (digest or embedding_digest(table), _digest(vocabulary), settings)
    if key not in _MADE:
        _MADE[key] = _made(table, vocabulary, settings)
    return _MADE[key]


@lru_cache(maxsize=8)
def _digest(vocabulary: Vocabulary) -> str:
    """What tells a tokenizer from others by what a table depends on: two may share one embedding."""
    told = (token_texts(vocabulary), sorted(vocabulary.special_ids), sorted(vocabulary.unused_ids))
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _made(table: Tensor, vocabulary: Vocabulary, settings: ShadowSettings) -> ShadowTable:
    beyond = max(0, len(table) - vocabulary.size)

    def padded(mask: Tensor) -> Tensor:
        return torch.cat([mask, torch.zeros(beyond, dtype=torch.bool)])[: len(table)]

    kept = padded(kept_by_policy(token_texts(vocabulary), settings))
    usable = padded(usable_tokens(vocabulary)) & ~kept
    names = [*lemmas(vocabulary, settings.language), *(f"\0{i}" for i in range(beyond))][: len(table)]
    allowed = padded(read_as_written(vocabulary)) if settings.round_trip else None
    found = search(table, names, usable, settings, allowed)
    found.relaxed[kept] = POLICY
    return found if settings.group == 1 else grouped(found, table, names, vocabulary)
