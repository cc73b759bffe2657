"""Texts that two data sets of the studies share: what an adversary or a model would know before.

    python -m tools.overlap DATA            print the table for the data sets in the folder DATA
    python -m tools.overlap DATA --write    put it into docs/data.md

The pairs are those of the studies: texts audited and reference text, texts of a training and of its test; and the pair of a
paper, SST-2 and Rotten Tomatoes.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from rasura.data.columns import Columns
from rasura.data.overlap import parts, shared
from rasura.data.text import load_examples
from rasura.runs.plans import Plan
from rasura.runs.service_plan import ServicePlan
from rasura.studies.files import FOLDER, load_study, names
from rasura.studies.metric_values import row_of
from tools.pages import put

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "data.md"
BEGIN, END = "<!-- overlap: written by python -m tools.overlap DATA --write -->", "<!-- end of overlap -->"

OF_A_PAPER = [("sst2.validation.parquet", "rotten_tomatoes.train.parquet", "reference of the GHOST paper")]


def pairs(folder: Path = ROOT / FOLDER) -> Iterator[tuple[str, str, str]]:
    """Texts, other texts, and what the others are to them, of every study."""
    yield from OF_A_PAPER
    for name in names(folder):
        study = load_study(name, folder)
        plan = study.plan
        if isinstance(plan, ServicePlan):
            yield plan.data, plan.reference, "reference and training" if study.train else "reference"
        elif isinstance(plan, Plan) and plan.data and plan.reference:
            yield plan.data, plan.reference, "reference"
        for training in (plan, study.train):
            if training is not None and not isinstance(training, (Plan, ServicePlan)) and training.test:
                yield training.test, training.data, "training"


def table(data: Path, folder: Path = ROOT / FOLDER) -> str:
    """The pairs whose files are in ``data``: how many rows of the first share a text with the second."""
    roles: dict[tuple[str, str], set[str]] = {}
    for first, second, role in pairs(folder):
        if (data / first).is_file() and (data / second).is_file():
            roles.setdefault((first, second), set()).update(role.split(" and "))
    lines = [row_of(["texts", "others", "of them used as", "shared", "word for word"]), "|" + "---|" * 5]
    for (first, second), known in sorted(roles.items()):
        texts, others = (load_examples(data / name, columns=Columns(label="none")) for name in (first, second))
        exact = {t.strip() for t in parts(others)}
        word = sum(any(t.strip() in exact for t in parts([e])) for e in texts)
        ends = (name.removesuffix(".parquet") for name in (first, second))
        lines.append(row_of([*ends, ", ".join(sorted(known)), f"{len(shared(others, texts))} of {len(texts)}", word]))
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--write", action="store_true", help="put the table into docs/data.md")
    given = parser.parse_args()
    found = table(given.data)
    if given.write:
        put(PAGE, BEGIN, found, END)
    else:
        print(found)


if __name__ == "__main__":
    main()
