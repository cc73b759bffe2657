"""What the tokens of a vocabulary look like to a reader: their texts, letters and lemmas."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from typing import Any

from rasura.core.interfaces import InputError, MissingExtra
from rasura.core.values import Vocabulary

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_TENS = "thirty forty fifty sixty seventy eighty ninety hundred"

NUMERALS = {word: str(n) for n, word in enumerate(_UNITS.split())}
NUMERALS |= {word: str(10 * n) for n, word in enumerate(_TENS.split(), 3)}
"""English numerals and their digits: ``four`` in place of ``4`` shows it."""

LATIN = str.maketrans("асеһіјкорԛѕуԝхαικνορυχ", "acehijkopqsywxaikvopux")
"""Cyrillic and Greek letters, in lower case, and the Latin ones that a reader takes them for."""


@lru_cache(maxsize=8)
def token_texts(vocabulary: Vocabulary) -> tuple[str, ...]:
    """The text of every token alone, lower case."""
    return tuple(vocabulary.decode([i]).strip().lower() for i in range(vocabulary.size))


def lemmatizer() -> Any:
    """The lemma library. Raises ``MissingExtra`` with the command to install it."""
    try:
        import simplemma
    except ImportError:
        raise MissingExtra("lemmas need simplemma: pip install 'rasura[ghost]', or pass --language none") from None
    return simplemma


def lemmas(vocabulary: Vocabulary, language: str | None) -> list[str]:
    """The lemma of every token, by its ``letters``; without a ``language``, the letters themselves.

    Tokens of the same letters have one lemma, where the paper takes a subword for its own (sec. 2.2): ``##i`` in place of
    ``i``, or ``₃`` of ``3``, would show it. Raises ``InputError`` if simplemma is missing or does not know the language.
    """
    words = [bare(text) for text in token_texts(vocabulary)]
    if language is None:
        return [letters(word) for word in words]
    simplemma = lemmatizer()
    found: dict[str, str] = {}
    try:
        for word in words:
            plain = unicodedata.normalize("NFKC", word)
            lemma = simplemma.lemmatize(plain, lang=language) if plain.isalpha() else plain
            found.setdefault(letters(word), letters(lemma))
    except ValueError as error:
        raise InputError(f"simplemma has no lemmas for the language {language!r} ({error}); pass --language none") from None
    return [found[letters(word)] for word in words]


def bare(piece: str) -> str:
    """The text of a token without the mark that it continues a word."""
    return piece.removeprefix("##").strip() or piece


def letters(word: str) -> str:
    """What a reader takes ``word`` for: without accents, case, and forms such as subscripts, full width and ligatures;
    Cyrillic and Greek letters that look Latin as these; of a numeral, English or of one sign, its digits."""
    parts = unicodedata.normalize("NFKD", word)
    plain = "".join(c for c in parts if not unicodedata.combining(c)).casefold() or word
    return NUMERALS.get(plain) or "".join(map(_digits, plain)).translate(LATIN)


def _digits(sign: str) -> str:
    """The digits of a ``sign`` that is a whole number in any script, such as ``四``; other signs unchanged."""
    value = unicodedata.numeric(sign, 0.5)
    return str(int(value)) if value.is_integer() else sign
