"""Sums over the entries of a gradient that is given by factors, block by block: the gradient is never formed whole.

What L1 and masks of visible entries ask for has no short form in the factors. Each block of rows is formed while it fits the
processor's cache, and its slopes by the factors are taken at once, so nothing of it is kept for the backward pass. A GPU is
slow at many small products: there the gradients of several candidates are formed whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Entries that are formed at a time."""

WIDE = 1 << 26
"""The same on a GPU."""


class _Entrywise(torch.autograd.Function):
    """The sums of one term over the entries of ``delta^T x``, ``(candidates,)``; differentiable once."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, x: Tensor, mask: Tensor | None, target: Tensor | None) -> Tensor:
        ctx.power = 2 if target is None else 1
        if delta.is_cuda:
            count = max(1, WIDE // (delta.shape[-1] * x.shape[-1]))
            parts = [_whole(d, y, mask, target) for d, y in zip(torch.split(delta, count), torch.split(x, count))]
            sums, *slopes = (torch.cat(found) for found in zip(*parts))
        else:
            sums, slopes = _by_blocks(delta, x, mask, target, any(ctx.needs_input_grad))
        ctx.save_for_backward(*slopes)
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_delta, by_x = ctx.saved_tensors
        slope = (ctx.power * slope)[:, None, None]
        return slope * by_delta, slope * by_x, None, None


def _by_blocks(
    delta: Tensor, x: Tensor, mask: Tensor | None, target: Tensor | None, sloped: bool
) -> tuple[Tensor, list[Tensor]]:
    """The sums and, if ``sloped``, the slopes by ``delta`` and ``x``: of squares half of them."""
    sums = delta.new_zeros(len(delta))
    slopes = [torch.zeros_like(delta), torch.zeros_like(x)] if sloped else []
    outputs = max(1, BLOCK // x.shape[-1])
    for k in range(len(delta)):
        for begin in range(0, delta.shape[-1], outputs):
            rows = slice(begin, begin + outputs)
            left = delta[k, :, rows]
            own = left.T @ x[k]
            sums[k] += _term(own, None if mask is None else mask[rows], None if target is None else target[rows])
            if sloped:
                slopes[0][k, :, rows] = x[k] @ own.T
                slopes[1][k].addmm_(left, own)
    return sums, slopes


def _whole(delta: Tensor, x: Tensor, mask: Tensor | None, target: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """As ``_by_blocks``, of whole gradients."""
    own = delta.mT @ x
    return _term(own, mask, target), x @ own.mT, delta @ own


def _term(own: Tensor, mask: Tensor | None, target: Tensor | None) -> Tensor:
    """The sums of one term over gradients ``own`` ``(..., outputs, inputs)``, which become its slopes by their entries: of
    squares half of them."""
    if mask is not None:
        own *= mask
    if target is None:
        entries = own.flatten(-2)
        squared: Tensor = torch.linalg.vecdot(entries, entries)  # of one gradient a dot product, which reads it once
        return squared
    own -= target
    sums = own.abs().sum((-2, -1))
    own.sign_()
    if mask is not None:
        own *= mask
    return sums


def squares(delta: Tensor, x: Tensor, mask: Tensor) -> Tensor:
    """Sum of the squares of the entries of ``delta^T x`` that ``mask`` ``(outputs, inputs)`` shows, ``(candidates,)``.

    ``delta`` is ``(candidates, tokens, outputs)``, ``x`` ``(candidates, tokens, inputs)``.
    """
    found: Tensor = _Entrywise.apply(delta, x, mask, None)  # type: ignore[no-untyped-call]
    return found


def deviations(delta: Tensor, x: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Sum of the absolute deviations of the entries of ``delta^T x``, 0 outside ``mask``, from ``target``, by candidate.

    ``target`` and ``mask`` are ``(outputs, inputs)``; ``delta`` and ``x`` as in ``squares``.
    """
    found: Tensor = _Entrywise.apply(delta, x, mask, target)  # type: ignore[no-untyped-call]
    return found
