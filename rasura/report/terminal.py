"""The end of a terminal run: the report's sentence and its matrix, so that nobody has to open the file to know."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rasura.report.findings import Findings


def summary(f: Findings) -> Group:
    """The sentence and a compact matrix: percent read back, by attack and defense."""
    table = Table(title=f.words.unit, title_justify="left", caption_justify="left", header_style="bold")
    table.add_column("attack", no_wrap=True)
    for defense in f.defenses:
        table.add_column(defense.replace("+", "\n+").replace("-", "-\n"), justify="right")
    for attack in f.attacks:
        row = []
        for defense in f.defenses:
            entry = f.matrix.get((attack, defense))
            mark = "" if entry is None else entry.mark
            row.append(Text(mark, style="bold" if entry is not None and entry.step >= 3 else ""))
        table.add_row(attack, *row)
    best = [Text(f.best[d].mark if d in f.best else "–", style="bold") for d in f.defenses]
    table.add_section()
    table.add_row(Text("best of all", style="bold"), *best)
    table.caption = "– not applicable    ! failed; reasons are in the report"
    return Group(Text(" ".join(f.sentence), style="bold"), Text(f.recommendation), Text(""), table)
