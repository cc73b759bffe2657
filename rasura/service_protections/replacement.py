"""Token replacement with metric or local differential privacy: SANTEXT+ (Yue et al. 2021) and CUSTEXT+ (Chen et al. 2023).

The client replaces each token by a random one, drawn again each time, from a distribution that the mechanism fixes and
anyone can compute. What is sent are ordinary ids of the public model. Both papers replace words; here it is tokens, so that
a model's own table can stand in for word vectors, and lengths stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.rng import Randomness, uniform
from rasura.core.values import Mechanism, Parameter, Stage, Vocabulary
from rasura.priors.ngram import Unigram
from rasura.service_protections.word_vectors import glove

BLOCK = 256
"""Tokens whose distributions are formed at once."""


class Replacement(Protocol):
    """From each token to the distribution of what is sent in its place."""

    @property
    def mechanism(self) -> Mechanism: ...

    def chances(self, tokens: Tensor) -> Tensor:
        """Log probabilities ``(n, vocabulary)`` of every token to be sent in place of ``tokens`` ``(n,)``."""
        ...

    def likelihoods(self, sent: Tensor) -> Tensor:
        """Log probabilities ``(n, vocabulary)`` of ``sent`` ``(n,)`` if each token were the private one."""
        ...


@dataclass(frozen=True)
class Words:
    """``table`` ``(vocabulary, width)``: the vectors of those tokens that are ``known`` ``(vocabulary,)`` bool; others have
    none. ``order``: known tokens, the most frequent in English first. ``source``: a file, or ``model``."""

    table: Tensor
    known: Tensor
    order: Tensor
    source: str

    @classmethod
    def of(cls, table: Tensor, vocabulary: Vocabulary, vectors: str = "model") -> Words:
        """The model's own ``table``, or the file ``vectors``."""
        if vectors == "model":
            known = torch.ones(len(table), dtype=torch.bool)
            known[sorted(vocabulary.wordless)] = False
        else:
            table, known = glove(vectors, vocabulary)
        usual = Unigram.english(vocabulary).probabilities
        order = usual.argsort(descending=True, stable=True)
        return cls(table.detach().float(), known, order[known[order]], vectors)


@dataclass(frozen=True)
class SanText:
    """SANTEXT+ (Yue et al. 2021): in place of a sensitive token a sensitive one, by exp(-epsilon distance / 2).

    Sensitive are the rarest ``share`` of the tokens. Others are kept, but with probability ``change`` replaced alike. A
    token without a vector is replaced by any sensitive one. Frequencies are those of English, not of the private texts: what
    is sensitive must not depend on them. ``epsilon`` counts per unit of distance, so it depends on the vectors: distances in
    MiniLM's table are about 1.5, in GloVe's several times that.
    """

    words: Words
    epsilon: float = 3.0
    share: float = 0.9
    change: float = 0.3

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < math.inf and 0 < self.share <= 1 and 0 <= self.change <= 1):
            raise InputError(
                f"santext+: epsilon {self.epsilon}, share {self.share}, change {self.change}; expected a finite epsilon "
                "above 0, a share above 0 and at most 1, a change between 0 and 1"
            )

    @property
    def mechanism(self) -> Mechanism:
        told: dict[str, Parameter] = {
            "epsilon": self.epsilon,
            "share": self.share,
            "change": self.change,
            "vectors": self.words.source,
        }
        return Mechanism("santext+", Stage.DATA, told)

    @cached_property
    def sensitive(self) -> Tensor:
        """The ids of sensitive tokens, rising."""
        order = self.words.order
        return order[len(order) - max(1, round(self.share * len(order))) :].sort().values

    @cached_property
    def _rank(self) -> Tensor:
        rank = torch.full((len(self.words.table),), -1)
        rank[self.sensitive] = torch.arange(len(self.sensitive))
        return rank

    def _distances(self, tokens: Tensor) -> Tensor:
        return torch.cdist(self.words.table[tokens], self.words.table[self.sensitive])

    @cached_property
    def _sums(self) -> Tensor:
        """Log of the sum that a token's distribution is divided by, ``(vocabulary,)``."""
        every = torch.arange(len(self.words.table))
        return torch.cat([(-self.epsilon / 2 * self._distances(some)).logsumexp(1) for some in torch.split(every, BLOCK)])

    def chances(self, tokens: Tensor) -> Tensor:
        """Log probabilities ``(n, vocabulary)`` of what is sent in place of ``tokens``."""
        drawn = (-self.epsilon / 2 * self._distances(tokens)).log_softmax(1)
        drawn[~self.words.known[tokens]] = -torch.tensor(float(len(self.sensitive))).log()
        kept = self.words.known[tokens] & (self._rank[tokens] < 0)
        out = torch.full((len(tokens), len(self.words.table)), -torch.inf)
        out[:, self.sensitive] = drawn + torch.where(kept, self.change, 1.0).log()[:, None]
        places = kept.nonzero().flatten()
        out[places, tokens[places]] = torch.tensor(1 - self.change).log()
        return out

    def likelihoods(self, sent: Tensor) -> Tensor:
        """Log probabilities ``(n, vocabulary)`` of ``sent`` if each token were the private one."""
        known = self.words.known
        out = -self.epsilon / 2 * torch.cdist(self.words.table[sent], self.words.table) - self._sums
        out[:, known & (self._rank < 0)] += torch.tensor(self.change).log()
        out[:, ~known] = -torch.tensor(float(len(self.sensitive))).log()
        own = self._rank[sent] < 0
        out[own] = -torch.inf  # only sensitive tokens are drawn; another one stands for itself
        places = (own & known[sent]).nonzero().flatten()
        out[places, sent[places]] = torch.tensor(1 - self.change).log()
        return out


