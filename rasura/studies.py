"""Studies: a table of a paper as a plan, run by the same audit; the paper's figures stand beside ours, never as ours."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from rasura.interfaces import InputError
from rasura.plan import Plan, plan_of
from rasura.recipes import known
from rasura.records import write_whole
from rasura.report.findings import pooled

FOLDER = Path("studies")
RESULTS = FOLDER / "RESULTS.md"

CELL = ("attack", "update", "defense", "threat", "batch_size")
"""What names a row of the results."""


@dataclass(frozen=True)
class Study:
    """One study file.

    ``source``: the paper and its table. ``differs``: what is not as in the paper. ``figures``: the paper's own, each with
    those of attack, update, defense, threat and batch_size that single it out, and ``paper``, its text.
    """

    name: str
    title: str
    source: str
    differs: tuple[str, ...]
    plan: Plan
    metrics: tuple[str, ...]
    figures: tuple[Mapping[str, Any], ...]

    def figure(self, row: Mapping[str, Any]) -> str:
        """What the paper has for a row, or a dash."""
        for figure in self.figures:
            if all(row[k] == v for k, v in figure.items() if k != "paper"):
                return str(figure["paper"])
        return "–"


def load_study(name: str, folder: Path = FOLDER) -> Study:
    """The study ``name`` (as ``grab/table7``) of ``folder``. Raises ``InputError`` for unknown names and malformed files."""
    there = sorted(p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.toml"))
    if not there:
        raise InputError(f"no study found in the folder {folder}; run this in a checkout of the repository")
    known("study", name, there)
    path = folder / f"{name}.toml"
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is no TOML: {error}") from None
    for key in found:
        known(f"key in {path}", key, ("title", "source", "differs", "metrics", "plan", "figures"))
    for figure in found.get("figures", []):
        for key in figure:
            known(f"key of a figure in {path}", key, (*CELL, "paper"))
    return Study(
        name,
        str(found.get("title", name)),
        str(found.get("source", "")),
        tuple(found.get("differs", ())),
        plan_of(found.get("plan", {}), str(path)),
        tuple(found.get("metrics", ("rouge1", "rouge2", "rougeL"))),
        tuple(found.get("figures", ())),
    )


def prepared(study: Study, **changes: Any) -> Plan:
    """The study's plan with the changes that are not None, checked; with the metric of the report's first line, too."""
    metrics = tuple(dict.fromkeys((*study.metrics, "token_recall")))
    return replace(study.plan, metrics=metrics, **{k: v for k, v in changes.items() if v is not None}).checked()


def section(study: Study, plan: Plan, records: Iterable[Mapping[str, Any]]) -> str:
    """The study's part of the results, in Markdown: our means with 95 % intervals and n, blind, the paper's figure."""
    rows = sorted(records, key=_place(plan))
    heads = [_NAMES.get(m, m) for m in study.metrics]
    paper = f"paper ({' / '.join(heads)})"
    columns = ["attack", "behind", "batch", "n", *heads, f"blind {heads[0]}", "failed", "CPU s", paper]
    lines = [
        f"## {study.name}: {study.title}",
        "",
        f"After {study.source}. Model {plan.model}, data {Path(plan.data or 'demo').name}, budget {plan.budget}, "
        f"{plan.seeds} seed(s) from {plan.seed}. Command: `rasura study {study.name}{_given(study, plan)}`.",
        "",
        *(f"- {line}" for line in study.differs),
        "",
        _row(columns),
        "|" + "---|" * len(columns),
    ]
    for cell, group in groupby(rows, key=lambda r: tuple(r[k] for k in CELL)):
        some = list(group)
        where = dict(zip(CELL, cell))
        values = [_values(some, m, "scores") for m in study.metrics]
        ours = [_level(v) for v in values]
        blind = _level(_values(some, study.metrics[0], "blind"))
        behind = ", ".join(dict.fromkeys(str(where[k]) for k in ("defense", "update", "threat") if where[k] not in _USUAL))
        failed = sum(r["status"] != "ok" for r in some)
        seconds = sum(r["cpu_seconds"] for r in some) / len(some)
        first = [where["attack"], behind or "none", where["batch_size"], len(values[0])]
        lines.append(_row([*first, *ours, blind, f"{failed} of {len(some)}", f"{seconds:.0f}", study.figure(where)]))
    reasons = sorted({f"{r['attack']}: {r['reason']}" for r in rows if r["reason"]})
    return "\n".join([*lines, "", *(f"- {reason}" for reason in reasons), ""]).replace("\n\n\n", "\n\n")


def _row(cells: Iterable[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


_NAMES = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L"}
_USUAL = ("fedsgd", "with-labels-and-lengths")


def _place(plan: Plan) -> Any:
    order = {"attack": plan.attacks, "update": plan.updates, "defense": plan.defenses, "threat": plan.threats}
    return lambda r: (r["batch_size"], *(order[k].index(r[k]) for k in ("defense", "update", "threat", "attack")))


def _given(study: Study, plan: Plan) -> str:
    out = [f" --limit {plan.limit}"] if plan.limit != study.plan.limit else []
    out += [f" --budget {plan.budget}"] if plan.budget != study.plan.budget else []
    out += [f" --attack {','.join(plan.attacks)}"] if plan.attacks != study.plan.attacks else []
    return "".join(out)


def _values(records: Iterable[Mapping[str, Any]], metric: str, side: str) -> list[float]:
    """Values of a metric, a text each; an attempt that failed stands at the guessing level, as in the report."""
    out = []
    for r in records:
        scores = r[side] if r["status"] == "ok" or side == "blind" else r["blind"] if r["status"] == "failed" else {}
        out += [v for v in scores.get(metric, {}).get("per_record", []) if v is not None]
    return out


def _level(values: list[float]) -> str:
    level = pooled(values)
    return "–" if level is None else f"{100 * level.mean:.1f} [{100 * level.low:.0f}, {100 * level.high:.0f}]"


def write_section(text: str, path: Path = RESULTS) -> None:
    """Put a section into the results, in place of an earlier one of the same study."""
    old = path.read_text(encoding="utf-8") if path.is_file() else "# Results of the studies\n"
    name = text.split("\n", 1)[0].split(":")[0]
    parts = re.split(r"(?m)^(?=## )", old)
    kept = [p.rstrip() + "\n" for p in parts if not p.startswith(name + ":")]
    write_whole(path, "\n".join([kept[0], *sorted([*kept[1:], text.rstrip() + "\n"])]))
