"""What came back of each text, attack by attack. Private words are masked by blocks of one width. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.records import CLIENT, LABELS, MASK
from rasura.report.findings import column_of
from rasura.report.language import recorded, tell
from rasura.report.matrix import Findings
from rasura.report.scores import BLIND, Record, gave_up, names_labels_alone, notes_of, scored

Word = tuple[str, bool, bool]
"""A word, whether it came back, and whether it is sensitive."""

SURE = {
    "verified": "verified: there is a proof, since the update tells these tokens from others that are almost the same",
    "span": "every token fits the update, as hardly any other token would; no proof of the whole text",
    "matched": "the best match that was found; no proof",
    "none": "a guess without a check",
}
"""How sure an attack is of its guess, by its confidence."""


@dataclass(frozen=True)
class Attempt:
    """One attack on one text under one protection: ``how`` it ended, and how ``sure`` it is of its guess.

    ``score``, ``guess``: what was read of the text, and what guessing read; None where it was not measured. ``words``,
    ``read``: the text and the guess, masked unless shown; empty where nothing is stored.
    """

    attack: str
    column: str
    where: str
    how: str
    sure: str
    score: float | None = None
    guess: float | None = None
    words: tuple[Word, ...] = ()
    read: str = ""


def masked(row: Mapping[str, Any], show: bool) -> dict[str, Any]:
    """What came back of one text or image, as stored; every word masked by the same block unless ``show``."""
    if row.get("image"):
        return dict(row) if show else dict(row, sent="", read="")
    words = tuple((str(w) if show else MASK, bool(hit), bool(hurts)) for w, hit, hurts in row["words"])
    return dict(row, words=words, read=row["read"] if show else " ".join(MASK for _ in row["read"].split()))


def notes_in(records: Sequence[Record], f: Findings) -> tuple[int, ...]:
    """The numbers of the texts that have a page; none of images, which are not stored one by one."""
    return () if f.figures else tuple(sorted({n for r in records for n in notes_of(r)}))


def attempts(note: int, records: Sequence[Record], f: Findings, show: bool) -> list[Attempt]:
    """Every attack on the text with the number ``note``, by protection as in the matrix, then by what was read."""
    found = [one for r in records if r["attack"] not in (BLIND, CLIENT) for one in _of(note, r, f.metric, show)]
    return sorted(found, key=lambda a: (f.columns.index(a.column), -(a.score or 0.0), a.attack, a.where))


def _of(note: int, r: Record, metric: str, show: bool) -> Iterator[Attempt]:
    examples, column = notes_of(r), column_of(r["update"], r["defense"])
    if note not in examples:
        return
    figures = {n: (value, guess) for n, value, guess in scored(r, metric)}
    score, guess = figures.get(note, (None, None))
    where = tell("{threat}, seed {seed}, {count} in the update", threat=r["threat"], seed=r["seed"], count=len(examples))
    if r["status"] != "ok" or gave_up(r):
        yield Attempt(r["attack"], column, where, _ended(r), tell("no guess"), score, guess)
        return
    rows = r["recovered"] if len(r["recovered"]) == len(examples) else [None] * len(examples)
    for number, row in zip(examples, rows):
        if number == note:
            told: dict[str, Any] = masked(row, show) if row and not row.get("image") else {"words": (), "read": ""}
            sure = recorded(SURE[r["confidence"]]) if r["confidence"] in SURE else tell("how sure is not known")
            how = _labels(r) if names_labels_alone(r) else tell("gave a guess")
            yield Attempt(r["attack"], column, where, how, sure, score, guess, told["words"], told["read"])
            return


def _labels(r: Record) -> str:
    values = r["scores"][LABELS]["per_record"]
    return tell(
        "named labels, no text: {hits:.0f} of {count} labels of the update", hits=float(sum(values)), count=len(values)
    )


def _ended(r: Record) -> str:
    if r["status"] == "crashed":
        how = tell("crashed")
    else:
        how = tell("does not apply") if r["status"] == "not_applicable" else tell("gave up, which counts as guessing")
    return f"{how}: {r['reason']}" if r["reason"] else how
