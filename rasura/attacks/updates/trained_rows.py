"""Embedding rows in what a training changed, whose steps move every row: which of them hold words of the texts?

AdamW's decay shrinks all rows by one factor. A row without a gradient moves by nothing else, so whatever moved otherwise had
one: the bag of a whole round. Where the output layer is tied to the embedding every row has a gradient, and AdamW makes all
of one size. There, the words that no text holds are pushed away from the texts' states, each as words like it are; the words
that follow in a text are pulled toward them, so that their rows move against what their own weights predict.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rasura.attacks.shared.verify import in_span
from rasura.core.interfaces import AttackFailed
from rasura.core.updates import announced_update
from rasura.core.values import Observation, Reconstruction
from rasura.victims.models import Parts, parts

GAP = 30.0
"""Rows that moved otherwise exceed what decay leaves unexplained so many times (measured: 40,000 times on MiniLM)."""

EXPLAINED = 0.5
"""Share of what decay moved by which rounding may change it: small rates move a weight by few units of its last place."""

STILL = 0.2
"""Rows that moved less than this share of the median hold too few numbers above AdamW's epsilon to say anything."""

AGAINST = 0.1
"""Largest cosine of a word's row and its prediction."""

PREDICTED, ABOVE = 0.3, 1.25
"""Median cosine of rows and their predictions, at least, and at least so many times that of noise."""

RIDGE = 0.1
"""Ridge of the prediction, in variances of the weights."""

CHUNK = 8192
"""Rows at once."""


def without_decay(change: Tensor, weights: Tensor, mask: Tensor | None) -> Tensor:
    """``change`` ``(rows, width)`` of an embedding's ``weights``, zero in rows that decay alone explains, less the decay in
    the others; ``change`` itself where decay does not explain most rows far better than the rest."""
    shown = weights.double() if mask is None else weights.double() * mask
    some = shown.square().sum(1).nonzero().flatten()  # rows of which nothing is in sight say nothing of the decay
    moved, weight = change[some].double(), shown[some]
    if len(some) < 3 or bool((moved == 0).all(1).any()):  # decay moves every row
        return change
    decay = ((moved * weight).sum(1) / weight.square().sum(1)).median()
    rest = moved - decay * weight
    left, order = rest.norm(dim=1).sort()
    half = len(left) // 2
    jumps = left[half + 1 :] / left[half:-1].clamp_min(1e-300)
    if not len(jumps) or not float(jumps.max()) > GAP:
        return change
    still = order[: half + 1 + int(jumps.argmax())]
    if not float(rest[still].norm()) <= EXPLAINED * abs(float(decay)) * float(weight[still].norm()):
        return change
    rest[still] = 0.0
    found = torch.zeros_like(change)
    found[some] = rest.to(change.dtype)
    return found


def against(change: Tensor, weights: Tensor, decay: float) -> Tensor:
    """Rows of a tied embedding's ``change`` ``(rows, width)`` that moved against what their ``weights`` predict, the most
    opposed first; ``decay``: what the weights' own decay takes off them, as a share."""
    rest = change.float() - decay * weights.float()
    sizes = rest.norm(dim=1)
    moved: Tensor = (sizes > STILL * sizes.median()).nonzero().flatten()
    if not len(moved):
        return moved
    units = rest[moved] / sizes[moved, None]
    own = weights[moved].float()
    known = torch.cat([own.new_ones(len(own), 1), own / own.std().clamp_min(1e-30)], 1)
    chunks = list(zip(torch.split(known, CHUNK), torch.split(units, CHUNK)))
    square: Tensor = sum(
        (x.double().T @ x.double() for x, _ in chunks), torch.zeros(known.shape[1], known.shape[1]).double()
    )
    cross = sum((x.double().T @ u.double() for x, u in chunks), torch.zeros(known.shape[1], units.shape[1]).double())
    square.diagonal().add_(RIDGE * len(known))
    predicted = known @ torch.linalg.solve(square, cross).float()
    cosines = torch.nn.functional.cosine_similarity(predicted, units, dim=1)
    chance = (known.shape[1] / len(known)) ** 0.5  # the cosine of noise and what is fitted to it
    if not float(cosines.median()) > max(PREDICTED, ABOVE * chance):
        return moved[:0]
    order = cosines.argsort()
    found: Tensor = moved[order[cosines[order] < AGAINST]]
    return found


def opposed(seen: Observation, name: str, change: Tensor, size: int) -> Reconstruction:
    """The bag of ``size`` texts from the ``change`` of an output layer ``name``, which may be the word embedding: words that
    follow in the texts, as far as their rows stand out (``matched``). Raises ``AttackFailed`` where none does."""
    rows = against(change, weights_of(seen, name), announced_update(seen).decayed(size)).tolist()
    bag = tuple(sorted(set(rows) - seen.vocabulary.special_ids))
    if not bag:
        raise AttackFailed("no word's row moved against what its weights predict")
    return in_span(
        (bag,) * size, seen, believed=False, ordered=False,
        details={"distinct_tokens": len(bag), "tied": parts(seen.model).tied},
    )  # fmt: skip


def own_output(seen: Observation, found: Parts) -> str | None:
    """The output layer of a causal model that has one of its own, where all of its gradient is visible."""
    if seen.task != "causal" or found.tied or found.head is None:
        return None
    gradient = seen.whole(found.head.weight)
    return found.head.weight if gradient is not None and bool(gradient.isfinite().all()) else None


def weights_of(seen: Observation, name: str) -> Tensor:
    """The parameter ``name`` as it was before the update."""
    return seen.model.get_parameter(name).detach().cpu()
