"""The verdict on a protection, from its records: the only code that can say one. No torch.

It fails closed. Only an attack that was seen to read the same texts without protection, and that ran on every one of them
here, can say that a protection was not told from guessing; and only if every other that was seen to work and every attack
that knows the protection ran, too.
Whatever crashed, does not apply, or was not run makes the verdict ``not measured``. ``docs/verdicts.md`` says it in words.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rasura.core.options import names_of
from rasura.core.rounding import percent, percent_above
from rasura.report.language import recorded, tell
from rasura.report.missing import (
    AGAINST,
    HOLDS_WITHIN,
    adversaries_of,
    no_active_attack,
    no_yardstick,
    not_by_one_who_knows,
    not_run,
    nothing_sent,
    seen_to_work,
)
from rasura.report.pooled import Level, in_updates, texts_needed
from rasura.report.readings import CLEARLY, PORTFOLIO, Reading, readings
from rasura.report.scores import Cell, Record, Setting, about_texts, cells_of, guessing, setting_of, together, updates_of

READS, ABOVE, NOT_MEASURED, NOT_TOLD = "reads", "above guessing", "not measured", "not told from guessing"
WORDS = (READS, ABOVE, NOT_MEASURED, NOT_TOLD)
"""The verdicts, the worst first: that of several columns is the worst of theirs."""


def plain(defense: str) -> bool:
    """Whether ``defense`` is no protection at all."""
    return set(names_of(defense)) == {"none"}


def unmeasured(missing: Iterable[str]) -> str:
    """What is ``missing`` in a sentence."""
    told = "; ".join(missing)
    word = recorded(NOT_MEASURED)
    return f"{word} {told}" if told.startswith((AGAINST, recorded(AGAINST))) else f"{word}: {told}"


@dataclass(frozen=True)
class Verdict:
    """What the records say of one protection.

    ``missing``: why it was not fully measured, in words; the verdict can still be that something was read. ``risk``: the
    mean share that the strongest attack read, ``upper``: where the interval of any attack and of guessing ends, ``excess``:
    the upper end of what is read above guessing; None where no attack gave a figure. ``n``: examples, each counted once, and
    ``updates``: in how many groups they were sent (``together``), or 0: each by itself.
    ``counted``: the yardsticks. ``columns``: of several threat models or batch sizes the verdict on each, the worst first;
    figures are then the highest of all, and ``attack``, ``whole`` and ``guess`` those of the worst. ``mixed``: how many of
    ``whole`` were read only among the words of other examples. ``proven``: how many are verified and yet not nearly whole.
    ``keys``: of a protection of a service, behind how many keys; one key says nothing of others. ``cut``: that
    examples had been cut before they were sent, in words.
    """

    word: str
    defense: str
    n: int
    risk: float | None = None
    upper: float | None = None
    excess: float | None = None
    attack: str = ""
    whole: int = 0
    guess: Level | None = None
    counted: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    many: str = "notes"
    mixed: int = 0
    proven: int = 0
    keys: int = 0
    updates: int = 0
    cut: str = ""
    columns: tuple[Verdict, ...] = field(default=(), compare=False, repr=False)

    @property
    def own(self) -> Verdict:
        """The verdict on the worst column by itself: what ``attack``, ``whole`` and ``guess`` are of."""
        return self.columns[0] if self.columns else self

    @property
    def settings(self) -> tuple[Verdict, ...]:
        """The verdict on each threat model and batch size by itself."""
        return tuple(one for column in self.columns for one in column.settings) or (self,)

    @property
    def draws(self) -> int:
        """The independent draws that the figures rest on: examples, updates or keys, whichever are fewest."""
        return min(self.n, self.updates or self.n, self.keys or self.n)

    @property
    def read(self) -> float | None:
        """The risk, where it says something: all was measured, or so much was read."""
        return self.risk if self.word in (READS, ABOVE) else self._measured(self.risk)

    def _measured(self, figure: float | None) -> float | None:
        return None if self.missing else figure

    @property
    def bound(self) -> float | None:
        """``upper``, where nothing is missing that could have read more."""
        return self._measured(self.upper)

    def within(self, limit: float, bound: float | None) -> bool:
        """Whether ``bound`` is known and at most ``limit``. Below ``texts_needed(limit)`` draws, no bound is."""
        return not self.missing and self.keys != 1 and bound is not None and bound <= limit

    def meets(self, limit: float) -> bool:
        """Whether what is read stays at or below ``limit``: by its upper bound, with no example read nearly whole."""
        return self.word != READS and self.within(limit, self.upper)

    @property
    def holds(self) -> bool:
        """Whether the protection may be said to hold, against the attacks of the run."""
        return self.word == NOT_TOLD and self.within(HOLDS_WITHIN, self.excess)

    @property
    def says(self) -> str:
        """The verdict in words, with what it rests on."""
        if self.word == NOT_MEASURED:
            return unmeasured(self.missing)
        said = self._rests_on
        if self.keys == 1:
            said = tell("{verdict}, behind the one key of this run where it has a key", verdict=said)
        elif self.keys:
            said = tell("{verdict}, behind {count} keys", verdict=said, count=self.keys)
        return f"{said}; {self.cut}" if self.cut else said

    @property
    def _rests_on(self) -> str:
        word, many, n = recorded(self.word), recorded(self.many), in_updates(self.n, self.updates)
        if self.word == READS and self.whole > self.mixed + self.proven:
            return tell(
                "{word} ({attack}: {whole} of {n} {many} nearly whole)", word=word, attack=self.attack,
                whole=self.whole - self.mixed - self.proven, n=self.n, many=many,
            )  # fmt: skip
        if self.word == READS and self.proven:
            return tell(
                "{word} ({attack}: {count} of {n} {many} proven, but for words that the tokenizer does not know)", word=word,
                attack=self.attack, count=self.proven, n=self.n, many=many,
            )  # fmt: skip
        if self.word == READS and self.whole:
            return tell(
                "{word} ({attack}: nearly all words of {whole} of {n} {many}, among those of others)", word=word,
                attack=self.attack, whole=self.whole, n=self.n, many=many,
            )  # fmt: skip
        guess = "" if self.guess is None else tell(", guessing {guess:.0f} %", guess=percent(self.guess.mean))
        if self.word != NOT_TOLD:
            return f"{word} ({self.attack}: {percent(self.own.risk or 0):.0f} %{guess}, n = {n})"
        few = "" if self.holds else tell("; too few or too uncertain to conclude that it holds")
        wanted = texts_needed(HOLDS_WITHIN)
        if self.n < wanted:
            few = tell("; too few to conclude that it holds, which takes {wanted}", wanted=wanted)
        elif 0 < self.updates < wanted:
            few = tell("; too few updates to conclude that it holds, which takes {wanted}", wanted=wanted)
        elif 0 < self.keys < wanted:
            few = tell("; too few keys to conclude that it holds, which takes {wanted}", wanted=wanted)
        bound = tell("upper bound {upper:.0f} %", upper=percent_above(1.0 if self.upper is None else self.upper))
        read = ""
        if self.guess is not None and (self.own.risk or 0.0) >= self.guess.mean + CLEARLY:
            read = tell("{attack} read {read:.0f} %, ", attack=self.attack, read=percent(self.own.risk or 0.0))
        return f"{word} (n = {n}, {read}{bound}{guess}{few})"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for ``summary.json``: no figure where it was not measured."""
        return {
            "verdict": self.word, "says": self.says, "n": self.n, "draws": self.draws, "risk": self.read,
            "upper": self.bound, "excess": self._measured(self.excess), "holds": self.holds,
            "counted": list(self.counted), "missing": list(self.missing),
        }  # fmt: skip


