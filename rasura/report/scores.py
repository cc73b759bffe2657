"""What a record says of its examples: which they are, how each was scored, and how guessing on it was. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from rasura.core.errors import InputError
from rasura.core.records import LABELS, OPERATOR
from rasura.report.pooled import Level, interval, share

Record = Mapping[str, Any]
Cell = tuple[int, int]
"""Seed and batch: what names one sent update within a column."""

Setting = tuple[str, int]
"""Threat model and batch size."""

Groups = tuple[tuple[int, ...], ...]
"""Examples that were sent together, a group each."""

BLIND = "blind"

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


def answered(record: Record, metric: str) -> bool:
    """Whether the attack has a figure of its own: it gave a guess that can be scored by ``metric``."""
    return not gave_up(record) and bool(scored(record, metric))


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


def shares_of(scores: Mapping[str, Any], metric: str, n: int) -> list[float | None]:
    """The values of ``metric`` in [0, 1], one for each of ``n`` examples; None where there is none."""
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
    guesses = shares_of(record["blind"], metric, len(notes))
    if gave_up(record):
        found = guesses
    elif record["status"] == "ok":
        found = shares_of(record["scores"], metric, len(notes))
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
            found = shares_of(r[side], metric, len(notes))
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


def named_in_batch(record: Record, notes: Sequence[int]) -> tuple[dict[int, float], dict[int, float]]:
    """``NAMED`` and ``NAMED_BLIND`` of a record. One that does not say gives at most the sum of its precisions: no token is
    in fewer texts than that."""
    kept = record.get("details", {})
    if NAMED in kept:
        pairs = [dict(zip(notes, kept.get(name) or ())) for name in (NAMED, NAMED_BLIND)]
        here, there = ({n: float(v) for n, v in one.items() if v is not None and v == v} for one in pairs)
        return here, there
    known = [v for v in shares_of(record["scores"], "token_precision", len(notes)) if v is not None]
    return (dict.fromkeys(notes, min(1.0, sum(known))) if known else {}), {}


def apart_of(sent: Iterable[Iterable[int]], measured: Container[int]) -> Groups:
    """The ``measured`` examples in groups that share no update, by the examples that each update ``sent``.

    What is read of one example says something of the others in its update, and so on over an example that two updates
    share. Nothing that is read of one group says anything of another, as far as the examples are independent.
    """
    group: dict[int, set[int]] = {}
    for update in sent:
        here = set(update)
        mine = {id(group[n]): group[n] for n in here if n in group}
        whole = here.union(*mine.values())
        if len(mine) != 1 or len(whole) > len(next(iter(mine.values()))):
            group |= dict.fromkeys(whole, whole)
    groups = {id(g): g for g in group.values()}.values()
    kept = (tuple(sorted(n for n in g if n in measured)) for g in groups)
    return tuple(sorted(some for some in kept if some))


def together(records: Iterable[Record], measured: Iterable[int]) -> Groups:
    """The ``measured`` examples in groups that share no update of ``records``. The notes of a service are read one by
    one."""
    records, there = list(records), set(measured)
    if any(r["threat"] == OPERATOR for r in records):
        return tuple((n,) for n in sorted(there))
    return apart_of(map(notes_of, records), there)


def means_of(values: Mapping[int, float], groups: Groups) -> list[float]:
    """The mean of each of ``groups`` of examples, by their ``values``."""
    return [fmean(values[n] for n in some) for some in groups]


def updates_of(groups: Groups, n: int) -> int:
    """The number of ``groups`` of ``n`` examples; 0 where each was sent by itself."""
    return len(groups) if len(groups) < n else 0


def guessing(records: Iterable[Record], metric: str) -> Level | None:
    """What guessing scores on the examples of ``records``."""
    records, values = list(records), defaultdict[int, list[float]](list)
    for r in records:
        notes = notes_of(r)
        for note, value in zip(notes, shares_of(r["blind"], metric, len(notes))):
            if value is not None:
                values[note].append(value)
    means = {note: fmean(some) for note, some in values.items()}
    groups = together(records, means)
    if not groups:
        return None
    return Level(*interval(means_of(means, groups)), max(means.values()), len(means), updates_of(groups, len(means)))
