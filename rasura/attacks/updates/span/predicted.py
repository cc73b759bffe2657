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

AT_ONCE = 2**25
"""Numbers that the directions of the prefixes of one run have over the vocabulary, at most."""

CLEAR, INSIDE, SIDE_BY_SIDE = 4.0, 0.1, 8
"""How many times farther outside the column space the next best token lies than those that clearly follow; the farthest
outside that one of these lies; and the most of them."""


@dataclass(frozen=True)
class Head:
    """The output ``layer`` of a model, with what it read and gave at the last position of each prefix."""

    layer: nn.Module
    states: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Ran:
    """Of prefixes: the ``logits`` ``(prefixes, vocabulary)`` of their last position, and the ``output`` of a layer before
    them. With the ``head``, the logits were computed of its ``scores`` alone."""

    logits: Tensor
    output: Tensor
    head: Head | None = None

    def sides(self, directions: Tensor) -> Tensor:
        """Of each next token, ``<delta, u>`` for the ``directions`` u ``(k, outputs)``: ``(prefixes, vocabulary, k)``.
        ``delta``: the gradient of its loss by the layer's output at the last position.

        Of the whole vocabulary at once: ``<J^T (p - e_y), u>`` is ``<p, J u> - (J u)_y``. ``J u`` passes the head as one
        product for all directions. Pushed through it by autograd, each direction would read all its weights.
        """
        outputs = directions.shape[1]
        steps = torch.zeros(len(directions), *self.output.shape, dtype=self.output.dtype)
        steps.view(len(directions), len(self.logits), -1, outputs)[:, :, -1] = directions.to(steps)[:, None]
        if self.head is None:
            pushed = _pushed(self.logits, self.output, steps)
        else:
            inner = _pushed(self.head.states, self.output, steps)
            with torch.no_grad():
                flat = inner.reshape(-1, inner.shape[-1])
                through = self.head.layer(flat) - self.head.layer(torch.zeros_like(flat[:1]))
            pushed = _pushed(self.logits, self.head.scores, through.view(len(directions), *self.head.scores.shape))
        expected = torch.einsum("pv,kpv->kp", self.logits.detach().softmax(1), pushed)
        return (expected[..., None] - pushed).permute(1, 2, 0)


def _pushed(end: Tensor, start: Tensor, steps: Tensor) -> Tensor:
    """How ``end`` changes with each of the ``steps`` ``(k, *start.shape)`` of ``start``: ``(k, *end.shape)``. The product
    with the Jacobian, as the slope of that with its transpose."""
    ones = torch.zeros_like(end, requires_grad=True)
    (back,) = torch.autograd.grad(end, start, ones, create_graph=True)
    (pushed,) = torch.autograd.grad(back, ones, steps, is_grads_batched=True, retain_graph=True)
    return pushed.detach()


def run(model: nn.Module, lin: Linear, tokens: Tensor, *, head: Linear | None = None) -> Ran:
    """``model`` on the prefixes ``tokens`` ``(prefixes, length)``. Its ``head``, if given, runs at the last position
    alone."""
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    scores: list[Tensor] = []

    def keep(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        outputs.append(out.detach().requires_grad_(True))
        return outputs[-1].clone()  # Falcon adds to it in place

    def last(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        if not given:
            return given
        states.append(given[0][..., -1:, :])
        return (states[-1], *given[1:])

    def score(_: nn.Module, __: tuple[Any, ...], out: Tensor) -> Tensor:
        scores.append(out.detach().requires_grad_(True))
        return scores[-1].clone()

    handles = [model.get_submodule(lin.module).register_forward_hook(keep)]
    if head is not None:
        handles.append(model.get_submodule(head.module).register_forward_pre_hook(last))
        if head != lin:
            handles.append(model.get_submodule(head.module).register_forward_hook(score))
    try:
        with torch.enable_grad():
            logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).logits[:, -1]
    finally:
        for handle in handles:
            handle.remove()
    if head is None or not states or not scores:
        return Ran(logits, outputs[-1])
    return Ran(logits, outputs[-1], Head(model.get_submodule(head.module), states[-1], scores[-1]))


class Predicted:
    """Proposes tokens behind prefixes, by the column ``space`` of the gradient of ``lin``."""

    def __init__(self, inputs: Inputs, lin: Linear, space: RowSpace) -> None:
        self.model, self.lin, self.head, self.rank = inputs.model, lin, inputs.parts.head, space.rank
        within = torch.randn(space.rank, DIRECTIONS, dtype=torch.float64, generator=generator(0, "predicted"))
        across = torch.randn(DIRECTIONS, len(space.basis), dtype=torch.float64, generator=generator(1, "predicted"))
        self.directions = torch.cat([space.outside(across), (space.basis @ within).T])
        self.together = max(
            1, AT_ONCE // (len(self.directions) * len(inputs.model.get_parameter(inputs.parts.word_embedding)))
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """The ids that are likely behind ``tokens`` ``(length,)``, each once."""
        (logits,), (outside,) = self.outside(tokens[None])
        nearest = outside.topk(min(NEAREST, len(outside)), largest=False).indices
        likeliest = logits.topk(min(LIKELIEST if self.clear(outside) else UNCLEAR, len(logits))).indices
        return torch.tensor(sorted({*nearest.tolist(), *likeliest.tolist()}))

    def outside(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The logits of what follows the prefixes ``tokens`` ``(prefixes, length)``, and how much of each one's ``delta``
        lies outside the column space, by what lies within: both ``(prefixes, vocabulary)``. Rounding alone leaves 1e-5 of a
        true one outside."""
        logits, shares = list[Tensor](), list[Tensor]()
        for some in torch.split(tokens, self.together):
            found = run(self.model, self.lin, some, head=self.head)
            along = found.sides(self.directions)
            outside, inside = along[..., :DIRECTIONS].norm(dim=-1), along[..., DIRECTIONS:].norm(dim=-1)
            logits.append(found.logits.detach())
            shares.append(outside / inside.clamp_min(1e-30))
        return torch.cat(logits), torch.cat(shares)

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
    tokens = torch.tensor([[5, 6, 7]])
    found = run(model, lin, tokens)
    if found.output.shape[:-1] != tokens.shape:
        return False
    (back,) = torch.autograd.grad(found.logits.sum(), found.output)
    return bool(back[0, -1].any()) and not bool(back[0, :-1].any())