def verdict(
    defense: str, records: Iterable[Record], baseline: Iterable[Record], metric: str, *, images: bool = False
) -> Verdict:
    """The verdict on ``defense`` by its ``records``, and by those of the same update without protection, ``baseline``.

    Threat models and batch sizes are judged apart, and the worst verdict stands. One that only the baseline has was not
    measured. It is about texts: attacks that name labels alone do not count in it.
    """
    records, baseline = list(records), list(baseline)
    records, baseline = (about_texts(some, [*records, *baseline]) for some in (records, baseline))
    columns: dict[Setting, list[Record]] = defaultdict(list)
    unprotected: dict[Setting, list[Record]] = defaultdict(list)
    for r in records:
        columns[setting_of(r)].append(r)
    for r in baseline:
        unprotected[setting_of(r)].append(r)
    found = [_of_column(defense, some, unprotected[where], metric, images) for where, some in columns.items()]
    many = "images" if images else "notes"
    if not found:
        return Verdict(NOT_MEASURED, defense, 0, missing=(tell("nothing was run"),), many=many)
    absent = (Verdict(NOT_MEASURED, defense, 0, missing=(why,), many=many) for why in not_run(columns, unprotected))
    return worst_of([*found, *absent])


def worst_of(found: Sequence[Verdict]) -> Verdict:
    """The worst of the verdicts on one protection, with the highest figures of all; what one is missing, it is missing."""
    worst = min(found, key=lambda v: (WORDS.index(v.word), -(v.risk or 0.0)))
    missing = tuple(dict.fromkeys(m for v in found for m in v.missing))
    told = found if worst.word == NOT_TOLD else [worst]

    def most(values: Iterable[float | None]) -> float | None:
        return max((v for v in values if v is not None), default=None)

    return replace(
        worst, missing=missing, n=min(v.n for v in told), updates=min(v.updates or v.n for v in told),
        risk=most(v.risk for v in found), upper=most(v.upper for v in found), excess=most(v.excess for v in found),
        columns=(worst, *(v for v in found if v is not worst)),
    )  # fmt: skip


