"""The results of a calibration: the recommendation, a row for each protection, the frontier and the page. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.report.template import COLOURS, filled

REACHED = ("found", "no need")
"""Outcomes of a protection whose setting meets the target."""

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
        return "not measured"
    return f"{100 * level['mean']:.1f} % ({100 * level['low']:.1f} to {100 * level['high']:.1f}), n = {level['n']}"


def outcome(part: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """What was found for one protection, in a sentence."""
    target, name = f"{100 * result['at_most']:.3g} %", part["family"]
    if part["status"] in REACHED:
        again = part["verification"]
        head = "no protection is needed" if part["status"] == "no need" else "the weakest setting that holds"
        says = (
            f"Use {part['setting']}, {head}: {result['risk']} {share(part['chosen']['risk'])} by {_by(part['chosen'])}, the "
            f"interval ends at or below {target}. Afresh ({again['on']}): {share(again['risk'])}."
        )
        if part["not_verified"]:
            weaker = ", ".join(f["setting"] for f in part["not_verified"])
            says += f" Weaker settings held at first and not afresh: {weaker}."
        return says
    if part["status"] == "not verified":
        last = part["not_verified"][-1]
        why = "; ".join([*([f"the risk was {share(last['risk'])}"] if last["risk"] else []), *last["reasons"]])
        why = why or "nothing was scored"
        return f"{name}: what held at first did not afresh; at {last['setting']} {why}, the target is {target}."
    measured = [p for p in part["points"] if p["risk"]]
    if part["status"] == "not measured" and part["unjudged"]:
        return f"{name}: {'; '.join(part['unjudged'])}."
    if not measured:
        reasons = sorted({r for p in part["points"] for r in p["reasons"]})
        return f"{name}: could not be measured ({'; '.join(reasons[:2]) or 'no attack applies'})."
    best = min(measured, key=lambda p: p["risk"]["high"])
    says = (
        f"no setting of {name} keeps the upper bound of {result['risk']} at or below {target}: {best['setting']} reached "
        f"{share(best['risk'])} by {_by(best)}."
    )
    beyond = part["points"][-1]
    if beyond["risk"] is None:
        says += f" At {beyond['setting']} no attack could be tried ({'; '.join(beyond['reasons'][:1])}): nothing is known."
    return says


def _by(point: Mapping[str, Any]) -> str:
    return "guessing alone" if point["risk"]["attack"] == "blind" else str(point["risk"]["attack"])


def recommendation(result: Mapping[str, Any]) -> str:
    """One sentence for all protections together: what to use, or what was reached."""
    good = [f for f in result["families"] if f["status"] in REACHED]
    if not good:
        return "No protection can be recommended. " + " ".join(outcome(f, result) for f in result["families"])
    says = " ".join(outcome(f, result) for f in good)
    if len(good) > 1 and all((f.get("utility") or {}).get("cost") is not None for f in good):
        cheapest = min(good, key=lambda f: f["utility"]["cost"])
        says += f" Of these, {cheapest['setting']} costs least {cheapest['utility']['metric']}."
    return says


def cost(part: Mapping[str, Any], *, short: bool = False) -> str:
    """What the setting costs in utility."""
    found = part.get("utility")
    if found is None:
        return "not measured"
    if "reason" in found:
        return f"not measured: {found['reason']}"
    if short:
        return f"{found['cost']:+.3f} {found['metric']}"
    return (
        f"{found['metric']} {found['behind']:.3f} behind it, {found['without']:.3f} behind {found['reference']}, "
        f"{found['untrained']:.3f} untrained ({found['n']} texts, {found['n_train']} trained on)"
    )


def promise(part: Mapping[str, Any]) -> str:
    """The formal guarantee and, if there is one, the training run that it applies to."""
    found = part.get("guarantee")
    if found is None:
        return "–"
    if found.get("epsilon") is None:
        return str(found["statement"])
    return f"{found['statement']} ({found['examples']} texts, {found['batch_size']} a step, noise from the operating system)"


def _yardstick(y: Mapping[str, Any]) -> str:
    rank = "" if y["spearman"] is None else f", rank correlation {y['spearman']:+.2f}"
    if y["well_behaved"]:
        end = "and reaches the guessing baseline" if y["bottom"] else "and does not reach the guessing baseline"
        return f"{y['attack']}: a reliable yardstick: risk falls with protection {end}{rank}"
    return f"{y['attack']}: not a reliable yardstick: {y['why']}{rank}"


def rows(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row of text for each protection, for the terminal and the page."""
    out = []
    for f in result["families"]:
        reached = f["status"] in REACHED
        chosen = f["chosen"] if reached else None
        out.append(
            {
                "family": f["family"],
                "setting": f["setting"] or f["status"],
                "risk": share(chosen["risk"]) if chosen else "–",
                "again": share(f["verification"]["risk"]) if reached else "–",
                "mb": f"{chosen['sent_bytes'] / 1e6:.3g}" if chosen else "–",
                "seconds": f"{chosen['seconds']:.2g}" if chosen else "–",
                "cost": cost(f),
                "promise": promise(f),
                "warnings": (f.get("guarantee") or {}).get("warnings", []),
                "says": outcome(f, result),
                "yardsticks": [_yardstick(y) for y in f["yardsticks"]],
            }
        )
    return out


