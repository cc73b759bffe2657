"""How much of a service's texts was recovered: the private token among the first guesses (ObfusLM, appendix C.2), and
ROUGE-L. All per text, in ``[0, 1]``; NaN, not measured, for a text of which the tokenizer knows no word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import compress
from math import nan

from rasura.core.answers import ServiceTranscript, TokenReading
from rasura.core.specs import ServiceMetricSpec
from rasura.core.values import UNKNOWN
from rasura.metrics.matching import named_text, worded
from rasura.metrics.text import rouge


def _private(guess: TokenReading, truth: ServiceTranscript) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Of each text its ids without special ones, and the guesses. Those of an ordered guess are at the same places: the
    service sees where special tokens are, so that nothing is guessed there. Words that the tokenizer does not know are
    there, and no guess names them."""
    special = truth.vocabulary.special_ids - truth.vocabulary.unknown_ids
    for ids, ranked in zip(truth.ids, guess.ranked, strict=True):
        own, rows = [i not in special for i in ids], ranked.tolist()
        if guess.ordered:
            rows = [row for row, there in zip(rows, own, strict=True) if there]
        yield list(compress(ids, own)), rows


@dataclass(frozen=True)
class TopTokens:
    """Fraction of the private tokens among the first ``count`` guesses at their place, special tokens left out."""

    count: int

    @property
    def name(self) -> str:
        """``top1``, ``top3``."""
        return f"top{self.count}"

    def __call__(self, guess: TokenReading, truth: ServiceTranscript) -> Sequence[float] | None:
        if not guess.ordered:
            return None
        special, out = truth.vocabulary.special_ids, []
        for own, rows in _private(guess, truth):
            hits = sum(i in row[: self.count] for i, row in zip(own, rows, strict=True) if i not in special)
            out.append(hits / len(own) if worded(own, truth.vocabulary) else nan)
        return out


@dataclass(frozen=True)
class RougeL:
    """ROUGE-L F1 of the text of the first guesses with the private one, special tokens left out. NaN also for a text without
    letters and digits."""

    name: str = "rougeL"

    def __call__(self, guess: TokenReading, truth: ServiceTranscript) -> Sequence[float] | None:
        if not guess.ordered:
            return None
        metric, words, out = rouge("rougeL"), truth.vocabulary, []
        for own, rows in _private(guess, truth):
            text, read = words.text(own), named_text([row[0] for row in rows], words)
            out.append(metric.score(text, read) if worded(own, words) and metric.units(text) else nan)
        return out


@dataclass(frozen=True)
class BagF1:
    """F1 of the first guesses and the private tokens as bags, special tokens left out."""

    name: str = "bag_f1"

    def __call__(self, guess: TokenReading, truth: ServiceTranscript) -> Sequence[float] | None:
        special = truth.vocabulary.special_ids | {UNKNOWN}
        out = []
        for own, rows in _private(guess, truth):
            read = Counter(row[0] for row in rows if row[0] not in special)
            both = sum((Counter(own) & read).values())
            out.append(2 * both / (len(own) + read.total()) if worded(own, truth.vocabulary) else nan)
        return out


TOP1 = ServiceMetricSpec(
    name="top1",
    about="fraction of the private tokens that are the first guess at their place",
    source="Lin et al. (ObfusLM), appendix C.2",
    make=lambda: TopTokens(1),
)

TOP3 = ServiceMetricSpec(
    name="top3",
    about="fraction of the private tokens among the first three guesses at their place",
    source="Lin et al. (ObfusLM), appendix C.2",
    make=lambda: TopTokens(3),
)

ROUGE_L = ServiceMetricSpec(
    name="rougeL",
    about="F1 of the longest common subsequence of words of the first guesses and the private text",
    source="Lin 2004 (ROUGE), sec. 3",
    make=RougeL,
)

BAG_F1 = ServiceMetricSpec(
    name="bag_f1",
    about="F1 of the first guesses and the private tokens, whatever their places",
    source="Rasura",
    make=BagF1,
)
