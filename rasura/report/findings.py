"""From Records to what a person needs to know: the matrix, the sentence, the recommendation. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rasura.metrics.intervals import mean_or_interval

HEADLINE = "token_recall"


@dataclass(frozen=True)
class Wording:
    """How one kind of data is spoken of: one record, several, and what the headline metric is a share of."""

    one: str
    many: str
    share: str
    unit: str


TEXTS = Wording("note", "notes", "of the words", "Words read back, %")
IMAGES = Wording("image", "images", "of the structure (SSIM)", "Structure read back (SSIM), %")
HOLDS_WITHIN = 0.1
"""A setting holds when the upper bound of its risk is at most this much above the guessing level."""


ADAPTIVE = {"ghost": ("ghost-", "ghost-lattice")}
"""Protection -> how the names of attacks begin that know it, and the strongest: without one nothing is said to hold."""


@dataclass(frozen=True)
class Level:
    """A pooled score: mean, interval (NaN for a metric without a range), worst case, number of texts."""

    mean: float
    low: float
    high: float
    worst: float
    n: int

    @property
    def text(self) -> str:
        """In whole percent with its interval."""
        return f"{100 * self.mean:.0f} % (95 %: {100 * self.low:.0f} to {100 * self.high:.0f}, n = {self.n})"


@dataclass(frozen=True)
class Entry:
    """One entry of the matrix. ``mark``: value, ``–`` (not applicable) or ``!`` (failed)."""

    attack: str
    defense: str
    level: Level | None
    blind: float
    reasons: tuple[str, ...]
    failed: int
    total: int
    verified: int
    seconds: float

    @property
    def mark(self) -> str:
        """What the cell shows."""
        if self.level is not None:
            return f"{100 * self.level.mean:.0f}"
        return "!" if self.failed else "–"

    @property
    def step(self) -> int:
        """Shade 0 to 5 by risk above the blind level."""
        if self.level is None:
            return 0
        above = max(0.0, self.level.mean - self.blind) / max(1e-9, 1 - self.blind)
        return min(5, int(above * 5 + 0.999)) if above > 0.02 else 0


@dataclass(frozen=True)
class Price:
    """What a protection costs on average: ``sent`` bytes of an update, ``seconds`` to make it."""

    sent: float
    seconds: float


@dataclass(frozen=True)
class Findings:
    """Everything that the page shows, for one metric."""

    metric: str
    attacks: tuple[str, ...]
    defenses: tuple[str, ...]
    matrix: Mapping[tuple[str, str], Entry]
    best: Mapping[str, Entry]
    blind: Level | None
    sentence: tuple[str, ...]
    recommendation: str
    threats: Mapping[str, str]
    evidence: tuple[dict[str, Any], ...]
    sizes: tuple[int, ...]
    cells: int
    failed: int
    words: Wording = TEXTS
    figures: tuple[dict[str, Any], ...] = ()
    prices: Mapping[str, Price] = field(default_factory=dict)


def pooled(values: Iterable[float | None], bounds: tuple[float, float] | None = (0.0, 1.0)) -> Level | None:
    """Pool values over cells; null (not measured) is left out. ``bounds``: the metric's range, None where it has none."""
    kept = [float(v) for v in values if v is not None and v == v]
    if not kept:
        return None
    mean, low, high = mean_or_interval(kept, bounds)
    return Level(mean, low, high, max(kept), len(kept))


def _values(records: Iterable[Mapping[str, Any]], metric: str, side: str = "scores") -> list[float | None]:
    return [v for r in records for v in r[side].get(metric, {}).get("per_record", [])]


def bounds_of(records: Iterable[Mapping[str, Any]], metric: str) -> tuple[float, float] | None:
    """The range of ``metric`` as the records tell it: [0, 1] where none does."""
    sides = [r[side].get(metric, {}) for r in records for side in ("scores", "blind")]
    told = [found["bounds"] for found in sides if "bounds" in found]
    if not told:
        return 0.0, 1.0
    return (float(told[0][0]), float(told[0][1])) if told[0] else None


