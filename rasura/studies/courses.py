"""How the loss of a reconstruction falls, step by step, under each protection: studies with ``course``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rasura.runs.plans import Plan
from rasura.studies.files import Study
from rasura.studies.metric_values import row_of
from rasura.studies.plots import Curve, Plot
from rasura.studies.tables import ENDED, ended, head

SHOWN = 6
"""Points of a course that the table has; the plot has all."""

Points = Mapping[int, tuple[float, float, float]]
"""Step -> the mean of the least loss so far over images, and the least and the largest."""


@dataclass(frozen=True)
class Course:
    """The losses of ``count`` images, and how the cells without a loss ended, as the tables say it."""

    count: int
    points: Points
    ended: str


def courses(plan: Plan, records: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Course]:
    """The course of the losses by attack and protection, in the plan's order."""
    told: dict[tuple[str, str], list[Mapping[str, Any]]] = {(a, d): [] for a in plan.attacks for d in plan.defenses}
    for r in records:
        told[r["attack"], r["defense"]].append(r)
    found: dict[tuple[str, str], Course] = {}
    for where, some in told.items():
        if some:
            details = [r["details"] for r in some if r["status"] == "ok" and "losses" in r["details"]]
            losses = [[float(v) for v in one["losses"].split(" ")] for one in details]
            steps = [int(s) for s in details[0]["losses_at"].split(" ")] if details else []
            points = {s: (sum(v) / len(v), min(v), max(v)) for s, v in zip(steps, zip(*losses))}
            found[where] = Course(len(details), points, ended(some))
    return found


def course_section(study: Study, plan: Plan, found: Mapping[tuple[str, str], Course]) -> str:
    """The study's part of the results: mean, and least to largest, of the loss after some of the steps."""
    steps = _some(sorted({s for course in found.values() for s in course.points}))
    columns = ["attack", "behind", "batch", "n", *(f"loss after {s}" for s in steps), ENDED]
    about = f"data {Path(plan.data or 'demo').name}, budget {plan.budget}, {plan.seeds} seed(s) from {plan.seed}"
    lines = head(study, plan, f"{about}; means, and the range over images", columns)
    for (attack, defense), course in found.items():
        told = ["{:.2g} ({:.2g} to {:.2g})".format(*course.points[s]) if s in course.points else "–" for s in steps]
        lines.append(row_of([attack, defense, 1, course.count, *told, course.ended]))
    return "\n".join([*lines, ""])


def course_plot(found: Mapping[tuple[str, str], Course]) -> Plot:
    """The losses over the steps, with their ranges: axes for each protection with a figure, the others on all of them."""
    curves = []
    families = dict.fromkeys(d.rpartition("=")[0] for _, d in found if "=" in d) or {"": None}
    for (attack, defense), course in found.items():
        family, _, figure = defense.rpartition("=")
        points = [(float(s), *point) for s, point in course.points.items()]
        panels = ([family] if family else families) if points else []
        curves += [Curve(figure, points, panel=" ".join([attack, p]).strip()) for p in panels]
    return Plot(curves, "step", "least loss so far", bounded=False)


def _some(steps: Sequence[int]) -> list[int]:
    """The first, the last and evenly spaced ones between."""
    last = len(steps) - 1
    return [steps[k] for k in sorted({round(last * i / (SHOWN - 1)) for i in range(SHOWN)})] if steps else []
