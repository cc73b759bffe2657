"""Which labels guessed texts may have: the granted ones, those that the head's gradient gives, or all that can be tried."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from rasura.core.updates import announced_update
from rasura.core.values import Grant, Observation
from rasura.victims.models import layer_inputs, one_class_each, parts

MAX_LABELINGS = 64

_OPPOSITE = 1e-2
"""Relative distance up to which labels count as opposite: ten times the largest error of a verified guess."""


def pad(tokens: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """Id sequences as ``input_ids`` and ``attention_mask``, both ``(batch, longest)``."""
    longest = max(map(len, tokens))
    ids = torch.tensor([[*t, *[pad_id] * (longest - len(t))] for t in tokens], dtype=torch.long)
    mask = torch.arange(longest) < torch.tensor([len(t) for t in tokens])[:, None]
    return ids, mask.long()


def labelings(seen: Observation, ids: Tensor, mask: Tensor, types: Tensor | None) -> list[Tensor]:
    """Which labels to try for the guessed texts: the granted ones, the ones that the head's gradient gives, or all of them.

    Rows may come in another order than the batch's, so granted labels are tried in every order. None fit more or fewer texts
    than there are granted labels, and none of a model whose labels are no classes.
    """
    if seen.task == "causal":
        return [targets(ids, mask)]
    if not one_class_each(seen.model):
        return []
    batch = len(ids)
    if Grant.LABELS in seen and batch != len(seen.labels):
        return []
    if Grant.LABELS in seen and batch <= 4:
        return [torch.tensor(p) for p in sorted(set(itertools.permutations(seen.labels.tolist())))]
    if not announced_update(seen).adaptive and (solved := _labels_from_head(seen, ids, mask, types)):
        return solved
    classes = int(getattr(seen.model.config, "num_labels", 2))
    if classes**batch > MAX_LABELINGS:
        return []
    return [torch.tensor(y) for y in itertools.product(range(classes), repeat=batch)]


def targets(ids: Tensor, mask: Tensor) -> Tensor:
    """The labels of a causal loss: the texts' own tokens, -100 where a text is padded."""
    return torch.where(mask.bool(), ids, torch.full_like(ids, -100))


def _labels_from_head(seen: Observation, ids: Tensor, mask: Tensor, types: Tensor | None) -> list[Tensor]:
    """Head gradient = sum_b (softmax_b - onehot_b) h_b^T / B: linear in the one-hots, and everything else is known.

    A learning rate or clipping scales it. The labels are then where a text's softmax minus one-hot is negative, unless
    copies of the text share it. These are the second labels to try, where they are others. Empty where the head is hidden.
    """
    model = seen.model
    head = parts(model).head
    if head is None or head.weight not in seen.gradients or head.weight in seen.visible or head.transposed:
        return []
    if len(ids) > parts(model).hidden:
        return []
    extra = {} if types is None else {"token_type_ids": types}
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask, **extra).logits
        # RoBERTa's head reads (batch, hidden); decoders score every position and use one, the last that is not padding's id.
        states = layer_inputs(model, [head.module], input_ids=ids, attention_mask=mask, **extra)[head.module]
        if states.dim() == 3:
            off = model.get_submodule(head.module)(states) - logits[:, None]
            states = states[torch.arange(len(ids)), off.abs().sum(-1).argmin(1)]
    logits, states = logits.double(), states.double()
    gradient = seen.gradients[head.weight].double()
    deltas = (gradient @ torch.linalg.pinv(states)).T / announced_update(seen).steps
    shares = logits.softmax(1) - deltas * len(ids)
    copies: dict[tuple[int, ...], list[int]] = {}
    for row, text in enumerate(map(tuple, ids.tolist())):
        copies.setdefault(text, []).append(row)
    solved, unscaled = torch.zeros(len(ids), dtype=torch.long), deltas.argmin(1)
    for rows in copies.values():
        # Copies of a text have one mean share in common, so what one takes the others no longer need.
        share, taken = shares[rows[0]] * len(rows), list[int]()
        for _ in rows:
            taken.append(int(share.argmax()))
            share[taken[-1]] -= 1
        # Which of them has which label is not told, and would be a matter of rounding: the lower ones come first.
        solved[rows] = torch.tensor(sorted(taken))
    return [solved] if len(copies) < len(ids) or torch.equal(solved, unscaled) else [solved, unscaled]


def turned(logits: Tensor, labels: Tensor) -> Tensor:
    """The labels ``(batch,)`` whose gradient is most like that of ``labels`` turned around: the likeliest other classes.

    With two classes a text's gradient under either is the other's at a negative scale: ``softmax - onehot`` is ``(q, -q)``
    or ``(-p, p)``. With more, what the other classes get has the wrong sign.
    """
    return logits.scatter(-1, labels[:, None], -torch.inf).argmax(-1)


def may_be_turned(logits: Tensor, labels: Tensor) -> bool:
    """Whether an update of the ``labels`` ``(batch,)``, of any size, may be that of others turned around.

    With two classes always: label smoothing turns a text's gradient too, where the model is certain of its label. With more,
    if softmax minus one-hot of the ``turned`` labels is nearly opposite. This looks at the ``logits`` ``(batch, classes)``,
    since float32 rounds away the gradient of a label of which the model is certain.
    """
    if logits.shape[-1] == 2:
        return True
    own, other = _deltas(logits, labels).flatten(), -_deltas(logits, turned(logits, labels)).flatten()
    along = (own @ other).clamp_min(0) / (other @ other)
    return not bool((own - along * other).norm() > _OPPOSITE * own.norm())  # nor where nothing is left of them


def _deltas(logits: Tensor, labels: Tensor) -> Tensor:
    """Softmax minus one-hot, ``(batch, classes)`` in float64; exact also where a label has a probability of almost one."""
    others = logits.double().softmax(-1).scatter(-1, labels[:, None], 0.0)
    return others.scatter(-1, labels[:, None], -others.sum(-1, keepdim=True))
