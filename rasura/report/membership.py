"""What attacks on a trained model found, in words, as a table and as a page with their ROC curves. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.metrics.membership import auc_bound
from rasura.report.template import COLOURS, filled

MIN_RATE = 1e-3
"""Where the logarithmic axes of the plot begin, unless there are texts for less."""


@dataclass(frozen=True)
class Found:
    """The page's content: sentences first, a row an attack, and what the figures must be held against."""

    sentences: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    checks: tuple[str, ...]
    reasons: tuple[str, ...]


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


def _rate(score: Mapping[str, Any]) -> str:
    return f"{_share(score['mean'])} ({100 * score['low']:.1f} to {100 * score['high']:.1f})"


def _auc(score: Mapping[str, Any]) -> str:
    return f"{score['mean']:.3f} ({score['low']:.3f} to {score['high']:.3f})"


def _own(score: Mapping[str, Any]) -> str:
    return "does not set a threshold" if score["mean"] is None else _auc(score)


def _largest(score: Mapping[str, Any]) -> str:
    above = score["mean"] > score["chance"]
    return f"{score['mean']:.3f} ({'above' if above else 'not above'} chance, {score['chance']:.3f})"


def _name(fpr: str) -> str:
    return f"found at {100 * float(fpr.removeprefix('tpr@')):g} % false alarms"


