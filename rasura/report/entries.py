"""The entries of the matrix: each figure is of one threat model and batch size. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rasura.report.matrix import Entry
from rasura.report.readings import reading
from rasura.report.scores import (
    Setting,
    answered,
    gave_up,
    guessing,
    names_labels_alone,
    notes_of,
    scored,
    setting_of,
    without_a_figure,
)


def _by_setting(records: Iterable[Mapping[str, Any]]) -> dict[Setting, list[Mapping[str, Any]]]:
    settings: dict[Setting, list[Mapping[str, Any]]] = defaultdict(list)
    for r in records:
        settings[setting_of(r)].append(r)
    return settings


def entry_of(
    attack: str,
    defense: str,
    records: Sequence[Mapping[str, Any]],
    notes: Mapping[Setting, int],
    metric: str,
    of_text: bool = True,
) -> Entry:
    """The entry of ``attack`` under ``defense``, by its ``records``. ``notes``: how many examples the column has in each
    setting. ``of_text``: false of an attack that names labels alone, which has no figure here."""
    settings = _by_setting(records)
    levels = {
        place: reading(attack, some, {}, metric).counted.level if of_text else None for place, some in settings.items()
    }
    told = {place: any(answered(r, metric) for r in some) for place, some in settings.items()}
    # Where it gave up, its level is that of guessing.
    place = max(levels, key=lambda p: (told[p], -1.0 if (level := levels[p]) is None else level.mean))
    blind = guessing(settings[place], metric)
    return Entry(
        attack,
        defense,
        levels[place],
        blind.mean if blind else 0.0,
        tuple(sorted({r["reason"] for r in records if r["reason"]})),
        notes[place],
        len(records),
        sum(r["status"] == "ok" and not gave_up(r) and not names_labels_alone(r) for r in records),
        sum(map(gave_up, records)),
        sum(r["status"] == "crashed" for r in records),
        len({n for r in settings[place] if r["confidence"] == "verified" for n, _, _ in scored(r, metric)}),
        sum(r["wall_seconds"] for r in settings[place]) / len(settings[place]),
        sum(map(names_labels_alone, records)),
        place,
        levels[place] is not None and not told[place],
    )


def notes_in(records: Iterable[Mapping[str, Any]], metric: str) -> dict[Setting, int]:
    """The number of different examples in each setting of a column, without those that cannot be scored there."""
    return {
        place: len({n for r in some for n in notes_of(r)} - without_a_figure(some, metric))
        for place, some in _by_setting(records).items()
    }
