"""Plots of studies: curves over a protection's strength or the batch size, utility against risk, scatter plots; as SVG."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from rasura.core.interfaces import MissingExtra
from rasura.core.records import CLIENT
from rasura.metrics.learned import has_figures
from rasura.metrics.utility import HIGHER_IS_BETTER
from rasura.report.page import strength
from rasura.runs.plans import Plan
from rasura.runs.service_plan import ServicePlan
from rasura.runs.train_plan import TrainPlan
from rasura.studies.files import Study
from rasura.studies.metric_values import NAMES, SCALES, SHARE, keyed_level, level_of, values_of
from rasura.studies.tables import service_place

GUESSING = "guessing"
"""The curve of the blind attack."""

FEW = 4
"""More curves than these are drawn on axes of their own for every attack, so many of them in a row."""

WIDE = 20
"""From this ratio of the largest and least value on, an axis is logarithmic."""


@dataclass(frozen=True)
class Curve:
    """One line: ``points`` are x, y, and the ends of y's interval. ``loose``: dots that no line joins. ``panel``: the axes
    that it is drawn on, where there are several; the baseline is drawn on all."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    loose: bool = False
    panel: str = ""


@dataclass(frozen=True)
class Plot:
    """Curves over one pair of axes. ``bounded``: y is a percentage."""

    curves: Sequence[Curve]
    across: str
    up: str
    bounded: bool = True


Point = tuple[float, float, float]
"""A level and the ends of its interval."""

Cells = dict[tuple[str, ...], dict[float, list[Mapping[str, Any]]]]
"""Records by attack and what else names a curve, and by the place on the axis across."""


def of_audit(study: Study, plan: Plan, records: Iterable[Mapping[str, Any]]) -> Plot | None:
    """The study's first metric over the strength of its protections or else over the batch size; None for other studies."""
    rows, metric = list(records), study.metrics[0]
    strengths: Cells = {}
    sizes: Cells = {}
    guesses: dict[bool, dict[float, list[Mapping[str, Any]]]] = {True: {}, False: {}}
    for r in rows:
        places = [(sizes, float(r["batch_size"]), [r["defense"]])]
        if (known := strength(r["defense"])) is not None:
            places.append((strengths, known[1], [known[0], str(r["batch_size"])]))
        for cells, x, about in places:
            key = (r["attack"], *about, r["threat"], r["update"])
            cells.setdefault(key, {}).setdefault(x, []).append(r)
            guesses[cells is strengths].setdefault(x, []).append(r)
    varied = any(len(points) > 1 for points in strengths.values())

    def level(some: Iterable[Mapping[str, Any]], side: str = "scores") -> Point:
        return level_of(values_of(some, metric, side).draws, metric)

    curves = _curves(strengths if varied else sizes, plan.attacks, level)
    if not curves:
        return None
    blind = {x: level(some, "blind") for x, some in guesses[varied].items()}
    return _over(curves, blind, _strength_of(strengths) if varied else "texts in a batch", metric)


def of_service(study: Study, plan: ServicePlan, records: Iterable[Mapping[str, Any]]) -> Plot | None:
    """As ``of_audit``, over the last number of each protection."""
    found: Cells = {}
    guesses: dict[float, Point] = {}
    metric = next(m for m in study.metrics if m not in HIGHER_IS_BETTER)
    level = partial(keyed_level, metric=metric)
    for r in sorted(records, key=service_place(plan)):
        known = strength(r["defense"])
        if known is not None and r["status"] != "not_applicable":
            if r["attack"] == "blind":
                guesses.setdefault(known[1], level([r]))  # guessing knows no key
            else:
                found.setdefault((r["attack"], known[0], r["update"]), {}).setdefault(known[1], []).append(r)
    curves = _curves(found, (*plan.attacks, CLIENT), level)
    return _over(curves, guesses, _strength_of(found), metric) if curves else None


def _strength_of(found: Cells) -> str:
    """What the axis of strengths shows: ``epsilon`` where all protections end in one."""
    ends = {re.split("[:/+]", key[1])[-1] for key, points in found.items() if len(points) > 1}
    return ends.pop() if len(ends) == 1 else "strength of the protection"


def _curves(found: Cells, attacks: Sequence[str], level: Callable[[Sequence[Mapping[str, Any]]], Point]) -> list[Curve]:
    """A curve for every cell with two places or more, named by what tells it from the others."""
    lines = {key: points for key, points in found.items() if len(points) > 1}
    varied = [k for k in range(1, max(map(len, lines), default=1)) if len({key[k] for key in lines}) > 1]
    beside = {key[1].rpartition("+")[0] for key in lines}  # frozen embeddings everywhere, say, tell nothing apart
    names = {key: key[1].rpartition("+")[2] if len(beside) == 1 else key[1] for key in lines}
    apart = len(lines) > FEW and bool(varied) and len({key[0] for key in lines}) > 1
    out = []
    for key in sorted(lines, key=lambda key: attacks.index(key[0])):  # and else in the order of the plan
        points = [(x, *level(some)) for x, some in sorted(lines[key].items())]
        if some := [p for p in points if p[1] == p[1]]:  # an attack that never applied has no curve
            about = [names[key] if k == 1 else key[k] for k in varied]
            name = ", ".join(about if apart else [key[0], *about])
            out.append(Curve(name, some, panel=key[0] if apart else ""))
    return out


