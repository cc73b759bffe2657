"""From Records to findings: the matrix, the summary sentence and the recommendation. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rasura.report.cut import cut_off
from rasura.report.entries import entry_of, notes_in
from rasura.report.gate import judged
from rasura.report.labels import label_readings
from rasura.report.language import tell
from rasura.report.matrix import IMAGES, TEXTS, Entry, Findings, Price
from rasura.report.scores import BLIND, gave_up, guessing, notes_of, of_labels, setting_of, without_a_figure
from rasura.report.sentence import HEADLINE, headline, sentence
from rasura.report.verdicts import ABOVE, NOT_MEASURED, NOT_TOLD, READS, Verdict, plain, unsaid, verdict


def _values(records: Iterable[Mapping[str, Any]], metric: str, side: str = "scores") -> list[float | None]:
    return [v for r in records for v in r[side].get(metric, {}).get("per_record", [])]


def column_of(update: str, defense: str) -> str:
    """A protection, with the kind of update unless it is one gradient or a service as it was uploaded."""
    if update in ("fedsgd", "uploaded"):
        return defense
    return update if defense == "none" else f"{defense}, {update}"


def findings(
    records: Iterable[Mapping[str, Any]], plan: Mapping[str, Any] | None = None, metric: str | None = None
) -> Findings:
    """What the records say. ``plan`` gives the order of attacks and defenses. ``metric``: the task's headline if None."""
    every = [{**r, "column": column_of(r["update"], r["defense"])} for r in records]
    order = plan or {}
    defenses = order.get("defenses", [])
    # The baseline stands first where the plan did not name it and the audit added it.
    asked = defenses if "none" in defenses else ["none", *defenses]
    columns = _ordered(
        (column_of(u, d) for u in order.get("updates", ["fedsgd"]) for d in asked), (r["column"] for r in every)
    )
    attacks = _ordered(order.get("attacks", []), (r["attack"] for r in every))
    images = order.get("task") == "vision"
    metric = metric or ("ssim" if images else HEADLINE)
    by_column: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for r in every:
        by_column[r["column"]].append(r)
        groups[r["attack"], r["column"]].append(r)
    notes = {c: notes_in(some, metric) for c, some in by_column.items()}
    silent = of_labels(every)
    matrix = {(a, c): entry_of(a, c, v, notes[c], metric, a not in silent) for (a, c), v in groups.items()}
    best: dict[str, Entry] = {}
    verdicts = {c: _verdict(by_column[c], every, metric, images) for c in columns}
    for c in columns:
        own = [a for a in attacks if a != BLIND]  # guessing is what the attacks are compared with, not one of them
        means = {a: (not e.silent, e.level.mean) for a in own if (e := matrix.get((a, c))) and e.level}
        if means:
            best[c] = matrix[max(means, key=means.__getitem__), c]
    baseline = tuple(c for c in columns if plain(verdicts[c].defense))
    blind = guessing(headline((*baseline, *columns), best, every)[1], metric)
    strongest = [r for r in every if r["status"] == "ok" and r["recovered"] and r["attack"] != BLIND]
    found = Findings(
        metric, tuple(attacks), tuple(columns), matrix, best, blind, (), "",
        {r["threat"]: r["threat_plain"] for r in every},
        tuple(_evidence(strongest)), tuple(sorted({len(r["examples"]) or r["batch_size"] for r in every})),
        len(every), sum(map(gave_up, every)), sum(r["status"] == "crashed" for r in every),
        verdicts, baseline, tuple(judged(verdicts)),
        IMAGES if images else TEXTS, tuple(_figures(groups, matrix, attacks, columns)) if images else (),
        _prices(every, columns), (len(without_a_figure(every, metric)), len({n for r in every for n in notes_of(r)})),
        label_readings(every, columns), len({setting_of(r) for r in every}),
    )  # fmt: skip
    return replace(found, sentence=tuple(sentence(found, every)), recommendation=recommendation(found))


def _ordered(first: Iterable[str], there: Iterable[str]) -> list[str]:
    """The names that are there: those of ``first`` in its order, then the others by the alphabet."""
    known = set(there)
    named = [name for name in dict.fromkeys(first) if name in known]
    return [*named, *sorted(known - set(named))]


def _verdict(records: Sequence[Mapping[str, Any]], every: Iterable[Mapping[str, Any]], metric: str, images: bool) -> Verdict:
    update = records[0]["update"]
    baseline = [r for r in every if plain(r["defense"]) and r["update"] == update]
    found = verdict(records[0]["defense"], records, baseline, metric, images=images)
    return replace(found, cut=cut_off(records, images=images))


def _prices(records: Iterable[Mapping[str, Any]], defenses: Sequence[str]) -> dict[str, Price]:
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for r in records:
        found[r["column"]].append((r["sent_bytes"], r["defense_seconds"]))
    return {d: Price(*(sum(part) / len(found[d]) for part in zip(*found[d]))) for d in defenses}


