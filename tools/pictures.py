"""The pictures of the explanation pages, drawn from figures that stand in the repository's tables.

    python -m tools.pictures           say which pictures differ from their tables
    python -m tools.pictures --write   draw all of them into docs/pictures

A bar is one cell of a table in Markdown, found by its section, its row's cells and its column.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tools.picture_list import PICTURES, Bar, Picture

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "pictures"

WIDTH, LEFT, RIGHT, ROW, TOP, BOTTOM = 640, 250, 60, 24, 34, 30

LIGHT = {
    "text": "font:13px system-ui,sans-serif;fill:#24292f", ".t": "font-weight:600", ".a": "fill:#57606a;font-size:12px",
    "line": "stroke:#8c959f", ".b": "fill:#2f6fb0", ".g": "fill:#8c959f", ".w": "stroke:#24292f;stroke-width:1.5",
}  # fmt: skip
DARK = {"text": "fill:#e6edf3", ".a": "fill:#9da7b1", ".b": "fill:#5b9bdf", ".w": "stroke:#e6edf3"}


def _rules(rules: Mapping[str, str]) -> str:
    return "".join(f"{where}{{{what}}}" for where, what in rules.items())


STYLE = f"{_rules(LIGHT)}@media(prefers-color-scheme:dark){{{_rules(DARK)}}}"


@dataclass(frozen=True)
class Value:
    """A figure with the ends of its interval, where the table has one."""

    mean: float
    low: float | None = None
    high: float | None = None


def parsed(cell: str) -> Value:
    """``54.8 [51, 59] (16)``, ``100 (63 to 100; n 8)`` or ``0.98``.

    >>> parsed("54.8 [51, 59] (16)")
    Value(mean=54.8, low=51.0, high=59.0)
    """
    found = re.match(r"(-?[\d.]+)(?: [\[(](-?[\d.]+)(?:, | to )(-?[\d.]+))?", cell)
    if found is None:
        raise ValueError(f"no figure in the cell {cell!r}")
    low, high = (None if end is None else float(end) for end in found.groups()[1:])
    return Value(float(found[1]), low, high)


def rows(text: str) -> Iterator[Mapping[str, str]]:
    """The rows of every table in ``text``, by column; of two columns of one name the first counts."""
    for table in re.findall(r"(?:^\|.*\n?)+", text, re.M):
        head, _, *rest = ([cell.strip() for cell in line.strip("| \n").split("|")] for line in table.splitlines())
        for cells in rest:
            yield dict(zip(reversed(head), reversed(cells)))


def rows_of(text: str, section: str) -> Iterator[Mapping[str, str]]:
    """The rows of every table below the heading ``section``."""
    found = re.search(rf"^(#+) {re.escape(section)}$(.*?)(?=^#{{1,2}} |\Z)", text, re.M | re.S)
    if found is None:
        raise ValueError(f"there is no section {section!r}")
    yield from rows(found[2])


def row_of(picture: Picture, bar: Bar) -> Mapping[str, str]:
    """The row that ``bar`` shows a cell of. Raises ``ValueError`` unless exactly one row fits."""
    text = (ROOT / picture.file).read_text(encoding="utf-8")
    column = bar.column or picture.column
    fit = [
        r
        for r in rows_of(text, picture.section)
        if column in r and {*bar.row} <= {*r.values(), *(f"{name}={cell}" for name, cell in r.items())}
    ]
    if len(fit) != 1:
        raise ValueError(f"{picture.name}: {len(fit)} rows fit {bar.row} in {picture.section!r}; expected one")
    return fit[0]


def drawn(picture: Picture) -> str:
    """The picture as SVG."""
    rows = [row_of(picture, bar) for bar in picture.bars]
    values = [parsed(row[bar.column or picture.column]) for row, bar in zip(rows, picture.bars)]
    counts = sorted({int(row["n"]) for row in rows if row.get("n", "").isdigit()})
    axis = picture.axis.replace("{n}", " to ".join(map(str, dict.fromkeys((counts[0], counts[-1])))) if counts else "")
    most = picture.most or max(v.high or v.mean for v in values) * 1.05
    height = TOP + ROW * len(values) + BOTTOM

    def at(value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(value, most) / most, 1)

    told = "; ".join(f"{b.label}: {v.mean:g}" for b, v in zip(picture.bars, values))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(told)}">',
        f"<style>{STYLE}</style>",
        f'<text class="t" x="0" y="18">{escape(picture.title)}</text>',
    ]
    for number, (bar, value) in enumerate(zip(picture.bars, values)):
        y = TOP + ROW * number
        kind = "g" if bar.guess else "b"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>')
        parts.append(
            f'<rect class="{kind}" x="{LEFT}" y="{y + 3}" width="{max(1, at(value.mean) - LEFT):.1f}" height="14"/>'
        )
        if value.low is not None and value.high is not None:
            parts.append(f'<line class="w" x1="{at(value.low)}" y1="{y + 10}" x2="{at(value.high)}" y2="{y + 10}"/>')
        end = max(at(value.mean), at(value.high or 0))
        parts.append(f'<text x="{end + 6}" y="{y + 14}">{value.mean:g}</text>')
    y = height - BOTTOM + 2
    parts.append(f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{y}"/>')
    parts.append(f'<text class="a" x="0" y="{y + 18}">{escape(axis)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    """Draw the pictures, or say which differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="draw them")
    given = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    for picture in PICTURES:
        path, svg = FOLDER / f"{picture.name}.svg", drawn(picture)
        if given.write:
            path.write_text(svg, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != svg:
            print(f"{path.relative_to(ROOT)} differs from {picture.file}")


if __name__ == "__main__":
    main()
