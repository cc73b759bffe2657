"""The tokens that may follow a decoder's prefix, told by a layer of the last block that acts on each position alone.

The gradient of such a layer is ``sum_t delta_t x_t^T``, so its column space holds the ``delta`` of every position: ``J^T
(softmax - onehot(next token))``, J the Jacobian of the position's logits by the layer's output. Behind a known prefix, both
the softmax and J are known. So one run of the model tests the whole vocabulary, in place of one run for each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import NARROW, RowSpace, row_space, visible_gradients
from rasura.attacks.updates.span.stand_ins import asks
from rasura.core.rng import generator
from rasura.core.values import Observation
from rasura.victims.models import Linear, parts

DIRECTIONS = 32
"""Random directions outside the column space that a ``delta`` is measured in, and as many within it."""

NEAREST, LIKELIEST = 32, 32
"""Tokens that are proposed: those whose ``delta`` lies nearest to the column space, and those that the model expects. One
that it is sure of has next to no ``delta``."""

UNCLEAR = 1024
"""Tokens that the model expects where none clearly follows: the ``delta`` of texts that share the prefix add up to one."""

CLEAR, INSIDE, SIDE_BY_SIDE = 4.0, 0.1, 8
"""How many times farther outside the column space the next best token lies than those that clearly follow; the farthest
outside that one of these lies; and the most of them."""


@dataclass(frozen=True)
class Ran:
    """Of a prefix: the ``logits`` ``(vocabulary,)`` of its last position, and the ``output`` of a layer before them."""

    logits: Tensor
    output: Tensor

    def sides(self, directions: Tensor) -> Tensor:
        """Of each next token, ``<delta, u>`` for the ``directions`` u ``(k, outputs)``: ``(vocabulary, k)``. ``delta``: the
        gradient of its loss by the layer's output at the last position.

        Of the whole vocabulary at once: ``<J^T (p - e_y), u>`` is ``<p, J u> - (J u)_y``.
        """
        ones = torch.zeros_like(self.logits, requires_grad=True)
        (back,) = torch.autograd.grad(self.logits, self.output, ones, create_graph=True)
        last = back.reshape(-1, directions.shape[1])[-1]
        (pushed,) = torch.autograd.grad(last, ones, directions.to(last), is_grads_batched=True, retain_graph=True)
        return self.logits.detach().softmax(0) @ pushed.T - pushed.T


def run(model: nn.Module, lin: Linear, tokens: Tensor, *, head: Linear | None = None) -> Ran:
    """``model`` on the prefix ``tokens`` ``(length,)``. Its ``head``, if given, runs at the last position alone."""
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        outputs.append(out.detach().requires_grad_(True))
        return outputs[-1].clone()  # Falcon adds to it in place

    def last(_: nn.Module, states: tuple[Any, ...]) -> tuple[Any, ...]:
        return (states[0][..., -1:, :], *states[1:]) if states else states

    handles = [model.get_submodule(lin.module).register_forward_hook(keep)]
    handles += [model.get_submodule(head.module).register_forward_pre_hook(last)] if head else []
    try:
        with torch.enable_grad():
            logits = model(input_ids=tokens[None], attention_mask=torch.ones_like(tokens)[None]).logits[0, -1]
    finally:
        for handle in handles:
            handle.remove()
    return Ran(logits, outputs[-1])


class Predicted:
    """Proposes tokens behind prefixes, by the column ``space`` of the gradient of ``lin``."""

    def __init__(self, inputs: Inputs, lin: Linear, space: RowSpace) -> None:
        self.model, self.lin, self.head = inputs.model, lin, inputs.parts.head
        within = torch.randn(space.rank, DIRECTIONS, dtype=torch.float64, generator=generator(0, "predicted"))
        across = torch.randn(DIRECTIONS, len(space.basis), dtype=torch.float64, generator=generator(1, "predicted"))
        self.directions = torch.cat([space.outside(across), (space.basis @ within).T])

    def __call__(self, tokens: Tensor) -> Tensor:
        """The ids that are likely behind ``tokens`` ``(length,)``, each once."""
        logits, outside = self.outside(tokens)
        nearest = outside.topk(min(NEAREST, len(outside)), largest=False).indices
        likeliest = logits.topk(min(LIKELIEST if self.clear(outside) else UNCLEAR, len(logits))).indices
        return torch.tensor(sorted({*nearest.tolist(), *likeliest.tolist()}))

    def outside(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of what follows ``tokens``, and how much of each one's ``delta`` lies outside the column space, by what
        lies within: both ``(vocabulary,)``. Rounding alone leaves 1e-5 of a true one outside."""
        found = run(self.model, self.lin, tokens, head=self.head)
        along = found.sides(self.directions)
        outside, inside = along[:, :DIRECTIONS].norm(dim=1), along[:, DIRECTIONS:].norm(dim=1)
        return found.logits.detach(), outside / inside.clamp_min(1e-30)

    @staticmethod
    def clear(outside: Tensor) -> list[int]:
        """The ids that clearly follow, by what ``outside`` gives; none where no gap sets some apart."""
        values, order = outside.topk(min(SIDE_BY_SIDE + 1, len(outside)), largest=False)
        times = values[1:] / values[:-1].clamp_min(1e-30)
        last = int(times.argmax())
        return order[: last + 1].tolist() if float(times[last]) >= CLEAR and float(values[last]) < INSIDE else []


def predicted(seen: Observation, inputs: Inputs) -> Predicted | None:
    """``Predicted`` by the last layer of the last block that the adversary sees whole, or else by the output layer; None if
    there is none, or it shows no column space, or the loss is not that of a language model. Layers of few inputs, whose
    gradient has no more columns, come last."""
    known = parts(inputs.model)
    within = f"{known.blocks[-1].module}."
    tried = [lin for lin in reversed(known.linears) if lin.module.startswith(within) and not asks(lin)]
    tried += [known.head] if known.head else []
    matrices = [(lin, g) for lin in tried for g in visible_gradients(seen, [lin])] if seen.task == "causal" else []
    for lin, gradient in sorted(matrices, key=lambda found: found[1].shape[1] <= NARROW):
        if (space := row_space([gradient.T])) is not None and _alone(inputs.model, lin):
            return Predicted(inputs, lin, space)
    return None


def _alone(model: nn.Module, lin: Linear) -> bool:
    """Whether ``lin`` gives one output for each position, on which no other position's logits depend. Keys, values and the
    layers of one of several experts do not."""
    tokens = torch.tensor([5, 6, 7])
    found = run(model, lin, tokens)
    if found.output.shape[:-1] != (1, len(tokens)):
        return False
    (back,) = torch.autograd.grad(found.logits.sum(), found.output)
    return bool(back[0, -1].any()) and not bool(back[0, :-1].any())
