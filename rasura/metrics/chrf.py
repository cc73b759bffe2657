"""chrF (Popovic 2015): F-score of character n-grams, which gives credit for words recovered in another form."""

from __future__ import annotations

from rasura.core.specs import MetricSpec
from rasura.metrics.text import TextMetric


def score(reference: str, read: str) -> float:
    """chrF3 of ``read`` with ``reference``, in ``[0, 1]``: n-grams of 1 to 6 characters without spaces; recall has three
    times the weight. 0 for an empty text.

    Computed by NLTK, which counts n-grams longer than the text as missed. Here n is at most the length of ``reference``, so
    that a short text that was fully recovered scores 1.

    >>> score("Lena pays.", "Lena pays."), score("Lena pays.", "")
    (1.0, 0.0)
    """
    from nltk.translate.chrf_score import sentence_chrf

    characters = len("".join(reference.split()))
    if not characters or not read.split():
        return 0.0
    return float(sentence_chrf(reference, read, max_len=min(6, characters)))


def chrf() -> TextMetric:
    """chrF3 as ``score`` computes it, per private text."""
    return TextMetric("chrf", score, str.split)


SPEC = MetricSpec(
    name="chrf",
    about="F3 of character n-grams of length 1 to 6",
    source="Popovic 2015 (chrF), sec. 2",
    make=chrf,
    usual=False,
)
