"""The columns of a table that are read, and its labels: numbers, or names that are numbered."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from rasura.core.errors import InputError
from rasura.data.rows import shown

TEXT = (
    "text", "texts", "sentence", "content", "body", "note", "message", "comment", "review", "document", "sentence1",
    "premise", "question1", "satz", "inhalt", "notiz", "nachricht", "kommentar", "bericht", "dokument", "freitext",
)  # fmt: skip
"""Names of text columns, in lower case; the first is preferred."""

PAIR = {
    "text": "text_pair", "sentence1": "sentence2", "premise": "hypothesis", "question1": "question2", "question": "sentence",
}  # fmt: skip
"""Name of the text's column -> name of its pair's. A ``question`` is only read with a ``sentence``, as in QNLI."""

NUMBERS = ("id", "idx", "index", "guid", "__index_level_0__")
"""Names of columns that number the rows."""

LABEL = ("label", "labels", "class", "category", "target", "sentiment", "klasse", "kategorie")
"""Names of label columns, in lower case; the first is preferred."""

NAMES = "label_text"
"""Column with the name of each row's label, beside ``label`` with its number."""

MAX_CLASSES = 10_000
"""Labels are below this limit, so that no huge head is made for a number that is not a label."""

MAX_NAME = 80
"""Maximum characters of a label's name."""


@dataclass(frozen=True)
class Columns:
    """Names of the columns with the text, the second text of a pair, and the label; None: found by their usual names.
    ``none`` as ``pair`` or ``label`` ignores that column. ``unit``: the column that says whose each row is; None for none.
    """

    text: str | None = None
    pair: str | None = None
    label: str | None = None
    unit: str | None = None


class Chosen:
    """The columns of one file: those of ``asked``, or with usual names. ``text`` is known after the first row. ``left``: the
    columns that are not read, of all rows so far."""

    def __init__(self, asked: Columns, source: str) -> None:
        self.asked, self.source = asked, source
        self.text: str | None = None
        self.pair: str | None = None
        self.label: str | None = None
        self.left: list[str] = []
        self._seen: set[str] = set()

    def wanted(self, names: tuple[str, ...]) -> list[str]:
        """Of the columns ``names``, those to read, the text's first. Raises ``InputError`` if there is no text column."""
        text = self._one("text", self.asked.text, names, _of_text(names))
        if text is None:
            option = "" if self.asked.text is None else f" named {self.asked.text!r}"
            # The first row of a table without a header, if it is one word, looks like the name of a column.
            bare = sum(map(bool, names)) == 1 and not self.source.lower().endswith((".jsonl", ".json", ".parquet"))
            found = "one column, whose first row may be text" if bare else shown(names)
            raise InputError(
                f"{self.source}, row 1: no column text{option} (found: {found}); pass the name of the text column as "
                "--text-column"
            )
        self.text = text
        pair = self.asked.pair or PAIR.get(text.casefold(), "")
        self.pair = self._one("pair", self.asked.pair, names, (pair.casefold(),))
        self.label = self._one("label", self.asked.label, names, LABEL)
        more = [n for n in names if self._beside(n)]
        if self.asked.unit is not None:
            if self.asked.unit not in names:
                raise InputError(
                    f"{self.source}: no column {self.asked.unit!r} (found: {shown(names)}), so it is not known whose each "
                    "row is; pass another name as --unit"
                )
            more.append(self.asked.unit)
        read = list(dict.fromkeys([n for n in (text, self.pair, self.label) if n is not None] + more))
        self._seen, self.left = set(names), self._unread(names)
        return read

    def _beside(self, name: str) -> bool:
        """Whether the column ``name`` is read with the text and the label: its tokens, and the name of its label."""
        return name in ("input_ids", "token_type_ids") or (name == NAMES and self.label == "label")

    def _unread(self, names: Iterable[str]) -> list[str]:
        read = (self.text, self.pair, self.label, self.asked.unit)
        return [n for n in names if n not in read and not self._beside(n) and n.casefold() not in NUMBERS]

    def also(self, row: Iterable[str]) -> None:
        """Of rows with keys of their own: the pair or the label, and what is not read, where only a later row has it. Raises
        ``InputError`` for a name that fits as well as the one that was taken, or better: earlier rows were read without it.
        """
        names = [n for n in row if n not in self._seen]
        if not names:
            return
        for kind, asked, usual in (
            ("text", self.asked.text, _of_text([*self._seen, *names])),
            ("pair", self.asked.pair, (PAIR.get(str(self.text).casefold(), ""),)), ("label", self.asked.label, LABEL),
        ):  # fmt: skip
            taken = getattr(self, kind)
            if taken is None:
                setattr(self, kind, self._one(kind, asked, names, usual, strict=False))
            elif asked is None and (fits := self._one(kind, None, [taken, *names], usual)) != taken:
                raise self._unclear(kind, [taken, str(fits)])
        self._seen.update(names)
        self.left += self._unread(names)

    def _one(
        self, kind: str, asked: str | None, names: Sequence[str], usual: Sequence[str], strict: bool = True
    ) -> str | None:
        if asked == "none" and kind != "text":
            return None
        if asked is not None:
            found = [n for n in names if n == asked] or [n for n in names if n.casefold() == asked.casefold()]
            if len(found) == 0 and strict and kind != "text":
                raise InputError(
                    f"{self.source}: no column {asked!r} (found: {shown(names)}); pass another name as --{kind}-column"
                )
        else:
            lower = {n.casefold().strip() for n in names}
            first = usual[0] if usual and usual[0] in lower else None
            found = [n for n in names if n.casefold().strip() in ((first,) if first else usual)]
        if len(set(found)) > 1:
            raise self._unclear(kind, found)
        return found[0] if found else None

    def _unclear(self, kind: str, names: Iterable[str]) -> InputError:
        return InputError(f"{self.source}: {kind} may be column {shown(set(names))}; choose with --{kind}-column")


