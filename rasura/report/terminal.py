"""The terminal summary of a run: the report's sentence, matrix and verdicts."""

from __future__ import annotations

import re

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rasura.report.matrix import Findings


def summary(f: Findings) -> Group:
    """The sentence, a compact matrix (percent read back, by attack and protection), and the verdict on each protection."""
    table = Table(title=f.words.unit, title_justify="left", caption_justify="left", header_style="bold")
    table.add_column("attack", no_wrap=True)
    for column in f.columns:
        table.add_column(re.sub(r"\+(?=\w)", "\n+", column).replace("-", "-\n").replace("/", "/\n"), justify="right")
    for attack in f.attacks:
        row = []
        for column in f.columns:
            entry = f.matrix.get((attack, column))
            mark = "" if entry is None else entry.mark
            if entry is not None and entry.coverage:
                mark += "\n{} of {}".format(*entry.coverage)
            row.append(Text(mark, style="bold" if entry is not None and entry.step >= 3 else ""))
        table.add_row(attack, *row)
    best = [Text(f.mark(c), style="bold") for c in f.columns]
    table.add_section()
    table.add_row(Text("best of all", style="bold"), *best)
    table.caption = "– not applicable    · gave up    ! crashed    ? not measured; reasons are in the report"
    if any(e.mark == "labels" for e in f.matrix.values()):
        table.caption += "    labels: names labels and no text"
    if f.settings > 1:
        table.caption += "    each figure: the threat model and batch size where the attack read most"
    return Group(Text(" ".join(f.sentence), style="bold"), Text(f.recommendation), Text(""), table, Text(""), verdicts(f))


def verdicts(f: Findings) -> Table:
    """A row a protection: what may be said of it."""
    table = Table(title="Verdict", title_justify="left", header_style="bold")
    table.add_column("protection", overflow="fold")
    table.add_column("what the records show", overflow="fold")
    for column in f.columns:
        name = column + (" (baseline)" if column in f.baseline and column not in f.judged else "")
        table.add_row(name, f.verdicts[column].says)
    return table
