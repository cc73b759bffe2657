"""What every attack on a service begins with: the two tables, the ids that were sent, and guesses by id."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.values import UNKNOWN
from rasura.victims.models import parts

KEPT = 3
"""Guesses that are kept of each place."""


def word_table(model: nn.Module) -> Tensor:
    """The word embedding ``(tokens, hidden)``, float32; ``model`` may be that embedding alone."""
    if isinstance(model, nn.Embedding):
        return model.weight.detach().float()
    return model.get_parameter(parts(model).word_embedding).detach().float()


@dataclass(frozen=True)
class Tables:
    """The tables of an observation. ``usable``: public tokens that a text can hold, ``(n,)``."""

    seen: ServiceObservation

    @cached_property
    def public(self) -> Tensor:
        """The public table ``(tokens, hidden)``."""
        return word_table(self.seen.public)

    @cached_property
    def served(self) -> Tensor:
        """The obfuscated table ``(tokens, hidden)``."""
        return word_table(self.seen.served)

    @cached_property
    def usable(self) -> Tensor:
        special = self.seen.vocabulary.special_ids
        return torch.tensor([i for i in range(len(self.public)) if i not in special])

    @cached_property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """The ids of every text; where vectors were sent, each place has a number of its own in place of an id."""
        if not self.seen.vectors:
            return self.seen.ids
        special, number = self.seen.vocabulary.special_ids, count(len(self.public))
        return tuple(tuple(i if i in special else next(number) for i in text) for text in self.seen.ids)

    @cached_property
    def rows(self) -> Tensor:
        """What was sent for each of ``ids``: its row of the served table, or the vector itself; ``(types, hidden)``."""
        if not self.seen.vectors:
            return self.served[self.ids]
        return torch.cat(self.seen.vectors).float()[[i == UNKNOWN for text in self.seen.ids for i in text]]

    @cached_property
    def counts(self) -> Counter[int]:
        """How often each id was sent, special ones left out, the most frequent first."""
        special = self.seen.vocabulary.special_ids
        found = Counter(i for text in self.texts for i in text if i not in special)
        return Counter(dict(found.most_common()))

    @cached_property
    def ids(self) -> Tensor:
        """The ids that were sent, in the order of ``counts``: ``(types,)``."""
        return torch.tensor(list(self.counts), dtype=torch.int64)

    def reading(self, ranked: Tensor, **details: Any) -> TokenReading:
        """The guess that reads every id by its row of ``ranked`` ``(types, guesses)``, public tokens, best first."""
        rows = dict(zip(self.ids.tolist(), ranked))
        width = ranked.shape[1]

        def row(i: int) -> Tensor:
            return rows[i] if i in rows else torch.tensor([i] + [UNKNOWN] * (width - 1))

        return TokenReading(tuple(torch.stack([row(i) for i in text]) for text in self.texts), details=details)


def cosines(rows: Tensor, others: Tensor) -> Tensor:
    """Cosines of all ``rows`` with all ``others``."""
    return nn.functional.normalize(rows, dim=1) @ nn.functional.normalize(others, dim=1).T


def nearest(tables: Tables, k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` usable public tokens nearest by cosine to each id that was sent, and the cosines: both ``(types, k)``."""
    values, places = cosines(tables.rows, tables.public[tables.usable]).topk(min(k, len(tables.usable)), dim=1)
    return tables.usable[places], values
