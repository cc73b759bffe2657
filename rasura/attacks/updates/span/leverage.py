"""Words of a batch whose tokens fill the row space: those whose inputs have little leverage over the gradients of block 0.

With as many different tokens as the layer has inputs, every token lies in the row space. But the directions of that space
are not equally strong. A token of the batch adds ``delta x^T`` to the gradient G, so that the leverage
``x^T (G^T G)^-1 x`` of its input x stays small, about ``1 / ||delta||^2``. The inputs of other words reach into the weakest
directions, where leverage is larger by orders of magnitude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rasura.attacks.shared.twins import one_of_twins, row_norms
from rasura.attacks.shared.verify import in_span
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import CHUNK, FULL, RowSpace, scaled, visible_gradients
from rasura.attacks.updates.span.tokens import EMPTY, candidates
from rasura.core.interfaces import AttackFailed
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.victims.models import parts
from rasura.victims.positions import positions

WEAKEST = 1e-6
"""Singular values below this share of the largest are float32's rounding, and count as this large."""

DEVIATIONS = 6.0
"""How many robust deviations below the median of all words the logarithm of a word's leverage lies. On MiniLM at .5 d, 5 %
of the words beyond are wrong; on stories260K, with 512 words, in some updates a third or more."""

TIMES = 3.0
"""... and how many times below the median its leverage is: in noise, all words have nearly the same."""

LEAST = 5
"""Fewer words are none: a batch that fills the row space holds many, and in noise one or two stand out by chance."""

LONGEST = 512
"""Places that are tried at most."""

STALE = 8
"""Places in a row without a word that is new, behind which no more are tried. With other weights than the model's, the same
words stand out at every place."""


def or_by_leverage(read: Callable[[], Reconstruction], seen: Observation) -> Reconstruction:
    """What ``read`` gives; the bag of words by leverage where that fails, or has no proof and names fewer words. Texts in
    order stay that name at least half of the bag's words: their order is worth more than a few words, which are counted."""
    try:
        guess = read()
    except AttackFailed:
        bag, outside = words_by_leverage(seen)
        if not bag:
            raise
    else:
        named = {t for text in guess.tokens for t in text} - seen.vocabulary.special_ids
        if guess.confidence != "matched":
            return guess
        bag, outside = words_by_leverage(seen)
        if len(bag) <= len(named):
            return guess
        if guess.ordered and 2 * len(named.intersection(bag)) >= len(bag):
            return replace(guess, details={**guess.details, "other_words": len(set(bag) - named)})
    size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
    details = {"distinct_tokens": len(bag), "by_leverage": True, "outside": outside}
    return in_span((bag,) * size, seen, believed=False, ordered=False, details=details)


@torch.no_grad()
def words_by_leverage(seen: Observation) -> tuple[tuple[int, ...], bool]:
    """The words that stand out by the gradients of block 0 that are visible whole, and whether most of them lie outside the
    row space, which has room.

    None where these have too few rows, fewer than ``LEAST`` words stand out, or more than a row space with room can hold:
    each word takes a direction, so some only resemble the batch's. Other weights than the model's leave words that are only
    near the row space, and so does another dropout.
    """
    known = parts(seen.model)
    matrices = scaled(visible_gradients(seen, known.blocks[0].qkv))
    stacked = torch.cat(matrices) if matrices else torch.zeros(0, known.hidden)
    if len(stacked) < stacked.shape[1] or not bool(stacked.isfinite().all()):
        return (), False
    _, values, rows = torch.linalg.svd(torch.linalg.qr(stacked).R, full_matrices=False)
    whiten = (rows.T / values.clamp_min(WEAKEST * float(values[0]))).float()
    ids, inputs = candidates(seen.vocabulary), Inputs(seen.model)
    places = 1 if (table := positions(seen.model)) is None else min(table, LONGEST)
    if Grant.LENGTHS in seen:
        places = min(places, max(seen.lengths))
    filled = int((values > WEAKEST * values[0]).sum())
    room = filled < FULL * known.hidden
    most = filled if room else len(ids)
    space = RowSpace(rows[:filled].T, values[filled] / values[:filled]) if room else None
    norms, found, inside, empty, stale = row_norms(seen), set[int](), set[int](), 0, 0
    for place in range(places):
        here = _standing_out(inputs, ids, place, whiten, norms)
        words = set(here) - seen.vocabulary.special_ids
        empty, stale = 0 if words else empty + 1, 0 if words - found else stale + 1
        found |= words
        inside |= _inside(space, inputs, sorted(words - inside), place)
        if empty > EMPTY or stale > STALE or len(found) > most:
            break
    outside = space is not None and 2 * len(inside) < len(found)
    return (tuple(sorted(found)), outside) if LEAST <= len(found) <= most else ((), outside)


def _inside(space: RowSpace | None, inputs: Inputs, words: list[int], place: int) -> set[int]:
    """Those of ``words`` whose input at ``place`` lies in ``space``."""
    if space is None or not words:
        return set()
    states = inputs.first(torch.tensor(words), place).double()
    return {word for word, lies in zip(words, (space.residual(states) < space.tolerance(states)).tolist()) if lies}


def _standing_out(inputs: Inputs, ids: Tensor, place: int, whiten: Tensor, norms: Tensor | None) -> list[int]:
    """Those of ``ids`` whose leverage at ``place`` is far below that of the others, one of twins."""
    chunks = (inputs.first(chunk, place).float() for chunk in torch.split(ids, CHUNK))
    levers = [(x @ whiten).square().sum(1) / x.square().sum(1).clamp_min(1e-30) for x in chunks]
    sizes = torch.cat(levers).clamp_min(1e-30).log()
    middle = sizes.median()
    spread = 1.4826 * (sizes - middle).abs().median()
    below = middle - torch.maximum(DEVIATIONS * spread, torch.tensor(TIMES).log())
    order = sizes.argsort()
    order = order[(sizes < below)[order]]
    table = inputs.model.get_parameter(inputs.parts.word_embedding)
    kept: list[int] = ids[order[one_of_twins(table, ids[order], norms)]].tolist()
    return kept