def _of_text(names: Iterable[str]) -> tuple[str, ...]:
    """Names that the text's column may have, among columns ``names``."""
    return ("question",) if {"question", "sentence"} <= {n.casefold().strip() for n in names} else TEXT


class Labels:
    """The labels of one file, in order of their rows: numbers, or names with the number at which each appeared first.

    ``names``: None to number the file's own names; empty if numbers are expected; otherwise the names of the numbers.
    ``usual``: names of the model's classes, which are used if they include the file's names.
    """

    def __init__(self, source: str, names: Sequence[str] | None = None, usual: Sequence[str] = ()) -> None:
        self.source, self.usual = source, tuple(usual)
        self.given = None if names is None else tuple(names)
        self._first: tuple[int, bool] | None = None
        self._numbers: dict[str, int] = {n: k for k, n in enumerate(self.given or ())}
        self._told: dict[int, str] = {}
        self._unknown: int | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the numbers; empty if labels are numbers, None if no row has a label."""
        if self._first is None:
            return None
        if self._told:
            return tuple(self._told.get(k, str(k)) for k in range(1 + max(self._told)))
        return tuple(self._numbers)

    def add(self, value: Any, name: Any, row: int) -> int | None:
        """The number of a row's label, given as ``value`` and perhaps with its ``name``; None without any."""
        place = f"{self.source}, row {row}"
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        number = _whole(value, place)
        if number is not None and isinstance(name, str) and name.strip():
            return self._named(number, name.strip(), row, place)
        text = number is None
        if self._first is None:
            self._first = (row, text)
        elif self._first[1] != text:
            kinds = ("a number", "text")
            raise InputError(
                f"{place}: the label is {kinds[text]}, but that of row {self._first[0]} is {kinds[not text]}; "
                "use one kind for all rows"
            )
        if number is not None:
            if self.given:
                raise InputError(f"{place}: the label is a number; expected, as in the other file, {_few(self.given)}")
            return number
        return self._of(str(value).strip(), row, place)

    def _of(self, name: str, row: int, place: str) -> int:
        if len(name) > MAX_NAME:
            raise InputError(
                f"{place}: the label has {len(name)} characters; expected at most {MAX_NAME}. "
                "Choose the column with --label-column"
            )
        if self.given is not None:
            if not self.given:
                raise InputError(f"{place}: the label is text; expected a number, as in the other file")
            if name not in self._numbers:
                raise InputError(f"{place}: the label does not occur in the other file: {_few(self.given)}")
            return self._numbers[name]
        if name not in self._numbers:
            self._numbers[name] = len(self._numbers)
            if len(self._numbers) > MAX_CLASSES:
                raise InputError(f"{place}: more than {MAX_CLASSES} different labels; choose the column with --label-column")
            if self._unknown is None and name not in self.usual:
                self._unknown = row
        return self._numbers[name]

    def _named(self, number: int, name: str, row: int, place: str) -> int:
        """A label with its number and its name, as files have it that were obfuscated."""
        if self._first is None:
            self._first = (row, True)
        if len(name) > MAX_NAME or self._told.setdefault(number, name) != name or number < 0:
            raise InputError(
                f"{place}: label {number} has another name than in an earlier row; use one name for each number"
            )
        return self._of(name, row, place) if self.given else number

    def settled(self, labels: Sequence[int | None]) -> list[int | None]:
        """``labels`` by the model's own numbers, where its classes have the file's names. Raises ``InputError`` if only some
        names match: the head would be given classes that it does not know."""
        own = {name: k for k, name in enumerate(self.usual)}
        names = list(self._numbers)
        if self.given is not None or not names or not any(n in own for n in names):
            return list(labels)
        if self._unknown is not None:
            raise InputError(
                f"{self.source}, row {self._unknown}: the label is not one of the model's classes "
                f"({_few(self.usual)}), although other labels are; rename it, or pass a model without a trained head"
            )
        self._numbers = own
        return [None if k is None else own[names[k]] for k in labels]


