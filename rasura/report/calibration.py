"""The results of a calibration: the recommendation, a row for each protection, the frontier and the page. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.rounding import percent, percent_above, percent_below
from rasura.report.cheapest import cheapest
from rasura.report.commands import applied
from rasura.report.head import Made, duration, machine, origin, settings
from rasura.report.language import number, recorded, size, tell
from rasura.report.matrix import risk_name
from rasura.report.search import judged
from rasura.report.template import COLOURS, filled
from rasura.report.training import chose, unproven

REACHED = ("found", "no need")
"""Outcomes of a protection whose setting meets the target."""

WORDS = {
    "found": "holds", "no need": "no protection needed", "unreached": "target missed", "not verified": "not verified",
    "not measured": "not measured",
}  # fmt: skip
"""What is said of a protection, by the status of its search."""

NEAR = 13
"""Smallest distance between two labels of a plot."""


def finished(folder: str | Path) -> dict[str, Any]:
    """The result of a calibration. Raises ``InputError`` if the calibration is not finished."""
    path = Path(folder) / "summary.json"
    if not path.is_file():
        raise InputError(f"{folder} holds an unfinished calibration; run the same command again to finish it")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def share(level: Mapping[str, Any] | None) -> str:
    """A level in percent, with its interval and n."""
    if level is None:
        return tell("not measured")
    mean, low, high = percent(level["mean"], 1), percent_below(level["low"], 1), percent_above(level["high"], 1)
    return tell("{mean:.1f} % ({low:.1f} to {high:.1f}), n = {n}", mean=mean, low=low, high=high, n=level["n"])


def outcome(part: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """What was found for one protection, in a sentence."""
    target, name = f"{number(100 * result['at_most'], '.3g')} %", part["family"]
    if part["status"] in REACHED:
        return _reached(part, risk_name(str(result["risk"])), target)
    if part["status"] == "not verified":
        last = part["not_verified"][-1]
        risk = [tell("the risk was {risk}", risk=share(last["risk"]))] if last["risk"] else []
        return tell(
            "{name}: what held at first did not afresh; at {setting} {why}, the target is {target}.", name=name,
            setting=last["setting"], why="; ".join([*risk, *last["reasons"]]) or tell("nothing was scored"), target=target,
        )  # fmt: skip
    if part["status"] == "not measured" and part["unjudged"]:
        return f"{name}: {'; '.join(part['unjudged'])}."
    measured = [p for p in judged(part["points"]) if p["position"] is not None]  # what it reads without is no setting
    if not measured:
        reasons = sorted({r for p in part["points"] for r in p["reasons"]})
        why = "; ".join(reasons[:2]) or tell("no attack applies")
        return tell("{name}: could not be measured ({why}).", name=name, why=why)
    best = min(measured, key=lambda p: p["risk"]["high"])
    read = f"; {best['verdict']['says']}" if best["risk"]["high"] <= result["at_most"] else ""
    return tell(
        "No setting of {name} keeps the upper bound of {metric} at or below {target}: {setting} reached {risk} by {by}.",
        name=name, metric=risk_name(str(result["risk"])), target=target, setting=best["setting"], risk=share(best["risk"]),
        by=f"{_by(best)}{read}",
    )  # fmt: skip


def _reached(part: Mapping[str, Any], metric: str, target: str) -> str:
    again, held = part["verification"], tell("the weakest setting that holds")
    says = tell(
        "Use {setting}, {head}. {metric}: {risk} by {by}; the target is at most {target}. Measured again ({on}): {again}.",
        setting=part["setting"], head=tell("no protection is needed") if part["status"] == "no need" else held,
        metric=metric[:1].upper() + metric[1:], risk=share(part["chosen"]["risk"]), by=_by(part["chosen"]), target=target,
        on=recorded(again["on"]), again=share(again["risk"]),
    )  # fmt: skip
    if part["not_verified"]:
        weaker = ", ".join(f["setting"] for f in part["not_verified"])
        says += " " + tell("Weaker settings held at first and not afresh: {weaker}.", weaker=weaker)
    return says


def _by(point: Mapping[str, Any]) -> str:
    return tell("guessing alone") if (r := point["risk"])["attack"] == "blind" or r.get("silent") else str(r["attack"])


def recommendation(result: Mapping[str, Any]) -> str:
    """One sentence for all protections together: what to use, or what was reached."""
    good = [f for f in result["families"] if f["status"] in REACHED]
    if not good:
        return " ".join([tell("No protection can be recommended."), *(outcome(f, result) for f in result["families"])])
    says = [outcome(f, result) for f in good]
    if len(good) > 1 and all((f.get("utility") or {}).get("cost") is not None for f in good):
        says.append(cheapest({f["setting"]: f["utility"] for f in good}))
    return " ".join(filter(None, says))


def cost(part: Mapping[str, Any], *, short: bool = False) -> str:
    """What the setting costs in utility."""
    found = part.get("utility")
    if found is None:
        return tell("not measured")
    if "reason" in found:
        return tell("not measured: {reason}", reason=found["reason"])
    if short:
        return f"{number(found['cost'], '+.3f')} {recorded(found['metric'])}"
    says = tell(
        "{metric} {behind:.3f} behind it, {without:.3f} behind {reference}, {untrained:.3f} untrained ({n} texts, {n_train} "
        "trained on)", metric=recorded(found["metric"]),
        **{k: found[k] for k in ("behind", "without", "reference", "untrained", "n", "n_train")},
    )  # fmt: skip
    more = " ".join(filter(None, (chose([found]), doubt(part))))
    return f"{says}. {more}" if more else says


def doubt(part: Mapping[str, Any]) -> str:
    """What speaks against the cost that is stated; empty where nothing does, or none is."""
    found = part.get("utility") or {}
    return unproven(found.get("trained", ()), found["metric"]) if "cost" in found else ""


def promise(part: Mapping[str, Any]) -> str:
    """The formal guarantee and, if there is one, the training run that it applies to."""
    found = part.get("guarantee")
    if found is None:
        return "–"
    if found.get("epsilon") is None:
        return recorded(str(found["statement"]))
    return tell(
        "{statement} ({examples} texts, {size} a step, noise from the operating system)",
        statement=recorded(found["statement"]), examples=found["examples"], size=found["batch_size"],
    )  # fmt: skip


def _yardstick(y: Mapping[str, Any]) -> str:
    rank = "" if y["spearman"] is None else tell(", rank correlation {rank:+.2f}", rank=float(y["spearman"]))
    if not y["well_behaved"]:
        return tell("{attack}: not a reliable yardstick: {why}", attack=y["attack"], why=_why_not(y)) + rank
    if y["bottom"]:
        says = tell("a reliable yardstick: risk falls with protection and reaches the guessing baseline")
    else:
        says = tell("a reliable yardstick: risk falls with protection and does not reach the guessing baseline")
    return f"{y['attack']}: {says}{rank}"


def _why_not(y: Mapping[str, Any]) -> str:
    times = str(y["why"]).startswith("risk rises")
    return tell("risk rises with protection {times} times", times=y["violations"]) if times else recorded(y["why"])


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row of text for each protection, for the terminal and the page."""
    out = []
    for f in result["families"]:
        reached = f["status"] in REACHED
        chosen = f["chosen"] if reached else None
        out.append(
            {
                "family": f["family"],
                "setting": f["setting"] or recorded(f["status"]),
                "risk": share(chosen["risk"]) if chosen else "–",
                "again": share(f["verification"]["risk"]) if reached else "–",
                "sent": size(chosen["sent_bytes"]) if chosen else "–",
                "seconds": number(chosen["seconds"], ".2g") if chosen else "–",
                "cost": cost(f),
                "promise": promise(f),
                "warnings": (f.get("guarantee") or {}).get("warnings", []),
                "says": outcome(f, result),
                "yardsticks": [_yardstick(y) for y in f["yardsticks"]],
            }
        )
    return out


