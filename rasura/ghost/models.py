"""The shadow table of a model, plain or in groups."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

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

_MADE: dict[tuple[str, str, ShadowSettings], ShadowTable] = {}


def made_for(model: nn.Module, vocabulary: Vocabulary, settings: ShadowSettings, digest: str | None = None) -> ShadowTable:
    """The shadow table of a Hugging Face ``model``; kept in memory while the program runs.

    ``digest``: that of the model's embedding, where it was just taken.
    """
    table = token_embedding(model)
    key = (digest or embedding_digest(table), tokenizer_digest(vocabulary), settings)
    if key not in _MADE:
        _MADE[key] = _made(table, vocabulary, settings)
    return _MADE[key]


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
