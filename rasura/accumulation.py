"""How many tokens an update must hold before it is sent, and how batches and updates are gathered until it does.

The gradient of a linear layer is a sum over tokens of outer products: with fewer tokens than the layer is wide, its row
space is smaller than the whole and names the tokens. With as many, it is the whole space and names none. The
protection refuses to send less; the audit, training and clients of a federation gather until it is enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rasura.interfaces import InputError
from rasura.values import Gradients, Mechanism

NAME = "accumulate"
"""The protection's name; its parameter is ``tokens`` or ``widths``."""


def width(model: nn.Module) -> int:
    """The width d of the model's hidden states. Raises ``InputError`` for what is no language model."""
    config: Any = getattr(model, "config", None)
    found = getattr(config, "hidden_size", None)
    if not isinstance(found, int):
        raise InputError(f"{NAME}: {type(model).__name__} has no hidden size; expected a language model, or pass tokens")
    return found


def least_tokens(mechanisms: Iterable[Mechanism], model: nn.Module) -> int:
    """How many tokens an update of ``model`` must hold to be sent behind ``mechanisms``; 0 where none of them asks."""
    least = 0
    for one in mechanisms:
        if one.name == NAME:
            tokens, widths = one.parameters.get("tokens"), one.parameters.get("widths")
            least = max(least, int(tokens) if tokens is not None else math.ceil(float(widths or 0) * width(model) - 1e-9))
    return least


def gathered(tokens: Sequence[int], least: int) -> tuple[list[list[int]], list[int]]:
    """Places of consecutive batches that hold at least ``least`` tokens together, and those left over at the end.

    ``tokens``: how many each batch holds. Every group ends with the batch that fills it.
    """
    whole: list[list[int]] = []
    group: list[int] = []
    held = 0
    for place, count in enumerate(tokens):
        group.append(place)
        held += count
        if held >= least:
            whole.append(group)
            group, held = [], 0
    return whole, group


@dataclass
class Accumulator:
    """Holds a client's updates back until they were made of at least ``least`` tokens, then gives their mean.

    For a client that sends updates of its own making (weights after local training minus weights before, or gradients):
    ``sent = held.add(update, tokens, weight=texts)`` is None while the client keeps quiet. ``total``, ``tokens`` and
    ``weight`` are all there is to keep between two rounds. Count each text once: the same text again adds tokens, but
    nothing to hide behind.
    """

    least: int
    tokens: int = 0
    weight: float = 0.0
    total: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.least < 1:
            raise InputError(f"{NAME}: {self.least} tokens; expected at least 1")

    def add(self, update: Gradients, tokens: int, *, weight: float = 1.0) -> Gradients | None:
        """Take in an update made of ``tokens`` tokens; the mean of all that were held, by weight, once there are enough."""
        if tokens < 0 or not weight > 0:
            raise InputError(f"{NAME}: an update of {tokens} tokens and weight {weight}; expected 0 or more, and above 0")
        if self.total and {n: t.shape for n, t in self.total.items()} != {n: u.shape for n, u in update.items()}:
            raise InputError(f"{NAME}: the update has other tensors than those held; expected one and the same model's")
        for name, entries in update.items():
            part = entries.detach() * weight
            self.total[name] = self.total[name] + part if name in self.total else part
        self.tokens, self.weight = self.tokens + tokens, self.weight + weight
        if self.tokens < self.least:
            return None
        mean = {name: entries / self.weight for name, entries in self.total.items()}
        self.tokens, self.weight, self.total = 0, 0.0, {}
        return mean


def tokens_in(inputs: Mapping[str, Tensor]) -> int:
    """Tokens of a step's inputs, special ones included and padding left out. Raises ``InputError`` for images."""
    mask = inputs.get("attention_mask")
    if mask is None:
        raise InputError(f"{NAME} counts tokens, and these inputs have no attention_mask; expected a language model's")
    return int(mask.to(torch.int64).sum())
