"""Gradient pruning: only part of the entries is sent.

The receiver can see which entries are missing (a sparse update lists those that it holds), so the message's ``visible``
masks show it: an attack may leave them out on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rasura.core.interfaces import InputError, Transform, made
from rasura.core.mechanisms import mechanism
from rasura.core.rng import Randomness, uniform
from rasura.core.specs import DefenseSpec, Strength
from rasura.core.values import Message, Stage
from rasura.defenses.compose import stateless


def _smallest(scores: Tensor, count: int) -> Tensor:
    """A bool mask of exactly ``count`` smallest ``scores``; ties are taken in order."""
    if count == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    cut = torch.kthvalue(scores, count).values
    mask: Tensor = scores < cut
    ties = (scores == cut).nonzero().flatten()
    mask[ties[: count - int(mask.sum())]] = True
    return mask


def _prune(name: str, ratio: float, score: Callable[[Tensor, Randomness], Tensor]) -> Transform[Message, Message, None]:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio < 1:
        raise InputError(f"{name}: ratio is {ratio!r}; expected the fraction of entries to drop, at least 0 and below 1")

    def apply(message: Message, state: None, rng: Randomness) -> tuple[Message, None]:
        if not message.gradients:
            return message, None
        # Boolean indexing of millions of entries costs more than the pruning: only where something is hidden already.
        parts = [g.reshape(-1) if k not in message.visible else g[message.visible[k]] for k, g in message.gradients.items()]
        entries = torch.cat(parts)
        keep = ~_smallest(score(entries, rng), round(ratio * entries.numel()))
        gradients, visible = {}, dict(message.visible)
        for (key, gradient), kept in zip(message.gradients.items(), torch.split(keep, [len(p) for p in parts])):
            if key in message.visible:
                mask = torch.zeros_like(message.visible[key])
                mask[message.visible[key]] = kept
            else:
                mask = kept.reshape(gradient.shape)
            gradients[key], visible[key] = gradient * mask, mask
        return replace(message, gradients=gradients, visible=visible), None

    return made(Stage.WIRE, mechanism(name, {"ratio": ratio}), stateless, apply)


def magnitude_pruning(ratio: float) -> Transform[Message, Message, None]:
    """Drop the fraction ``ratio`` of the visible entries that is smallest in absolute value, over all tensors together.

    Exactly ``round(ratio * entries)`` entries are dropped. Raises ``InputError`` unless ``0 <= ratio < 1``.
    """
    return _prune("pruning", ratio, lambda entries, rng: entries.abs())


def random_pruning(ratio: float) -> Transform[Message, Message, None]:
    """Drop a random fraction ``ratio`` of the visible entries, over all tensors together.

    Exactly ``round(ratio * entries)`` entries are dropped. Raises ``InputError`` unless ``0 <= ratio < 1``.
    """
    return _prune("random-pruning", ratio, lambda entries, rng: uniform(entries.shape, rng).to(entries.device))


MAGNITUDE = DefenseSpec(
    name="pruning",
    about="drops the smallest entries, a fraction RATIO of all",
    source="Zhu et al. 2019 (DLG), sec. 5: gradient compression",
    make=magnitude_pruning,
    example="pruning:0.7",
    parameter=float,
    known_by=("span", "mask-positions"),
    strength=Strength(name="ratio", weakest=0.1, strongest=0.9999, points=5, dropped=True),
    neutral=lambda: magnitude_pruning(0.0),
)

RANDOM = DefenseSpec(
    name="random-pruning",
    about="drops random entries, a fraction RATIO of all",
    source="Selective encryption of gradients, sec. 5.2 (the random baseline)",
    make=random_pruning,
    example="random-pruning:0.7",
    parameter=float,
    known_by=("span", "mask-positions"),
    strength=Strength(name="ratio", weakest=0.1, strongest=0.9999, points=5, dropped=True),
    neutral=lambda: random_pruning(0.0),
    draws=True,
)
