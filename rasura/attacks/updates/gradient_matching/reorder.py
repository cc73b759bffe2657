"""LAMP's discrete half: random changes of order, kept when the gradient and the language prior like them better."""

from __future__ import annotations

import torch
from torch import Tensor


def orders(free: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """``count`` random orders of positions, ``(count, batch, length)`` indices; ``free``: ``(batch, length)`` bool.

    Each changes one text, by one of LAMP's four transformations (Balunovic et al. 2022), at even odds: two tokens
    swapped, one token moved, a run of tokens moved, a beginning moved to the end. Other positions stay where they are.
    """
    batch, length = free.shape
    out = torch.arange(length).repeat(count, batch, 1)

    def draw(below: int) -> int:
        return int(torch.randint(below, (), generator=rng))

    longer = [b for b in range(batch) if int(free[b].sum()) > 1]
    for k in range(count if longer else 0):
        text = longer[draw(len(longer))]
        spots = free[text].nonzero().flatten()
        order = list(range(len(spots)))
        kind = draw(4)
        if kind == 0:
            i, j = draw(len(order)), draw(len(order))
            order[i], order[j] = order[j], order[i]
        elif kind == 3:
            cut = draw(len(order))
            order = order[cut:] + order[:cut]
        else:
            begin = draw(len(order))
            end = begin + 1 if kind == 1 else begin + 1 + draw(len(order) - begin)
            run, rest = order[begin:end], order[:begin] + order[end:]
            at = draw(len(rest) + 1)
            order = rest[:at] + run + rest[at:]
        out[k, text, spots] = spots[torch.tensor(order)]
    return out


def shuffles(free: Tensor, count: int, rng: torch.Generator) -> Tensor:
    """``count`` orders, as in ``orders``, that shuffle the free positions of every text."""
    out = torch.arange(free.shape[1]).repeat(count, len(free), 1)
    for row in range(len(free)):
        spots = free[row].nonzero().flatten()
        for k in range(count):
            out[k, row, spots] = spots[torch.randperm(len(spots), generator=rng)]
    return out


def reordered(x: Tensor, order: Tensor) -> Tensor:
    """``x`` ``(..., batch, length, hidden)`` with its positions taken in ``order`` ``(..., batch, length)``, which may lie
    elsewhere."""
    return x.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]).to(x.device))
