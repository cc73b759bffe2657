"""What a frozen encoder gives a head that is trained on it: one vector a text, computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rasura.data.text import Example, encode
from rasura.victims.batching import joined, split
from rasura.victims.loading import Victim

LONGEST, TOGETHER = 64, 128

Pool = Callable[[Tensor, Tensor], Tensor]
"""From last states ``(texts, length, hidden)`` and their mask ``(texts, length)`` to ``(texts, hidden)``."""


def first(states: Tensor, mask: Tensor) -> Tensor:
    """The state of the first token."""
    return states[:, 0]


def mean(states: Tensor, mask: Tensor) -> Tensor:
    """The mean over a text's tokens."""
    shown = mask[..., None].to(states.dtype)
    return (states * shown).sum(1) / shown.sum(1)


@torch.no_grad()
def frozen(victim: Victim, examples: Sequence[Example], pool: Pool) -> Tensor:
    """The last states of each text, cut to ``LONGEST`` tokens, made one by ``pool``: ``(texts, hidden)``."""
    rows = []
    for start in range(0, len(examples), 2 * TOGETHER):
        some = examples[start : start + 2 * TOGETHER]
        rows += split(encode(some, victim.tokenizer, victim.task, max_length=LONGEST, num_labels=2, truncate=True))
    body: Any = victim.model.base_model
    order = sorted(range(len(rows)), key=lambda k: rows[k].input_ids.shape[1])
    out: dict[int, Tensor] = {}
    for start in range(0, len(order), TOGETHER):
        part = order[start : start + TOGETHER]
        batch = joined([rows[k] for k in part], victim.vocabulary.pad_id or 0)
        states = body(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        out |= dict(zip(part, pool(states, batch.attention_mask).clone()))
    return torch.stack([out[k] for k in range(len(rows))])