_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?|[+-]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)


def _whole(value: Any, place: str) -> int | None:
    """``value`` as a whole number; None for text. Raises ``InputError`` for other values, and for huge numbers."""
    if isinstance(value, str):
        if not _NUMBER.fullmatch(value.strip()):
            return None
        value = float(value)
    if not isinstance(value, Real):
        raise InputError(f"{place}: the label is a {type(value).__name__}; expected a whole number or a name")
    if isinstance(value, Integral):
        number = int(value)
    else:
        figure = float(value)
        if math.isnan(figure):
            raise InputError(f"{place}: the label is NaN; fill it or remove the row")
        if math.isinf(figure) or figure != int(figure):
            raise InputError(f"{place}: label {figure:g} is not a whole number; expected 0, 1, ... or names")
        number = int(figure)
    if abs(number) >= MAX_CLASSES:
        raise InputError(f"{place}: the label is a number above {MAX_CLASSES - 1}; expected classes 0, 1, ...")
    return number


def person(name: str | int) -> str:
    """The one writing of a person's ``name``: a number as text, without space around it, accents composed. One person who
    counts as two has less of a guarantee than is said."""
    return unicodedata.normalize("NFC", str(name)).strip()


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f", ... ({len(names)} in all)" if len(names) > 20 else "")


def taken(chosen: Chosen, labels: Labels, more: Sequence[str]) -> str | None:
    """One line on how a file was read, unless everything is default: UTF-8, commas, only columns text and label, numbers."""
    parts = list(more)
    for kind, plain in (("text", "text"), ("pair", "text_pair"), ("label", "label")):
        name = getattr(chosen, kind)
        if name is not None and name != plain:
            parts.append(f"{kind} from column {name!r}")
    if names := labels.names:
        parts.append("labels: " + _few([f"{k} = {n}" for k, n in enumerate(names)]))
    if chosen.left:
        named, bare = {n for n in chosen.left if n}, chosen.left.count("")
        left = [*([shown(named)] if named else []), *([f"{bare} without a name"] if bare else [])]
        parts.append(f"not read: {', '.join(left)}")
    return f"{chosen.source}: {', '.join(parts)}" if parts else None
