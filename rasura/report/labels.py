"""What an audit says of the labels that attacks read: apart from the texts, on which its verdicts rest. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.records import LABELS
from rasura.report.language import tell
from rasura.report.readings import Record


@dataclass(frozen=True)
class LabelReading:
    """One attack under one protection: it named every label of ``whole`` of ``updates``, and ``right`` is the share of
    labels that it named. ``guess``: that share where every text is given the class that is most frequent in the run's data.

    An update on which the attack gave up, or named a text without labels, counts as not read.
    """

    attack: str
    column: str
    whole: int
    updates: int
    right: float
    guess: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``summary.json``."""
        return dict(self.__dict__)


def label_readings(records: Sequence[Record], columns: Sequence[str]) -> tuple[LabelReading, ...]:
    """A reading for each attack that named labels in some update of the run, under every protection on which it ended; by
    protection as in ``columns``, then by what was read."""
    naming = {r["attack"] for r in records if LABELS in r["scores"]}
    named: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    guesses: dict[tuple[Any, ...], list[float]] = {}
    for r in records:
        if LABELS in r["blind"]:
            guesses[r["batch_size"], r["seed"], r["batch"]] = _values(r["blind"])
        if r["attack"] in naming and r["status"] in ("ok", "failed"):
            named[r["attack"], r["column"]].append(_values(r["scores"]) or [0.0] * len(r["examples"]))
    guess = _mean([v for some in guesses.values() for v in some])
    found = [
        LabelReading(attack, column, sum(map(all, updates)), len(updates), _mean([v for u in updates for v in u]), guess)
        for (attack, column), updates in named.items()
    ]
    return tuple(sorted(found, key=lambda one: (columns.index(one.column), -one.right, one.attack)))


def _values(scores: Mapping[str, Any]) -> list[float]:
    return [float(v or 0) for v in scores.get(LABELS, {}).get("per_record", [])]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def label_sentence(readings: Sequence[LabelReading], where: str) -> list[str]:
    """What the attack read that named most labels in the first column; nothing where none did. ``where``: that column, in a
    sentence."""
    if not readings:
        return []
    most = readings[0]
    return [
        tell(
            "Labels {where}: {attack} named every label of {whole} of {n} updates, {right:.0f} % of the labels. Naming the "
            "most frequent class every time: {guess:.0f} %.", where=where, attack=most.attack, whole=most.whole,
            n=most.updates, right=100 * most.right, guess=100 * most.guess,
        )
    ]  # fmt: skip
