"""What each attack read in one column of an audit, example by example, beside guessing on the same example. No torch.

A column holds what one protection sends under one threat model at one batch size. Its notes are the different texts or
images in it: one that comes twice, or with several seeds, counts once, with the mean of its scores.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rasura.core.errors import InputError
from rasura.core.records import LABELS
from rasura.report.language import tell
from rasura.report.pooled import Level, interval, pooled, share

Record = Mapping[str, Any]
Cell = tuple[int, int]
"""Seed and batch: what names one sent update within a column."""

Setting = tuple[str, int]
"""Threat model and batch size."""

BLIND = "blind"
PORTFOLIO = "best"
"""The attack that runs others and keeps one guess; what it ran stands in ``details["ran"]``, the winner in ``attack``."""

WHOLE = 0.9
"""From this score on an example counts as read nearly whole ..."""

CLEARLY = 0.3
"""... where guessing scored at least so much less on the same example."""

OWN = 0.5
"""Below this share of own tokens in its guess, the words of an example are not told from those of others; below this share
of tokens of the whole batch, nothing was read: who names every word names the right ones, too."""

NAMED, NAMED_BLIND = "in_batch", "blind_in_batch"
"""In the details of a record: for each example, the share of the tokens in the guess at it that stand anywhere in the batch;
the same of guessing."""


def notes_of(record: Record) -> tuple[int, ...]:
    """The numbers of the examples in the record's update: the same text has the same number.

    Raises ``InputError`` for a record that does not say, since nothing could be counted.
    """
    if "examples" not in record:
        raise InputError(
            "this run was made by an older version, which did not store the examples of each update; run the audit again"
        )
    return tuple(record["examples"])


def setting_of(record: Record) -> Setting:
    """The threat model and the batch size of a record: no figure is of several together."""
    return record["threat"], record["batch_size"]


def gave_up(record: Record) -> bool:
    """Whether the attack looked and guessed nothing, no text and no label: it says so, or its guess is empty. A crash is
    neither."""
    return record["status"] == "failed" or (record["status"] == "ok" and not record["scores"])


def names_labels_alone(record: Record) -> bool:
    """Whether the attack named labels of this update, and no text."""
    return record["status"] == "ok" and set(record["scores"]) == {LABELS}


def of_labels(records: Iterable[Record]) -> frozenset[str]:
    """The attacks that name labels, and never a text. Nothing that is said of texts rests on them."""
    records = list(records)
    texts = {r["attack"] for r in records if set(r["scores"]) - {LABELS}}
    return frozenset({r["attack"] for r in records if names_labels_alone(r)} - texts)


def about_texts(records: Iterable[Record], every: Iterable[Record]) -> list[Record]:
    """``records``, in which the attacks that name labels alone, by ``every`` record of the run, are guessing: that is what
    they say of a text."""
    silent = of_labels(every)
    return [{**r, "attack": BLIND, "status": "ok", "scores": {}} if r["attack"] in silent else r for r in records]


def _values(scores: Mapping[str, Any], metric: str, n: int) -> list[float | None]:
    found: Sequence[Any] = scores.get(metric, {}).get("per_record", [])
    if len(found) != n:
        return [None] * n
    return [None if v is None or v != v else share(float(v)) for v in found]


def scored(record: Record, metric: str) -> list[tuple[int, float, float]]:
    """For each example that was measured: its number, what the attack scored, and what guessing scored.

    An attack that gave up has the score of guessing, which is what that adversary would do. One that crashed, does not
    apply, or has no value of ``metric`` is not measured.
    """
    notes = notes_of(record)
    guesses = _values(record["blind"], metric, len(notes))
    if gave_up(record):
        found = guesses
    elif record["status"] == "ok":
        found = _values(record["scores"], metric, len(notes))
    else:
        return []
    return [(n, v, g) for n, v, g in zip(notes, found, guesses) if v is not None and g is not None]


def without_a_figure(records: Iterable[Record], metric: str) -> frozenset[int]:
    """The examples that cannot be scored, such as a text of which the tokenizer knows no word: neither guessing, which was
    scored, nor any attack has a value of ``metric`` there."""
    blank: set[int] = set()
    valued: set[int] = set()
    for r in records:
        notes = notes_of(r)
        for side in ("blind", "scores"):
            found = _values(r[side], metric, len(notes))
            valued.update(n for n, v in zip(notes, found) if v is not None)
            if side == "blind" and len(r[side].get(metric, {}).get("per_record", [])) == len(notes):
                blank.update(n for n, v in zip(notes, found) if v is None)
    return frozenset(blank - valued)


def cells_of(records: Iterable[Record], metric: str) -> dict[Cell, tuple[int, ...]]:
    """The updates of a column, each with the examples in it that can be scored; without those of which none can."""
    records = list(records)
    left_out = without_a_figure(records, metric)
    cells = {(r["seed"], r["batch"]): notes_of(r) for r in records}
    kept = {cell: tuple(n for n in notes if n not in left_out) for cell, notes in cells.items()}
    return {cell: notes for cell, notes in kept.items() if notes or not cells[cell]}


@dataclass(frozen=True)
class Reading:
    """One attack in one column.

    ``read``, ``guessed``: example -> its score, and what guessing scored on it. ``whole``: examples that were read nearly
    whole in any seed. ``mixed``: those of them that were read only among the words of others. ``proven``: those whose
    tokens were verified, though not nearly all of their words are known to the tokenizer. ``sure``: those read clearly above
    guessing by a guess that is at least ``span``. ``ended``: updates of which every example was measured. ``ended_as``:
    status -> examples. ``named``, ``named_blind``: example -> the known shares of tokens in the guess, and in guessing's,
    that stand anywhere in the batch.
    """

    attack: str
    notes: int
    read: Mapping[int, float]
    guessed: Mapping[int, float]
    whole: frozenset[int]
    mixed: frozenset[int]
    proven: frozenset[int]
    sure: frozenset[int]
    ended: frozenset[Cell]
    complete: bool
    ended_as: Mapping[str, int]
    named: Mapping[int, float] = field(default_factory=dict)
    named_blind: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def level(self) -> Level | None:
        """What was read on average."""
        return pooled(self.read.values())

    @cached_property
    def gains(self) -> tuple[float, ...]:
        """What was read above guessing, an example each, in [-1, 1]."""
        return tuple(self.read[n] - self.guessed[n] for n in sorted(self.read))

    @cached_property
    def above(self) -> bool:
        """Whether the mean gain is above 0 by its interval."""
        return interval(self.gains, (-1.0, 1.0))[1] > 0

    @cached_property
    def excess(self) -> float:
        """The upper end of what is read above guessing, where it is above; 1 where nothing was measured."""
        return interval(max(0.0, g) for g in self.gains)[2] if self.gains else 1.0

    @cached_property
    def precise(self) -> bool:
        """Whether at least ``OWN`` of the tokens that it names stand in the batch, as far as that is known."""
        return not self.named or _mean(self.named) >= OWN

    @cached_property
    def inflated(self) -> bool:
        """Whether what it scores above guessing may come from naming more tokens than guessing, and fewer of them right."""
        if self.precise or not self.named_blind or _mean(self.named) >= _mean(self.named_blind):
            return False
        return self.above or sum(self.gains) >= CLEARLY * len(self.gains) > 0

    @property
    def reads(self) -> bool:
        """Whether any example was read nearly whole, or more than half of all by the interval, and above guessing."""
        return bool(self.whole) or (self.level is not None and self.level.low > 0.5 and self.above and self.precise)

    @property
    def works(self) -> bool:
        """Whether the attack reads anything: an example nearly whole or surely, or more than guessing by the interval."""
        return bool(self.whole or self.sure) or self.above

    @property
    def yardstick(self) -> bool:
        """Whether the attack works on these examples: of an unprotected column, all of which was measured, it reads at least
        half of the examples nearly whole, or is above guessing by the interval and ``precise``."""
        return self.complete and (2 * len(self.whole) >= self.notes > 0 or (self.above and self.precise))

    @property
    def inapplicable(self) -> bool:
        """Whether the attack applies to no example at all, and this is known of each."""
        return self.ended_as == {"not_applicable": self.notes}

    @property
    def how_it_ended(self) -> str:
        """Why the reading is not complete, in words."""
        if crashed := self.ended_as.get("crashed"):
            return tell("crashed on {count} of {notes}", count=crashed, notes=self.notes)
        if other := self.ended_as.get("not_applicable"):
            return tell("does not apply to {count} of {notes}", count=other, notes=self.notes)
        return tell("has results for {count} of {notes}", count=len(self.read), notes=self.notes)


def reading(attack: str, records: Iterable[Record], cells: Mapping[Cell, tuple[int, ...]], metric: str) -> Reading:
    """What ``attack`` read, by its ``records`` of a column that consists of ``cells`` (``cells_of``)."""
    values: dict[int, list[tuple[float, float]]] = defaultdict(list)
    whole, apart, full, sure = set[int](), set[int](), set[int](), set[int]()
    ended: set[Cell] = set()
    statuses: dict[str, set[int]] = defaultdict(set)
    named, blind = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for r in records:
        notes, found, cell = notes_of(r), scored(r, metric), (r["seed"], r["batch"])
        due = cells.get(cell, ())
        statuses[r["status"]].update(due)
        if due and len(found) == len(due):
            ended.add(cell)
        confidence = r["confidence"] if r["status"] == "ok" else ""
        own = dict(zip(notes, _values(r["scores"], "token_precision", len(notes))))
        here, there = _named(r, notes) if r["status"] == "ok" and not gave_up(r) else ({}, {})
        for note, value, guess in found:
            values[note].append((value, guess))
            named[note] += [here[note]] if note in here else []
            blind[note] += [there[note]] if note in there else []
            full.update({note} if value >= WHOLE else ())
            if here.get(note, 1.0) < OWN:
                continue
            clearly = value - guess >= CLEARLY
            sure.update({note} if clearly and confidence in ("verified", "span") else ())
            if (value >= WHOLE and clearly) or (confidence == "verified" and value > guess):
                whole.add(note)
                if (mine := own[note]) is None or mine >= OWN:
                    apart.add(note)
    return Reading(
        attack,
        len({n for notes in cells.values() for n in notes}),
        {n: sum(v for v, _ in pairs) / len(pairs) for n, pairs in values.items()},
        {n: sum(g for _, g in pairs) / len(pairs) for n, pairs in values.items()},
        frozenset(whole), frozenset(whole - apart), frozenset(whole - full), frozenset(sure), frozenset(ended),
        bool(cells) and ended == set(cells),
        Counter({status: len(notes) for status, notes in statuses.items()}),
        {n: sum(some) / len(some) for n, some in named.items() if some},
        {n: sum(some) / len(some) for n, some in blind.items() if some},
    )  # fmt: skip


def _named(record: Record, notes: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """``NAMED`` and ``NAMED_BLIND`` of a record. One that does not say gives at most the sum of its precisions: no token is
    in fewer texts than that."""
    kept = record.get("details", {})
    if NAMED in kept:
        pairs = [dict(zip(notes, kept.get(name) or ())) for name in (NAMED, NAMED_BLIND)]
        here, there = ({n: float(v) for n, v in one.items() if v is not None and v == v} for one in pairs)
        return here, there
    known = [v for v in _values(record["scores"], "token_precision", len(notes)) if v is not None]
    return (dict.fromkeys(notes, min(1.0, sum(known))) if known else {}), {}


def _mean(found: Mapping[int, float]) -> float:
    return sum(found.values()) / len(found)


def readings(records: Iterable[Record], cells: Mapping[Cell, tuple[int, ...]], metric: str) -> dict[str, Reading]:
    """What each attack but guessing read, as ``reading`` says."""
    by_attack: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        if r["attack"] != BLIND:
            by_attack[r["attack"]].append(r)
    return {a: reading(a, some, cells, metric) for a, some in by_attack.items()}


def guessing(records: Iterable[Record], metric: str) -> Level | None:
    """What guessing scores on the examples of ``records``."""
    values: dict[int, list[float]] = defaultdict(list)
    for r in records:
        notes = notes_of(r)
        for note, value in zip(notes, _values(r["blind"], metric, len(notes))):
            if value is not None:
                values[note].append(value)
    return pooled(sum(some) / len(some) for some in values.values())