def membership_findings(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> Found:
    """From the records of one run to what a person needs to know; intervals are of 95 %."""
    order = {name: k for k, name in enumerate(plan["attacks"])}
    done = sorted((r for r in records if r["status"] == "ok"), key=lambda r: order[r["attack"]])
    rates = sorted({m for r in done for m in r["scores"] if m.startswith("tpr@")}, key=lambda m: -float(m[4:]))
    rows = [
        (r["attack"], _auc(s["auc"]), *(_rate(s[m]) for m in rates), _own(s["leakage"]), _largest(s["largest_leakage"]))
        for r in done
        for s in (r["scores"],)
    ]
    reasons = [f"{r['attack']}: {r['reason']}" for r in records if r["status"] != "ok"]
    columns = ("attack", "AUC", *map(_name, rates), "leakage", "largest leakage")
    return Found(tuple(_sentences(done, rates, plan)), columns, tuple(rows), tuple(_checks(done, plan)), tuple(reasons))


def _sentences(done: Sequence[Mapping[str, Any]], rates: Sequence[str], plan: Mapping[str, Any]) -> list[str]:
    real = [r for r in done if r["attack"] != "blind"]
    if not real:
        return ["No attack on the model gave a result: not measured."]
    out = _figures(real, rates, plan)
    if _off(done):
        out.append(
            "Members and others differ as texts, without any model. No figure here says how much of the difference "
            "the model adds."
        )
    return out


def _off(done: Sequence[Mapping[str, Any]]) -> bool:
    """Whether length or words alone part members from others beyond their intervals."""
    beside = done[0]["blind"]
    return any(s["low"] > 0.5 or s["high"] < 0.5 for s in (beside.get("auc"), beside["words"]) if s is not None)


def _figures(real: Sequence[Mapping[str, Any]], rates: Sequence[str], plan: Mapping[str, Any]) -> list[str]:
    asked = f"{plan['n_members']} texts that the model was trained on and {plan['n_others']} other texts"
    if not rates:
        best = max(real, key=lambda r: r["scores"]["auc"]["mean"])
        return [
            f"Asked about {asked}, {best['attack']} ranks a member above another text with a chance of "
            f"{_auc(best['scores']['auc'])}; guessing is .5.",
            _verdict(real, None),
            "There are too few texts to measure how many members are found at a low false positive rate: a rate of 1 % "
            "needs 100 texts of each kind.",
        ]
    best = max(real, key=lambda r: r["scores"][rates[0]]["mean"])
    score, fpr = best["scores"][rates[0]], float(rates[0][4:])
    says = f"Asked about {asked}, the best attack ({best['attack']}) finds {_rate(score)} of the members"
    out = [f"{says} while it mistakes {100 * fpr:g} % of the others for members; guessing finds {100 * fpr:g} %."]
    out.append(_verdict(real, rates[0]))
    return out


def _verdict(real: Sequence[Mapping[str, Any]], rate: str | None) -> str:
    """What the attacks that gave a figure say together: each beyond its interval, or nothing."""
    if rate is not None and any(r["scores"][rate]["low"] > float(rate[4:]) for r in real):
        return "Above guessing: the model reveals which texts it was trained on."
    ranked = [r["attack"] for r in real if r["scores"]["auc"]["low"] > 0.5 or r["scores"]["auc"]["high"] < 0.5]
    if ranked:
        few = (
            " There are too few texts to measure how many members are found at a low false positive rate."
            if rate is not None
            else ""
        )
        return f"Above guessing: {', '.join(ranked)} separates members from others, and its interval excludes guessing.{few}"
    n = real[0]["scores"]["auc"]["n"]
    high = max(max(r["scores"]["auc"]["high"], 1 - r["scores"]["auc"]["low"]) for r in real)
    says = f"Not told from guessing: with {n} texts, an AUC of up to {high:.3f} is not ruled out"
    return f"{says}, and another attack may do better."


def _checks(done: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> list[str]:
    if not done:
        return []
    out = []
    beside = done[0]["blind"]
    blind, by_words = beside.get("auc"), beside["words"]
    by_length = "(not measured)" if blind is None else _auc(blind)
    out.append(
        f"Without the model, length separates members from others with AUC {by_length}, words with AUC {_auc(by_words)}."
    )
    if _off(done):
        out.append(
            "This differs from .5: members and others differ as texts, and every figure here also measures that "
            "difference. Draw both at random from the same source."
        )
    chance = done[0]["scores"]["largest_leakage"]["chance"]
    out.append(
        "Leakage is the true minus the false positive rate at the attack's own threshold, as the papers report it; it may "
        "be negative. The largest over all thresholds is above 0 by chance: random guessing stays at or below "
        f"{chance:.3f} in 19 of 20 draws with this number of texts."
    )
    if plan.get("epsilon") is not None:
        bound = auc_bound(plan["epsilon"], plan.get("delta", 0.0))
        above = [r["attack"] for r in done if max(r["scores"]["auc"]["low"], 1 - r["scores"]["auc"]["high"]) > bound]
        delta = f", delta {plan['delta']:g}" if plan.get("delta") else ""
        says = f"Epsilon {plan['epsilon']:g}{delta} permits an AUC of at most {bound:.3f}"
        if above:
            out.append(f"{says}, and {', '.join(above)} is above it: the guarantee does not hold, or the texts differ.")
        else:
            out.append(f"{says}; no attack exceeds it by more than its interval.")
    if len([r for r in done if r["attack"] != "blind"]) > 1:
        out.append(
            "The best of several attacks was selected after the results were known; its interval does not account "
            "for that selection."
        )
    return out


def render_membership(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> str:
    """The page as a string."""
    first = records[0] if records else {}
    return filled(
        "membership.html", f=membership_findings(records, plan), plan=plan, plot=_plot(records, plan), first=first,
        seconds=sum(r["wall_seconds"] for r in records),
    )  # fmt: skip


def _plot(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> dict[str, Any]:
    """ROC curves on logarithmic axes, where few false alarms can be seen: pixels in a box of 340 x 300."""
    least = min(MIN_RATE, 1.0 / max(1, plan["n_others"]), 1.0 / max(1, plan["n_members"]))
    decades = math.ceil(-math.log10(least) - 1e-9)

    def place(rate: float) -> float:
        return max(0.0, 1 + math.log10(max(rate, 1e-12)) / decades)

    def point(false: float, true: float) -> str:
        return f"{60 + 340 * place(false):.1f},{310 - 300 * place(true):.1f}"

    order = {name: k for k, name in enumerate(plan["attacks"])}
    curves: list[dict[str, Any]] = []
    for r in sorted((r for r in records if r["status"] == "ok"), key=lambda r: order[r["attack"]]):
        points = " ".join(point(a, b) for a, b in r["details"]["roc"])
        colour = "var(--faint)" if r["attack"] == "blind" else COLOURS[len(curves) % len(COLOURS)]
        curves.append({"name": r["attack"], "points": points, "colour": colour, "y": 24 + 18 * len(curves)})
    steps = [10.0**-k for k in range(decades + 1)]
    guess = " ".join(point(10 ** (-decades * (1 - k / 40)), 10 ** (-decades * (1 - k / 40))) for k in range(41))
    ticks = [{"label": f"{100 * s:g} %", "x": 60 + 340 * place(s), "y": 310 - 300 * place(s)} for s in steps]
    return {"curves": curves, "ticks": ticks, "guess": guess}
