"""What of a service's texts was read: the private token among the first guesses (ObfusLM, appendix C.2), and ROUGE-L."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rasura.core.answers import ServiceTranscript, TokenReading
from rasura.core.values import UNKNOWN
from rasura.metrics.text import rouge


@dataclass(frozen=True)
class TopTokens:
    """Share of a text's private tokens that stand among the first ``most`` guesses at their place, special ones left out."""

    most: int

    @property
    def name(self) -> str:
        """``top1``, ``top3``."""
        return f"top{self.most}"

    def __call__(self, guess: TokenReading, truth: ServiceTranscript) -> Sequence[float] | None:
        if not guess.ordered:
            return None
        out = []
        for ids, ranked in zip(truth.ids, guess.ranked, strict=True):
            hits = [t in row[: self.most] for t, row in zip(ids, ranked.tolist()) if t not in truth.vocabulary.special_ids]
            out.append(sum(hits) / len(hits) if hits else 0.0)
        return out


@dataclass(frozen=True)
class RougeL:
    """ROUGE-L F1 of the text of the first guesses with the private one."""

    name: str = "rougeL"

    def __call__(self, guess: TokenReading, truth: ServiceTranscript) -> Sequence[float] | None:
        if not guess.ordered:
            return None
        score, text = rouge("rougeL").score, truth.vocabulary.text
        return [score(text(ids), text(ranked[:, 0].tolist())) for ids, ranked in zip(truth.ids, guess.ranked, strict=True)]


@dataclass(frozen=True)
class BagF1:
    """F1 of the first guesses and the private tokens as bags, special tokens left out."""

    name: str = "bag_f1"

    def __call__(self, guess: TokenReading, truth: ServiceTranscript) -> Sequence[float] | None:
        special = truth.vocabulary.special_ids | {UNKNOWN}
        out = []
        for ids, ranked in zip(truth.ids, guess.ranked, strict=True):
            own = Counter(i for i in ids if i not in special)
            read = Counter(i for i in ranked[:, 0].tolist() if i not in special)
            both = sum((own & read).values())
            out.append(2 * both / (own.total() + read.total()) if both else 0.0)
        return out
