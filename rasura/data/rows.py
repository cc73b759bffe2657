"""The rows of a data file, one by one: JSONL, JSON, CSV, Parquet, or a Hugging Face data set id."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError, MissingExtra
from rasura.data.lines import Lines

Row = tuple[int, Mapping[str, Any]]
"""A row's number and its cells by column. For JSONL, the number is the line number; otherwise 1 is the first row (for CSV,
the first after the header)."""

MAX_CELL = 1 << 20
"""Maximum characters of a cell."""

MAX_JSON = 1 << 28
"""Maximum bytes of a .json file with one list, which can only be read as a whole."""

SAMPLE = 64
"""Number of lines from which the separator of a CSV file is chosen."""

SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}


class _Twice(dict[str, Any]):
    """A JSON object with a key that is given more than once, so that what it says depends on the reader."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    return found if len(found) == len(pairs) else _Twice(found)


class Source:
    """The source of rows. ``taken``: how the file was read, if this was not given (filled in while rows are read).
    ``wanted(names)``: the needed columns of a table, the text column first. Raises ``InputError`` for files that do not
    exist, are empty, or have another type.
    """

    def __init__(self, source: str | Path, wanted: Callable[[tuple[str, ...]], list[str]]) -> None:
        if not isinstance(source, str | PathLike):
            raise InputError(f"texts were given as {type(source).__name__}; expected the name of a file: notes.jsonl")
        path = Path(source)
        self.name, self.path, self.wanted = str(source), path, wanted
        self.taken: list[str] = []
        self._lines: Lines | None = None
        self._reader: Callable[[], Iterator[Row]] = self._hub
        suffix = path.suffix.lower()
        try:
            there, exists = path.is_file(), path.exists()
        except (OSError, ValueError):  # a name that no file can have
            raise InputError("FILE is not a valid file name; expected a .jsonl, .csv or .parquet file") from None
        if there:
            if suffix not in READERS:
                raise InputError(f"{path}: unknown file type {path.suffix or '(none)'}; expected .jsonl, .csv or .parquet")
            if path.stat().st_size == 0:
                raise InputError(f"{path} is empty; expected rows with a column text")
            self._reader = partial(READERS[suffix], self)
        elif suffix in READERS or path.is_absolute() or self.name.startswith(".") or exists:
            raise InputError(f"{source} does not exist or is not a file; expected a .jsonl, .csv or .parquet file")
        elif not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", self.name):
            # Not quoted, and not asked of a server: it may be a text instead of a file.
            raise InputError(
                "FILE does not exist, and its name is not a data set id; expected a .jsonl, .csv or .parquet file"
            )

    def __iter__(self) -> Iterator[Row]:
        try:
            yield from self._reader()
        except OSError as error:
            raise InputError(f"{self.name} cannot be read ({error.strerror or type(error).__name__})") from None

    @property
    def encoding(self) -> str | None:
        """The encoding of a text file, as far as it was read."""
        return None if self._lines is None else self._lines.encoding

    def _open(self) -> Lines:
        self._lines = Lines(self.path)
        return self._lines

    def _object(self, text: str, place: str) -> Mapping[str, Any]:
        try:
            row = json.loads(text, object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise InputError(f"{place}: not valid JSON ({error.msg[:60]}); expected one object per line") from None
        except (RecursionError, ValueError):
            raise InputError(
                f"{place}: JSON is nested too deeply or has a number that is too long; expected one flat object"
            ) from None
        return self._row(row, place)

    def _row(self, row: Any, place: str) -> Mapping[str, Any]:
        if isinstance(row, _Twice):
            raise InputError(f"{place}: a key is given twice (columns: {shown(row)}); expected each once")
        if not isinstance(row, dict):
            raise InputError(f"{place}: found {type(row).__name__}; expected one object")
        return row

    def _jsonl(self) -> Iterator[Row]:
        for number, line in enumerate(self._open(), 1):
            if line.strip():
                yield number, self._object(line, f"{self.path}, line {number}")

    def _json(self) -> Iterator[Row]:
        """Lines of objects, or one list of them."""
        lines = iter(self._open())
        first = next((line for line in lines if line.strip()), "")
        if not first.lstrip().startswith("["):
            yield from self._jsonl()
            return
        if self.path.stat().st_size > MAX_JSON:
            raise InputError(f"{self.path}: a list above {MAX_JSON >> 20} MiB; expected .jsonl, one object per line")
        try:
            rows = json.loads("".join(chain([first], lines)), object_pairs_hook=_unique)
        except json.JSONDecodeError as error:
            raise InputError(f"{self.path}, line {error.lineno}: not valid JSON; expected one list of objects") from None
        except (RecursionError, ValueError):
            raise InputError(f"{self.path}: JSON is nested too deeply or has a number that is too long") from None
        for number, row in enumerate(rows, 1):
            yield number, self._row(row, f"{self.path}, row {number}")

    def _csv(self) -> Iterator[Row]:
        csv.field_size_limit(max(MAX_CELL, csv.field_size_limit()))
        lines = iter(self._open())
        sample = list(islice(lines, SAMPLE))
        separator = None
        if sample and (said := re.fullmatch(r'"?sep=(.)"?[\r\n]*', sample[0])):  # Excel's own way to tell it
            separator = said[1]
            del sample[0]
        if separator is None:
            separator = self._separator(sample)
        if separator != ",":
            self.taken.append(f"separator {SEPARATORS.get(separator, repr(separator))}")
        table = csv.reader(chain(sample, lines), delimiter=separator, strict=True)
        names: list[str] | None = None
        number = 0
        while True:
            try:
                cells = next(table, None)
            except csv.Error:
                where = "the header" if names is None else f"row {number + 1}"
                raise InputError(
                    f"{self.path}, {where} (line {table.line_num}): a quote is not closed, text follows a closing quote, or "
                    f'a cell has more than {MAX_CELL} characters; write quotes within quoted cells as ""'
                ) from None
            if cells is None:
                return
            if names is None:
                if any(c.strip() for c in cells):
                    names = [c.strip() for c in cells]
                    needed = self.wanted(tuple(names))
                    if double := [n for n in needed if names.count(n) > 1]:
                        raise InputError(f"{self.path}: two columns are named {shown(double)}; rename one")
                continue
            number += 1
            if not any(c.strip() for c in cells):
                continue
            if len(cells) < len(names) or any(c.strip() for c in cells[len(names) :]):
                raise InputError(
                    f"{self.path}, row {number} (line {table.line_num}): {len(cells)} cells, but the header has "
                    f"{len(names)} (separator {SEPARATORS.get(separator, repr(separator))}); "
                    f"quote cells that contain {'it' if len(cells) > len(names) else 'a line break'}"
                )
            yield number, {n: c for n, c in zip(names, cells) if n and not (c == "" and n != needed[0])}

    def _separator(self, sample: list[str]) -> str:
        """The separator by which the header has an expected column; otherwise the one with the most columns, the same in all
        rows."""

        def fit(separator: str) -> tuple[bool, bool, float, int]:
            found = []
            try:
                for cells in csv.reader(sample, delimiter=separator):
                    found.append(cells)
            except csv.Error:
                pass
            found = [cells for cells in found if any(c.strip() for c in cells)]
            if not found:
                return False, False, 0.0, 0
            width = len(found[0])
            alike = sum(len(cells) == width for cells in found) / len(found)
            try:
                known = bool(self.wanted(tuple(c.strip() for c in found[0])))
            except InputError:
                known = False
            return known, width > 1, alike, width

        return max(SEPARATORS, key=fit)

    def _parquet(self) -> Iterator[Row]:
        from rasura.data.parquet import read_rows

        def needed(names: tuple[str, ...]) -> list[str]:
            found = self.wanted(names)
            if double := [n for n in found if names.count(n) > 1]:
                raise InputError(f"{self.path}: two columns are named {shown(double)}; rename one")
            return found

        return read_rows(self.path, needed)

    def _hub(self) -> Iterator[Row]:
        try:
            import datasets
        except ImportError:
            raise MissingExtra(
                f"{self.name} is not a file; to read it as a data set id, run: pip install 'rasura[datasets]'"
            ) from None
        try:
            found = datasets.load_dataset(self.name)
        except Exception as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise InputError(f"{self.name} is neither a file nor a data set that can be loaded here ({first})") from None
        if hasattr(found, "values"):
            name = "train" if "train" in found else next(iter(found))
            if len(found) > 1 and name != "train":
                raise InputError(
                    f"{self.name} has the splits {shown(found)}, and none is called train; save the one to read as a file"
                )
            self.taken.append(f"split {name}")
            found = found[name]
        yield from enumerate(found, 1)


READERS: Mapping[str, Callable[[Source], Iterator[Row]]] = {
    ".jsonl": Source._jsonl, ".json": Source._json, ".csv": Source._csv, ".tsv": Source._csv, ".parquet": Source._parquet,
}  # fmt: skip
"""How a file is read, by the end of its name in lower case."""


def names_file(text: str) -> bool:
    """Whether ``text``, which may be a text itself, names a file: one that exists, or that is read here by its suffix."""
    try:
        return Path(text).suffix.lower() in READERS or Path(text).is_file()
    except (OSError, ValueError):  # a name that no file can have
        return False


def shown(names: Any) -> str:
    """Names of columns for a message. Anything that does not look like a name may be private text, so only its position is
    given."""
    fine = re.compile(r"[^\W\d][\w.:/-]*(?: [\w.:/-]+){0,2}")
    names = [str(n) for n in names]
    # A header in which a cell is a number or a sentence is no header: its words are those of the first row.
    if not all(n == "" or (len(n) <= 32 and fine.fullmatch(n)) for n in names):
        return f"{len(names)} columns whose first row does not look like names"
    return ", ".join(sorted(n for n in names if n)) or "none"
