"""``studies/RESULTS.md`` against the plans: its heads, the papers' values and the table of what is covered.

    python -m tools.results            print the table of what is covered
    python -m tools.results --write    put it on top of the results, and mend heads and values of every section

Our own figures are never touched: they are those of the runs that the sections name.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rasura.metrics.utility import HIGHER_IS_BETTER
from rasura.runs.plans import Plan
from rasura.runs.service_plan import ServicePlan
from rasura.studies.deviations import COMPARED
from rasura.studies.files import FOLDER, PRINTED, Study, load_study, names
from rasura.studies.kept import FOLDER as RECORDS
from rasura.studies.metric_values import NAMES, row_of
from rasura.studies.papers import LISTS, NONE, Paper, Printed, load_paper

ROOT = Path(__file__).resolve().parents[1] / FOLDER
TITLE = "# Results of the studies\n"

MEASURED = dict(zip(COMPARED, ("weights moved", "deviation of the loss", "deviation of the gradient")))
"""Columns of a study of deviations, by the paper's."""

PAPERS = ["paper", "tables and figures", "cells", "inside"]
COLUMNS = ["printed", "what", "cells", "n", "seeds", "keys", "model", "inside", "sections", "why not all"]


@dataclass(frozen=True)
class Cell:
    """One value of a paper beside ours: ``ours`` is the text of our cell, with its interval if any."""

    table: str
    row: str
    column: str
    ours: str
    n: int
    seeds: int

    def inside(self, paper: Paper) -> bool | None:
        """Whether the paper's value lies in our interval; None without one."""
        ends = re.search(r"\[(-?[\d.]+), (-?[\d.]+)\]", self.ours)
        shown = paper.printed[self.table].shown(self.row, self.column)
        return None if ends is None else float(ends[1]) <= float(shown) <= float(ends[2])


@dataclass(frozen=True)
class Section:
    """A section of the results as it should read, and what it has of the paper."""

    study: Study
    text: str
    model: str
    cells: Sequence[Cell]
    sizes: frozenset[int]
    keys: int


def sections(text: str, folder: Path = ROOT) -> list[Section]:
    """Every section of the results, mended by its plan."""
    parts = re.split(r"(?m)^(?=## )", text)[1:]
    return [_section(part, load_study(part[3:].partition(":")[0], folder)) for part in parts]


def _section(text: str, study: Study) -> Section:
    lines = text.rstrip().split("\n")
    about = next(line for line in lines if line.startswith("After "))
    keys = re.search(r", (\d+) keys", about)
    told = re.search(r"\. Model (.*?), ", about)
    assert told is not None, f"{study.name}: the head names no model"
    first = next(k for k, line in enumerate(lines) if line.startswith("| "))
    head = [f"## {study.name}: {study.title}", "", f"After {study.source}{about[told.start() :]}", ""]
    head += [*(f"- {line}" for line in study.notes), ""]
    cells: list[Cell] = []
    body: list[str] = []
    heads: list[str] = []
    sizes: set[int] = set()
    for line in lines[first:]:
        row = line.strip("|").strip().split(" | ")
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = row[:-1] if row[-1].startswith("paper") else row
            if len(heads) < len(row) or ("audited behind" in heads and study.figures):
                heads = [*heads, f"paper ({' / '.join(_named(m, heads) for m in _metrics(study, heads))})"]
            line = row_of(heads)
        elif set(line) <= {"|", "-"}:
            line = "|" + "---|" * len(heads)
        elif heads[-1].startswith("paper"):
            where, metrics = _where(study, heads, row), _metrics(study, heads)
            row = [*row[: len(heads) - 1], study.figure(where, metrics)]
            cells += _cells(study, where, metrics, dict(zip(heads, row)), about)
            line = row_of(row)
        if heads and set(line) - {"|", "-"} and row[0] != heads[0]:
            sizes.add(_size(about, {**dict(zip(heads, row)), "ours": row[-1 if not heads[-1].startswith("paper") else -2]}))
        body.append(line)
    return Section(study, "\n".join([*head, *body]) + "\n", told[1], cells, frozenset(sizes), int(keys[1]) if keys else 1)


