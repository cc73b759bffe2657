"""The search for the least protection by upper bounds: which setting holds, and what is said where none does. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rasura.report.verdicts import READS, plain

UNPROTECTED = -math.inf
"""The position of a protection without its open part."""

Measured = Sequence[float | None]


def least(
    measure: Callable[[Sequence[float]], Measured], ladder: Sequence[float], at_most: float, steps: int
) -> float | None:
    """The weakest position whose bound is at most ``at_most``, as are those of all stronger ones on ``ladder``.

    ``measure`` gives the upper bound of the risk at each position, None where nothing could be measured: such a position
    neither holds nor fails. ``ladder`` goes from weak to strong; between two of its finite positions ``steps`` halvings
    follow, in which what was not measured does not hold. None: no position holds.
    """
    bounds = [(t, high) for t, high in zip(ladder, measure(ladder)) if high is not None]
    chosen, weaker = None, UNPROTECTED
    for position, high in reversed(bounds):
        if high > at_most:
            weaker = position
            break
        chosen = position
    if chosen is None:
        return None
    for _ in range(steps if math.isfinite(weaker) else 0):
        middle = (weaker + chosen) / 2
        (found,) = measure([middle])
        if found is not None and found <= at_most:
            chosen = middle
        else:
            weaker = middle
    return chosen


def holds(point: Mapping[str, Any], at_most: float) -> bool:
    """Whether the upper bound at ``point`` is known and at most ``at_most``."""
    return point["bound"] is not None and point["bound"] <= at_most


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