def _figures(
    groups: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    matrix: Mapping[tuple[str, str], Entry],
    attacks: Sequence[str],
    defenses: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Means of MSE and PSNR, which are not fractions, with the baseline beside them."""
    for defense in defenses:
        for attack in attacks:
            every = groups.get((attack, defense), ())
            scored = [r for r in every if r["scores"] and setting_of(r) == matrix[attack, defense].setting]
            images = max(len(_values(scored, metric)) for metric in ("mse", "psnr"))
            row: dict[str, Any] = {"attack": attack, "defense": defense, "n": images}
            for metric in ("mse", "psnr"):
                for side in ("scores", "blind"):
                    values = [v for v in _values(scored, metric, side) if v is not None]
                    row[f"{metric}_{side}"] = sum(values) / len(values) if values else None
            if images:
                yield row


def recommended(f: Findings) -> str | None:
    """Of the judged columns that hold, the one under which least was read above guessing; None if none holds."""
    columns = {name: f.verdicts[name] for name in f.judged}
    holding = {name: v.excess for name, v in columns.items() if v.holds and v.excess is not None}
    return min(holding, key=holding.__getitem__) if holding else None


def recommendation(f: Findings) -> str:
    """What follows for the columns that the run is judged by, in the words of their verdicts."""
    columns = {name: f.verdicts[name] for name in f.judged}
    if not columns:
        return tell("No protection can be recommended: the run contains no records.")
    if (name := recommended(f)) is not None:
        return tell(
            "Of the settings tested, {name} holds against the attacks of this run: {says}. This result is empirical. It is "
            "not a formal guarantee, and a stronger attack may exist.", name=name, says=columns[name].says,
        )  # fmt: skip
    if set(f.judged) == set(f.baseline):
        return tell("No protection was tested. Without one: {says}.", says="; ".join(v.says for v in columns.values()))
    said = []
    read = [name for name, v in columns.items() if v.word in (READS, ABOVE)]
    if len(read) == len(columns):
        level, name = min(((e.level, c) for c in read if (e := f.best[c]).level), key=lambda pair: pair[0].mean)
        said.append(
            tell(
                "None of the settings tested holds. Least was recovered under {name}: {level} {share}.", name=name,
                level=level.text, share=f.words.here.share,
            )
        )  # fmt: skip
    elif read:
        said.append(tell("Attacks recovered private data under {names}.", names=", ".join(read)))
    said += [f"{name}: {v.says}." for name, v in columns.items() if v.word == NOT_TOLD]
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, v in columns.items():
        if v.word == NOT_MEASURED:  # no figure stands here: what was not measured may be read in full
            reasons[v.says].append(f"{name} ({tell('no figure')})" if v.risk is None else name)
    said += [tell("No verdict on {names}: {why}.", names=", ".join(names), why=why) for why, names in reasons.items()]
    more = [told for part, told in f.words.here.more.items() if not any(part in name for name in f.columns)]
    if more:
        said.append(tell("Not in this run: --defense {more}.", more="; ".join(more)))
    return " ".join(said)


def unfinished(f: Findings, done: int, asked: int) -> Findings:
    """``f`` of a run that has only ``done`` of its ``asked`` results: what is not here could have read more, so that
    nothing is said for a protection."""
    why = tell("the run is unfinished ({done} of {asked} results)", done=done, asked=asked)
    found = replace(f, verdicts={c: unsaid(v, why) for c, v in f.verdicts.items()}, unfinished=why)
    return replace(found, recommendation=recommendation(found))


def _evidence(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was read of the most, the median and the least read example, in the setting of the one that was read most."""
    rows = [
        {**text, **{name: r[name] for name in ("attack", "confidence", "threat", "batch_size")}, "defense": r["column"]}
        for r in records
        for text in r["recovered"]
    ]
    rows.sort(key=lambda row: -float(row["score"] or 0))
    rows = [row for row in rows if setting_of(row) == setting_of(rows[0])]
    if len(rows) <= 3:
        return [dict(row, rank=name) for row, name in zip(rows, ("most read", "median", "least read"))]
    chosen = {"most read": rows[0], "median": rows[len(rows) // 2], "least read": rows[-1]}
    return [dict(row, rank=name) for name, row in chosen.items()]


def summarise(records: Iterable[Mapping[str, Any]], plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """``summary.json`` of an audit of updates: see ``summary_of``."""
    return summary_of(findings(records, plan))


def _highest_risk(f: Findings) -> dict[str, Any]:
    """The highest share that was read in any setting of the judged columns. None where a setting was not measured and
    nothing was read in it, with the columns of such settings."""
    risks = {c: [v.read for v in f.verdicts[c].settings] for c in f.judged}
    unknown = [c for c, some in risks.items() if None in some]
    known = [risk for some in risks.values() for risk in some if risk is not None]
    return {"highest_risk": None if unknown else max(known, default=None), "without_risk": unknown}


def summary_of(f: Findings) -> dict[str, Any]:
    """The sentence, the recommendation and the matrix in plain values."""
    return {
        "sentence": list(f.sentence),
        "recommendation": f.recommendation,
        "metric": f.metric,
        "blind": f.blind.__dict__ if f.blind else None,
        "verdicts": {name: v.to_dict() for name, v in f.verdicts.items()},
        "judged": list(f.judged),
        **_highest_risk(f),
        "not_scored": f.without_a_figure[0],
        "labels": [one.to_dict() for one in f.labels],
        "cells": f.cells,
        "gave_up": f.gave_up,
        "crashed": f.crashed,
        "matrix": [
            {
                "attack": e.attack, "defense": e.defense, "level": e.level.__dict__ if e.level else None, "silent": e.silent,
                "blind": e.blind, "notes": e.notes, "n_cells": e.cells, "gave_up": e.gave_up, "crashed": e.crashed,
                "verified": e.verified, "reasons": list(e.reasons), "threat": e.setting[0], "batch_size": e.setting[1],
            }
            for e in f.matrix.values()
        ],
    }  # fmt: skip
