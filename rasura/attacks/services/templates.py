"""Templates (after Chari et al. 2002): what the states behind a block look like for each token, from reference text.

The client's half is public. So an adversary runs reference text through it, without the noise: every token's mean state, and
how far states lie from it in other sentences. With the noise, whose width is known, that is a Gaussian for each token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rasura.attacks.services.tables import Tables
from rasura.attacks.services.trained import BATCH, reference_ids
from rasura.service_protections.noisy_states import Cape, MatrixGaussian, Prototypes
from rasura.service_protections.split import Change, Split

RIDGE = 0.1
"""Added to the diagonal of the regression on public rows, as a share of its mean."""


class _Unchanged(Change):
    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        return states


def clean_states(split: Split, texts: list[list[int]]) -> list[Tensor]:
    """What the client would send for each of ``texts`` before its change: ``(length, hidden)``."""
    half, found = Split(split.model, split.depth, _Unchanged()).eval(), []
    for start in range(0, len(texts), BATCH):
        some = texts[start : start + BATCH]
        longest = max(map(len, some))
        ids = torch.tensor([[*t, *[0] * (longest - len(t))] for t in some])
        mask = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t in some])
        found += [row[: len(t)].double() for row, t in zip(half.sent(ids, mask), some)]
    return found


def noise(change: Change, states: Tensor) -> float | None:
    """The variance of the noise that ``change`` adds to an entry, on average over ``states`` ``(n, hidden)``; None where the
    change is unknown."""
    match change:
        case MatrixGaussian():
            return change.sigma**2
        case Cape():
            return float(2 * (states.amax(1) - states.amin(1)).square().mean()) / change.epsilon**2
        case Prototypes():
            return float(2 * (change.noise * change.spread) ** 2)
    return None


def predicted(table: Tensor, named: Tensor, means: Tensor, counts: Tensor) -> Tensor:
    """Each token's mean state ``(tokens, hidden)`` by a ridge regression on the rows of the public ``table``, fitted to
    the ``means`` of those that are ``named``, seen ``counts`` times."""
    weights = (counts / counts.sum())[:, None]
    middle, centre = (weights * table[named]).sum(0), (weights * means).sum(0)
    rows = table[named] - middle
    gram = rows.T @ (weights * rows)
    ridge = RIDGE * gram.trace() / len(gram) * torch.eye(len(gram), dtype=gram.dtype)
    turn = torch.linalg.solve(gram + ridge, rows.T @ (weights * (means - centre)))
    out: Tensor = (table - middle) @ turn + centre
    return out


def likelihoods(tables: Tables, split: Split, variance: float, texts: list[list[int]], states: list[Tensor]) -> Tensor:
    """Log likelihoods ``(places, tokens)`` of the vectors that were sent, up to a constant for each place.
    ``states`` are the clean ones of the reference ``texts``."""
    seen, special = tables.seen, tables.seen.vocabulary.special_ids
    ids = torch.tensor([i for text in texts for i in text])
    own = ~torch.isin(ids, torch.tensor(sorted(special)))
    rows, (named, which, counts) = torch.cat(states)[own], torch.unique(ids[own], return_inverse=True, return_counts=True)
    means = torch.zeros(len(named), rows.shape[1], dtype=rows.dtype).index_add_(0, which, rows) / counts[:, None]
    away = rows - means[which]
    spread, axes = torch.linalg.eigh(away.T @ away / max(1, len(rows) - len(named)))
    # A rare token's mean is uncertain, an absent one's unknown: a linear map of its public row stands in for it.
    usual = predicted(tables.public.double(), named, means, counts.double())
    between = float((means - usual[named]).square().sum(1) @ counts.double()) / len(rows)
    doubt = float(spread.sum()) / max(between, 1e-12)
    usual[named] += (means - usual[named]) * (counts / (counts + doubt))[:, None]
    centre = rows.mean(0)
    usual = (usual[tables.usable] - centre) @ axes
    size = float(rows.square().sum(1).mean())
    out = torch.full((len(tables.ids), len(tables.public)), -torch.inf)
    place = 0
    for text, vectors in zip(seen.ids, seen.vectors):
        scale = 1.0
        if isinstance(split.change, MatrixGaussian):
            # The text's own norm, by which it was scaled down, is not known: that of as many usual rows stands in for it.
            scale = min(1.0, split.change.clip / (size * len(text)) ** 0.5)
        sent = vectors[[i not in special for i in text]].double() / scale
        weight = 1 / (spread.clamp_min(0) + variance / scale**2).clamp_min(1e-9)
        turned = ((sent - centre) @ axes) * weight
        out[place : place + len(sent), tables.usable] = (turned @ usual.T - usual.square() @ weight / 2).float()
        place += len(sent)
    return out


def templates(tables: Tables, split: Split, count: int) -> Tensor | None:
    """``likelihoods`` from up to ``count`` reference texts; None where it is not known what ``split`` does to its states."""
    texts = reference_ids(tables.seen, count)
    states = clean_states(split, texts)
    variance = noise(split.change, torch.cat(states))
    return None if variance is None else likelihoods(tables, split, variance, texts, states)
