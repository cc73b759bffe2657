"""Nearest tokens by the cosine of their embeddings, exactly, block by block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

GROUP = 32
"""Columns whose maximum is taken first: the k largest of a row stand in the k groups of largest maximum."""

BLOCK_BYTES = 1 << 26
"""Size of a block of cosines, which should stay near the cache."""


def unit_rows(table: Tensor) -> Tensor:
    """``table`` ``(tokens, hidden)`` with rows of norm 1, float32; rows of zeros stay."""
    rows = table.detach().float()
    return nn.functional.normalize(rows, dim=1)


def neighbours(table: Tensor, k: int, usable: Tensor, upto: int | None = None) -> Tensor:
    """The ``k`` ``usable`` tokens nearest to each token by cosine, nearest first: ``(tokens, k)`` int32.

    ``table``: ``(tokens, hidden)``; ``usable``: bool, ``(tokens,)``; ``upto``: of the first so many tokens only. No token is
    its own neighbour. At no time are more than ``BLOCK_BYTES`` of cosines held. Raises ``ValueError`` where fewer than ``k``
    others are usable.
    """
    if int(usable.sum()) <= k:
        raise ValueError(f"{int(usable.sum())} usable tokens have no {k} neighbours each")
    rows = unit_rows(table)
    count = len(rows)
    groups = -(-count // GROUP)
    banned = torch.zeros(groups * GROUP)
    banned[:count] = torch.where(usable, 0.0, -torch.inf)
    banned[count:] = -torch.inf
    asked = count if upto is None else min(upto, count)
    out = torch.empty(asked, k, dtype=torch.int32)
    size = max(1, BLOCK_BYTES // (4 * groups * GROUP))
    cosines = torch.empty(size, groups * GROUP)
    offsets = torch.arange(GROUP)
    for start in range(0, asked, size):
        some = rows[start : min(start + size, asked)]
        block = cosines[: len(some)]
        block[:] = banned
        torch.addmm(block[:, :count], some, rows.T, out=block[:, :count])
        block[torch.arange(len(some)), torch.arange(start, start + len(some))] = -torch.inf
        if groups > k:
            grouped = block.view(len(some), groups, GROUP)
            first = grouped.amax(2).topk(k, dim=1, sorted=False).indices
            values = grouped.gather(1, first[:, :, None].expand(-1, -1, GROUP)).flatten(1)
            columns = (first[:, :, None] * GROUP + offsets).flatten(1)
            best = values.topk(k, dim=1).indices
            out[start : start + len(some)] = columns.gather(1, best).int()
        else:
            out[start : start + len(some)] = block.topk(k, dim=1).indices.int()
    return out


def common(near: Tensor, rows: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """For each token of ``rows`` ``(n,)`` and each of its neighbours that is ``asked`` for: how many neighbours both have,
    int32, and whether it is a neighbour of its neighbour, bool; both ``(n, k)``, as is ``asked``; zero elsewhere. ``near``:
    ``(tokens, k)``, the neighbours of all tokens.

    Token by token, since then the marks of one token's neighbours and the rows that are looked up stay in the cache.
    """
    # Indices as numpy takes them, so that no lookup converts them anew; no copy where they are so already.
    table = near.numpy().astype(np.intp, copy=False)
    marks = np.zeros(len(table), dtype=np.uint8)
    shared = np.zeros((len(rows), table.shape[1]), dtype=np.int32)
    back = np.zeros((len(rows), table.shape[1]), dtype=bool)
    for n, (token, some) in enumerate(zip(rows.tolist(), asked.numpy())):
        own = table[token]
        theirs = table[own[some]]
        marks[own] = 1
        shared[n, some] = marks.take(theirs).sum(1, dtype=np.int32)
        marks[own] = 0
        back[n, some] = (theirs == token).any(1)
    return torch.from_numpy(shared), torch.from_numpy(back)
