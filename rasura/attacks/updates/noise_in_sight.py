"""Noise that an update shows itself, whether somebody announced it or not."""

from __future__ import annotations

import torch

from rasura.attacks.updates.row_evidence import is_noisy, max_tokens
from rasura.attacks.updates.span.rows import visible_blocks, visible_gradients
from rasura.core.updates import announced_update
from rasura.core.values import Grant, Observation
from rasura.victims.models import parts

UNBALANCED = 1e-2
"""Size of the sum of a softmax head's rows over the head's own: exact gradients leave 1e-7, half precision 1e-3."""

FULL = 1e-2
"""A singular value beyond the rank that the texts' lengths allow, over the largest: rounding leaves 1e-3."""


def shows_noise(seen: Observation) -> bool:
    """Whether ``seen`` holds what no gradient of texts can hold.

    Rows of the word embedding for more words than texts have; a classifier's head whose rows do not add up to zero, as those
    of softmax and one label do; attention gradients of a higher rank than the texts' lengths allow. Local training with
    AdamW or with weight decay is none of these laws' business and shows nothing here.
    """
    local = announced_update(seen)
    if local.adaptive or local.round.decay:
        return False
    return _words(seen) or _head(seen) or _rank(seen)


def _whole(seen: Observation, name: str) -> torch.Tensor | None:
    gradient = seen.whole(name)
    return None if gradient is None or not bool(gradient.any()) else gradient.double()


def _words(seen: Observation) -> bool:
    known = parts(seen.model)
    gradient = _whole(seen, known.word_embedding)
    if gradient is None or (known.tied and seen.task == "causal"):
        return False
    return is_noisy(gradient, sum(seen.lengths) if Grant.LENGTHS in seen else max_tokens(seen))


def _head(seen: Observation) -> bool:
    head = parts(seen.model).head
    gradient = None if head is None or seen.task != "classification" else _whole(seen, head.weight)
    if head is None or gradient is None:
        return False
    rows = gradient.T if head.transposed else gradient
    return float(rows.sum(0).norm()) > UNBALANCED * float(rows.norm())


def _rank(seen: Observation) -> bool:
    if Grant.LENGTHS not in seen or announced_update(seen).kind != "fedsgd":
        return False
    blocks = visible_blocks(seen)
    if not blocks:
        return False
    values = torch.linalg.svdvals(torch.cat(visible_gradients(seen, blocks[0].qkv)).double())
    max_rank = sum(seen.lengths)
    return max_rank < len(values) and float(values[max_rank]) > FULL * float(values[0])