def render_calibration(
    result: Mapping[str, Any], plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]], made: Made
) -> str:
    """The page as a string. ``plan``: the identity of the run; ``records``: what it measured; ``made``: as in ``Made``."""
    told = [
        {**row, "word": recorded(WORDS[part["status"]]), "chosen": part["status"] in REACHED, "apply":
         applied(part["setting"], _plan(plan, result), result.get("training", {})) if part["status"] in REACHED else []}
        for row, part in zip(rows(result), result["families"])
    ]  # fmt: skip
    lines = [
        {"name": row["family"], "anchor": f"protection-{place}", "word": row["word"], "dot": _dot(part),
         "baseline": False, "chosen": part["status"] in REACHED}
        for place, (row, part) in enumerate(zip(told, result["families"]), 1)
    ]  # fmt: skip
    guesses = [level for f in result["families"] for p in f["points"] for level in p["levels"] if level["attack"] == "blind"]
    band = (100 * min(g["low"] for g in guesses), 100 * max(g["high"] for g in guesses)) if guesses else None
    slowest = max((r["wall_seconds"] for r in records), default=0.0)
    means = tell("every attack took at most {duration}, on {machine}", duration=duration(slowest), machine=machine(made))
    source = str(plan.get("data") or tell("texts from the command line or of the demo"))
    head = origin(plan, records, made, who=recorded(result["threat_plain"]), means=means, source=source)
    return filled(
        "calibration.html", r=result, rows=told, lines=lines, band=band, made=made, head=head, settings=settings(plan),
        risk=risk_name(str(result["risk"])),
        says=_headline(result), plots=[p for p in (_by_strength(result), _by_utility(result)) if p],
    )  # fmt: skip


