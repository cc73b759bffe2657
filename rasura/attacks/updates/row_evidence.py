"""Whether the rows of an embedding's gradient are those of words, or noise that was made sparse before it was sent."""

from __future__ import annotations

import torch
from torch import Tensor

from rasura.attacks.updates.span.rows import block_spaces, visible_blocks
from rasura.core.updates import announced_update
from rasura.core.values import Grant, Observation
from rasura.victims.positions import longest_text

FLOOR = 1e-9
"""Rows below this fraction of the largest row count as zero."""

FILLED = 0.9
"""Least fraction of a row's visible entries that are not zero. The gradient of a word's embedding is zero nowhere; what is
left of noise by its largest entries fills few entries of a row."""


def max_tokens(seen: Observation) -> int:
    """How many tokens a batch can hold: texts as long as the model allows, 64 of them where their number is not known."""
    return (seen.batch_size if Grant.BATCH_SIZE in seen else 64) * longest_text(seen.model)


def is_noisy(gradient: Tensor, max_count: int) -> bool:
    """Whether something filled the zero rows of a word embedding's gradient; ``max_count``: tokens that a batch can hold."""
    norms = gradient.norm(dim=1)
    return int((norms > FLOOR * norms.max()).sum()) > min(max_count, 0.8 * len(norms))


def rows_of_words(seen: Observation, index: Tensor, gradient: Tensor, mask: Tensor | None) -> bool:
    """Whether the rows ``index`` of the word embedding's ``gradient`` are believed to be the words of the batch.

    Each is filled. Most other rows are visible and zero: where a mask shows the largest entries alone, the others may hold
    anything. And there are no more words than the row space of block 0 holds, where that block is visible; AdamW and decay
    leave none.
    """
    shown = torch.ones_like(gradient[index], dtype=torch.bool) if mask is None else mask[index]
    filled = (gradient[index] * shown != 0).sum(1) >= FILLED * shown.sum(1)
    if not bool(filled.all()):
        return False
    if mask is not None:
        others = torch.ones(len(gradient), dtype=torch.bool)
        others[index] = False
        if 2 * int(mask[others].any(1).sum()) <= int(others.sum()):
            return False
    first = [block for block in visible_blocks(seen) if block.index == 0]
    local = announced_update(seen)
    if not first or local.adaptive or local.round.decay:
        return True
    space = block_spaces(seen, first).get(0)
    return space is not None and len(index) <= space.rank
