"""Texts that two data sets share: as reference text, they would give the adversary what it is supposed to recover."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from rasura.core.errors import InputError
from rasura.core.letters import MARKS, UNSPACED, of_category
from rasura.data.text import Example

_SPELLED = f"[^\\W_{UNSPACED}](?:[a-z0-9]+|[^\\W_{UNSPACED}]|[{MARKS}]|(?<=\\d)[^\\w\\s](?=\\d))*"
_SIGNED = rf"(?<!\S)(?:-\.?|\.)(?=\d){_SPELLED}"
_WORD = re.compile(f"{_SPELLED}|{_SIGNED}|[{UNSPACED}][{MARKS}]*|[{of_category('Sm')}]")
"""A word with the marks on its letters; a number with its sign, its point and what stands between its digits; a mathematical
sign. In a script without spaces, each character is a word."""

RUN = 5
"""From so many words on, a text is looked for within longer ones: fewer may stand together by chance."""


def _words(text: str) -> tuple[list[str], str]:
    """The words of ``text`` without case, and its ``wording``."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    folded = folded.replace("i\u0307", "i").replace("\u2212", "-")  # the Turkish capital İ, and a minus
    words = _WORD.findall(folded)
    return words, "".join(words) or folded.strip()


def wording(text: str) -> str:
    """``text`` without case, spaces and punctuation; a text without letters and digits is unchanged. Accents, vowel signs,
    mathematical signs and what belongs to a number stay: 1.5 is not 15, and -40 not 40."""
    return _words(text)[1]


def wording_of(example: Example) -> tuple[str, str]:
    """The wording of a text, and of the second text of a pair."""
    return wording(example.text), wording(example.text_pair or "")


def texts_hash(examples: Iterable[Example]) -> str:
    """Sixteen hex digits that identify the wording of ``examples`` and their order, whatever their labels are called."""
    lines = (json.dumps(wording_of(e), ensure_ascii=False) for e in examples)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def parts(examples: Iterable[Example]) -> Iterator[str]:
    """Every text of ``examples``; for a pair, both texts."""
    return (t for e in examples for t in (e.text, e.text_pair) if t)


def shared(private: Iterable[Example], public: Sequence[Example]) -> list[int]:
    """Indices of the rows in ``public`` that are a private text, or one text of a private pair."""
    known = {wording(t) for t in parts(private)}
    return [k for k, e in enumerate(public) if any(wording(t) in known for t in parts([e]))]


def holding(private: Iterable[Example], public: Sequence[Example]) -> list[int]:
    """Indices of the rows in ``public`` that hold a private text, or one text of a private pair: as a whole, or from ``RUN``
    words on within a longer text."""
    texts = [_words(t) for t in parts(private)]
    known, runs = {whole for _, whole in texts}, {whole for words, whole in texts if len(words) >= RUN}
    first = min(map(len, runs), default=0)
    lengths: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        lengths[run[:first]].add(len(run))

    def held(text: str) -> bool:
        words, whole = _words(text)
        if whole in known:
            return True
        edges = [0, *accumulate(map(len, words))]
        ends = set(edges)
        spans = ((at, at + n) for at in edges for n in lengths.get(whole[at : at + first], ()))
        return any(end in ends and whole[at:end] in runs for at, end in spans)

    return [k for k, e in enumerate(public) if any(map(held, parts([e])))]


def refuse_shared(private: Iterable[Example], public: Sequence[Example], source: str, hint: str = "") -> None:
    """Raise ``InputError`` if ``public``, the rows of ``source``, hold private texts: the adversary would already know
    them."""
    if found := holding(private, public):
        raise InputError(
            f"{source} holds audited texts in {len(found)} of its rows, as a whole or within a longer text (ignoring case, "
            f"spaces and punctuation); expected other texts of the same kind{hint}"
        )