def unsaid(v: Verdict, why: str) -> Verdict:
    """``v`` without anything that it says for the protection, and why."""
    return worst_of([v, Verdict(NOT_MEASURED, v.defense, 0, missing=(why,), many=v.many)]) if why else v


def _of_column(defense: str, records: Sequence[Record], baseline: Sequence[Record], metric: str, images: bool) -> Verdict:
    cells = cells_of(records, metric)
    notes = {n for some in cells.values() for n in some}
    here = readings(records, cells, metric)
    ran = {a: r.ended for a, r in here.items()}
    for a, ended in _ran_by_the_portfolio(records, here).items():
        ran[a] = ran.get(a, frozenset()) | ended
    finished = {a for a, ended in ran.items() if cells and ended == set(cells)} - {PORTFOLIO}
    worked = seen_to_work(baseline, notes, metric)
    yardsticks = [a for a, r in worked.items() if r.yardstick and a != PORTFOLIO]
    many = recorded("images" if images else "notes")
    missing = nothing_sent(records) or [
        *(
            tell("{attack} names more words than guessing, and fewer of them are right", attack=a)
            for a, r in here.items()
            if r.inflated
        ),
        *([tell("none of the {many} can be scored", many=many)] if not notes else []),
        *no_yardstick(here, finished, yardsticks, worked, {r["attack"] for r in baseline}, many),
        *no_active_attack(records, finished, yardsticks),
        *not_by_one_who_knows(adversaries_of(names_of(defense), records), here, finished, yardsticks, images),
    ]
    told = [(r, r.level) for r in (one.counted for one in here.values()) if r.level is not None]
    guess = guessing(records, metric)
    strongest = max(told, key=lambda one: (one[0].reads, one[0].works, one[1].mean))[0] if told else None
    word = NOT_MEASURED if missing else NOT_TOLD
    if strongest is not None and strongest.works:
        word = READS if strongest.reads else ABOVE
    highs = [level.high for level in (guess, *(level for _, level in told)) if level is not None]
    return Verdict(
        word,
        defense,
        len(notes),
        max((level.mean for _, level in told), default=None),
        max(highs) if told else None,
        max((r.excess for r, _ in told), default=None),
        strongest.attack if strongest is not None else "",
        len(strongest.whole) if strongest is not None else 0,
        guess,
        tuple(a for a in yardsticks if a in finished),
        tuple(missing),
        "images" if images else "notes",
        len(strongest.mixed) if strongest is not None else 0,
        len(strongest.proven) if strongest is not None else 0,
        keys=max((len(r.keys) for r in here.values()), default=0),
        updates=updates_of(together(records, notes), len(notes)),
    )


def _ran_by_the_portfolio(records: Iterable[Record], here: Mapping[str, Reading]) -> dict[str, frozenset[Cell]]:
    """Member -> the updates on which the portfolio ran it to its end."""
    ran: dict[str, set[Cell]] = defaultdict(set)
    for r in records:
        cell = (r["seed"], r["batch"])
        if r["attack"] == PORTFOLIO and cell in here[PORTFOLIO].ended and "ran" in r["details"]:
            for member in filter(None, str(r["details"]["ran"]).split(",")):
                ran[member].add(cell)
    return {member: frozenset(cells) for member, cells in ran.items()}
