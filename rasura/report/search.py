"""The search for the least protection by upper bounds: which setting holds, and what is said where none does. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rasura.report.verdicts import READS, plain

UNPROTECTED = -math.inf
"""The position of a protection without its open part."""

Tried = Sequence[tuple[float, float | None]]
"""Positions from weak to strong, each with the upper bound of its risk; None where it could not be judged."""


def searchable(points: Mapping[float, Mapping[str, Any]]) -> Tried:
    """What ``least`` goes by, from the points by position. The strongest settings under which no text was sent are left out:
    there is nothing to read, and nothing to use either."""
    tried = sorted(points.items())
    while tried and not tried[-1][1]["sent"]:
        tried.pop()
    return [(t, p["bound"]) for t, p in tried]


def least(measure: Callable[[float], float | None], tried: Tried, at_most: float, steps: int) -> float | None:
    """The weakest position whose bound is known and at most ``at_most``, as are those of all stronger ones of ``tried``.

    ``measure`` gives the upper bound of the risk at a position, None where it could not be judged. Below the weakest of
    ``tried`` that holds, ``steps`` halvings follow, if the next weaker position is finite. None: no position holds.
    """
    chosen, weaker = None, UNPROTECTED
    for position, high in reversed(tried):
        if high is None or high > at_most:
            weaker = position
            break
        chosen = position
    if chosen is None:
        return None
    for _ in range(steps if math.isfinite(weaker) else 0):
        middle = (weaker + chosen) / 2
        found = measure(middle)
        if found is not None and found <= at_most:
            chosen = middle
        else:
            weaker = middle
    return chosen


def holds(point: Mapping[str, Any], at_most: float) -> bool:
    """Whether the upper bound at ``point`` is known and at most ``at_most``."""
    return point["bound"] is not None and point["bound"] <= at_most


def judged(points: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The settings whose figures may stand: none is said of one that could not be judged."""
    return [p for p in points if p["risk"] and p["bound"] is not None]


def not_found(points: Sequence[Mapping[str, Any]], at_most: float) -> dict[str, Any]:
    """The status of a protection of which no setting was found, from weak to strong: whether the target was missed, or could
    not be judged beyond the last setting that misses it. Why not is said of one setting, since the reasons of several would
    be read as those of one: of the strongest that was tried, or else of the weakest, from where a search would go on."""
    missed = [k for k, p in enumerate(points) if p["bound"] is not None and p["bound"] > at_most]
    beyond = points[missed[-1] + 1 :] if missed else points
    unjudged = next((list(p["unjudged"]) for p in reversed(beyond) if p["risk"] is not None and p["unjudged"]), [])
    first = next((p for p in beyond if p["unjudged"]), None)
    if first is not None and not unjudged:
        where = "without protection" if plain(first["setting"]) else f"at {first['setting']}"
        unjudged = [f"{where} {'; '.join(first['unjudged'])}"]
    return {"status": "not measured" if beyond else "unreached", "unjudged": unjudged}


def why_not(again: Mapping[str, Any]) -> list[str]:
    """Why a fresh audit does not confirm a setting, beyond its risk."""
    v = again["verdict"]
    if v["missing"] or v["verdict"] == READS:
        return [v["says"]]
    return [] if again["risk"] else list(again["reasons"])


def missed(again: Mapping[str, Any], worst: Mapping[str, Any] | None, at_most: float) -> bool:
    """Whether a fresh audit shows that a setting misses the target, by its ``worst`` risk or its verdict: not only that it
    cannot be judged."""
    return again["verdict"]["verdict"] == READS or (worst is not None and worst["mean"] > at_most)


def not_confirmed(failures: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The status of a protection whose settings held at first and not afresh: one missed the target there, or none could be
    judged. Why not is said of the strongest."""
    if any(f["missed"] for f in failures):
        return {"status": "not verified"}
    last = failures[-1]
    why = "; ".join(last["reasons"]) or "nothing was scored"
    return {
        "status": "not measured",
        "unjudged": [f"what held at first could not be judged afresh; at {last['setting']} {why}"],
    }
