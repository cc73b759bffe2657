"""What each attack read in one column of an audit, example by example, beside guessing on the same example. No torch.

A column holds what one protection sends under one threat model at one batch size. Its notes are the different texts or
images in it: one that comes twice, or with several seeds, counts once, with the mean of its scores.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from rasura.core.records import OPERATOR
from rasura.report.language import tell
from rasura.report.pooled import Level, crossed, interval
from rasura.report.scores import (
    BLIND,
    Cell,
    Groups,
    Record,
    gave_up,
    means_of,
    named_in_batch,
    notes_of,
    scored,
    shares_of,
    together,
    updates_of,
)

PORTFOLIO = "best"
"""The attack that runs others and keeps one guess; what it ran stands in ``details["ran"]``, the winner in ``attack``."""

WHOLE = 0.9
"""From this score on an example counts as read nearly whole ..."""

CLEARLY = 0.3
"""... where guessing scored at least so much less on the same example."""

OWN = 0.5
"""Below this share of own tokens in its guess, the words of an example are not told from those of others; below this share
of tokens of the whole batch, nothing was read: who names every word names the right ones, too."""


@dataclass(frozen=True)
class Reading:
    """One attack in one column.

    ``read``, ``guessed``: example -> its score, and what guessing scored on it. ``whole``: examples that were read nearly
    whole in any seed. ``mixed``: those of them that were read only among the words of others. ``proven``: those whose
    tokens were verified, though not nearly all of their words are known to the tokenizer. ``sure``: those read clearly above
    guessing by a guess that is at least ``span``. ``ended``: updates of which every example was measured. ``ended_as``:
    status -> examples. ``named``, ``named_blind``: example -> the known shares of tokens in the guess, and in guessing's,
    that stand anywhere in the batch. ``keys``: of a protection of a service, the number of each key -> what ``read`` and
    ``guessed`` say behind it. ``together``: the measured examples in the groups of ``scores.together``.
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
    keys: Mapping[int, Mapping[int, tuple[float, float]]] = field(default_factory=dict)
    together: Groups = ()

    @cached_property
    def level(self) -> Level | None:
        """What was read on average. Of updates with several examples each, the mean of the updates' means."""
        found = self._over(lambda read, _: read)
        if found[0] != found[0]:
            return None
        return Level(*found, max(self.read.values()), len(self.read), updates_of(self.together, len(self.read)))

    def _over(
        self, worth: Callable[[float, float], float], bounds: tuple[float, float] = (0.0, 1.0)
    ) -> tuple[float, float, float]:
        """The mean of ``worth`` of what was read and guessed, with its interval: over what was sent ``together``, since an
        attack often reads all of an update or nothing, or over the examples and the keys where there are several."""
        if len(self.keys) < 2:
            return interval(means_of({n: worth(v, self.guessed[n]) for n, v in self.read.items()}, self.together), bounds)
        rows = (
            tuple(worth(*behind[n]) if n in behind else math.nan for n in sorted(self.read)) for behind in self.keys.values()
        )
        return crossed(tuple(rows), bounds)

    @cached_property
    def gains(self) -> tuple[float, ...]:
        """What was read above guessing, an example each, in [-1, 1]."""
        return tuple(self.read[n] - self.guessed[n] for n in sorted(self.read))

    @cached_property
    def above(self) -> bool:
        """Whether the mean gain is above 0 by its interval."""
        return self._over(lambda read, guess: read - guess, (-1.0, 1.0))[1] > 0

    @cached_property
    def excess(self) -> float:
        """The upper end of what is read above guessing, where it is above; 1 where nothing was measured."""
        found = self._over(lambda read, guess: max(0.0, read - guess))[2] if self.gains else 1.0
        return 1.0 if found != found else found

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

    @cached_property
    def counted(self) -> Reading:
        """What counts of it: if it is ``inflated``, guessing wherever its guess names mostly tokens that are not there, and
        nothing where that is so of every example."""
        if not self.inflated:
            return self
        right = {n for n in self.read if self.named.get(n, 1.0) >= OWN}
        kept = {n: v if n in right else self.guessed[n] for n, v in self.read.items()} if right else {}
        return replace(self, read=kept, named={}, named_blind={}, together=self.together if right else ())

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
    keys: dict[int, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    records = list(records)
    for r in records:
        notes, found, cell = notes_of(r), scored(r, metric), (r["seed"], r["batch"])
        due = cells.get(cell, ())
        statuses[r["status"]].update(due)
        if due and len(found) == len(due):
            ended.add(cell)
        confidence = r["confidence"] if r["status"] == "ok" else ""
        own = dict(zip(notes, shares_of(r["scores"], "token_precision", len(notes))))
        here, there = named_in_batch(r, notes) if r["status"] == "ok" and not gave_up(r) else ({}, {})
        for note, value, guess in found:
            values[note].append((value, guess))
            if r["threat"] == OPERATOR and r["defense"] != "none" and attack != BLIND:  # guessing knows no key
                keys[r["seed"]][note].append((value, guess))
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
    means = _means(values)
    return Reading(
        attack,
        len({n for notes in cells.values() for n in notes}),
        {n: v for n, (v, _) in means.items()},
        {n: g for n, (_, g) in means.items()},
        frozenset(whole), frozenset(whole - apart), frozenset(whole - full), frozenset(sure), frozenset(ended),
        bool(cells) and ended == set(cells),
        Counter({status: len(notes) for status, notes in statuses.items()}),
        {n: sum(some) / len(some) for n, some in named.items() if some},
        {n: sum(some) / len(some) for n, some in blind.items() if some},
        {key: _means(behind) for key, behind in keys.items()},
        together(records, means),
    )  # fmt: skip


def _means(found: Mapping[int, Sequence[tuple[float, float]]]) -> dict[int, tuple[float, float]]:
    return {n: (sum(v for v, _ in some) / len(some), sum(g for _, g in some) / len(some)) for n, some in found.items()}


def _mean(found: Mapping[int, float]) -> float:
    return sum(found.values()) / len(found)


def readings(records: Iterable[Record], cells: Mapping[Cell, tuple[int, ...]], metric: str) -> dict[str, Reading]:
    """What each attack but guessing read, as ``reading`` says."""
    by_attack: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        if r["attack"] != BLIND:
            by_attack[r["attack"]].append(r)
    return {a: reading(a, some, cells, metric) for a, some in by_attack.items()}