@dataclass(frozen=True)
class CusText:
    """CUSTEXT+ (Chen et al. 2023): tokens in groups of ``size``, in place of a token one of its group.

    Groups are formed from the most frequent token on, each of it and the nearest that no group has. The score of a member is
    its distance, scaled so that the nearest has 1 and the farthest 0; it is drawn by exp(epsilon score / 2). ``stop``
    words are kept (scikit-learn's list, where the paper takes NLTK's), tokens without vector too. Numbers in digits, which
    the paper's code shifts at random where they have no vector, are treated as any token.
    """

    words: Words
    epsilon: float = 3.0
    size: int = 20
    stop: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < math.inf and self.size >= 1):
            raise InputError(f"custext+: epsilon {self.epsilon}, size {self.size}; expected finite, above 0 and at least 1")

    @property
    def mechanism(self) -> Mechanism:
        told: dict[str, Parameter] = {"epsilon": self.epsilon, "size": self.size, "vectors": self.words.source}
        return Mechanism("custext+", Stage.DATA, told)

    @cached_property
    def groups(self) -> Tensor:
        """The members of every token's group ``(vocabulary, size)``, -1 where there are fewer or no vector."""
        table = self.words.table
        out = torch.full((len(table), self.size), -1)
        free = self.words.known.clone()
        squares = table.square().sum(1)
        for token in self.words.order.tolist():
            if not free[token]:
                continue
            away = squares - 2 * (table @ table[token])
            away[~free] = torch.inf
            away[token] = -torch.inf
            members = away.topk(min(self.size, int(free.sum())), largest=False).indices
            out[members, : len(members)] = members
            free[members] = False
        return out

    @cached_property
    def kept(self) -> Tensor:
        """Which tokens are sent as they are ``(vocabulary,)``."""
        out = ~self.words.known
        out[sorted(self.stop)] = True
        return out

    def chances(self, tokens: Tensor) -> Tensor:
        """Log probabilities ``(n, vocabulary)`` of what is sent in place of ``tokens``."""
        out = torch.full((len(tokens), len(self.words.table) + 1), -torch.inf)
        members = self.groups[tokens]
        there = members >= 0
        away = (self.words.table[tokens][:, None] - self.words.table[members]).norm(dim=2)
        least = away.masked_fill(~there, torch.inf).amin(1, keepdim=True)
        most = away.masked_fill(~there, -torch.inf).amax(1, keepdim=True)
        score = 1 - (away - least) / (most - least).clamp_min(1e-12)
        drawn = (self.epsilon / 2 * score).masked_fill(~there, -torch.inf).log_softmax(1)
        out.scatter_(1, members % out.shape[1], drawn)  # -1 becomes the column behind the last token
        out = out[:, :-1]
        same = self.kept[tokens].nonzero().flatten()
        out[same] = -torch.inf
        out[same, tokens[same]] = 0.0
        return out

    def likelihoods(self, sent: Tensor) -> Tensor:
        """Log probabilities ``(n, vocabulary)`` of ``sent`` if each token were the private one."""
        out = torch.full((len(sent), len(self.words.table)), -torch.inf)
        for row, token in zip(out, sent.tolist()):
            members = self.groups[token]
            private = torch.tensor(sorted({token, *members[members >= 0].tolist()}))
            row[private] = self.chances(private)[:, token]
        return out


def stop_words(vocabulary: Vocabulary) -> frozenset[int]:
    """The tokens that are stop words of English by themselves."""
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    return frozenset(i for i in range(vocabulary.size) if vocabulary.decode([i]).strip().lower() in ENGLISH_STOP_WORDS)


def replacement(mechanism: Mechanism, table: Tensor, vocabulary: Vocabulary) -> Replacement:
    """The distribution that ``mechanism`` announces, over the public ``table``; client and adversaries compute it alike."""
    told = dict(mechanism.parameters)
    words = Words.of(table, vocabulary, str(told.pop("vectors")))
    options: dict[str, Any] = told
    if mechanism.name == "santext+":
        return SanText(words, **options)
    return CusText(words, **options, stop=stop_words(vocabulary))


def replaced(
    made: Replacement, texts: Sequence[Sequence[int]], special: frozenset[int], rng: Randomness
) -> tuple[tuple[int, ...], ...]:
    """What is sent for ``texts``: each token drawn by itself; special ones stay. Randomness as in ``rng.uniform``."""
    out = [list(text) for text in texts]
    places: dict[int, list[tuple[int, int]]] = {}
    for n, text in enumerate(texts):
        for place, i in enumerate(text):
            if i not in special:
                places.setdefault(i, []).append((n, place))
    tokens = sorted(places)
    for some in (tokens[n : n + BLOCK] for n in range(0, len(tokens), BLOCK)):
        for token, row in zip(some, made.chances(torch.tensor(some)).double().exp().cumsum(1)):
            drawn = torch.searchsorted(row, uniform((len(places[token]),), rng) * row[-1])
            for (n, place), new in zip(places[token], drawn.tolist()):
                out[n][place] = new
    return tuple(map(tuple, out))
