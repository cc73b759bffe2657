"""The cells of a study that narrow its widest intervals, one after another, in the time that is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from rasura.core.records import Record
from rasura.core.run_store import RunStore
from rasura.studies.metric_values import ENOUGH, level_of, seeds_by_text, values_of

if TYPE_CHECKING:
    from rasura.runs.audit import Audit
    from rasura.runs.cells import Cell

Row = tuple[str, str, str, str, int]


def row_key(cell: Cell) -> Row:
    """The row of the table that ``cell`` belongs to."""
    return cell.attack, cell.update, cell.defense, cell.threat, cell.batch_size


TEXTS, SEEDS, CHEAP = 16, 3, 60.0
"""A row whose cells take less than ``CHEAP`` CPU seconds is to have this many texts, each with this many seeds."""


def urgency(records: Sequence[Mapping[str, Any]], metric: str) -> tuple[int, float, int]:
    """How much a row with ``records`` wants another cell: the least first.

    Rows with fewer than five values come before all others, those with fewer cells first. Then come cheap rows that lack
    some of their 16 texts or three seeds, those that take the least time first. The others follow by the width of their
    interval, the widest first. An attack that never gives a value has its cells counted in place of values.
    """
    values = values_of(records, metric, "scores").draws
    if len(values) < ENOUGH and len(records) < ENOUGH:
        return 0, 0.0, len(records)
    seconds = median(r["cpu_seconds"] for r in records)
    if seconds < CHEAP and (lacking := _lacking(records)):
        return 1, lacking * seconds, len(records)
    _, low, high = level_of(values, metric)
    return 2, (low - high if values and low == low else 0.0), len(records)


def _lacking(records: Sequence[Mapping[str, Any]]) -> int:
    """How many cells a row lacks, until each of its texts was attacked with three seeds: 16 texts at least, in as many
    updates as an interval needs."""
    tried, size = seeds_by_text(records), int(records[0]["batch_size"])
    missing = sum(max(0, SEEDS - len(seeds)) for seeds in tried.values())
    return -(-(missing + SEEDS * max(0, max(TEXTS, ENOUGH * size) - len(tried))) // size)


def in_time(
    audit: Audit, store: RunStore, seconds: float, metric: str, progress: Callable[[Cell], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Record]:  # fmt: skip
    """Run cells that ``store`` lacks until ``seconds`` are over; store and yield each Record.

    The next cell is of the row that wants one the most (``urgency``). A cell is left out if it does not fit into the time
    that is left: by the median of its row's cells that ran here or, before there is one, by the estimate. So the end is met
    as closely as these are true. Each Record is the one that a whole run has.
    """
    end = clock() + seconds
    audit.describe(store)
    left, estimated = [c for step in audit.left(store) for c in step], audit.estimate(store)
    known: dict[Row, list[Mapping[str, Any]]] = {row_key(c): [] for c in audit.cells}
    for cell in audit.cells:
        if cell.key in store:
            known[row_key(cell)].append(store[cell.key])

    def takes(cell: Cell) -> float:
        ran = [r for r in known[row_key(cell)] if r["wall_seconds"]]  # 0: run elsewhere
        some = [r["wall_seconds"] - r["details"].get("learning_seconds", 0.0) for r in ran]
        return median(some) if some else estimated[cell.key]

    while left:
        over = end - clock()
        wanted = {row: urgency(some, metric) for row, some in known.items()}
        fitting = [c for c in left if takes(c) <= over]
        if over <= 0 or not fitting:
            return
        cell = min(fitting, key=lambda c: wanted[row_key(c)])
        left.remove(cell)
        for record in audit.records([cell], progress):
            store.add(record)
            known[row_key(cell)].append(store[record.key])
            yield record