def render_calibration(result: Mapping[str, Any]) -> str:
    """The page as a string."""
    plots = [p for p in (_by_strength(result), _by_utility(result)) if p]
    return filled("calibration.html", r=result, rows=rows(result), plots=plots)


def _height(value: float) -> float:
    return 210 - 190 * value


def _plot(result: Mapping[str, Any], name: str, low: str, high: str, curves: list[dict[str, Any]]) -> dict[str, Any]:
    guesses = [
        level["mean"] for f in result["families"] for p in f["points"] for level in p["levels"] if level["attack"] == "blind"
    ]
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
        "name": name, "low": low, "high": high, "curves": curves, "labels": labels, "blind": blind,
        "target": _height(result["at_most"]),
    }  # fmt: skip


def _curve(part: Mapping[str, Any], number: int, points: Sequence[tuple[float, Mapping[str, Any]]]) -> dict[str, Any]:
    """Pixels of one protection's points: their means, the interval of each, and the one that was chosen."""
    ring = next(((x, _height(p["risk"]["mean"])) for x, p in points if p["setting"] == part["setting"]), None)
    return {
        "name": part["family"], "setting": part["setting"], "colour": COLOURS[number % len(COLOURS)], "ring": ring,
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
    for number, f in enumerate(result["families"]):
        # Without the open part there is no place on a scale of ratios: left of it.
        at = [(100 + 380 * p["position"] if p["position"] is not None else 70.0, p) for p in f["points"] if p["risk"]]
        if at:
            curves.append(_curve(f, number, at))
    return _plot(result, "strength", "weakest tried", "strongest tried", curves) if curves else None


def _by_utility(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """Risk against utility: what each setting that was found is worth, beside the same without its open part."""
    priced = [(k, f) for k, f in enumerate(result["families"]) if (f.get("utility") or {}).get("cost") is not None]
    if not priced:
        return None
    values = [v for _, f in priced for v in (f["utility"]["behind"], f["utility"]["without"])]
    first, last = min(values), max(values)
    width = (last - first) or 1.0
    curves = []
    for number, f in priced:
        named = {p["setting"]: p for p in f["points"]}
        found = [(f["utility"]["without"], named[f["utility"]["reference"]]), (f["utility"]["behind"], named[f["setting"]])]
        curves.append(_curve(f, number, [(90 + 370 * (v - first) / width, p) for v, p in found if p["risk"]]))
    return _plot(result, str(priced[0][1]["utility"]["metric"]), f"{first:.3f}", f"{last:.3f}", curves)
