"""What a paper prints: its numbered tables and figures with every value, as it stands there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from rasura.core.interfaces import InputError
from rasura.core.options import known
from rasura.runs.fields import text, texts, toml

LISTS = "papers"
"""The folder, beside those of the studies, with a file for each paper."""

NONE = "-"
"""A cell without a value."""

_PRINTED = re.compile(r"[<>]?-?(?:\d+\.?\d*|\.\d+)(?:e\d+|hours)?|NA|-")


@dataclass(frozen=True)
class Printed:
    """A numbered table or figure.

    ``rows``: the values of each row by column, as printed; ``fractions``: columns that are shown in percent. ``plot``: it
    prints no numbers; ``nothing``: why nothing in it is measured. ``left``: why not all of it is reproduced.
    """

    name: str
    about: str
    rows: Mapping[str, Mapping[str, str]]
    fractions: tuple[str, ...] = ()
    plot: bool = False
    nothing: str = ""
    left: str = ""

    def shown(self, row: str, column: str) -> str:
        """A value in the unit of the results: of fractions in percent, with all digits that the paper prints; or a dash."""
        value = self.rows[row].get(column, NONE)
        if value == NONE:
            return "–"
        return f"{Decimal(value).scaleb(2):f}" if column in self.fractions else value


@dataclass(frozen=True)
class Paper:
    """A paper: ``title``, and its tables and figures by name, as ``Table 3``."""

    title: str
    printed: Mapping[str, Printed]

    def row(self, where: str) -> tuple[Printed, str]:
        """The table and the row that ``where`` names, as ``Table 3: DLG, BERT tiny``. Raises ``InputError`` if none."""
        name, _, row = where.partition(": ")
        known(f"table of {self.title}", name, list(self.printed))
        known(f"row of {name} of {self.title}", row, list(self.printed[name].rows))
        return self.printed[name], row

    def filled(self, line: str) -> str:
        """``line`` with the values of every row that it names in braces, as ``{Table 6: BERT, ProdSig}``."""

        def values(found: re.Match[str]) -> str:
            table, row = self.row(found[1])
            return " / ".join(table.shown(row, column) for column in table.rows[row])

        return re.sub(r"\{(.+?)\}", values, line)


def load_paper(name: str, folder: Path) -> Paper:
    """The values of the paper ``name`` (as ``grab``). Raises ``InputError`` for a missing or malformed file."""
    path = folder / LISTS / f"{name}.toml"
    found = toml(path, "the values of a paper")
    title = text(found.pop("title", name), f"{path}: title")
    return Paper(title, {k: _printed(k, v, f"{path}: {k}") for k, v in found.items()})


def _printed(name: str, found: Any, place: str) -> Printed:
    if not isinstance(found, dict):
        raise InputError(f"{place} is not a table")
    for key in found:
        known(f"key in {place}", key, ("about", "columns", "fractions", "rows", "plot", "nothing", "left"))
    columns = texts(found.get("columns", ()), f"{place}: columns")
    rows = {}
    for row, values in found.get("rows", {}).items():
        cells = text(values, f"{place}: {row}").split()
        if len(cells) != len(columns) or not all(_PRINTED.fullmatch(c) for c in cells):
            raise InputError(f"{place}: {row}: expected {len(columns)} values, as printed, a dash for none")
        rows[row] = dict(zip(columns, cells))
    kinds = [bool(rows), found.get("plot") is True, bool(found.get("nothing"))]
    if sum(kinds) != 1:
        raise InputError(f"{place}: expected rows of values, plot = true or the reason why nothing is measured")
    fractions = texts(found.get("fractions", ()), f"{place}: fractions")
    told = {k: text(found.get(k, ""), f"{place}: {k}") for k in ("about", "nothing", "left")}
    return Printed(name, rows=rows, fractions=fractions, plot=kinds[1], **told)
