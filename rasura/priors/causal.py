"""The prior of a causal language model, as LAMP has it (Balunovic et al. 2022: GPT-2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rasura.core.values import Vocabulary

REMEMBERED = 1 << 16
"""Texts whose probability is kept: an attack tries the same orders again and again."""


class CausalPrior:
    """The probability of a text under ``model``, a causal language model with a vocabulary of its own; a ``Prior``.

    ``vocabulary`` is that of the texts' ids: they are decoded, and encoded again if the model has other ids.
    """

    def __init__(self, model: nn.Module, own: Vocabulary, vocabulary: Vocabulary) -> None:
        self.model, self.own, self.vocabulary = model.eval(), own, vocabulary
        config: Any = model.config
        self.longest = int(getattr(config, "max_position_embeddings", None) or 1024)
        self._known: dict[tuple[int, ...], float] = {}

    @torch.no_grad()
    def log_probability(self, ids: Sequence[int]) -> float:
        """Natural log of the probability of the text of ``ids``, in nats; of its beginning where it is too long."""
        key = tuple(ids)
        if key not in self._known:
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            start = self.own.prefix or (self.own.suffix or (0,))[-1:]  # GPT-2 opens a text with what ends one
            told = [i for i in self.own.encode(self.vocabulary.text(ids)) if i not in self.own.special_ids]
            whole = torch.tensor([[*start, *told][: self.longest]])
            scores = self.model(input_ids=whole).logits.log_softmax(-1)[0]
            after = torch.arange(len(start), whole.shape[1])
            self._known[key] = float(scores[after - 1, whole[0, after]].double().sum())
        return self._known[key]
