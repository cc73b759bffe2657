"""Sums over the entries of a gradient that is given by factors, block by block: the gradient is never formed whole.

What L1 and masks of visible entries ask for has no short form in the factors. Each block of rows is formed while it fits the
processor's cache, and its slopes by the factors are taken at once, so nothing of it is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK = 1 << 16
"""Entries that are formed at a time."""


class _Entrywise(torch.autograd.Function):
    """The sums of one term over the entries of ``delta^T x``, ``(candidates,)``; differentiable once."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, x: Tensor, mask: Tensor | None, target: Tensor | None) -> Tensor:
        sloped = any(ctx.needs_input_grad)
        sums = delta.new_zeros(len(delta))
        by_delta, by_x = (torch.zeros_like(delta), torch.zeros_like(x)) if sloped else (None, None)
        outputs = max(1, BLOCK // x.shape[-1])
        for k in range(len(delta)):
            for begin in range(0, delta.shape[-1], outputs):
                rows = slice(begin, begin + outputs)
                left = delta[k, :, rows]
                own = left.T @ x[k]
                if mask is not None:
                    own *= mask[rows]
                if target is None:
                    sums[k] += torch.dot(own.view(-1), own.view(-1))
                else:
                    own -= target[rows]
                    sums[k] += own.abs().sum()
                    own.sign_()
                    if mask is not None:
                        own *= mask[rows]
                if by_delta is not None and by_x is not None:
                    by_delta[k, :, rows] = x[k] @ own.T
                    by_x[k].addmm_(left, own)
        if by_delta is not None and by_x is not None:
            ctx.save_for_backward(by_delta, by_x)
            ctx.power = 2 if target is None else 1
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None, None]:
        by_delta, by_x = ctx.saved_tensors
        slope = (ctx.power * slope)[:, None, None]
        return slope * by_delta, slope * by_x, None, None


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
