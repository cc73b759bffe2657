"""What an audit says of the labels that attacks read: apart from the texts, on which its verdicts rest. No torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.records import LABELS
from rasura.core.rounding import percent
from rasura.report.language import tell
from rasura.report.scores import Record, Setting, setting_of


@dataclass(frozen=True)
class LabelReading:
    """One attack under one protection: it named every label of ``whole`` of ``updates``, and ``right`` is the share of
    labels that it named, None where it named none in any update. ``guess``: that share where every text is given the class
    that is most frequent in the run's data; None where no attack named a label in updates of ``batch_size``, since guessing
    was then not scored.

    All of it is of one threat model and batch size, the one where most was named. An update on which the attack named no
    label counts as not read; ``silent`` is the number of these, on which it gave up or named a text alone.
    """

    attack: str
    column: str
    whole: int
    updates: int
    silent: int
    right: float | None
    guess: float | None
    threat: str
    batch_size: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``summary.json``."""
        return dict(self.__dict__)


def label_readings(records: Sequence[Record], columns: Sequence[str]) -> tuple[LabelReading, ...]:
    """A reading for each attack that named labels in some update of the run, under every protection on which it ended; by
    protection as in ``columns``, then by what was read."""
    naming = {r["attack"] for r in records if LABELS in r["scores"]}
    named: dict[tuple[str, str, Setting], list[list[float]]] = defaultdict(list)
    silent = Counter[tuple[str, str, Setting]]()
    guesses: dict[int, dict[tuple[int, int], list[float]]] = defaultdict(dict)
    for r in records:
        if LABELS in r["blind"]:
            guesses[r["batch_size"]][r["seed"], r["batch"]] = _values(r["blind"])
        if r["attack"] in naming and r["status"] in ("ok", "failed"):
            where = r["attack"], r["column"], setting_of(r)
            named[where].append(_values(r["scores"]) or [0.0] * len(r["examples"]))
            silent[where] += LABELS not in r["scores"]
    most: dict[tuple[str, str], LabelReading] = {}
    for where, updates in named.items():
        attack, column, (threat, size) = where
        whole, guess = sum(map(all, updates)), _mean(guesses[size].values())
        right = None if silent[where] == len(updates) else _mean(updates)
        one = LabelReading(attack, column, whole, len(updates), silent[where], right, guess, threat, size)
        most[attack, column] = max(most.get((attack, column), one), one, key=_told)
    return tuple(sorted(most.values(), key=lambda one: (columns.index(one.column), -_told(one)[0], one.attack)))


def _told(one: LabelReading) -> tuple[float, bool]:
    """What decides which setting is told: what was named, then whether guessing was scored."""
    return -1.0 if one.right is None else one.right, one.guess is not None


def _values(scores: Mapping[str, Any]) -> list[float]:
    return [float(v or 0) for v in scores.get(LABELS, {}).get("per_record", [])]


def _mean(updates: Iterable[Sequence[float]]) -> float | None:
    values = [v for some in updates for v in some]
    return sum(values) / len(values) if values else None


def label_sentence(readings: Sequence[LabelReading], where: str) -> list[str]:
    """What the attack read that named most labels in the first column, where guessing was scored; nothing where none did.
    ``where``: that column, in a sentence."""
    if not readings:
        return []
    most = readings[0]
    assert most.guess is not None
    if most.right is None:
        return [tell("Labels {where}: no attack named any.", where=where)]
    said = [
        tell(
            "Labels {where}: {attack} named every label of {whole} of {n} updates, {right:.0f} % of the labels. Naming the "
            "most frequent class every time: {guess:.0f} %.", where=where, attack=most.attack, whole=most.whole,
            n=most.updates, right=percent(most.right), guess=percent(most.guess),
        )
    ]  # fmt: skip
    return said + ([tell("On {n} of them, it named none.", n=most.silent)] if most.silent else [])
