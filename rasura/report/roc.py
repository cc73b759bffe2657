"""The ROC curves of attacks on a trained model, as pixels of a plot. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rasura.report.language import number
from rasura.report.template import COLOURS


def roc_plot(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> dict[str, Any]:
    """ROC curves on logarithmic axes, where few false alarms can be seen: pixels in a box of 340 x 300.

    A curve begins at one false alarm: of so many texts, no lower rate is known.
    """
    one = 1.0 / max(1, plan["n_others"])
    decades = max(1, math.ceil(math.log10(max(plan["n_others"], plan["n_members"], 1)) - 1e-9))

    def place(rate: float) -> float:
        return max(0.0, 1 + math.log10(max(rate, 1e-12)) / decades)

    def point(false: float, true: float) -> str:
        return f"{60 + 340 * place(false):.1f},{310 - 300 * place(true):.1f}"

    order = {name: k for k, name in enumerate(plan["attacks"])}
    curves: list[dict[str, Any]] = []
    for r in sorted((r for r in records if r["status"] == "ok"), key=lambda r: order[r["attack"]]):
        points = " ".join(point(max(a, one), b) for a, b in r["details"]["roc"])
        colour = "var(--faint)" if r["attack"] == "blind" else COLOURS[len(curves) % len(COLOURS)]
        curves.append({"name": r["attack"], "points": points, "colour": colour, "y": 24 + 18 * len(curves)})
    steps = [10.0**-k for k in range(decades + 1)]
    guess = " ".join(point(10 ** (-decades * (1 - k / 40)), 10 ** (-decades * (1 - k / 40))) for k in range(41))
    ticks = [{"label": f"{number(100 * s, 'g')} %", "x": 60 + 340 * place(s), "y": 310 - 300 * place(s)} for s in steps]
    return {"curves": curves, "ticks": ticks, "guess": guess}