def _where(study: Study, heads: Sequence[str], row: Sequence[str]) -> dict[str, Any]:
    """What names a row of the results, from its cells."""
    cell = dict(zip(heads, row))
    plan = study.plan
    if "model" in cell:
        return {"model": cell["model"]}
    if isinstance(plan, ServicePlan):
        attack = cell.get("attack", "training")
        return {"protection": cell["protection"], "attack": attack, "weights": cell.get("weights", "uploaded")}
    if "audited behind" in cell:
        assert isinstance(plan, Plan)
        return {"attack": plan.attacks[0], "defense": cell["audited behind"]}
    if "trained behind" in cell:
        return {"attack": cell["attack"], "defense": cell["trained behind"].partition(", seed ")[0]}
    if "attack" not in cell:
        return {"defense": cell["behind"]}
    assert isinstance(plan, Plan)
    told = set(cell["behind"].split(", "))
    updates, threats = ([v for v in some if v in told] for some in (plan.updates, plan.threats))
    defense = ", ".join(v for v in cell["behind"].split(", ") if v not in {*updates, *threats})
    usual = {"update": "fedsgd", "threat": "with-labels-and-lengths"}
    given = {"update": updates[0] if updates else "", "threat": threats[0] if threats else ""}
    where = {k: v or usual[k] for k, v in given.items()}
    return {"attack": cell["attack"], "batch_size": int(cell["batch"]), "defense": defense or "none", **where}


def _named(metric: str, heads: Sequence[str]) -> str:
    return {"drift": "weights moved"}.get(metric, metric) if "model" in heads else NAMES.get(metric, metric)


def _metrics(study: Study, heads: Sequence[str]) -> list[str]:
    """The metrics of the paper's column."""
    if "model" in heads:
        return list(COMPARED)
    useful = [m for m in study.metrics if m in HIGHER_IS_BETTER]
    risky = [m for m in study.metrics if m not in useful]
    if isinstance(study.plan, ServicePlan):
        return risky if "attack" in heads else useful
    return risky if "audited behind" in heads else list(study.metrics)


def _cells(
    study: Study, where: Mapping[str, Any], metrics: Sequence[str], cell: Mapping[str, str], about: str
) -> Iterator[Cell]:
    figures = (f for f in study.figures if all(where[k] == v for k, v in f.items() if k not in PRINTED))
    figure = next(figures, None)
    if figure is None or study.paper is None:
        return
    table, row = study.paper.row(figure["row"])
    for metric in metrics:
        named = MEASURED[metric] if "model" in where else NAMES.get(metric, metric)
        ours = cell.get(f"{where.get('attack')}: {named} (n)", cell.get(named, "–"))
        if table.shown(row, metric) != "–" and not ours.startswith("–"):
            seeds = re.search(r"(\d+) seed\(s\)", about)
            repeated = int(seeds[1] if seeds else cell.get("seeds", 1))
            yield Cell(table.name, row, metric, ours, _size(about, {**cell, "ours": ours}), repeated)


def _size(about: str, cell: Mapping[str, str]) -> int:
    """The number of texts behind a cell, from its row or else from the head of its section."""
    if "n" in cell:
        return int(cell["n"])
    if beside := re.search(r"\((\d+)\)$", cell.get("ours", "")):
        return int(beside[1])
    if others := re.search(r"trained on (\d+) texts .*?, (\d+) others", about):
        return int(others[1]) + int(others[2])
    order = (r"judged on (\d+)", r"(\d+) (?:training )?texts of")
    found = [re.search(pattern, about) for pattern in (order if "attack" not in cell else order[::-1])]
    return next((int(f[1]) for f in found if f), 0)


