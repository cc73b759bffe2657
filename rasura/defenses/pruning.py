"""Gradient pruning: only part of the entries is sent.

The receiver can tell which entries are missing (a sparse update lists those that it holds), so the message's ``visible``
masks say it: an attack may leave them out on both sides.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Generator, Tensor

from rasura.defenses.compose import stateless
from rasura.interfaces import InputError, Transform
from rasura.values import Mechanism, Message, Stage


def _smallest(scores: Tensor, count: int) -> Tensor:
    """A bool mask of exactly ``count`` smallest ``scores``; ties are taken in order."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    if count == 0:
        return mask
    cut = torch.kthvalue(scores, count).values
    mask |= scores < cut
    ties = (scores == cut).nonzero().flatten()
    mask[ties[: count - int(mask.sum())]] = True
    return mask


def _prune(name: str, ratio: float, score: Callable[[Tensor, Generator], Tensor]) -> Transform[Message, Message, None]:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio < 1:
        raise InputError(f"{name}: ratio is {ratio!r}; expected the share of entries to drop, at least 0 and below 1")

    def apply(message: Message, state: None, rng: Generator) -> tuple[Message, None]:
        everything = {k: torch.ones_like(g, dtype=torch.bool) for k, g in message.gradients.items()}
        before = {k: message.visible.get(k, full) for k, full in everything.items()}
        if not before:
            return message, None
        entries = torch.cat([g[before[k]].reshape(-1) for k, g in message.gradients.items()])
        keep = ~_smallest(score(entries, rng), round(ratio * entries.numel()))
        gradients, visible, start = {}, dict(message.visible), 0
        for key, gradient in message.gradients.items():
            mask, shown = torch.zeros_like(before[key]), int(before[key].sum())
            mask[before[key]] = keep[start : start + shown]
            start += shown
            gradients[key], visible[key] = gradient * mask, mask
        return Message(gradients, visible, message.sealed, message.kind), None

    return Transform(Stage.WIRE, Mechanism(name, Stage.WIRE, {"ratio": float(ratio)}), stateless, apply)


def magnitude_pruning(ratio: float) -> Transform[Message, Message, None]:
    """Drop the share ``ratio`` of the visible entries that is smallest in size, over all tensors together.

    Exactly ``round(ratio * entries)`` entries go. Raises ``InputError`` unless ``0 <= ratio < 1``.
    """
    return _prune("pruning", ratio, lambda entries, rng: entries.abs())


def random_pruning(ratio: float) -> Transform[Message, Message, None]:
    """Drop the share ``ratio`` of the visible entries at random, over all tensors together.

    Exactly ``round(ratio * entries)`` entries go. Raises ``InputError`` unless ``0 <= ratio < 1``.
    """
    return _prune("random-pruning", ratio, lambda entries, rng: torch.rand(entries.shape, generator=rng).to(entries.device))
