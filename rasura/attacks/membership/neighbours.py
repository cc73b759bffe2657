"""MIA-N: is the model surer of a text than of its neighbours? Needs no other model than the public one it began with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn

from rasura.core.answers import Membership, ModelObservation
from rasura.core.batches import Batch
from rasura.core.specs import MembershipSpec
from rasura.core.values import Grant, Vocabulary
from rasura.core.word_rows import token_count, token_rows

NEAREST = 10
"""Tokens that may stand in for one, by the public word embedding."""

DROPPED = 0.7
"""Share of a token's embedding that is dropped before a masked language model says what else could stand there."""


@dataclass(frozen=True)
class Neighbours:
    """MIA-N: the mean loss of ``count`` neighbours minus the loss of the text itself (Mattern et al. 2023, sec. 2.2).

    A neighbour differs in one token. Where the granted public model is a masked language model, its likeliest swaps are
    taken, over all places, with most of the swapped token's embedding dropped (the paper's way). Else, and that is weaker,
    tokens near in the public word embedding stand in, at random places.
    """

    count: int = 10
    name: str = "mia-n"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.CANDIDATES, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        model, vocabulary = seen.base
        masked = type(model).__name__.endswith("ForMaskedLM")
        swaps = _Masked(model, vocabulary) if masked else _Nearest(model, vocabulary)
        rows: list[Batch] = []
        counts = []
        for row in seen.candidates:
            found = [_swapped(row, place, token) for place, token in swaps(row, self.count, rng)]
            rows += found
            counts.append(len(found))
        losses = torch.split(seen.ask(rows).losses, counts)
        own = seen.ask(seen.candidates).losses
        # A text without a token that may be swapped has no neighbours: nothing speaks for it or against it.
        scores = [float(n.mean() - loss) if len(n) else 0.0 for n, loss in zip(losses, own)]
        by = "masked language model" if masked else "word embedding"
        return Membership(torch.tensor(scores, dtype=torch.float64), {"neighbours": self.count, "swaps_by": by})


def _swapped(row: Batch, place: int, token: int) -> Batch:
    ids = row.input_ids.clone()
    ids[0, place] = token
    labels = row.labels
    if labels.dim() == 2:
        labels = torch.where(labels == -100, labels, ids)
    return replace(row, input_ids=ids, labels=labels)


def _allowed(size: int, vocabulary: Vocabulary) -> Tensor:
    allowed = torch.ones(size, dtype=torch.bool)
    allowed[[i for i in vocabulary.special_ids | vocabulary.unused_ids if i < size]] = False
    return allowed


class _Nearest:
    def __init__(self, model: nn.Module, vocabulary: Vocabulary) -> None:
        self.table = nn.functional.normalize(token_rows(model).float(), dim=1)
        self.allowed = _allowed(len(self.table), vocabulary)
        self.near: dict[int, list[int]] = {}

    def __call__(self, row: Batch, count: int, rng: Generator) -> list[tuple[int, int]]:
        ids = row.ids(0)
        places = [k for k, i in enumerate(ids) if bool(self.allowed[i])]
        if not places:
            return []
        drawn = torch.randint(0, len(places) * NEAREST, (count,), generator=rng).tolist()
        pairs = [(places[d // NEAREST], d % NEAREST) for d in drawn]
        return [(place, self._of(ids[place])[rank]) for place, rank in pairs]

    def _of(self, token: int) -> list[int]:
        if token not in self.near:
            alike = (self.table @ self.table[token]).masked_fill(~self.allowed, -2.0)
            alike[token] = -2.0
            self.near[token] = alike.topk(NEAREST).indices.tolist()
        return self.near[token]


class _Masked:
    def __init__(self, model: nn.Module, vocabulary: Vocabulary) -> None:
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model
        self.model, self.embedding = model, embedding
        self.allowed = _allowed(token_count(model), vocabulary)

    def __call__(self, row: Batch, count: int, rng: Generator) -> list[tuple[int, int]]:
        ids = torch.tensor(row.ids(0))
        places = [k for k, i in enumerate(ids.tolist()) if bool(self.allowed[i])]
        if not places:
            return []
        with torch.no_grad():
            inputs = self.embedding(ids).expand(len(places), -1, -1).clone()
            for k, place in enumerate(places):
                kept = torch.rand(inputs.shape[2], generator=rng) >= DROPPED
                inputs[k, place] *= kept / (1 - DROPPED)
            logits = self.model(inputs_embeds=inputs, attention_mask=torch.ones(inputs.shape[:2])).logits
        chance = torch.softmax(torch.stack([logits[k, p] for k, p in enumerate(places)]).double(), 1)
        here = ids[places][:, None]
        # How likely the swap is, given that the token itself is not taken.
        score = chance / (1 - chance.gather(1, here)).clamp(min=1e-12)
        score = score.masked_fill(~self.allowed, 0.0).scatter(1, here, 0.0)
        best = score.flatten().topk(min(count, score.numel())).indices.tolist()
        return [(places[b // score.shape[1]], b % score.shape[1]) for b in best]


SPEC = MembershipSpec(
    name="mia-n",
    about="a member has a lower loss than similar texts",
    source="Mattern et al. 2023, sec. 2.2",
    make=Neighbours,
    usual=frozenset({"classification"}),
)
