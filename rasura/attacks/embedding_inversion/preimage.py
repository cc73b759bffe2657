"""Preimages (ours): which token the announced mechanism most likely drew from, by Bayes with how often tokens occur.

Replaced tokens (SANTEXT+, CUSTEXT+) and Gaussian noise on the word embedding (DP-Forward) have likelihoods that anybody can
compute. Each place is read by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.embedding_inversion.nearest import frequencies
from rasura.attacks.embedding_inversion.tables import KEPT, Tables
from rasura.interfaces import Budget, NotApplicable
from rasura.obfuscation.noisy_states import MatrixGaussian
from rasura.obfuscation.replacement import replacement
from rasura.values import ServiceObservation, TokenReading

BLOCK = 64
"""Ids or places whose posteriors are formed at once."""


@dataclass(frozen=True)
class Preimage:
    """The tokens of greatest posterior, given what was sent in their place."""

    name: str = "preimage"

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        tables = Tables(seen)
        prior = frequencies(seen).probabilities.clamp_min(1e-12).log()
        prior[sorted(seen.vocabulary.special_ids)] = -torch.inf
        name = seen.mechanism.name
        if name in ("santext+", "custext+"):
            made = replacement(seen.mechanism, tables.public, seen.vocabulary)
            likelihoods = [made.likelihoods(some) for some in torch.split(tables.ids, BLOCK)]
        elif name == "dp-forward" and seen.mechanism.parameters["depth"] == 0:
            likelihoods = list(torch.split(gaussian(tables), BLOCK))
        else:
            raise NotApplicable(f"the likelihood of what {name} sends is not known in closed form")
        ranked = torch.cat([(prior + some.double()).topk(KEPT, dim=1).indices for some in likelihoods])
        return tables.reading(ranked)


def gaussian(tables: Tables) -> Tensor:
    """Log likelihoods ``(places, tokens)`` of the vectors that DP-Forward sent, up to a constant for each place.

    Its noise is known. By how much a text's matrix was scaled down is not, since that takes its norm: the mean norm of the
    public rows, each weighted by its token's frequency, stands in for its rows'.
    """
    seen = tables.seen
    told = seen.mechanism.parameters
    change = MatrixGaussian(float(told["epsilon"] or 0), float(told["delta"] or 0), float(told["clip"] or 0))
    usual = frequencies(seen).probabilities.float()
    square = float((usual * tables.public.square().sum(1)).sum())
    scales = [min(1.0, change.clip / (square * len(text)) ** 0.5) for text in seen.ids]
    special = seen.vocabulary.special_ids
    scale = torch.tensor([s for text, s in zip(seen.ids, scales) for i in text if i not in special])[:, None]
    own = tables.public.square().sum(1)
    return (scale * (tables.rows @ tables.public.T) - scale.square() * own / 2) / change.sigma**2
