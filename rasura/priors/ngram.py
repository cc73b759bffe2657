"""The unigram prior: how often each token occurs in ordinary text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.resources import files

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.values import Vocabulary

TYPICAL_TOKENS = 12
"""Default number of tokens of a text, without special tokens."""

_PER = 10_000


def _english() -> list[tuple[str, float]]:
    text = files("rasura.priors").joinpath("english_words.txt").read_text(encoding="utf-8")
    pairs = (line.split() for line in text.splitlines() if line and not line.startswith("# "))
    return [(word, float(count)) for word, count in pairs]


class Unigram:
    """Independent tokens with fixed frequencies; a ``Prior``.

    ``counts`` are relative frequencies by token id; ``seen_share`` is the probability of all of them together, the rest is
    spread evenly over every usable token (no special or unused one). ``typical_tokens`` is a text's usual number of tokens
    without special ones. Raises ``InputError`` when no usable token has a count.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        counts: Mapping[int, float],
        *,
        seen_share: float,
        typical_tokens: int = TYPICAL_TOKENS,
    ) -> None:
        self.vocabulary = vocabulary
        self.typical_tokens = typical_tokens
        usable = torch.ones(vocabulary.size, dtype=torch.float64)
        usable[sorted(i for i in vocabulary.special_ids | vocabulary.unused_ids if 0 <= i < vocabulary.size)] = 0
        found = torch.zeros_like(usable)
        for token, count in counts.items():
            if 0 <= token < vocabulary.size:
                found[token] += count
        found *= usable
        if not float(found.sum()) > 0:
            raise InputError("no token of the prior's text is in the vocabulary; expected text in the model's language")
        self.probabilities: Tensor = seen_share * found / found.sum() + (1 - seen_share) * usable / usable.sum()
        """Probability of every token, ``(vocabulary,)`` float64."""

    @classmethod
    def english(cls, vocabulary: Vocabulary) -> Unigram:
        """From the package's own list of common English words and marks."""
        counts: dict[int, float] = {}
        total = 0.0
        for word, count in _english():
            total += count
            # Most tokenizers mark a word inside a sentence by the space before it; some add that space themselves.
            forms = [vocabulary.encode(word)]
            if word.isalpha():
                forms.insert(0, vocabulary.encode(f" {word}"))
            for token in min(forms, key=len):
                counts[token] = counts.get(token, 0.0) + count
        return cls(vocabulary, counts, seen_share=min(0.95, total / _PER))

    @classmethod
    def of(cls, vocabulary: Vocabulary, texts: Sequence[str]) -> Unigram:
        """From reference texts. The share of unseen tokens is Good and Turing's: tokens that occur once, over all tokens."""
        encoded = [[i for i in vocabulary.encode(text) if i not in vocabulary.special_ids] for text in texts]
        lengths = sorted(len(ids) for ids in encoded if ids)
        if not lengths:
            raise InputError(f"{len(texts)} reference texts hold no token; expected at least one text")
        counts = Counter(i for ids in encoded for i in ids)
        once = sum(1 for count in counts.values() if count == 1)
        share = 1 - min(0.9, once / sum(counts.values()))
        return cls(vocabulary, counts, seen_share=share, typical_tokens=lengths[len(lengths) // 2])

    def log_probability(self, ids: Sequence[int]) -> float:
        """Natural log of the probability of ``ids``, in nats; special and unused tokens are impossible (``-inf``)."""
        if not ids:
            return 0.0
        return float(self.probabilities[list(ids)].log().sum())

    def top(self, k: int) -> list[int]:
        """The ``k`` likeliest tokens, likeliest first."""
        order = torch.sort(self.probabilities, descending=True, stable=True).indices
        return [int(i) for i in order[:k]]

    def expected_copies(self, length: int, candidates: int = 256) -> list[tuple[float, int]]:
        """What to guess of ``length`` unknown tokens: ``(gain, token)``, best first; a token may come several times.

        The gain of the r-th copy of a token is the probability that the text holds it at least r times (Poisson with mean
        ``length * p``), which is what that copy adds to the expected number of recovered tokens.
        """
        gains = []
        for token in self.top(min(candidates, self.vocabulary.size)):
            mean = length * float(self.probabilities[token])
            term, below = math.exp(-mean), 0.0
            for copy in range(1, length + 1):
                below += term
                term *= mean / copy
                if 1 - below <= 1e-6:
                    break
                gains.append((1 - below, token))
        return sorted(gains, key=lambda gain: -gain[0])