def _entry(attack: str, defense: str, records: Sequence[Mapping[str, Any]], metric: str) -> Entry:
    bounds = bounds_of(records, metric)
    blind = pooled(_values(records, metric, "blind"), bounds)
    failed = sum(r["status"] == "failed" for r in records)
    # A failed attempt is a status; in the pool it stands at the guessing level, which is what that adversary would do.
    values = _values(records, metric)
    if values and failed:
        values += [v for r in records if r["status"] == "failed" for v in r["blind"].get(metric, {}).get("per_record", [])]
    return Entry(
        attack,
        defense,
        pooled(values, bounds),
        blind.mean if blind else 0.0,
        tuple(sorted({r["reason"] for r in records if r["reason"]})),
        failed,
        len(records),
        sum(r["confidence"] == "verified" for r in records),
        sum(r["wall_seconds"] for r in records) / max(1, len(records)),
    )


def _setting(update: str, defense: str) -> str:
    """A protection with what is sent behind it, where that is not one gradient."""
    if update == "fedsgd":
        return defense
    return update if defense == "none" else f"{defense}, {update}"


def findings(
    records: Iterable[Mapping[str, Any]], plan: Mapping[str, Any] | None = None, metric: str | None = None
) -> Findings:
    """What the records say. ``plan`` gives the order of attacks and defenses. ``metric``: the task's headline if None."""
    every = [{**r, "defense": _setting(r.get("update", "fedsgd"), r["defense"])} for r in records]
    order = dict(plan or {})
    order["defenses"] = [_setting(u, d) for u in order.get("updates", ["fedsgd"]) for d in order.get("defenses", [])]
    images = order.get("task") == "vision"
    metric = metric or ("ssim" if images else HEADLINE)
    attacks = [a for a in order.get("attacks", []) if any(r["attack"] == a for r in every)]
    attacks += sorted({r["attack"] for r in every} - set(attacks))
    defenses = [d for d in order.get("defenses", []) if any(r["defense"] == d for r in every)]
    defenses += sorted({r["defense"] for r in every} - set(defenses))
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for r in every:
        groups[r["attack"], r["defense"]].append(r)
    matrix = {k: _entry(*k, v, metric) for k, v in groups.items()}
    best: dict[str, Entry] = {}
    for d in defenses:
        rows = [matrix[a, d] for a in attacks if (a, d) in matrix and matrix[a, d].level is not None]
        if rows:
            best[d] = max(rows, key=lambda e: e.level.mean if e.level else -1.0)
    # Every cell of a batch carries the same guess, so it counts once.
    once = {(r["threat"], r["batch_size"], r["seed"], r["batch"]): r for r in every}
    blind = pooled(_values(once.values(), metric, "blind"), bounds_of(every, metric))
    strongest = [r for r in every if r["status"] == "ok" and r["recovered"] and r["attack"] != "blind"]
    found = Findings(
        metric, tuple(attacks), tuple(defenses), matrix, best, blind, (), "",
        {r["threat"]: r.get("threat_plain", "") for r in every},
        tuple(_evidence(strongest)), tuple(sorted({r["batch_size"] for r in every})),
        len(every), sum(r["status"] == "failed" for r in every),
        IMAGES if images else TEXTS, tuple(_figures(groups, attacks, defenses)) if images else (),
        _prices(every, defenses),
    )  # fmt: skip
    recommendation = _recommendation(found)
    return Findings(**{**found.__dict__, "sentence": tuple(_sentence(found, every)), "recommendation": recommendation})


def _prices(records: Iterable[Mapping[str, Any]], defenses: Sequence[str]) -> dict[str, Price]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for r in records:
        found[r["defense"]].append((r.get("sent_bytes", 0), r.get("defense_seconds", 0.0)))
    return {d: Price(*(sum(part) / len(found[d]) for part in zip(*found[d]))) for d in defenses}