def _over(curves: Sequence[Curve], guesses: Mapping[float, Point], across: str, metric: str) -> Plot:
    there = {x for curve in curves for x, *_ in curve.points}
    levels = [(x, *level) for x, level in sorted(guesses.items()) if x in there]
    blind = [Curve(GUESSING, [(x, y, y, y) for x, y, _, _ in levels if y == y])] if levels else []
    return Plot([*curves, *blind], across, NAMES.get(metric, metric), SCALES.get(metric, SHARE)[0] == 100)


def of_tradeoff(
    study: Study, plan: Plan, records: Sequence[Mapping[str, Any]], training: TrainPlan, results: Sequence[Mapping[str, Any]]
) -> Plot:
    """Risk against utility, a dot a protection: the first attack, and the first metric of each."""
    useful = next(m for m in study.metrics if m in HIGHER_IS_BETTER)
    risky = next(m for m in study.metrics if m not in HIGHER_IS_BETTER)
    kinds: dict[str, list[tuple[float, float, float, float]]] = {}
    for trained, audited in zip(training.defenses, plan.defenses):
        some = [r for r in results if r["defense"] == trained]
        if not all(map(has_figures, some)):
            continue
        worth = [r["after"][useful] for r in some]
        cells = [r for r in records if (r["attack"], r["defense"]) == (plan.attacks[0], audited)]
        known = strength(audited)
        y = level_of(values_of(cells, risky, "scores").draws, risky)
        kinds.setdefault(known[0] if known else audited, []).append(
            (SCALES.get(useful, SHARE)[0] * sum(worth) / len(worth), *y)
        )
    curves = [Curve(name, points, loose=True) for name, points in kinds.items()]
    percent = SCALES.get(risky, SHARE)[0] == 100
    return Plot(curves, NAMES.get(useful, useful), f"{NAMES.get(risky, risky)}, {plan.attacks[0]}", percent)


def write(plot: Plot, path: Path) -> Path:
    """Draw ``plot``; the same plot is the same file, byte by byte. Raises ``MissingExtra`` without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure as Canvas
    except ImportError:
        raise MissingExtra("the plot of a study needs matplotlib; pip install 'rasura[plots]'") from None
    panels = list(dict.fromkeys(c.panel for c in plot.curves if c.name != GUESSING))
    colors = {name: f"C{k}" for k, name in enumerate(dict.fromkeys(c.name for c in plot.curves if c.name != GUESSING))}
    with rc_context({"svg.hashsalt": "rasura", "svg.fonttype": "none", "font.family": "serif", "font.size": 9}):
        columns, rows = min(len(panels), FEW), ceil(len(panels) / FEW)
        size = (5.6 if len(panels) == 1 else 1.2 + 2.4 * columns, 3.4 if rows == 1 else 2.6 * rows)
        canvas = Canvas(figsize=size, layout="constrained")
        every = canvas.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten().tolist()
        for axes in every[len(panels) :]:
            axes.remove()
        for axes, panel in zip(every, panels):
            for curve in plot.curves:
                guess = curve.name == GUESSING
                if guess or curve.panel == panel:
                    _draw(axes, curve, "0.5" if guess else colors[curve.name], "--" if guess else "-")
            axes.set_title(panel, fontsize=9)
            axes.spines[["top", "right"]].set_visible(False)
        places, heights = ([p[k] for curve in plot.curves for p in curve.points] for k in (0, 1))
        if _wide(places):
            every[0].set_xscale("log")
        if plot.bounded:
            every[0].set_ylim(-3, 103)
        elif _wide(heights):
            every[0].set_yscale("log")
        canvas.supxlabel(plot.across, fontsize=9)
        for axes in every[: len(panels) : columns]:
            axes.set_ylabel(plot.up)
        for axes in every[len(panels) - columns : len(panels)]:
            axes.tick_params(labelbottom=True)
        beside: dict[str, Any] = {} if len(panels) == 1 else {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        every[min(columns, len(panels)) - 1].legend(frameon=False, fontsize=8, **beside)
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    return path


def _draw(axes: Any, curve: Curve, color: str, line: str) -> None:
    x, y, low, high = (list(column) for column in zip(*curve.points))
    ends = [[max(0.0, b - a) for a, b in zip(low, y)], [max(0.0, b - a) for a, b in zip(y, high)]]
    axes.errorbar(
        x, y, ends, label=curve.name, marker="" if curve.name == GUESSING else "o", markersize=3.5, linewidth=1.2, capsize=2,
        color=color, linestyle="none" if curve.loose else line,
    )  # fmt: skip


def _wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) >= WIDE
