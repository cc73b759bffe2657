"""Preimages (ours): which token the announced mechanism most likely drew from, by Bayes with what language is likely.

Replaced tokens (SANTEXT+, CUSTEXT+) and Gaussian noise on the word embedding (DP-Forward) have likelihoods that anyone can
compute. For states from behind a block (DP-Forward, CAPE, TextObfuscator), ``templates`` estimates them. Every draw is
independent, so each place is decoded separately: first with how often tokens occur, then, place by place in some sweeps,
with the tokens around it as they are read so far (trigrams of the reference text).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rasura.attacks.services.nearest import frequencies
from rasura.attacks.services.tables import KEPT, Tables
from rasura.attacks.services.templates import templates
from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.interfaces import Budget, InputError, NotApplicable, Prior
from rasura.core.specs import ServiceAttackSpec
from rasura.core.values import UNKNOWN
from rasura.priors import trigrams
from rasura.service_protections.noisy_states import MatrixGaussian
from rasura.service_protections.replacement import replacement
from rasura.service_protections.split import Split

BLOCK = 64
"""Ids or places whose posteriors are formed at once."""


@dataclass(frozen=True)
class Preimage:
    """The tokens of greatest posterior, given what was sent in their place and around it."""

    name: str = "preimage"
    work: Mapping[str, tuple[int, int, int]] = field(
        default_factory=lambda: {"quick": (10, 2, 500), "default": (30, 3, 2000), "paper": (100, 5, 20000)}
    )
    """Budget level -> tokens tried at a place, sweeps, reference texts whose states are computed."""

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        tables, (tried, sweeps, count) = Tables(seen), self.work[budget.level]
        usual = frequencies(seen).probabilities
        prior = usual.clamp_min(1e-12).log()
        prior[sorted(seen.vocabulary.special_ids)] = -torch.inf
        name, split = seen.mechanism.name, seen.served
        if name in ("santext+", "custext+"):
            made = replacement(seen.mechanism, tables.public, seen.vocabulary)
            likelihoods = [made.likelihoods(some) for some in torch.split(tables.ids, BLOCK)]
        elif name == "dp-forward" and seen.mechanism.parameters["depth"] == 0:
            likelihoods = list(torch.split(gaussian(tables, usual), BLOCK))
        elif isinstance(split, Split) and (estimated := templates(tables, split, count)) is not None:
            likelihoods = list(torch.split(estimated, BLOCK))
        else:
            raise NotApplicable(f"the likelihood of what {name} sends is not known in closed form")
        tried = max(KEPT, min(tried, len(tables.usable)))
        best = torch.cat([(prior + some.double()).topk(tried, dim=1).indices for some in likelihoods])
        try:
            language: Prior = trigrams(seen.vocabulary, seen.reference_text)
        except InputError:
            return tables.reading(best[:, :KEPT], language="frequencies")
        chances = torch.cat([some.gather(1, b) for some, b in zip(likelihoods, torch.split(best, BLOCK))])
        options = {
            i: dict(zip(tokens, values)) for i, tokens, values in zip(tables.counts, best.tolist(), chances.tolist())
        }  # fmt: skip
        special = seen.vocabulary.special_ids
        ranked = []
        for text in tables.texts:
            own = [i for i in text if i not in special]
            found = iter(in_context([options[i] for i in own], language, sweeps))
            ranked.append(torch.tensor([[i] + [UNKNOWN] * (KEPT - 1) if i in special else next(found) for i in text]))
        return TokenReading(tuple(ranked), details={"language": "trigrams"})


def in_context(places: Sequence[Mapping[int, float]], language: Prior, sweeps: int) -> list[list[int]]:
    """The ``KEPT`` best tokens at each of a text's ``places``, which hold log likelihoods by token, the likeliest first."""
    read = [next(iter(options)) for options in places]
    out: list[list[int]] = [[] for _ in places]
    for _ in range(sweeps):
        before = list(read)
        for n, options in enumerate(places):
            start = max(0, n - 2)
            around = read[start : n + 3]
            scores = {}
            for token, chance in options.items():
                around[n - start] = token
                scores[token] = chance + language.log_probability(around)
            out[n] = sorted(scores, key=lambda t: -scores[t])[:KEPT]
            read[n] = out[n][0]
        if read == before:
            break
    return out


def gaussian(tables: Tables, usual: Tensor) -> Tensor:
    """Log likelihoods ``(places, tokens)`` of the vectors that DP-Forward sent, up to a constant for each place.

    Its noise is known. By how much a text's matrix was scaled down is not, since that takes its norm: the mean norm of the
    public rows, each weighted by its token's frequency in ``usual`` ``(tokens,)``, stands in for its rows'.
    """
    seen = tables.seen
    told = seen.mechanism.parameters
    change = MatrixGaussian(float(told["epsilon"] or 0), float(told["delta"] or 0), float(told["clip"] or 0))
    square = float((usual.float() * tables.public.square().sum(1)).sum())
    scales = [min(1.0, change.clip / (square * len(text)) ** 0.5) for text in seen.ids]
    special = seen.vocabulary.special_ids
    scale = torch.tensor([s for text, s in zip(seen.ids, scales) for i in text if i not in special])[:, None]
    own = tables.public.square().sum(1)
    return (scale * (tables.rows @ tables.public.T) - scale.square() * own / 2) / change.sigma**2


SPEC = ServiceAttackSpec(
    name="preimage",
    about="decodes replaced tokens by their probability and a language model",
    source="Rasura",
    make=Preimage,
    home=("santext+:epsilon=0.5", "bert"),
    protection=True,
)
