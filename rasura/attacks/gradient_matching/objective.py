"""Distances between candidates' gradients and the observed one, and the losses that the victim may have used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rasura.attacks.gradient_matching.factors import Factor

Kind = Literal["l2", "l2+l1", "cosine", "global-cosine"]

NEGLIGIBLE = 1e-6
"""Parameters whose observed gradient is smaller than this share of the largest have no direction to match."""

BLOCK = 2**17
"""Entries of one candidate's weight gradient that exist at once where entries are needed: half a megabyte in float32."""


class _Entries(torch.autograd.Function):
    """``sum(mask * ((delta^T x - target)^2 + alpha |delta^T x - target|))`` for each candidate, block by block.

    With ``S`` the slope by the entries, the slopes by the factors are ``x S^T`` and ``delta S``: small, and all that is kept.
    """

    @staticmethod
    def forward(ctx: Any, delta: Tensor, x: Tensor, target: Tensor, mask: Tensor | None, alpha: float) -> Tensor:
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        value = delta.new_zeros(len(delta))
        by_delta, by_x = torch.empty_like(delta), torch.zeros_like(x)
        step = max(1, BLOCK // x.shape[2])
        for k in range(len(delta)):
            for first in range(0, delta.shape[2], step):
                rows = slice(first, first + step)
                part = delta[k, :, rows]
                gap = torch.addmm(target[rows], part.T, x[k], beta=-1)
                if mask is not None:
                    gap *= mask[rows]
                value[k] += torch.dot(gap.flatten(), gap.flatten())
                if alpha:
                    value[k] += alpha * torch.linalg.vector_norm(gap, 1)
                if wanted:
                    slope = gap.sign().mul_(alpha).add_(gap, alpha=2) if alpha else gap.mul_(2)
                    by_delta[k, :, rows] = x[k] @ slope.T
                    by_x[k] += part @ slope
        ctx.save_for_backward(by_delta, by_x)
        return value

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch does not type it
    def backward(ctx: Any, weight: Tensor) -> tuple[Tensor | None, ...]:
        by_delta, by_x = ctx.saved_tensors
        return weight[:, None, None] * by_delta, weight[:, None, None] * by_x, None, None, None


def _gap(factor: Factor, target: Tensor, mask: Tensor | None, alpha: float) -> Tensor:
    """Squared plus ``alpha`` times absolute distance from ``target`` over visible entries, ``(candidates,)``."""
    if factor.x is not None:
        value: Tensor = _Entries.apply(factor.delta, factor.x, target, mask, alpha)  # type: ignore[no-untyped-call]
        return value
    gap = factor.delta - target if mask is None else (factor.delta - target) * mask
    return gap.square().sum(1) + alpha * gap.abs().sum(1)


def _square(factor: Factor, mask: Tensor | None, target: Tensor) -> Tensor:
    """Squared norm of each candidate's visible entries; only hidden entries make it need the entries themselves."""
    return factor.square() if mask is None else _gap(factor, torch.zeros_like(target), mask, 0.0)


def distance(
    factors: Mapping[str, Factor],
    observed: Mapping[str, Tensor],
    kind: Kind,
    *,
    alpha: float = 0.0,
    visible: Mapping[str, Tensor] | None = None,
    rescale: bool = False,
) -> Tensor:
    """Distance of each candidate from ``observed``, ``(candidates,)``, summed over parameters.

    ``l2``: squared L2 (DLG). ``l2+l1``: plus ``alpha`` times L1 (TAG). ``cosine``: mean over parameters of 1 - cosine (LAMP);
    ``global-cosine``: 1 - cosine of all parameters as one vector (Geiping et al. 2020). Entries outside ``visible`` are left
    out of both sides (``observed`` is zero there). L1 and hidden entries need the weight gradients' entries: they are formed
    ``BLOCK`` at a time and never kept; everything else comes from Gram matrices.

    ``rescale``: compare up to a scale, for a message that was clipped. Each candidate's gradient is multiplied by its
    least-squares scale, which is held fixed in the slopes (at the best scale it does not matter to squared distances).
    """
    masks = visible or {}
    if rescale and kind in ("l2", "l2+l1"):
        factors = _rescaled(factors, observed, masks)
    if kind == "cosine":
        # Some gradients are zero but for rounding (attention's key bias): their direction says nothing.
        largest = max(float(observed[n].norm()) for n in factors)
        factors = {n: f for n, f in factors.items() if float(observed[n].norm()) > NEGLIGIBLE * largest}
    terms, squares, inners = [], [], []
    for name, factor in factors.items():
        target, mask = observed[name], masks.get(name)
        if kind == "l2+l1" or (kind == "l2" and mask is not None):
            terms.append(_gap(factor, target, mask, alpha if kind == "l2+l1" else 0.0))
            continue
        square, inner, size = _square(factor, mask, target), factor.inner(target), target.square().sum()
        if kind == "l2":
            terms.append(square - 2 * inner + size)
        elif kind == "cosine":
            terms.append((1 - inner / (square * size).clamp_min(1e-30).sqrt()) / len(factors))
        else:
            squares.append(square)
            inners.append(inner)
    if kind == "global-cosine":
        size = torch.stack([observed[n].square().sum() for n in factors]).sum()
        return 1 - torch.stack(inners).sum(0) / (torch.stack(squares).sum(0) * size).clamp_min(1e-30).sqrt()
    return torch.stack(terms).sum(0)


def _rescaled(
    factors: Mapping[str, Factor], observed: Mapping[str, Tensor], masks: Mapping[str, Tensor]
) -> Mapping[str, Factor]:
    with torch.no_grad():
        square = torch.stack([_square(f, masks.get(n), observed[n]) for n, f in factors.items()]).sum(0)
        inner = torch.stack([f.inner(observed[n]) for n, f in factors.items()]).sum(0)
        size = torch.stack([observed[n].square().sum() for n in factors]).sum()
        # A candidate that points away would get scale 0, and no slope to turn by.
        least = 0.01 * (size / square.clamp_min(1e-30)).sqrt()
        scale = torch.maximum(inner / square.clamp_min(1e-30), least)
    return {n: f.scaled(scale) for n, f in factors.items()}


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the batch of the cross-entropy with ``targets`` (probabilities), both ``(candidates, batch, classes)``."""
    return -(targets * torch.log_softmax(logits, -1)).sum(-1).mean(-1)


def soft_next_token_loss(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """A causal model's loss with ``targets`` (probabilities): the mean over all predicted tokens of the batch.

    ``logits`` and ``targets`` are ``(candidates, batch, length, vocabulary)``, ``mask`` is ``(batch, length)``. Position t
    predicts token t + 1; padding is not predicted; texts of unequal length weigh by their tokens, as in Hugging Face.
    """
    counted = mask[:, 1:].to(logits.dtype)
    each = -(targets[:, :, 1:] * torch.log_softmax(logits[:, :, :-1], -1)).sum(-1)
    return (each * counted).sum((1, 2)) / counted.sum()
