"""Rows as mixtures (ours): which public rows an obfuscated one is made of, then which of them it stands for.

A row that was mixed from its cluster is a non-negative combination of some ten public rows: ``members`` finds them exactly.
Training moves rows, but not the ids, so those are read that were uploaded. Of rows that are no exact mixture, least squares
finds the near ones that make them best. Which of them is the row's own token, the weights tell by their size and, better, by
the mechanism, which is not secret: the logarithms of the weights are known up to Laplace noise once the token is. Each token
belongs to one row only, which a matching uses; then a language model decides between the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from rasura.attacks.services.members import exactness, members
from rasura.attacks.services.nearest import frequencies
from rasura.attacks.services.tables import KEPT, Tables, nearest
from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.interfaces import Budget, InputError, NotApplicable, Prior
from rasura.core.specs import ServiceAttackSpec
from rasura.priors import trigrams

NEAR = 60
"""Public rows near an obfuscated one, of which it may be made."""

STEPS = 300
"""Steps of accelerated projected gradients; three hundred leave the weights within a thousandth."""

MIN_PROBABILITY = 2e-3
"""Public rows with weights below this fraction are not part of the mixture."""

LOST = 1e-9
"""The weight of a public row that is part of the mixture, where single precision has lost it."""

SECOND = 6.0
"""Nats that a token costs which another id has already been read as: each has one id alone."""


def mixtures(rows: Tensor, parts: Tensor) -> Tensor:
    """Non-negative weights ``(n, m)`` with which ``parts`` ``(n, m, hidden)`` make ``rows`` ``(n, hidden)`` best."""
    gram = parts @ parts.mT
    wanted = (parts @ rows[:, :, None])[:, :, 0]
    slope = torch.linalg.matrix_norm(gram, ord=2).clamp_min(1e-12)[:, None]
    weights = torch.zeros_like(wanted)
    ahead, pace = weights, 1.0
    for _ in range(STEPS):
        step = (ahead - ((gram @ ahead[:, :, None])[:, :, 0] - wanted) / slope).clamp_min(0)
        faster = (1 + math.sqrt(1 + 4 * pace * pace)) / 2
        ahead, weights, pace = step + (pace - 1) / faster * (step - weights), step, faster
    return weights


def own_likelihood(weights: Tensor, members: Tensor, table: Tensor, epsilon: float, calibrated: bool = False) -> Tensor:
    """For each of ``members`` ``(m,)`` the log likelihood of the ``weights`` ``(m,)`` if it is the row's own token.

    WeightSynth: log weight_j = epsilon * cos(own, j) / 2 + noise_j + constant, the noise Laplace with half the spread of the
    own token's cosines; the constant is at its likeliest, the median. ``calibrated`` noise has one scale in a cluster.
    """
    rows = nn.functional.normalize(table[members], dim=1)
    cosine = (rows @ rows.T).double()
    scale = ((cosine.amax(1) - cosine.amin(1)) / 2).clamp_min(1e-3)
    if calibrated:
        signal = cosine - cosine.median(1, keepdim=True).values
        scale = torch.cdist(signal, signal, p=1).max().clamp_min(1e-3).expand_as(scale)
    away = weights.double().log() - epsilon / 2 * cosine
    away = (away - away.median(1, keepdim=True).values).abs()
    return -(away / scale[:, None]).sum(1) - len(members) * scale.log()


def matched(scores: list[dict[int, float]]) -> list[int]:
    """For each id its token, each token once, with the greatest sum of ``scores`` (of each id: token, log chance)."""
    columns = {token: n for n, token in enumerate(dict.fromkeys(t for s in scores for t in s))}
    # Behind the tokens a column for every id: it is read by its own best score where the others leave it nothing.
    table = np.full((len(scores), len(columns) + len(scores)), 1e6)
    for n, some in enumerate(scores):
        for token, value in some.items():
            table[n, columns[token]] = -value
        table[n, len(columns) + n] = 1e3
    names = list(columns)
    chosen = linear_sum_assignment(table)[1]
    return [names[c] if c < len(names) else max(s, key=lambda t: s[t]) for c, s in zip(chosen.tolist(), scores)]


def _near(tables: Tables, which: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """For each of the rows numbered ``which`` the weights of the near public rows that make it best, and their tokens."""
    if not which:
        return
    near, rows = nearest(tables, NEAR)[0][which], tables.rows[which]
    for some, wanted in zip(torch.split(near, 256), torch.split(rows, 256)):
        for weights, names in zip(mixtures(wanted, tables.public[some]), some):
            kept = weights > MIN_PROBABILITY * weights.sum()
            kept = kept if bool(kept.any()) else torch.arange(len(weights)) < KEPT
            yield weights[kept], names[kept]


def candidates(tables: Tables, epsilon: float | None, calibrated: bool = False, *, cluster: int) -> list[dict[int, float]]:
    """For each id that was sent its tokens with their log chances: by likelihood at ``epsilon``, by weight if None. They are
    those of its cluster where its row is exactly a mixture of few, or else those near it that make it best."""
    left = exactness(tables.served, tables.public, sorted(tables.seen.vocabulary.special_ids))
    exact = members(tables.rows, tables.served, tables.public, tables.usable, cluster, left)
    near = _near(tables, [k for k, own in enumerate(exact) if own is None])
    out: list[dict[int, float]] = []
    for own in exact:
        weights, names = next(near) if own is None else (torch.tensor([*own.values()]), torch.tensor([*own]))
        weights = weights.clamp_min(LOST)
        if epsilon is None or len(names) == 1:
            chance = (weights / weights.sum()).double().log()
        else:
            chance = own_likelihood(weights, names, tables.public, epsilon, calibrated).log_softmax(0)
        out.append(dict(zip(names.tolist(), chance.tolist())))
    return out


def ranking(first: list[int], scores: list[dict[int, float]]) -> Tensor:
    """Guesses ``(types, KEPT)``: the chosen token, then by chance."""
    rows = []
    for own, some in zip(first, scores):
        order = [own, *sorted((t for t in some if t != own), key=lambda t: -some[t])][:KEPT]
        rows.append(order + [-1] * (KEPT - len(order)))
    return torch.tensor(rows)


def announced(seen: ServiceObservation) -> float:
    """The privacy parameter that the mechanism tells. Raises ``NotApplicable`` where hidden dimensions are mixed too."""
    if seen.mechanism.name != "obfuslm":
        raise NotApplicable("no protection by obfuslm was announced")
    if seen.mechanism.parameters.get("plus"):
        raise NotApplicable("the hidden dimension is mixed too, so rows are not mixtures of public ones; use realigned-*")
    return float(seen.mechanism.parameters.get("epsilon") or 1.0)


def cluster_size(seen: ServiceObservation) -> int:
    """The tokens of a cluster that the mechanism tells, at least."""
    return int(seen.mechanism.parameters.get("k") or 1)


@dataclass(frozen=True)
class RowMixture:
    """The public rows that make each row, and the matching by weight."""

    name: str = "row-mixture"

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        announced(seen)
        tables = Tables(seen.as_uploaded)
        scores = candidates(tables, None, cluster=cluster_size(seen))
        return tables.reading(ranking(matched(scores), scores), candidates=sum(map(len, scores)) / len(scores))


@dataclass(frozen=True)
class Decipherment:
    """The same with the mechanism's likelihood, then frequencies and trigrams of the reference text over the candidates.

    Ids are read one after the other, the most frequent first: the token that fits all its places best, given what the others
    are read as, in some sweeps. An id stands for the same token wherever it occurs.
    """

    name: str = "decipherment"
    sweeps: dict[str, int] = field(default_factory=lambda: {"quick": 2, "default": 4, "paper": 8})

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        tables = Tables(seen.as_uploaded)
        calibrated = bool(seen.mechanism.parameters.get("calibrated"))
        scores = candidates(tables, announced(seen), calibrated, cluster=cluster_size(seen))
        usual = frequencies(seen).probabilities
        total = tables.counts.total()
        told: list[dict[int, float]] = []
        for (_, count), some in zip(tables.counts.items(), scores):
            # Poisson: a frequent token would have been sent more often, a rare one less.
            rates = {t: total * max(float(usual[t]), 1e-12) for t in some}
            told.append({t: s + count * math.log(rates[t]) - rates[t] for t, s in some.items()})
        read = dict(zip(tables.counts, matched(told)))
        try:
            prior: Prior = trigrams(seen.vocabulary, seen.reference_text)
        except InputError:
            return tables.reading(ranking(list(read.values()), told), language="frequencies")
        fits = {}
        for _ in range(self.sweeps[budget.level]):
            before = dict(read)
            fits = swept(tables, scores, read, prior, lambda t: total * float(usual[t]))
            if read == before:
                break
        guesses = ranking([read[i] for i in tables.counts], [fits[i] for i in tables.counts])
        return tables.reading(guesses, language="trigrams")


def swept(
    tables: Tables, scores: list[dict[int, float]], read: dict[int, int], prior: Prior, expected: Callable[[int], float]
) -> dict[int, dict[int, float]]:
    """One sweep over all ids, which changes ``read``; the scores of every candidate as its id was read."""
    special = tables.seen.vocabulary.special_ids
    texts = [[i for i in text if i not in special] for text in tables.seen.ids]
    places: dict[int, list[tuple[int, int]]] = {i: [] for i in tables.counts}
    for n, text in enumerate(texts):
        for place, i in enumerate(text):
            places[i].append((n, place))
    holders: dict[int, int] = {}
    for token in read.values():
        holders[token] = holders.get(token, 0) + 1
    fits = {}
    for i, some in zip(tables.counts, scores):
        holders[read[i]] -= 1
        found = {}
        for token, score in some.items():
            value = score - expected(token) - SECOND * bool(holders.get(token))
            for n, place in places[i]:
                window = texts[n][max(0, place - 2) : place + 3]
                value += prior.log_probability([token if j == i else read[j] for j in window])
            found[token] = value
        read[i] = max(found, key=lambda t: found[t])
        holders[read[i]] = holders.get(read[i], 0) + 1
        fits[i] = found
    return fits


ROW_MIXTURE = ServiceAttackSpec(
    name="row-mixture",
    about="finds the public rows that each row was mixed from",
    source="Rasura",
    make=RowMixture,
    protection=True,
)

DECIPHERMENT = ServiceAttackSpec(
    name="decipherment",
    about="combines row-mixture with decipherment",
    source="Rasura",
    make=Decipherment,
    protection=True,
)
