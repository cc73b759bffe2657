"""How many different tokens an update must hold before it is sent, and how batches and updates are collected until then.

The gradient of a linear layer is a sum of outer products, one per input. With fewer different inputs than the layer is wide,
its row space is a proper subspace and names the tokens; otherwise it is the whole space and names none. In the first block,
a repeated token is the same input again (apart from its position, where the model adds one), so different tokens are
counted. Counted with repeats, a batch of 1.0 d tokens can be read in full, and the words of a batch of 2.25 d
(benchmarks/README.md).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.batches import Batch
from rasura.core.interfaces import InputError
from rasura.core.values import Gradients, Mechanism

NAME = "accumulate"
"""The protection's name; its parameter is ``tokens`` or ``widths``."""


def width(model: nn.Module) -> int:
    """The width d of the model's hidden states. Raises ``InputError`` for a model that is not a language model."""
    config: Any = getattr(model, "config", None)
    found = getattr(config, "hidden_size", None)
    if not isinstance(found, int):
        raise InputError(
            f"{NAME}: {type(model).__name__} has no hidden size; pass a language model, or give the option tokens"
        )
    return found


def needed_tokens(mechanisms: Iterable[Mechanism], model: nn.Module) -> int:
    """How many different tokens an update of ``model`` must hold to be sent under ``mechanisms``; 0 if none of them sets a
    minimum."""
    needed = 0
    for one in mechanisms:
        if one.name == NAME:
            tokens, widths = one.parameters.get("tokens"), one.parameters.get("widths")
            needed = max(needed, int(tokens) if tokens is not None else math.ceil(float(widths or 0) * width(model) - 1e-9))
    return needed


def tokens_in(inputs: Mapping[str, Tensor]) -> frozenset[int]:
    """The different tokens of a step's inputs that leave a gradient. Raises ``InputError`` for images.

    Padding leaves none. In a causal model (labels ``(texts, length)``), neither does a text's last token, since nothing is
    predicted from it.
    """
    ids, mask, labels = inputs.get("input_ids"), inputs.get("attention_mask"), inputs.get("labels")
    if ids is None or mask is None:
        raise InputError(
            f"{NAME} counts tokens, but these inputs have no input_ids; expected the inputs of a language model"
        )
    heard = mask.bool()
    if labels is not None and labels.dim() == 2:
        predicted = (labels != -100).long()
        heard = heard & (predicted.flip(1).cumsum(1).flip(1) - predicted > 0)  # something behind the place is predicted
    return frozenset(torch.unique(ids[heard]).tolist())


def counted(rows: Iterable[Batch]) -> frozenset[int]:
    """The tokens that ``tokens_in`` counts, for several batches together."""
    return frozenset[int]().union(*(tokens_in(row.inputs()) for row in rows))


def gathered(batches: Sequence[Collection[int]], min_tokens: int) -> tuple[list[list[int]], list[int]]:
    """The indices of consecutive batches that together hold at least ``min_tokens`` different tokens, and the indices left
    over.

    ``batches``: the tokens of each. Every group ends with the batch that fills it.
    """
    whole: list[list[int]] = []
    group: list[int] = []
    held: set[int] = set()
    for place, tokens in enumerate(batches):
        group.append(place)
        held.update(tokens)
        if len(held) >= min_tokens:
            whole.append(group)
            group, held = [], set()
    return whole, group


@dataclass
class Accumulator:
    """Holds a client's updates back until they contain at least ``min_tokens`` different tokens, then returns their mean.

    For a client that computes its own updates (weights after local training minus weights before, or gradients): ``sent =
    held.add(update, tokens, weight=texts)`` is None while the client should send nothing. ``total``, ``tokens`` and
    ``weight`` are the whole state between two rounds. A repeated text adds no new tokens and does not count again.
    """

    min_tokens: int
    tokens: set[int] = field(default_factory=set)
    weight: float = 0.0
    total: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.min_tokens < 1:
            raise InputError(f"{NAME}: {self.min_tokens} tokens; expected at least 1")

    def add(self, update: Gradients, tokens: Collection[int], *, weight: float = 1.0) -> Gradients | None:
        """Add an update computed on texts with these ``tokens``, as counted by ``tokens_in``. Returns the weighted mean of
        all held updates once there are enough tokens."""
        if not weight > 0:
            raise InputError(f"{NAME}: an update of weight {weight}; expected a number above 0")
        if self.total and {n: t.shape for n, t in self.total.items()} != {n: u.shape for n, u in update.items()}:
            raise InputError(f"{NAME}: the update's tensors differ from those held; expected updates of the same model")
        for name, entries in update.items():
            part = entries.detach() * weight
            self.total[name] = self.total[name] + part if name in self.total else part
        self.tokens, self.weight = self.tokens | set(tokens), self.weight + weight
        if len(self.tokens) < self.min_tokens:
            return None
        mean = {name: entries / self.weight for name, entries in self.total.items()}
        self.tokens, self.weight, self.total = set(), 0.0, {}
        return mean
