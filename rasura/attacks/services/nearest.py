"""The nearest public row names the token: by cosine, element by element, or by how often it occurs; and the blind guess."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rasura.attacks.services.tables import KEPT, Tables, nearest
from rasura.core.answers import ServiceObservation, TokenReading
from rasura.core.interfaces import Budget, InputError, NotApplicable
from rasura.core.specs import ServiceAttackSpec
from rasura.core.values import Stage
from rasura.priors.ngram import Unigram
from rasura.victims.models import layer_inputs, parts

BLOCK = 64
"""Rows whose distances to all public ones are formed at once."""


@dataclass(frozen=True)
class Knn:
    """The nearest by cosine (Qu et al. 2021, as ObfusLM uses it).

    Where ids of the public tokenizer are sent, an id names itself first: its row may equal another's, or may have moved in
    training.
    """

    name: str = "knn"

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        tables = Tables(seen)
        found = nearest(tables, KEPT)[0]
        if seen.mechanism.stage is Stage.DATA and not seen.vectors:
            own = [[i, *(j for j in row if j != i)] for i, row in zip(tables.ids.tolist(), found.tolist())]
            found = torch.tensor([row[: found.shape[1]] for row in own], dtype=torch.int64).reshape(found.shape)
        return tables.reading(found)


@dataclass(frozen=True)
class Ednn:
    """Element-wise differential nearest neighbour: the least sum of absolute differences, each table's mean taken off.

    ObfusLM names it (Lin et al. 2024) without a formula; read so, it undoes what is added alike to all rows.
    """

    name: str = "ednn"

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        tables = Tables(seen)
        public = tables.public[tables.usable] - tables.public[tables.usable].mean(0)
        # Of vectors the adversary knows no table that they come from: their own mean stands in for its mean.
        rows = tables.rows - (tables.rows if seen.vectors else tables.served[tables.usable]).mean(0)
        away = (torch.cdist(some, public, p=1) for some in torch.split(rows, BLOCK))
        found = torch.cat([some.topk(KEPT, dim=1, largest=False).indices for some in away])
        return tables.reading(tables.usable[found])


@dataclass(frozen=True)
class TokenFrequency:
    """TFA: matches tokens by their frequency in reference text (Zanella-Beguelin et al. 2020; ObfusLM, app. E)."""

    name: str = "tfa"

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        if seen.vectors:
            raise NotApplicable("vectors were sent and no two of them are alike, so tokens cannot be counted")
        tables = Tables(seen)
        usual = frequencies(seen).probabilities[tables.usable]
        counts = torch.tensor(list(tables.counts.values()), dtype=torch.float64)
        found = [(usual - share).abs().topk(KEPT, largest=False).indices for share in counts / counts.sum()]
        return tables.reading(tables.usable[torch.stack(found)])


@dataclass(frozen=True)
class BlindTokens:
    """The most frequent tokens of reference text, whatever was sent."""

    name: str = "blind"

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        tables = Tables(seen)
        return tables.reading(torch.tensor(frequencies(seen).top(KEPT)).expand(len(tables.ids), -1))


@dataclass(frozen=True)
class EmbeddingReplacement:
    """ERA: the public head reads the served model's last states, so each state names the token that follows it.

    ObfusLM, sec. 5.2 and app. E. The ids hold what was generated too, since the server sends it; the first is not read.
    """

    name: str = "era"

    def __call__(self, seen: ServiceObservation, *, rng: torch.Generator, budget: Budget) -> TokenReading:
        head = getattr(seen.public, "get_output_embeddings", lambda: None)()
        if not isinstance(head, nn.Module) or not parts(seen.public).causal:
            raise NotApplicable("the served model does not generate text, so its head cannot be replaced")
        name = next(n for n, m in seen.served.named_modules() if m is seen.served.get_output_embeddings())  # type: ignore[operator]
        special = sorted(seen.vocabulary.special_ids)
        ranked = []
        for text in seen.ids:
            ids = torch.tensor([text])
            with torch.no_grad():
                states = layer_inputs(seen.served, [name], input_ids=ids, attention_mask=torch.ones_like(ids))[name]
                scores = head(states[0])
            scores[:, special] = -torch.inf
            read = scores.topk(KEPT, dim=1).indices
            ranked.append(torch.cat([_first(text[0]), read[:-1]]))
        return TokenReading(tuple(ranked))


def _first(token: int) -> Tensor:
    return torch.full((1, KEPT), token)


def frequencies(seen: ServiceObservation) -> Unigram:
    """How often tokens occur in the reference text, or in English where there is none."""
    try:
        return Unigram.of(seen.vocabulary, seen.reference_text) if seen.reference_text else Unigram.english(seen.vocabulary)
    except InputError as error:
        raise NotApplicable(str(error)) from None


BLIND = ServiceAttackSpec(
    name="blind",
    about="baseline: guesses frequent tokens without looking at the data sent",
    source="Rasura: the baseline",
    make=BlindTokens,
)

KNN = ServiceAttackSpec(
    name="knn",
    about="takes the public row nearest to the row that is sent",
    source="Qu et al. 2021; ObfusLM, app. C.2",
    make=Knn,
)

EDNN = ServiceAttackSpec(
    name="ednn",
    about="takes the public row with the smallest L1 distance after centring",
    source="Lin et al. 2024; ObfusLM, app. C.2",
    make=Ednn,
)

TFA = ServiceAttackSpec(
    name="tfa",
    about="matches tokens by their frequency in reference text",
    source="Zanella-Beguelin et al. 2020; ObfusLM, app. E",
    make=TokenFrequency,
)

ERA = ServiceAttackSpec(
    name="era",
    about="predicts the next token from each final state with the public output layer",
    source="ObfusLM, sec. 5.2 and app. E",
    make=EmbeddingReplacement,
    home=("obfuslm:k=4", "llama"),
)