def _headline(result: Mapping[str, Any]) -> str:
    """The recommendation; where there is none, each protection says below what was reached."""
    found = any(f["status"] in REACHED for f in result["families"])
    return recommendation(result) if found else tell("No protection can be recommended.")


def _plan(plan: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """The plan of an audit like this calibration: the run's identity leaves out what may be added to it."""
    return {**plan, "attacks": result["attacks"], "seeds": result["seeds"], "seed": result["seed"], "kind": None}


def _dot(part: Mapping[str, Any]) -> tuple[float, ...] | None:
    """The risk at the setting found, or the lowest that was measured, with its interval, in percent."""
    measured = [p["risk"] for p in judged(part["points"])]
    risk = part["chosen"]["risk"] if part["status"] in REACHED else min(measured, key=lambda r: r["high"], default=None)
    return risk and (100 * risk["mean"], 100 * risk["low"], 100 * risk["high"])


def _height(value: float) -> float:
    return 210 - 190 * value


def _plot(
    result: Mapping[str, Any], title: str, note: str, low: str, high: str, curves: list[dict[str, Any]]
) -> dict[str, Any]:
    every = (level for f in result["families"] for p in f["points"] for level in p["levels"])
    guesses = [level["mean"] for level in every if level["attack"] == "blind"]
    labels: list[dict[str, Any]] = []
    for curve in curves:
        if curve["ring"]:
            x, y = curve["ring"]
            place = y - 12
            while any(abs(place - other["y"]) < NEAR and abs(x - other["x"]) < 150 for other in labels):
                place -= NEAR
            anchor = "end" if x > 360 else "start" if x < 160 else "middle"
            labels.append({"x": x, "y": place, "text": curve["setting"], "anchor": anchor, "colour": curve["colour"]})
    blind = _height(sum(guesses) / len(guesses)) if guesses else None
    return {
        "title": title, "note": note, "low": low, "high": high, "curves": curves, "labels": labels, "blind": blind,
        "target": _height(result["at_most"]),
    }  # fmt: skip


def _curve(part: Mapping[str, Any], place: int, points: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """Pixels of one protection's points: their means, the interval of each, and the one that was chosen."""
    ring = next(((x, _height(p["risk"]["mean"])) for x, p in points if p["setting"] == part["setting"]), None)
    return {
        "name": part["family"], "setting": part["setting"], "colour": COLOURS[place % len(COLOURS)], "ring": ring,
        "line": " ".join(f"{x:.1f},{_height(p['risk']['mean']):.1f}" for x, p in points),
        "points": [
            {
                "x": x, "y": _height(p["risk"]["mean"]), "setting": p["setting"],
                "low": _height(p["risk"]["low"]), "high": _height(p["risk"]["high"]),
            }
            for x, p in points
        ],
    }  # fmt: skip


def _by_strength(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Risk against strength on one axis: 0 the weakest setting tried of each protection, 1 its strongest."""
    curves = []
    for place, f in enumerate(result["families"]):
        # Without the open part there is no place on a scale of ratios: left of it.
        at = [(100 + 380 * p["position"] if p["position"] is not None else 70.0, p) for p in judged(f["points"])]
        if at:
            curves.append(_curve(f, place, at))
    if not curves:
        return None
    note = tell("Steps are ratios of each protection's figure; leftmost, apart: without it.")
    return _plot(result, tell("Risk against strength"), note, tell("weakest tried"), tell("strongest tried"), curves)


def _by_utility(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Risk against utility: what each setting that was found is worth, beside the same without its open part."""
    priced = [(k, f) for k, f in enumerate(result["families"]) if (f.get("utility") or {}).get("cost") is not None]
    if not priced:
        return None
    values = [v for _, f in priced for v in (f["utility"]["behind"], f["utility"]["without"])]
    first, last = min(values), max(values)
    width = (last - first) or 1.0
    curves = []
    for place, f in priced:
        named = {p["setting"]: p for p in f["points"]}
        found = [(f["utility"]["without"], named[f["utility"]["reference"]]), (f["utility"]["behind"], named[f["setting"]])]
        curves.append(_curve(f, place, [(90 + 370 * (v - first) / width, p) for v, p in found if p["risk"]]))
    title = tell("Risk against {metric}", metric=recorded(priced[0][1]["utility"]["metric"]))
    note = tell("A line joins each setting found with the same model trained without it.")
    return _plot(result, title, note, number(first, ".3f"), number(last, ".3f"), curves)
