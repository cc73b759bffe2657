"""Tied embeddings: separating the rows of input words from the output layer's part of the same gradient.

The gradient of a tied embedding is the input part, a row for every word of the batch, plus the output part
``sum_t (p_t - onehot_t) h_t^T``, which fills every row, but only with combinations of the last hidden states h_t, one for
each token that enters the loss. Rows outside their span hold an input word.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from rasura.core.interfaces import AttackFailed, NotApplicable

_OUTSIDE = 1e-4
"""Share of a row outside the output part's span above which the row holds an input word (noise: 1e-6)."""

_WEAKEST = (0.5, 0.75, 0.9)
"""Shares of the rows, weakest first, from which the span is taken: the half is free of input words, more is richer."""

_ENOUGH = 4096
"""Rows that fix the span; a large vocabulary has ten times as many."""


def without_output_part(gradient: Tensor, mask: Tensor | None, rng: Generator) -> tuple[Tensor, Tensor]:
    """An orthonormal basis ``(hidden, rank)`` of the output part's rows, and the indices of the rows that lie outside it.

    The span is taken from the weakest rows: an input word's row is far stronger than that of a word which the model merely
    thought possible. There are at most as many input words as tokens in the loss, which is the span's rank; anything else is
    refused. Raises ``NotApplicable`` where entries are hidden; ``AttackFailed`` where noise fills the space, or the batch
    holds as many tokens as the model has dimensions.
    """
    if mask is not None and not bool(mask.all()):
        raise NotApplicable("the word embedding is tied to the output layer and part of its gradient is hidden")
    norms = gradient.float().norm(dim=1)
    unit = gradient.float() / norms.clamp_min(1e-30)[:, None]
    order = norms.argsort()
    order = order[norms[order] > 0]
    width = gradient.shape[1]
    for share in _WEAKEST:
        weak = order[: int(share * len(order))]
        weak = weak[torch.randperm(len(weak), generator=rng)[:_ENOUGH]]
        basis = _span(unit[weak])
        narrow = basis.float()
        outside = (norms > 0) & ((unit - (unit @ narrow) @ narrow.T).norm(dim=1) > _OUTSIDE)
        if basis.shape[1] < width and 0 < int(outside.sum()) <= basis.shape[1]:
            return basis, outside.nonzero().flatten()
    raise AttackFailed(
        f"the tied output layer's part cannot be separated: it fills {width} dimensions or {len(order)} rows "
        "(noise, or as many tokens as dimensions)"
    )


def _span(rows: Tensor) -> Tensor:
    """An orthonormal basis ``(hidden, rank)`` of unit ``rows`` ``(count, hidden)``, up to float32's rounding."""
    _, values, directions = torch.linalg.svd(rows.double(), full_matrices=False)
    floor = torch.finfo(torch.float32).eps * (rows.shape[0] ** 0.5 + rows.shape[1] ** 0.5)
    basis: Tensor = directions[: int((values > floor).sum())].T
    return basis
