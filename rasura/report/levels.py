"""What the Records of one setting say of its risk, and whether an attack is a yardstick for it. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rasura.report.findings import Level, pooled


def point(setting: str, records: Sequence[Mapping[str, Any]], attacks: Iterable[str], risk: str) -> dict[str, Any]:
    """One setting from its Records: the level of every attack and of guessing, and as ``risk`` the one whose 95 % interval
    ends highest; None where no attack could be tried, with ``reasons``: that nobody tried says nothing.

    A text counts once, with the mean over seeds. An attack that failed, or named no text, stands at the guessing level.
    """
    levels = []
    first = {(r["seed"], r["batch"]): r["blind"] for r in records if r["blind"]}
    guess = _level(((batch, blind) for (_, batch), blind in first.items()), risk)
    if guess is not None:
        levels.append({"attack": "blind", **guess.__dict__, "failed": 0, "cells": len(first)})
    reasons = sorted({f"{r['attack']}: {r['reason']}" for r in records if r["reason"]})
    for name in attacks:
        tried = [r for r in records if r["attack"] == name and r["status"] in ("ok", "failed")]
        level = _level(((r["batch"], r["scores"] if risk in r["scores"] else r["blind"]) for r in tried), risk)
        if level is not None:
            failed = sum(r["status"] == "failed" for r in tried)
            levels.append({"attack": name, **level.__dict__, "failed": failed, "cells": len(tried)})
    sent = [r for r in records if r["sent_bytes"]]
    return {
        "setting": setting,
        "risk": max(levels, key=lambda level: (level["high"], level["mean"])) if len(levels) > 1 else None,
        "levels": levels,
        "sent_bytes": sum(r["sent_bytes"] for r in sent) / max(1, len(sent)),
        "seconds": sum(r["defense_seconds"] for r in sent) / max(1, len(sent)),
        "reasons": reasons,
    }


def _level(scored: Iterable[tuple[int, Mapping[str, Any]]], risk: str) -> Level | None:
    texts: dict[tuple[int, int], list[float]] = defaultdict(list)
    bounds: tuple[float, float] | None = (0.0, 1.0)
    for batch, scores in scored:
        bounds = scores.get(risk, {}).get("bounds", bounds)
        for place, value in enumerate(scores.get(risk, {}).get("per_record", [])):
            if value is not None and value == value:
                texts[batch, place].append(value)
    return pooled((sum(values) / len(values) for values in texts.values()), bounds)


def yardstick(attack: str, points: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether ``attack`` measures the strength of a protection: its risk is above guessing somewhere, and falls with it.

    ``spearman``: rank correlation of strength and mean risk, -1 where every step lowers it. ``violations``: stronger
    settings whose mean lies above the interval of the next weaker one. ``bottom``: the guessing level is reached. What is
    below guessing counts as guessing, which is what that adversary would do.
    """
    found = []
    for p in points:
        levels = {level["attack"]: level for level in p["levels"]}
        if attack in levels:
            found.append((levels[attack], levels["blind"]))
    told: dict[str, Any] = {"attack": attack, "settings": len(found), "spearman": None, "well_behaved": False}
    if len(found) < 2:
        return {**told, "violations": 0, "above_blind": False, "bottom": False, "why": "it gave a figure at fewer than two"}
    means = [max(level["mean"], blind["mean"]) for level, blind in found]
    if len(set(means)) > 1:
        from scipy.stats import spearmanr

        told["spearman"] = float(spearmanr(range(len(means)), means).statistic)
    highs = [max(level["high"], blind["high"]) for level, blind in found]
    violations = sum(mean > high for high, mean in zip(highs, means[1:]))
    above = any(level["low"] > blind["mean"] for level, blind in found)
    bottom = any(level["mean"] <= blind["high"] for level, blind in found)
    falls = means[-1] < found[0][0]["low"]
    why = (
        "never above guessing" if not above else "no lower at the strongest than at the weakest" if not falls else
        f"risk rises with protection {violations} times" if violations else ""
    )  # fmt: skip
    told |= {"violations": violations, "above_blind": above, "bottom": bottom}
    return {**told, "well_behaved": not why, "why": why}
