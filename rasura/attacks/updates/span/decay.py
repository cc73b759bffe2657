"""Weight decay in the change that SGD made: a multiple of each weight, which fills row spaces."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rasura.attacks.updates.span.rows import visible_blocks, visible_gradients
from rasura.core.updates import announced_update
from rasura.core.values import Observation
from rasura.victims.models import Linear

ROUNDS, SETTLED = 5, 1e-5
"""Rounds at most in which the factor is fitted, and its relative change at which it counts as found."""

EXPLAINED = 0.5
"""Share of what the decay moved by which rounding may change it."""


def less_decay(seen: Observation) -> Observation:
    """``seen`` less the weight decay in its matrices, where one factor of a layer's weights is what hides its row space.

    A step of SGD changes a weight by ``c W`` beside its gradient, which has few directions. So ``c`` is the factor at which
    most directions vanish. AdamW divides gradients by their sizes: its changes have no row space.
    """
    update = announced_update(seen)
    if update.adaptive or (seen.message.sign == "known" and not (update.kind != "fedsgd" and update.round.decay)):
        return seen
    layers = (lin for block in visible_blocks(seen) for lin in block.qkv)
    told = next((one for lin in layers if (one := _square(seen, lin)) is not None), None)
    factor = None if told is None else decay_of(*told)
    if factor is None:
        return seen
    weights = dict(seen.model.named_parameters())
    less = {n: g - factor * weights[n].detach().to(g) for n, g in seen.gradients.items() if g.dim() > 1 and n in weights}
    return replace(seen, message=replace(seen.message, gradients={**seen.gradients, **less}))


def _square(seen: Observation, lin: Linear) -> tuple[Tensor, Tensor] | None:
    """The change and the weights of a layer with no fewer outputs than inputs, ``(outputs, inputs)`` in float64; None for
    any other, and where it is not seen whole."""
    for change in visible_gradients(seen, [lin]):
        if bool(change.any()) and change.shape[0] >= change.shape[1]:
            weights = seen.model.get_parameter(lin.weight).detach().to(change.device)
            return change.double(), (weights.T if lin.transposed else weights).double()
    return None


def decay_of(change: Tensor, weights: Tensor) -> float | None:
    """The factor ``c`` for which ``change - c * weights`` ``(outputs, inputs)`` leaves least in half of the directions; None
    where these are not mostly explained by ``c * weights``."""
    few = change.shape[1] // 2
    if few < 1:
        return None
    factor = float((change * weights).sum() / weights.square().sum())
    for _ in range(ROUNDS):
        # Between directions that no delta and no input has, the factor's error is all that is left.
        u, _, vh = torch.linalg.svd(change - factor * weights, full_matrices=False)
        moved, weight = (u[:, -few:].T @ x @ vh[-few:].T for x in (change, weights))
        before, factor = factor, float((moved * weight).sum() / weight.square().sum())
        if abs(factor - before) <= SETTLED * abs(factor):
            break
    left = float((moved - factor * weight).norm())
    return factor if left < EXPLAINED * abs(factor) * float(weight.norm()) else None
