"""Which of several settings of a calibration costs least. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rasura.metrics.learned import accuracy_interval, learned
from rasura.report.language import recorded, tell


def cheapest(utilities: Mapping[str, Mapping[str, Any]]) -> str:
    """Which of several settings costs least, by what a calibration says of their utility; empty where the costs are not
    of one training to compare with, or where that did not learn. Least is only said where it and the best learned, and where
    the intervals of the accuracy are apart; other figures have none."""
    best = min(utilities, key=lambda setting: float(utilities[setting]["cost"]))
    metric, apart, every = utilities[best]["metric"], False, list(utilities.values())
    sound = [_learned(u, u.get("reference")) for u in every]
    if len({(u.get("reference"), u.get("without")) for u in every}) > 1 or False in sound:
        return ""
    if metric == "accuracy" and all(sound) and _learned(utilities[best], best):
        ends = {s: accuracy_interval({**u, "after": {metric: u["behind"]}, "n_test": u["n"]}) for s, u in utilities.items()}
        first = ends.pop(best)
        apart = first is not None and all(e is not None and e[1] < first[0] for e in ends.values())
    if apart:
        return tell("Of these, {setting} costs least {metric}.", setting=best, metric=recorded(metric))
    return tell(
        "Of these, {setting} costs least {metric} in one training each; whether it does is not told from chance.",
        setting=best, metric=recorded(metric),
    )  # fmt: skip


def _learned(utility: Mapping[str, Any], name: str | None) -> bool | None:
    """Whether the training under ``name`` learned; None for a result of an earlier version, which does not say."""
    return next((learned(r) for r in utility.get("trained", ()) if r["defense"] == name), None)
