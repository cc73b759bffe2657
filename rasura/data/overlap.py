"""Texts that two data sets share: as reference text, they would give the adversary what it is supposed to recover."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from rasura.core.errors import InputError
from rasura.data.text import Example

_NO_WORD = re.compile(r"[\W_]+")


def wording(text: str) -> str:
    """``text`` without case, spaces and punctuation; a text without letters and digits is unchanged."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _NO_WORD.sub("", folded) or folded.strip()


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
    """Indices of the rows in ``public`` that contain a private text, or one text of a private pair."""
    known = {wording(t) for t in parts(private)}
    return [k for k, e in enumerate(public) if any(wording(t) in known for t in parts([e]))]


def refuse_shared(private: Iterable[Example], public: Sequence[Example], source: str, hint: str = "") -> None:
    """Raise ``InputError`` if ``public``, the rows of ``source``, contain private texts: the adversary would already know
    them."""
    if found := shared(private, public):
        raise InputError(
            f"{source} contains {len(found)} of the audited texts (ignoring case, spaces and punctuation); "
            f"expected other texts of the same kind{hint}"
        )