def coverage(found: Sequence[Section], folder: Path = ROOT) -> str:
    """What of each paper is reproduced: a table for each, a row for each of its numbered tables and figures."""
    lines = [
        "What of each paper is reproduced, counted from the plans and the sections below by "
        "`python -m tools.results --write`. A cell is one printed value. Ours is a cell of the same row on a stand-in, so "
        "the two need not agree: each section says first in what ours differs. `n` counts texts. The texts of one update "
        "count once in an interval, and fewer than five updates have none. *Inside* counts the paper's values that lie in "
        "our 95 % interval, or in the range over seeds of a training, of all that have one.",
        "",
        "{} of {} rows of attacks that ran under several seeds have the same figures under each, text by text. In such a "
        "row further seeds add nothing.".format(*_equal(folder)),
        "",
    ]
    papers, parts = [], []
    missing = [n for n in names(folder) if n not in {s.study.name for s in found}]
    for name in sorted(p.stem for p in (folder / LISTS).glob("*.toml")):
        paper = load_paper(name, folder)
        some = [s for s in found if s.study.name.startswith(f"{name}/")]
        rows = [_row(paper, table, some) for table in paper.printed.values() if not table.nothing]
        cells = {(c.table, c.row, c.column): c for s in some for c in s.cells}
        done = sum(row[COLUMNS.index("sections")] != "–" for row in rows)
        whole = sum(_count(table) for table in paper.printed.values())
        nothing = [f"{t.name} ({t.nothing})" for t in paper.printed.values() if t.nothing]
        papers.append([paper.title, f"{done} of {len(rows)}", f"{len(cells)} of {whole}", _inside(cells.values(), paper)])
        parts += [f"**{paper.title}**", "", *_table(COLUMNS, rows)]
        parts += [f"Nothing to measure: {', '.join(nothing)}.", ""] if nothing else []
    return "\n".join(
        [*lines, *_table(PAPERS, papers), *parts, f"Plans that have no section yet: {', '.join(missing) or 'none'}.", ""]
    )


def _equal(folder: Path) -> tuple[int, int]:
    """Of the kept rows with several seeds, how many have the same scores under each for every text; and all of them."""
    equal = every = 0
    for path in sorted((folder / RECORDS).rglob("*.jsonl")):
        head, *cells = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        rows: dict[Any, dict[int, dict[int, Any]]] = defaultdict(lambda: defaultdict(dict))
        for cell in ({"seed": 0, **head["common"], **cell} for cell in cells):
            row = tuple(cell.get(name) for name in ("attack", "defense", "threat", "update", "batch_size"))
            rows[row][cell["batch"]][cell["seed"]] = (cell["status"], cell.get("scores"))
        several = [[[*told.values()] for told in texts.values() if len(told) > 1] for texts in rows.values()]
        every += sum(map(bool, several))
        equal += sum(bool(texts) and all(told[0] == one for told in texts for one in told) for texts in several)
    return equal, every


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [row_of(heads), "|" + "---|" * len(heads), *map(row_of, rows), ""]


def _inside(cells: Iterable[Cell], paper: Paper) -> str:
    known = [v for v in (c.inside(paper) for c in cells) if v is not None]
    return f"{sum(known)} of {len(known)}" if known else "–"


def _link(study: Study) -> str:
    """A link to the section of ``study``, as GitHub and others name the place of a heading."""
    place = re.sub(r"[^\w\- ]", "", f"{study.name}: {study.title}".lower()).replace(" ", "-")
    return f"[{study.name.partition('/')[2]}](#{place})"


def _count(table: Printed) -> int:
    return sum(value != NONE for row in table.rows.values() for value in row.values())


def _row(paper: Paper, table: Printed, found: Sequence[Section]) -> list[str]:
    cells = {(c.row, c.column): c for s in found for c in s.cells if c.table == table.name}
    used = [s for s in found if table.name in s.study.covers or any(c.table == table.name for c in s.cells)]
    many = f"{len(cells)} of {_count(table)}" if table.rows else "plot"
    sizes = [c.n for c in cells.values()] or sorted({n for s in used for n in s.sizes if n})
    seeds = [c.seeds for c in cells.values()] or [1] * bool(used)
    keys = _range([s.keys for s in used if isinstance(s.study.plan, ServicePlan)])
    where = ", ".join(_link(s.study) for s in used)
    models = ", ".join(dict.fromkeys(s.model for s in used))
    shown = [many, _range(sizes), _range(seeds), keys, models or "–", _inside(cells.values(), paper), where or "–"]
    return [table.name, table.about, *shown, table.left or "–"]


def _range(values: Sequence[int]) -> str:
    ends = sorted({*values})
    return "–" if not ends else str(ends[0]) if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def mended(text: str, folder: Path = ROOT) -> str:
    """The results with heads, values of the papers and the table of what is covered as the plans have them."""
    found = sections(text, folder)
    return "\n".join([TITLE, coverage(found, folder), *(s.text for s in found)])


def main() -> None:
    """Print the table, or write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {FOLDER}/RESULTS.md")
    path = ROOT / "RESULTS.md"
    text = path.read_text(encoding="utf-8")
    if parser.parse_args().write:
        path.write_text(mended(text), encoding="utf-8")
    else:
        print(coverage(sections(text)))


if __name__ == "__main__":
    main()
