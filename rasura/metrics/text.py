"""How much of a text was recovered: ROUGE, METEOR, Jaccard, tokens, exact match. All per private text, in ``[0, 1]``."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import nan
from typing import Any, Literal

import numpy as np

from rasura.core.interfaces import Unavailable
from rasura.core.letters import MARKS, UNSPACED
from rasura.core.specs import MetricSpec
from rasura.core.values import UNKNOWN, Reconstruction, Transcript
from rasura.metrics.matching import UNREAD, assign, own_tokens, paired, read_texts, unknown_words


@dataclass(frozen=True)
class TextMetric:
    """A score of (private text, recovered text); recovered texts are assigned one to one (``metrics.matching``). ``units``:
    what is compared of a private text, such as its words. NaN, not measured, for a text that has none."""

    name: str
    score: Callable[[str, str], float]
    units: Callable[[str], Sequence[Any]]
    unit: str = "share"
    higher_is: Literal["worse", "better"] = "worse"
    bounds: tuple[float, float] | None = (0.0, 1.0)

    def __call__(self, guess: Reconstruction, truth: Transcript) -> Sequence[float]:
        seen = truth.text_batch.seen
        pairs = paired(seen, read_texts(guess, truth), self.score)
        return [value if self.units(text) else nan for text, (value, _) in zip(seen, pairs, strict=True)]


WORD = re.compile(f"[{UNSPACED}]|[^\\W_{UNSPACED}](?:[^\\W_{UNSPACED}]|[{MARKS}])*")
"""A word that is written with letters or digits, in lower case, with their marks."""


def words(text: str) -> list[str]:
    """The words and numbers of ``text`` in lower case, without punctuation; in a script without spaces, each character. A
    letter and its accent count as the one sign that they may also be written as.

    >>> words("Lena owes 4,250 euros: 你好")
    ['lena', 'owes', '4', '250', 'euros', '你', '好']
    """
    return re.findall(f"{WORD.pattern}|{UNREAD}", unicodedata.normalize("NFC", text.lower()))


class RougeWords:
    """The words of a text for ROUGE: on English those of the package rouge-score, which drops all letters but a to z. A text
    in another script would score 0 however well it was read, so here other letters count as well."""

    def tokenize(self, text: str) -> list[str]:
        """As ``words``."""
        return words(text)


@lru_cache(maxsize=4)
def _scorer(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], tokenizer=RougeWords())


def rouge(kind: Literal["rouge1", "rouge2", "rougeL"]) -> TextMetric:
    """ROUGE F1 by the package rouge-score, without stemming, as in the papers; all scripts count (``RougeWords``). ROUGE-2
    measures texts of two words and more.

    ROUGE-L is ``2 LCS / (a + b)`` for texts of a and b words. The calibration paper writes ``LCS / max(a, b)``, which is
    never larger, and equal if both are equally long.
    """
    first = 1 if kind == "rouge2" else 0  # as many pairs of words begin after the first word as there are
    return TextMetric(
        kind,
        lambda reference, read: float(_scorer(kind).score(reference, read)[kind].fmeasure),
        lambda reference: words(reference)[first:],
    )


def _jaccard(reference: str, read: str) -> float:
    a, b = set(words(reference)), set(words(read))
    return len(a & b) / len(a | b) if a | b else 0.0


def jaccard() -> TextMetric:
    """Common words over all words, as sets; all words that the tokenizer does not know count as one that was not read."""
    return TextMetric("jaccard", _jaccard, words)


@cache
def _english() -> Any:
    """NLTK's WordNet without the map to another version of it, which only other languages need and which takes longest to
    load."""
    from nltk.corpus import CorpusReader, LazyCorpusLoader, WordNetCorpusReader

    class English(WordNetCorpusReader):  # type: ignore[misc]  # NLTK has no types
        def map_wn(self, version: str = "wordnet") -> None:
            return None

    return LazyCorpusLoader("wordnet", English, LazyCorpusLoader("omw-2.0", CorpusReader, ".*"))


def meteor(reference: str, read: str) -> float:
    """METEOR of ``read`` with ``reference``, in ``[0, 1]``; WordNet must be there (``wordnet``)."""
    from nltk.translate.meteor_score import meteor_score

    return float(meteor_score([words(reference)], words(read), wordnet=_english())) if words(read) else 0.0


@dataclass(frozen=True)
class Meteor:
    """METEOR by NLTK with WordNet's synonyms. Raises ``Unavailable`` if WordNet is not on NLTK's data path."""

    name: str = "meteor"
    unit: str = "share"
    higher_is: Literal["worse", "better"] = "worse"
    bounds: tuple[float, float] | None = (0.0, 1.0)

    def __call__(self, guess: Reconstruction, truth: Transcript) -> Sequence[float]:
        if wordnet() is None:
            raise Unavailable(
                "METEOR needs WordNet, but NLTK does not find it; set NLTK_DATA to a folder with corpora/wordnet.zip"
            )
        return TextMetric(self.name, meteor, words)(guess, truth)


def wordnet() -> str | None:
    """The path at which NLTK finds WordNet on this machine; None if it does not."""
    import nltk

    for name in ("corpora/wordnet", "corpora/wordnet.zip"):
        try:
            return str(nltk.data.find(name))
        except LookupError:
            continue
    return None


@dataclass(frozen=True)
class TokenMetric:
    """A score of (private ids, recovered ids), special tokens left out; texts assigned by common tokens. NaN for a text
    without a token of its own. Words that the tokenizer does not know count as ``UNKNOWN``: never recovered."""

    name: str
    score: Callable[[Sequence[int], Sequence[int]], float]
    special: Literal["drop", "keep"] = "drop"
    unit: str = "share"
    higher_is: Literal["worse", "better"] = "worse"
    bounds: tuple[float, float] | None = (0.0, 1.0)

    def __call__(self, guess: Reconstruction, truth: Transcript) -> Sequence[float]:
        def plain(ids: Sequence[int]) -> list[int]:
            return own_tokens(ids, truth)

        whole = [truth.text_batch.ids(row) for row in range(len(truth.text_batch))]
        read = list(guess.tokens)
        table = np.array([[_common(plain(a), plain(b)) for b in read] for a in whole]).reshape(len(whole), len(read))
        places = assign(table.astype(float), [tuple(ids) for ids in whole])
        out = []
        for row, place in enumerate(places):
            found, own = read[place] if place >= 0 else (), plain(whole[row])
            unread = [UNKNOWN] * unknown_words(whole[row], truth.vocabulary)
            if not own:
                out.append(nan)
            elif self.special == "drop":
                out.append(self.score(own + unread, plain(found)))
            else:
                kept = set(own)
                hits = [guess.ordered and k < len(found) and found[k] == t for k, t in enumerate(whole[row]) if t in kept]
                out.append(sum(hits) / len(own + unread))
        return out


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum((Counter(a) & Counter(b)).values())


def token_precision() -> TokenMetric:
    """Fraction of the recovered tokens that are in the private text, counting repeats."""
    return TokenMetric("token_precision", lambda a, b: _common(a, b) / len(b) if b else 0.0)


def token_recall() -> TokenMetric:
    """Fraction of the private tokens that were recovered, in any order, counting repeats; a word that the tokenizer does not
    know is a token that was not."""
    return TokenMetric("token_recall", lambda a, b: _common(a, b) / len(a))


def position_exact() -> TokenMetric:
    """Fraction of the private tokens that are at their exact position in the recovered text; 0 for a bag."""
    return TokenMetric("position_exact", lambda a, b: 0.0, special="keep")


def exact_match() -> TokenMetric:
    """1 if the recovered tokens are exactly the private text in order, otherwise 0."""
    return TokenMetric("exact_match", lambda a, b: float(list(a) == list(b)))


ROUGE1 = MetricSpec(
    name="rouge1",
    about="F1 of words",
    source="Lin 2004 (ROUGE), sec. 2 to 3",
    make=lambda: rouge("rouge1"),
)

ROUGE2 = MetricSpec(
    name="rouge2",
    about="F1 of word pairs",
    source="Lin 2004 (ROUGE), sec. 2 to 3",
    make=lambda: rouge("rouge2"),
)

ROUGE_L = MetricSpec(
    name="rougeL",
    about="F1 of the longest common subsequence of words",
    source="Lin 2004 (ROUGE), sec. 2 to 3",
    make=lambda: rouge("rougeL"),
)

METEOR = MetricSpec(
    name="meteor",
    about="word matches by form, stem and synonym",
    source="Banerjee and Lavie 2005, sec. 2.2",
    make=Meteor,
)

JACCARD = MetricSpec(
    name="jaccard",
    about="words in both texts divided by words in either",
    source="Jaccard 1912; Empirical calibration with metric DP, sec. III",
    make=jaccard,
)

TOKEN_PRECISION = MetricSpec(
    name="token_precision",
    about="fraction of the recovered tokens that are in the private text",
    source="Rasura",
    make=token_precision,
)

TOKEN_RECALL = MetricSpec(
    name="token_recall",
    about="fraction of the private tokens that were recovered",
    source="Rasura",
    make=token_recall,
)

POSITION_EXACT = MetricSpec(
    name="position_exact",
    about="fraction of the private tokens that were recovered at their position",
    source="Rasura",
    make=position_exact,
)

EXACT_MATCH = MetricSpec(
    name="exact_match",
    about="whether the whole text was recovered",
    source="Rasura",
    make=exact_match,
)
