"""The trigram prior: token order in reference text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rasura.core.values import Vocabulary
from rasura.priors.ngram import Unigram

_EDGE = -1


class Trigram:
    """Token trigrams, bigrams and unigrams of ``texts``, interpolated; a ``Prior``.

    The three weights are set by deleted interpolation (Brants 2000, TnT, sec. 2.2): each trigram of the texts votes for the
    order that would predict it best if it had been left out. Raises ``InputError`` when the texts hold no token.
    """

    def __init__(self, vocabulary: Vocabulary, texts: Sequence[str]) -> None:
        self.unigram = Unigram.of(vocabulary, texts)
        self._usual: list[float] = self.unigram.probabilities.tolist()  # type: ignore[no-untyped-call]
        self._three: Counter[tuple[int, int, int]] = Counter()
        self._two: Counter[tuple[int, int]] = Counter()
        self._after: Counter[tuple[int, int]] = Counter()
        self._one: Counter[int] = Counter()
        self._begun: Counter[int] = Counter()
        for text in texts:
            ids = [i for i in vocabulary.encode(text) if i not in vocabulary.special_ids]
            for a, b, c in self._windows(ids):
                self._three[a, b, c] += 1
                self._after[a, b] += 1
                self._two[b, c] += 1
                self._begun[b] += 1
                self._one[c] += 1
        self.weights = self._interpolate()
        """Shares of the unigram, bigram and trigram estimates; they sum to 1."""

    @staticmethod
    def _windows(ids: Sequence[int]) -> list[tuple[int, int, int]]:
        padded = [_EDGE, _EDGE, *ids]
        return list(zip(padded, padded[1:], ids))

    def _interpolate(self) -> tuple[float, float, float]:
        votes = [0.0, 0.0, 0.0]
        total = sum(self._one.values())
        for (a, b, c), count in self._three.items():
            left_out = [
                (self._one[c] - 1) / max(1, total - 1),
                (self._two[b, c] - 1) / max(1, self._begun[b] - 1),
                (count - 1) / max(1, self._after[a, b] - 1),
            ]
            votes[max(range(3), key=left_out.__getitem__)] += count
        # The unigram knows every token, so that it alone keeps unseen orders possible.
        votes[0] += 1
        whole = sum(votes)
        return votes[0] / whole, votes[1] / whole, votes[2] / whole

    def log_probability(self, ids: Sequence[int]) -> float:
        """Natural log of the probability of ``ids`` as a text's beginning, in nats; special tokens are impossible."""
        one, two, three = self.weights
        total = 0.0
        for a, b, c in self._windows(ids):
            # What was never seen to be continued says nothing: the shorter context stands in for it.
            p = self._usual[c]
            if self._begun[b]:
                p = (one * p + two * self._two[b, c] / self._begun[b]) / (one + two)
            if self._after[a, b]:
                p = (one + two) * p + three * self._three[a, b, c] / self._after[a, b]
            total += math.log(p) if p > 0 else -math.inf
        return total
