"""Texts that two data sets share: an adversary who has them as reference text is told what it should have to read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from rasura.core.errors import InputError
from rasura.data.text import Example

_NO_WORD = re.compile(r"[\W_]+")


def wording(text: str) -> str:
    """What is left of ``text`` without case, spaces and punctuation; of a text without letters and digits, all of it."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _NO_WORD.sub("", folded) or folded.strip()


def wording_of(example: Example) -> tuple[str, str]:
    """The wording of a text, and of the other one of a pair."""
    return wording(example.text), wording(example.text_pair or "")


def parts(examples: Iterable[Example]) -> Iterator[str]:
    """Every text of ``examples``, of a pair both."""
    return (t for e in examples for t in (e.text, e.text_pair) if t)


def shared(private: Iterable[Example], public: Sequence[Example]) -> list[int]:
    """Places in ``public`` of rows that hold a private text, or one of a private pair."""
    known = {wording(t) for t in parts(private)}
    return [k for k, e in enumerate(public) if any(wording(t) in known for t in parts([e]))]


def refuse_shared(private: Iterable[Example], public: Sequence[Example], source: str, hint: str = "") -> None:
    """Raise ``InputError`` where ``public``, the rows of ``source``, hold private texts: what is read would be known."""
    if found := shared(private, public):
        raise InputError(
            f"{source} holds {len(found)} of the audited texts (case, spaces and punctuation aside); expected other texts "
            f"of their kind{hint}"
        )
