"""The language of a report. Every sentence stands in the code in English; a catalogue for each other language translates it.
No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.resources import files
from string import Formatter

from rasura.core.options import known

LANGUAGES = {"en": "English", "de": "Deutsch", "fr": "français"}
"""The languages of reports, each with its own name for itself."""

_NOW: ContextVar[str] = ContextVar("language", default="en")


def current() -> str:
    """The language that is written now: a key of ``LANGUAGES``."""
    return _NOW.get()


@contextmanager
def written_in(language: str) -> Iterator[None]:
    """Within this context, sentences and figures are written in ``language``. Raises ``InputError`` for an unknown one."""
    before = _NOW.set(known("language", language, LANGUAGES))
    try:
        yield
    finally:
        _NOW.reset(before)


@cache
def catalogue(language: str) -> Mapping[str, str]:
    """The translation of every English sentence. Empty for English."""
    if language == "en":
        return {}
    text = files("rasura.report").joinpath("languages", f"{language}.json").read_text(encoding="utf-8")
    found: dict[str, str] = json.loads(text)
    return {english: _spaced(there, language) for english, there in found.items()}


def _spaced(text: str, language: str) -> str:
    """French sets a space before some marks; no line may end there."""
    return re.sub(r" (?=[:;?!»])|(?<=«) ", "\N{NO-BREAK SPACE}", text) if language == "fr" else text


class _Figures(Formatter):
    def format_field(self, value: object, format_spec: str) -> str:
        return number(value, format_spec) if isinstance(value, float) else str(super().format_field(value, format_spec))


def number(value: float | None, form: str) -> str:
    """``value`` in the format ``form``, with the decimal mark of the language; a dash for what was not measured."""
    text = "–" if value is None else format(value, form)
    return text if current() == "en" else text.replace(".", ",")


def tell(sentence: str, /, **values: object) -> str:
    """``sentence`` in the language that is written now, with ``values`` in its places. ``sentence`` is a literal in English,
    with the names of ``values`` in braces. Raises ``LookupError`` if a catalogue lacks it, so that no page is mixed."""
    there = sentence if current() == "en" else catalogue(current())[sentence]
    return _Figures().vformat(there, (), values)


def size(count: float) -> str:
    """``count`` bytes in the largest unit that fits, as written in the language."""
    if count >= 1e9:
        return tell("{figure} GB", figure=number(count / 1e9, ".3g"))
    if count >= 1e6:
        return tell("{figure} MB", figure=number(count / 1e6, ".3g"))
    if count >= 1e3:
        return tell("{figure} kB", figure=number(count / 1e3, ".3g"))
    return tell("{count:.0f} bytes", count=count)


def recorded(text: str) -> str:
    """A description that a run stored in English, in the language that is written now. Descriptions that come from plug-ins
    and from other versions stay as they are."""
    return catalogue(current()).get(text, text)