def _figures(
    groups: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]], attacks: Sequence[str], defenses: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Means of MSE and PSNR, which are no shares, with the blind level beside them."""
    for defense in defenses:
        for attack in attacks:
            scored = [r for r in groups.get((attack, defense), ()) if r["scores"]]
            row: dict[str, Any] = {"attack": attack, "defense": defense, "n": len(_values(scored, "mse"))}
            for metric in ("mse", "psnr"):
                for side in ("scores", "blind"):
                    values = [v for v in _values(scored, metric, side) if v is not None]
                    row[f"{metric}_{side}"] = sum(values) / len(values) if values else None
            if row["n"]:
                yield row


def _sentence(f: Findings, records: Sequence[Mapping[str, Any]]) -> list[str]:
    plain = "none" if "none" in f.best else next(iter(f.best), None)
    if plain is None or f.blind is None:
        return ["No attack gave a result that can be scored; the reasons stand in the table."]
    entry = f.best[plain]
    assert entry.level is not None
    sizes = f"a single {f.words.one}" if f.sizes == (1,) else f"{f.sizes[0]} to {f.sizes[-1]} {f.words.many}"
    where = "with no protection" if plain == "none" else f"behind {plain}"
    out = [f"From one update of {sizes} {where}, the server read back {entry.level.text} {f.words.share}."]
    out.append(f"Guessing without the update: {f.blind.text}.")
    sensitive = [r for r in records if (r["attack"], r["defense"]) == (entry.attack, plain)]
    values = [v for v in _values(sensitive, "sensitive") if v is not None]
    if values:
        whole = sum(v >= 1.0 for v in values)
        out.append(f"Every name, number and date came back in {whole} of the {len(values)} notes that hold any.")
    return out


def _untried(f: Findings, defense: str) -> str | None:
    """The attack made against ``defense``, where none of its kind is in the run; None where nothing is missing."""
    for name, (kind, attack) in ADAPTIVE.items():
        parts = [part.partition(":")[0] for part in defense.split("+")]
        if name in parts and not any(a.startswith(kind) and (a, defense) in f.matrix for a in f.attacks):
            return attack
    return None


def _recommendation(f: Findings) -> str:
    if f.blind is None or not f.best:
        return "Nothing can be recommended: no attack was scored."
    safe = [(e.level.high, d) for d, e in f.best.items() if e.level and e.level.high <= f.blind.mean + HOLDS_WITHIN]
    tested = [(high, d) for high, d in safe if _untried(f, d) is None]
    if safe and not tested:
        name = min(safe)[1]
        return (
            f"Nothing is known of {name} yet: no attack of this run knows how it works. Add one that does, --attack "
            f"{_untried(f, name)}, before you rely on it."
        )
    if safe:
        name = min(tested)[1]
        level = f.best[name].level
        assert level is not None
        return (
            f"Of the settings tested, {name} holds: {level.text} {f.words.share}, against {f.blind.text} by guessing. "
            "Empirical only: no formal guarantee, and a stronger attack may come."
        )
    name, entry = min(f.best.items(), key=lambda item: item[1].level.mean if item[1].level else 1.0)
    assert entry.level is not None
    advice = (
        "Freezing or dropping out lower layers does not help; keep updates back until they hold more tokens than the model "
        "is wide, or seal every gradient."
    )
    if f.words is IMAGES:
        advice = "Any part of a linear layer's gradient gives a single image's features away; seal every gradient."
    least = f"{entry.level.text} {f.words.share}"
    return f"None of the settings tested holds. The least is read behind {name}: {least}. {advice}"


def _evidence(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = [
        {**text, "attack": r["attack"], "defense": r["defense"], "confidence": r["confidence"]}
        for r in records
        for text in r["recovered"]
    ]
    rows.sort(key=lambda row: -float(row["score"] or 0))
    if len(rows) <= 3:
        return [dict(row, rank=name) for row, name in zip(rows, ("most read", "median", "least read"))]
    chosen = {"most read": rows[0], "median": rows[len(rows) // 2], "least read": rows[-1]}
    return [dict(row, rank=name) for name, row in chosen.items()]


def summarise(records: Iterable[Mapping[str, Any]], plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``summary.json``: the sentence, the recommendation and the matrix in plain values."""
    f = findings(records, plan)
    return {
        "sentence": list(f.sentence),
        "recommendation": f.recommendation,
        "metric": f.metric,
        "blind": f.blind.__dict__ if f.blind else None,
        "highest_risk": max((e.level.mean for e in f.best.values() if e.level), default=None),
        "cells": f.cells,
        "failed": f.failed,
        "matrix": [
            {
                "attack": e.attack, "defense": e.defense, "level": e.level.__dict__ if e.level else None,
                "blind": e.blind, "failed": e.failed, "verified": e.verified, "n_cells": e.total, "reasons": list(e.reasons),
            }
            for e in f.matrix.values()
        ],
    }  # fmt: skip
