"""The inputs of the last attention for all tokens of one text, from what each of its heads reads.

Behind the last block only the read position counts, so each head leaves one outer product in every gradient. With the inputs
``s_j``, the read one ``s``, a head's query ``q``, its attention weights ``a_j`` and the gradient ``d`` of what it gathers::

    dW_query = e s^T,   d_bias = e        gives s
    dW_value = d u^T,   d_bias = d        gives u = sum_j a_j s_j, since the weights add up to one
    dW_key   = q w^T / sqrt(width)        gives w = sum_j a_j (g_j - g) s_j, with g_j = d^T W_value s_j and g = sum_j a_j g_j

The inputs lie in the row space, so each is as many numbers as the text has tokens. Every head then gives two equations for
each of these numbers, and the weights depend on the inputs alone. Texts of up to twice as many tokens as there are heads can
be solved by least squares. The solution is the set of inputs, in no order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.updates.span.rows import RowSpace
from rasura.core.values import Observation
from rasura.victims.models import Block, attention_heads

NEAR = 1e-7
"""Sum of squared relative errors from which a start that hardly improves any more has ended: float32 leaves 1e-12."""

TRUSTED = 0.03
"""Standard error, relative to the inputs, up to which a solution is taken. Where all heads attend alike, none is."""

STEPS = 200
"""Most steps of one start."""

DAMPING = 1e-2
"""Damping that a start begins with, relative to the diagonal of the normal matrix."""


@dataclass(frozen=True)
class Equations:
    """In coordinates of the row space, all float64: the ``read`` input ``(rank,)``; of each head what it gathers, ``means``,
    and ``spreads``, ``u`` and ``w`` above; ``queries``, whose products with inputs are attention's logits, and ``pulls``,
    whose products with inputs are ``g_j``, each ``(heads, rank)``."""

    read: Tensor
    means: Tensor
    spreads: Tensor
    queries: Tensor
    pulls: Tensor

    def __call__(self, others: Tensor) -> tuple[Tensor, Tensor]:
        """Relative errors ``(equations,)`` of the inputs ``others`` ``(tokens - 1, rank)``, and their derivatives by the
        flattened ``others``."""
        inputs = torch.cat([self.read[None], others])
        heads, rank = self.means.shape
        weights = torch.softmax(self.queries @ inputs.T, 1)
        gathered, pulled = weights @ inputs, self.pulls @ inputs.T
        pulled = pulled - (weights * pulled).sum(1, keepdim=True)
        spread = (weights * pulled) @ inputs
        one = torch.eye(rank, dtype=inputs.dtype)
        away, queries, pulls = inputs - gathered[:, None], self.queries[:, None, None], self.pulls[:, None, None]
        scale = weights[:, :, None, None]
        by_means = scale * (one + away[..., None] * queries)
        turned = (pulled[..., None] * away - spread[:, None])[..., None] * queries
        by_spreads = scale * (turned + away[..., None] * pulls + pulled[..., None, None] * one)
        sizes = torch.cat([self.means.norm().expand(heads), self.spreads.norm(dim=1)])
        errors = torch.cat([gathered - self.means, spread - self.spreads]) / sizes[:, None]
        slopes = torch.cat([by_means, by_spreads])[:, 1:] / sizes[:, None, None, None]
        return errors.flatten(), slopes.transpose(1, 2).reshape(2 * heads * rank, -1)


def equations(seen: Observation, space: RowSpace, block: Block) -> Equations | None:
    """What the gradients of the last ``block``'s attention say of the inputs of one text; None where they are not all
    visible, are of another kind of attention, or are too few for so many tokens."""
    heads, layers = attention_heads(seen.model), block.qkv
    names = [name for lin in layers for name in (lin.weight, lin.bias)]
    if len(layers) != 3 or space.rank - 1 >= 2 * heads or any(name not in seen.gradients for name in names):
        return None
    if any(name in seen.visible and not bool(seen.visible[name].all()) for name in names if name is not None):
        return None
    matrices, biases = ([seen.gradients[n].double() for n in names[k::2] if n is not None] for k in (0, 1))
    if len({m.shape for m in matrices}) != 1 or len(biases[0]) % heads or any(lin.transposed for lin in layers):
        return None
    query, key, value = (seen.model.get_parameter(lin.weight).detach().double() for lin in layers)
    shift = seen.model.get_parameter(names[1] or "").detach().double()
    basis, width = space.basis, len(shift) // heads
    read = _divided(biases[0], matrices[0])
    split = [x.view(heads, width, *x.shape[1:]) for x in (query @ read + shift, biases[2], *matrices[1:], key, value)]
    queries, gathered, by_key, by_value, key, value = split
    found = Equations(
        read @ basis,
        torch.stack([_divided(d, m) for d, m in zip(gathered, by_value)]) @ basis,
        width**0.5 * torch.stack([_divided(q, m) for q, m in zip(queries, by_key)]) @ basis,
        torch.einsum("hi,hij->hj", queries, key) @ basis / width**0.5,
        torch.einsum("hi,hij->hj", gathered, value) @ basis,
    )
    finite = all(bool(x.isfinite().all()) for x in (found.read, found.means, found.spreads))
    return found if finite and bool((found.spreads.norm(dim=1) > 0).all()) else None


def _divided(column: Tensor, product: Tensor) -> Tensor:
    """``row`` of the ``product`` ``column row^T``."""
    return (column @ product) / (column @ column)


def solve(wanted: Equations, start: Tensor) -> Tensor | None:
    """The inputs ``(tokens - 1, rank)`` that meet ``wanted``, from ``start`` of that shape, by the steps of Levenberg and
    Marquardt. None where they end elsewhere, or where the errors that are left leave more doubt than ``TRUSTED``."""
    x, damping = start, DAMPING
    errors, slopes = wanted(x)
    for _ in range(STEPS):
        cost, normal = float(errors @ errors), slopes.T @ slopes
        damped = normal + damping * torch.diag(normal.diagonal() + 1e-12)
        moved = x - torch.linalg.solve_ex(damped, slopes.T @ errors).result.view_as(x)
        after = wanted(moved)
        left = float(after[0] @ after[0])
        if left < cost:
            x, (errors, slopes), damping = moved, after, max(damping / 3, 1e-12)
        else:
            damping *= 4
        if damping > 1e8 or (cost < NEAR and 0.99 * cost < left):
            break
    return x if _doubt(errors, slopes) < TRUSTED * float(x.norm()) else None


def _doubt(errors: Tensor, slopes: Tensor) -> float:
    """The standard error of a solution by least squares that leaves ``errors``; infinite where these say nothing."""
    spare = slopes.shape[0] - slopes.shape[1]
    spread = torch.linalg.svdvals(slopes)
    if spare < 1 or not float(spread[-1]) > 0:
        return float("inf")
    doubt: Tensor = errors.norm() * spread.pow(-2).sum().sqrt() / spare**0.5
    return float(doubt)
