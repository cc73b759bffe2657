"""The most sensitive items: names, numbers and dates, found in the private text by rules, and the fraction of them
recovered."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Literal

from rasura.core.specs import MetricSpec
from rasura.core.values import Reconstruction, Transcript
from rasura.metrics.matching import paired, read_texts
from rasura.metrics.text import WORD, _scorer

_MONTHS = ["January", "February", "March", "April", "May", "June"]
_MONTHS += ["July", "August", "September", "October", "November", "December"]
_TITLES = r"(?:Mr|Mrs|Ms|Dr|Prof|Miss|Sir|Lady)"
_COMMON_FIRST = {"the", "a", "an", "please", "do", "our", "hi", "dear", "ask", "send", "meet", "block", "someone", "happy"}
_MONTH = f"(?:{'|'.join(_MONTHS)})"
_DATE = rf"\d{{1,2}} {_MONTH}|{_MONTH} \d{{1,2}}|\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}"
_EMAIL = r"[\w.+-]+@[\w-]+\.[\w.]+"
_NUMBER = r"\d[\d.,]*\d|\d"
_UPPER = "".join(c for c in map(chr, (*range(0x590), *range(0x1E00, 0x2000), *range(0xA640, 0xA800))) if c.isupper())
_MARKS = "\u0300-\u036f"
_NAME = rf"[{_UPPER}][\w{_MARKS}'’-]+"
SCRIPTS = ("LATIN", "GREEK", "CYRILLIC", "ARMENIAN")
"""The scripts in which a name is told by its capital, as Unicode names their letters."""


@cache
def _told(letter: str) -> bool:
    """Whether ``letter`` is of one of ``SCRIPTS``, or of no script (an apostrophe, a sign such as the one for micro)."""
    plain = unicodedata.normalize("NFKC", letter)
    return unicodedata.category(letter) == "Lm" or unicodedata.name(plain[0], "").startswith(SCRIPTS)


def tells_names(text: str) -> bool:
    """Whether the rules can tell names in ``text``: all of its letters are of ``SCRIPTS``, and some are capitals. Text
    without letters has no names.

    >>> [tells_names(text) for text in ("Call Łukasz", "Иван 42", "患者李小明", "call john", "42")]
    [True, True, False, False, True]
    """
    letters = [c for c in text if c.isalpha()]
    return not letters or (all(map(_told, letters)) and any(c.isupper() for c in letters))


def sensitive_spans(text: str) -> list[tuple[int, int]] | None:
    """(start, end) of names, numbers, dates and e-mail addresses in ``text``, in order, not overlapping. None, not known,
    where the rules cannot tell names (``tells_names``).

    Rules, not a model: capitalised words that do not open a sentence, words after a title, runs of capitalised words, and
    everything with digits.

    >>> text = "Please pay Lena Brandt 4,250 euros"
    >>> [text[start:end] for start, end in sensitive_spans(text)]
    ['Lena Brandt', '4,250']
    """
    return _spans(text) if tells_names(text) else None


def _spans(text: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for pattern in (_EMAIL, _DATE, _NUMBER):
        for m in re.finditer(pattern, text):
            if all(m.end() <= a or m.start() >= b for a, b in found):
                found.append(m.span())
    for m in re.finditer(rf"(?:{_TITLES}\.? )?{_NAME}(?: {_NAME})*", text):
        start, end = m.span()
        opens = start == 0 or bool(re.search(r"[.!?:]\s*$", text[:start]))
        parts = m.group().split(" ")
        if re.fullmatch(_TITLES, parts[0].rstrip(".")) and len(parts) > 1:
            start += len(parts[0]) + 1
        elif opens and len(parts) == 1:
            continue
        elif opens and parts[0].lower() in _COMMON_FIRST:
            start += len(parts[0]) + 1
        if m.group() in _MONTHS or any(start < b and end > a for a, b in found):
            continue
        found.append((start, end))
    return sorted(found)


def _folded(text: str) -> str:
    """``text`` without what tokenizers may drop: capitals, accents, and signs that are not seen."""
    kept = (c for c in unicodedata.normalize("NFKD", text) if unicodedata.category(c) not in ("Mn", "Cf"))
    return "".join(kept).casefold()


def plain_words(text: str, spans: Sequence[tuple[int, int]] | None = None) -> list[str]:
    """The words of ``text`` as they are compared here, without capitals and accents; with ``spans`` those that a span
    touches, each whole. So a text that was read whole holds all of them.

    >>> plain_words("Frau Müller: 500mg"), plain_words("Frau Müller: 500mg", [(13, 16)])
    (['frau', 'muller', '500mg'], ['500mg'])
    """
    found = WORD.finditer(_folded(text))
    if spans is None:
        return [m.group() for m in found]
    place = [0, *accumulate(len(_folded(c)) for c in text)]  # of each character of the text in the folded one
    folded = [(place[start], place[end]) for start, end in spans]
    return [m.group() for m in found if any(m.start() < end and m.end() > start for start, end in folded)]


@dataclass(frozen=True)
class Sensitive:
    """Fraction of the words touched by a sensitive span that were recovered (``plain_words``). NaN, which means leave out,
    for a text without any, and where it is not known whether there are any."""

    name: str = "sensitive"
    unit: str = "share"
    higher_is: Literal["worse", "better"] = "worse"
    bounds: tuple[float, float] | None = (0.0, 1.0)

    def __call__(self, guess: Reconstruction, truth: Transcript) -> Sequence[float]:
        read = read_texts(guess, truth)
        pairs = paired(truth.text_batch.seen, read, lambda a, b: float(_scorer("rouge1").score(a, b)["rouge1"].fmeasure))
        out = []
        for text, (_, place) in zip(truth.text_batch.texts, pairs):
            wanted = Counter(plain_words(text, sensitive_spans(text) or ()))
            got = Counter(plain_words(read[place])) if place >= 0 else Counter()
            total = sum(wanted.values())
            out.append(sum((wanted & got).values()) / total if total else float("nan"))
        return out


def marked_words(reference: str, read: str) -> list[tuple[str, bool, bool]]:
    """The words of ``reference`` as written: (word, whether it was recovered, whether the rules find it sensitive). Where
    they cannot tell names, they still find numbers.

    >>> marked_words("Lena Brandt owes", read="lena owes")
    [('Lena', True, True), ('Brandt', False, True), ('owes', True, False)]
    """
    spans = _spans(reference)
    left, marks = Counter(plain_words(read)), Counter(read)
    out = []
    for m in re.finditer(r"\S+", reference):
        # A mark that stands alone counts as itself; beside letters it follows them.
        own = Counter(plain_words(m.group()))
        pieces, there = (own, left) if own else (Counter(m.group()), marks)
        hit = pieces <= there
        if hit:
            there.subtract(pieces)
        out.append((m.group(), hit, any(m.start() < b and m.end() > a for a, b in spans)))
    return out


SPEC = MetricSpec(
    name="sensitive",
    about="fraction of names, numbers, dates and similar items that were recovered",
    source="Rasura",
    make=Sensitive,
)
