"""What changed between two runs, beyond noise. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from rasura.core.errors import InputError
from rasura.metrics.intervals import mean_interval
from rasura.report.findings import column_of
from rasura.report.gate import ABOVE_LIMIT, NOT_JUDGED, PASSED
from rasura.report.head import Made
from rasura.report.matrix import Findings
from rasura.report.readings import Reading, reading
from rasura.report.scores import BLIND, Record, about_texts, apart_of, cells_of, means_of, setting_of
from rasura.report.verdicts import WORDS, Verdict

BESIDE = ("tokenizer of the {}", "configuration of the {}")
"""Fingerprints that a run stores of a model beside that of its weights."""

FACTS = (
    *(kind.format("model") for kind in BESIDE), "reference text", "language model",
    *(kind.format("language model") for kind in BESIDE), "code of own methods", "file of a protection",
)  # fmt: skip
"""Fingerprints that a run stores, beside those of its weights and data, of what keeps its name when it changes."""

CHANGED, NOISE, UNKNOWN, SAME = "changed", "not told from noise", "not comparable", "the same"


@dataclass(frozen=True)
class Run:
    """One of the two runs: what it stored, and what its records say."""

    records: Sequence[Record]
    plan: Mapping[str, Any]
    made: Made
    found: Findings

    @property
    def data(self) -> frozenset[str]:
        """The fingerprints of the data."""
        return frozenset(str(r["data"]) for r in self.records)


@dataclass(frozen=True)
class Change:
    """One attack under one protection in both runs; ``where``: the threat model and the batch size, if a run has several,
    since no figure is of several together. ``before``, ``after``: the mean fractions read, None without a figure.
    ``low``, ``high``: the 95 % interval of the difference; None where there is none. ``why``: the reason, where they are not
    comparable."""

    attack: str
    column: str
    word: str
    before: float | None
    after: float | None
    low: float | None = None
    high: float | None = None
    n: tuple[int, int] = (0, 0)
    where: str = ""
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """``settings``: what differs between the runs, in words. ``paired``: both read the same texts, so that each text is
    compared with itself. ``verdicts``: column, verdict before, verdict after; None where a run lacks the column. ``worse``:
    the columns whose verdict says less for the protection than before. ``more``: those of which an attack read more, by
    intervals that hold for all comparisons together at 95 %, and whose protection cannot be said to hold. ``unfinished``:
    ``first``, ``second`` or both, where a run has not all of its results: what neither has is no comparison, and missing."""

    settings: tuple[str, ...]
    paired: bool
    verdicts: tuple[tuple[str, str | None, str | None], ...]
    changes: tuple[Change, ...]
    worse: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()

    def count(self, word: str) -> int:
        """How many attacks under a protection have this ``word``."""
        return sum(c.word == word for c in self.changes)

    @property
    def measured(self) -> bool:
        """Whether any attack but guessing has a figure in both runs."""
        return any(c.attack != BLIND and c.low is not None for c in self.changes)

    @property
    def exit(self) -> int:
        """The exit code: that of ``gate`` for what is above a limit, where a verdict became worse or more was read; else
        that for what could not be judged, where a comparison or all of them are missing, or a run is unfinished."""
        if self.worse or self.more:
            return ABOVE_LIMIT
        return NOT_JUDGED if self.unfinished or self.count(UNKNOWN) or not self.measured else PASSED

    @property
    def says(self) -> str:
        """Which verdicts became worse, where more was read, what changed beyond noise, and how many comparisons could not be
        made."""
        changed, unknown, n = self.count(CHANGED), self.count(UNKNOWN), len(self.changes)
        told = f"{changed} of {n} comparisons changed beyond noise" if changed or self.exit else "No change is shown"
        if unknown:
            told += f"; {unknown} could not be made"
        elif not self.measured:
            told += "; the runs have no figures to compare"
        worse = f"The verdict became worse on {', '.join(self.worse)}. " if self.worse else ""
        more = f"More was read than before on {', '.join(self.more)}. " if self.more else ""
        told += ", by the 95 % interval of each difference. By chance, about one in twenty is called changed."
        return "".join(f"The {name} run is unfinished. " for name in self.unfinished) + worse + more + told


@cache
def enough(paired: bool) -> int:
    """Independent texts or updates that it takes at least until a difference can leave out 0: none read before, and all
    read after."""
    n = 1
    while _difference([0.0] * n, [1.0] * n, paired)[0] <= 0:
        n += 1
    return n


def _difference(a: Sequence[float], b: Sequence[float], paired: bool, missed: float = 0.05) -> tuple[float, float]:
    """The interval of the mean of ``b`` less that of ``a``, at level ``1 - missed``."""
    if paired:
        return mean_interval([y - x for x, y in zip(a, b)], low=-1.0, high=1.0, level=1 - missed)[1:]
    # each misses half as often, so that both hold together
    (_, a_low, a_high), (_, b_low, b_high) = (mean_interval(v, level=1 - missed / 2) for v in (a, b))
    return b_low - a_high, b_high - a_low


def _rank(verdict: Verdict) -> int:
    """How much a verdict says for the protection; most where it may be said to hold."""
    return WORDS.index(verdict.word) + verdict.holds


def compared(first: Run, second: Run) -> Comparison:
    """Compare two runs of the same kind. Raises ``InputError`` if they measure different things."""
    if first.plan.get("kind") != second.plan.get("kind") or first.found.metric != second.found.metric:
        raise InputError("the runs measure different things (updates, a service, images); compare two runs of one kind")
    paired = first.data == second.data and len(first.data) == 1
    apart = any(len({setting_of(r) for r in run.records}) > 1 for run in (first, second))
    before, after = (_values(run, apart) for run in (first, second))
    order = dict.fromkeys([*first.found.columns, *second.found.columns])
    keys = sorted({*before, *after}, key=lambda key: (list(order).index(key[1]), key[0], key[2]))
    was, now = ({c: v.says for c, v in run.found.verdicts.items()} for run in (first, second))
    verdicts = tuple((c, was.get(c), now.get(c)) for c in order)
    one, two = first.found.verdicts, second.found.verdicts
    worse = tuple(c for c in order if c in one and c in two and _rank(two[c]) < _rank(one[c]))
    changes = tuple(replace(_change(*key[:2], before.get(key), after.get(key), paired), where=key[2]) for key in keys)
    shown = {key: c for key, c in zip(keys, changes) if c.attack != BLIND and c.low is not None}
    risen = {
        key[1] for key, c in shown.items()
        if c.word == CHANGED and _difference(*_values_of(before[key], after[key], paired), paired, 0.05 / len(shown))[0] > 0
    }  # fmt: skip
    more = tuple(c for c in order if c in risen and not two[c].holds)
    begun = tuple(name for name, run in (("first", first), ("second", second)) if run.found.unfinished)
    return Comparison(_settings(first, second), paired, verdicts, changes, worse, more, begun)


def _values(run: Run, apart: bool) -> dict[tuple[str, str, str], Reading]:
    """Attack, column and, if settings are to be ``apart``, setting -> what was read of each text, the mean over seeds."""
    groups: dict[tuple[str, str, str], list[Record]] = defaultdict(list)
    columns: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in about_texts(run.records, run.records):
        threat, size = setting_of(r)
        column, where = column_of(r["update"], r["defense"]), f"{threat}, batch size {size}" if apart else ""
        groups[r["attack"], column, where].append(r)
        columns[column, where].append(r)
    metric = run.found.metric
    cells = {key: cells_of(some, metric) for key, some in columns.items()}
    known = {key: reading(key[0], some, cells[key[1:]], metric) for key, some in groups.items()}
    return {key: found for key, found in known.items() if key[1] in run.found.columns}


def _change(attack: str, column: str, first: Reading | None, second: Reading | None, paired: bool) -> Change:
    if first is not None and second is not None and first.inapplicable and second.inapplicable:
        return Change(attack, column, SAME, None, None)
    a, b = (r.read if r is not None else {} for r in (first, second))
    n = len(a), len(b)
    before, after = (sum(v.values()) / len(v) if v else None for v in (a, b))
    if why := _incomparable(first, second, paired):
        return Change(attack, column, UNKNOWN, before, after, n=n, why=why)
    if paired and dict(a) == dict(b):
        return Change(attack, column, SAME, before, after, 0.0, 0.0, n)
    assert first is not None and second is not None
    low, high = _difference(*_values_of(first, second, paired), paired)
    return Change(attack, column, CHANGED if low > 0 or high < 0 else NOISE, before, after, low, high, n)


def _values_of(first: Reading, second: Reading, paired: bool) -> tuple[list[float], list[float]]:
    """What was read of each group of texts that were sent together: if ``paired``, in either run."""
    if not paired:
        return means_of(first.read, first.together), means_of(second.read, second.together)
    both = apart_of([*first.together, *second.together], first.read)
    return means_of(first.read, both), means_of(second.read, both)


def _incomparable(first: Reading | None, second: Reading | None, paired: bool) -> str:
    """Why what an attack read in both runs cannot be compared; empty if it can."""
    for name, one in (("first", first), ("second", second)):
        if one is None:
            return f"not in the {name} run"
        if not one.complete:
            return f"{name} run: {one.how_it_ended}"
    assert first is not None and second is not None
    if set(first.keys) != set(second.keys):
        return "read behind other keys, which differ in what is read"
    if paired and set(first.read) != set(second.read):
        return "some texts were measured in one run only"
    if min(map(len, _values_of(first, second, paired))) < enough(paired):
        what = "updates" if any(r.level is not None and r.level.updates for r in (first, second)) else "texts"
        return f"too few {what}: at least {enough(paired)} are needed"
    return ""


def _settings(first: Run, second: Run) -> tuple[str, ...]:
    said = []
    if first.data != second.data:
        said.append("the data is different: texts are compared as two independent groups")
    for name in sorted({*first.plan, *second.plan} - {"texts"}):
        was, now = first.plan.get(name), second.plan.get(name)
        if was != now:
            said.append(f"{name.replace('_', ' ')}: {_shown(was)}, then {_shown(now)}")
    models = [run.made.about.get("model") for run in (first, second)]
    if None in models:
        said.append("the weights of the model: not recorded in one of the runs, so they may differ")
    elif models[0] != models[1]:
        said.append(f"the weights of the model: {models[0]}, then {models[1]}")
    expected = {kind.format("model") for kind in BESIDE}
    if "language_model" in first.plan and "language_model" in second.plan:
        expected |= {"language model", *(kind.format("language model") for kind in BESIDE)}
    for what in FACTS:
        was, now = (run.made.about.get(what) for run in (first, second))
        if None in (was, now) and what in expected:
            said.append(f"{what}: not recorded in one of the runs, so it may differ")
        elif was != now:
            parts = _differing(was, now) if isinstance(was, Mapping) and isinstance(now, Mapping) else (was, now)
            said.append(f"{what}: {_shown(parts[0])}, then {_shown(parts[1])}")
    versions = [_versions(run) for run in (first, second)]
    for package in sorted({*versions[0], *versions[1]} if all(versions) else ()):
        was, now = (known.get(package, ["not installed"]) for known in versions)
        if was != now:
            said.append(f"package {package}: {_shown(was)}, then {_shown(now)}")
    for what in ("code", "machine"):
        was, now = (run.made.kept(what) for run in (first, second))
        if was != now:
            said.append(f"{what}: {', '.join(was) or 'not recorded'}, then {', '.join(now) or 'not recorded'}")
    return tuple(said)


def _versions(run: Run) -> dict[str, list[str]]:
    """Package -> its versions in the order of use; empty where the run did not store any."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for one in run.made.sittings:
        for package, version in dict(one["packages"]).items():  # type: ignore[arg-type]  # a mapping by its form
            found[package][version] = None
    return {package: list(some) for package, some in found.items()}


def _differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    """The entries of each that the other has not, or has otherwise; None for a side without any."""
    return [{k: v for k, v in one.items() if v != other.get(k)} or None for one, other in ((was, now), (now, was))]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        value = [f"{name} {one}" for name, one in value.items()]
    return "not set" if value is None else ", ".join(map(str, value)) if isinstance(value, list) else str(value)
