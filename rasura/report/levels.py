"""What the Records of one setting say of its risk, and how an attack behaves as a protection grows. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rasura.report.missing import nothing_sent
from rasura.report.pooled import texts_needed
from rasura.report.readings import reading
from rasura.report.scores import Record, about_texts, answered, cells_of, gave_up, guessing, without_a_figure
from rasura.report.sentence import HEADLINE
from rasura.report.verdicts import READS, Verdict, unmeasured, verdict


def point(
    setting: str, records: Sequence[Record], baseline: Sequence[Record], attacks: Iterable[str], risk: str, at_most: float,
    *, images: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """One setting from its Records: the level of every attack and of guessing, the verdict, and as ``risk`` the level whose
    95 % interval ends highest; None where no attack could be tried, with ``reasons``: an attack that did not run shows
    nothing.

    ``baseline``: Records of the same updates without protection. A text counts once, with the mean over seeds. An attack
    that gave up, or named no text, has the score of guessing. ``bound`` is for the search, see there. Whatever ``risk``
    is, the verdict is ``reads`` where an audit's is: an attack may name every word and leave a low ROUGE.
    """
    levels = []
    records, baseline = (about_texts(some, [*records, *baseline]) for some in (records, baseline))
    guess = guessing(records, risk)
    if guess is not None:
        levels.append({"attack": "blind", **guess.__dict__, "failed": 0, "cells": len(cells_of(records, risk))})
    for name in attacks:
        tried = [r for r in records if r["attack"] == name]
        read = reading(name, tried, cells_of(records, risk), risk).counted
        if read.level is not None:
            ended = {"failed": sum(map(gave_up, tried)), "cells": len(tried)}
            ended["silent"] = not any(answered(r, risk) for r in tried)
            levels.append({"attack": name, **read.level.__dict__, **ended, "works": read.yardstick})
    sent = [r for r in records if r["sent_bytes"]]
    found = verdict(setting, records, baseline, risk, images=images)
    if not images and found.word != READS:
        words = verdict(setting, records, baseline, HEADLINE)
        found = words if words.word == READS else found
    count = len(without_a_figure(records, risk))
    blank = [f"{count} {found.many} could not be scored and do not count: {risk} has no value for them"] if count else []
    return {
        "setting": setting,
        "risk": max(levels, key=lambda level: (level["high"], level["mean"])) if len(levels) > 1 else None,
        "levels": levels,
        "verdict": found.to_dict(),
        **bound(found, at_most),
        "sent": not nothing_sent(records),
        "sent_bytes": sum(r["sent_bytes"] for r in sent) / max(1, len(sent)),
        "seconds": sum(r["defense_seconds"] for r in sent) / max(1, len(sent)),
        "reasons": [*blank, *sorted({f"{r['attack']}: {r['reason']}" for r in records if r["reason"]})],
    }


def bound(v: Verdict, at_most: float) -> dict[str, Any]:
    """What a search goes by: ``bound``, the upper bound of the risk, where the verdict allows to say that it is at most
    ``at_most`` or that it is not; else None, with the reasons in ``unjudged``.

    An example that was read nearly whole fails every target, as does a mean above it. Too few examples fail none.
    """
    if v.meets(at_most):
        return {"bound": v.upper, "unjudged": []}
    if v.word == READS or (v.risk is not None and v.risk > at_most):
        return {"bound": 1.0, "unjudged": []}
    why = [unmeasured(v.missing)] if v.missing else []
    need = texts_needed(at_most)
    if v.draws < need:
        n = v.many if v.draws == v.n else "updates"
        why.append(f"{v.draws} {n}; at least {need} are needed to keep the upper bound at or below {100 * at_most:.3g} %")
    return {"bound": None if why else v.upper, "unjudged": why}


def yardstick(attack: str, points: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Whether ``attack`` measures the strength of a protection: it works somewhere, as verdicts ask, and its risk falls.

    ``spearman``: rank correlation of strength and mean risk, -1 where every step lowers it. ``violations``: stronger
    settings whose mean lies above the interval of the next weaker one. ``bottom``: the level of guessing is reached. What is
    below guessing counts as guessing, which is what that adversary would do.
    """
    found = []
    for p in points:
        levels = {level["attack"]: level for level in p["levels"]}
        if attack in levels:
            found.append((levels[attack], levels["blind"]))
    told: dict[str, Any] = {"attack": attack, "settings": len(found), "spearman": None, "well_behaved": False}
    if len(found) < 2:
        return {
            **told,
            "violations": 0,
            "above_blind": False,
            "bottom": False,
            "why": "it gave a result at fewer than two settings",
        }
    means = [max(level["mean"], blind["mean"]) for level, blind in found]
    if len(set(means)) > 1:
        from scipy.stats import spearmanr

        told["spearman"] = float(spearmanr(range(len(means)), means).statistic)
    highs = [max(level["high"], blind["high"]) for level, blind in found]
    violations = sum(mean > high for high, mean in zip(highs, means[1:]))
    above = any(level["works"] for level, _ in found)
    bottom = any(level["mean"] <= blind["high"] for level, blind in found)
    falls = means[-1] < found[0][0]["low"]
    why = (
        "never above guessing" if not above else "not lower at the strongest setting than at the weakest" if not falls else
        f"risk rises with protection {violations} times" if violations else ""
    )  # fmt: skip
    told |= {"violations": violations, "above_blind": above, "bottom": bottom}
    return {**told, "well_behaved": not why, "why": why}
