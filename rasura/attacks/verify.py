"""Is the guess right? A guess whose recomputed gradient equals the observed one is the data, or its exact twin."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rasura.updates import announced_update, changed
from rasura.values import UNKNOWN, Grant, Observation
from rasura.victims.models import layer_inputs, parts

VERIFIED = 1e-3
"""Largest relative error of a verified guess. Exact guesses in float32 stay below 1e-4, also where the update was rounded to
16 bits (errors of 5e-4 to 4e-3 an entry average out only with an exact guess at bf16: those stay ``span``); one wrong token
in a text was never seen below 1e-2 on trained models, 5e-3 on tiny random ones."""

MOST_LABELINGS = 64


def pad(tokens: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Id sequences as ``input_ids`` and ``attention_mask``, both ``(batch, longest)``."""
    longest = max(len(t) for t in tokens)
    ids = torch.full((len(tokens), longest), pad_id)
    mask = torch.zeros(len(tokens), longest, dtype=torch.long)
    for row, t in enumerate(tokens):
        ids[row, : len(t)] = torch.tensor(list(t))
        mask[row, : len(t)] = 1
    return ids, mask


def relative_error(
    guess: Mapping[str, Tensor], observed: Mapping[str, Tensor], visible: Mapping[str, Tensor] | None = None
) -> float:
    """``||a * guess - observed|| / ||observed||`` over visible entries, at the best scale ``a`` (clipping rescales)."""
    pairs = []
    inner = own = square = 0.0
    for name, target in observed.items():
        mask = None if visible is None else visible.get(name)
        b = target.flatten() if mask is None else target[mask]
        square += float(b.norm().double()) ** 2
        if name in guess:
            a = guess[name].flatten() if mask is None else guess[name][mask]
            inner += float(a @ b)
            own += float(a.norm().double()) ** 2
            pairs.append((a, b))
    if square == 0.0 or own == 0.0:
        return float("inf")
    scale = max(inner, 0.0) / own
    # The difference itself, not 1 - cos^2: that would vanish below the square root of the precision.
    missed = square - sum(float(b.norm().double()) ** 2 for _, b in pairs)
    error = max(missed, 0.0) + sum(float((b - scale * a).norm().double()) ** 2 for a, b in pairs)
    return math.sqrt(error / square)


def labelings(seen: Observation, ids: Tensor, mask: Tensor, types: Tensor | None) -> list[Tensor]:
    """Which labels to try for the guessed texts: the granted ones, the ones that the head's gradient gives, or all of them.

    Rows may come in another order than the batch's, so granted labels are tried in every order.
    """
    if seen.task == "causal":
        return [torch.where(mask.bool(), ids, torch.full_like(ids, -100))]
    batch = len(ids)
    if Grant.LABELS in seen and batch <= 4:
        return [torch.tensor(p) for p in sorted(set(itertools.permutations(seen.labels.tolist())))]
    solved = None if announced_update(seen).kind == "fedavg-adamw" else _labels_from_head(seen, ids, mask, types)
    if solved is not None:
        return [solved]
    classes = int(getattr(seen.model.config, "num_labels", 2))
    if classes**batch > MOST_LABELINGS:
        return []
    return [torch.tensor(y) for y in itertools.product(range(classes), repeat=batch)]


def _labels_from_head(seen: Observation, ids: Tensor, mask: Tensor, types: Tensor | None) -> Tensor | None:
    """Head gradient = sum_b (softmax_b - onehot_b) h_b^T / B: linear in the one-hots, and everything else is known."""
    model = seen.model
    head = parts(model).head
    if head is None or head.weight not in seen.gradients or head.weight in seen.visible or head.transposed:
        return None
    if len(ids) > parts(model).hidden:
        return None
    extra = {} if types is None else {"token_type_ids": types}
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, **extra).logits.double()
        # RoBERTa's head reads (batch, hidden); decoders score every position and use the last real one.
        states = layer_inputs(model, [head.module], input_ids=ids, attention_mask=mask, **extra)[head.module].double()
    if states.dim() == 3:
        states = states[torch.arange(len(ids)), mask.sum(1) - 1]
    gradient = seen.gradients[head.weight].double()
    deltas = (gradient @ torch.linalg.pinv(states)).T / announced_update(seen).steps  # up to the clipping's scale
    shares = logits.softmax(1) - deltas * len(ids)
    labels = []
    owed: dict[tuple[int, ...], Tensor] = {}
    for row, text in enumerate(map(tuple, ids.tolist())):
        # Copies of a text have one mean share in common, so what one takes the others no longer need.
        share = owed.setdefault(text, shares[row] * sum(text == tuple(other) for other in ids.tolist()))
        labels.append(int(share.argmax()))
        share[labels[-1]] -= 1
    return torch.tensor(labels)


def check(
    seen: Observation, tokens: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
) -> tuple[float, tuple[int, ...] | None]:
    """The least relative error with which ``tokens`` reproduce the observed gradient, and the labels that reach it.

    ``(inf, None)`` when the guess has holes, or no labels can be tried. Meaningless while dropout is active.
    """
    if not tokens or any(not t or UNKNOWN in t for t in tokens):
        return float("inf"), None
    pad_id = seen.vocabulary.pad_id or 0
    ids, mask = pad(tokens, pad_id)
    # GPT-2 adds a word embedding for segment 0 when it is told of segments, so say nothing where there are none.
    type_ids = pad(types, 0)[0] if types is not None and any(any(t) for t in types) else None
    local = announced_update(seen)
    best, best_labels = float("inf"), None
    for labels in labelings(seen, ids, mask, type_ids):
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if type_ids is not None:
            inputs["token_type_ids"] = type_ids
        guess, _ = changed(seen.model, inputs, list(seen.gradients), local)
        error = relative_error(guess, seen.gradients, seen.visible)
        if error < best:
            best, best_labels = error, labels
    flat = None if best_labels is None or seen.task == "causal" else tuple(int(y) for y in best_labels)
    return best, flat
