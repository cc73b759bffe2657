"""What the attacks on a trained model say by their figures: above guessing, above what an epsilon permits, or nothing. No
torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rasura.core.rounding import percent_above
from rasura.metrics.membership import auc_bound, tpr_bound
from rasura.report.language import number, recorded, tell
from rasura.report.verdicts import unmeasured

Record = Mapping[str, Any]


def rates_of(scores: Mapping[str, Any]) -> dict[str, float]:
    """The false positive rates at which members were counted, the largest first, by the names of their figures."""
    found = {name: float(name.removeprefix("tpr@")) for name in scores if name.startswith("tpr@")}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def ranks(scores: Mapping[str, Any]) -> bool:
    """Whether the interval of the AUC excludes guessing, on either side."""
    auc = scores.get("auc")
    return auc is not None and bool(auc["low"] > 0.5 or auc["high"] < 0.5)


def finds(scores: Mapping[str, Any]) -> list[str]:
    """The rates at which more members are found than by guessing, by their intervals."""
    return [name for name, fpr in rates_of(scores).items() if scores[name]["low"] > fpr]


def separates(scores: Mapping[str, Any]) -> bool:
    """Whether the largest leakage is above the level of chance. Scores of members that lie together amid those of others
    separate them at a threshold, though the AUC is .5."""
    largest = scores.get("largest_leakage")
    return largest is not None and bool(largest["mean"] > largest["chance"])


def above(scores: Mapping[str, Any]) -> bool:
    """Whether ``scores`` are above guessing: an interval excludes it, or the largest leakage is above chance. All that is
    said of an attack rests on this. Scores that say nothing are above it with a chance of at most ``by_chance``."""
    return ranks(scores) or bool(finds(scores)) or separates(scores)


def level_of(scores: Mapping[str, Any]) -> float:
    """The share of draws in which guessing stays at or below the level of chance of ``separates``."""
    return float(scores["largest_leakage"].get("level", 0.95))  # runs of before the level was stored


def by_chance(rates: int, level: float) -> float:
    """The chance with which ``above`` errs at most: 5 % by the AUC, which errs on either side, 2.5 % by each rate, and what
    ``level`` leaves."""
    return 0.05 + 0.025 * rates + 1 - level


BY_SPLIT = ("words", "labels", "words_and_labels", "base")
"""The checks of how texts were chosen, by their names beside an attack; those by label are of a classifier's texts, that by
the model on which training began of a causal model's."""


def of_texts(done: Sequence[Record]) -> list[Mapping[str, Any]]:
    """The scores of texts without the trained model: by words and labels, by the model on which training began, and by
    length, which stand beside each attack or are one themselves."""
    beside = done[0]["blind"]
    by_split = [{"auc": beside[name]} for name in BY_SPLIT if name in beside]
    return [*by_split, beside, *(r["scores"] for r in done if r["attack"] == "blind")]


def off(done: Sequence[Record]) -> bool:
    """Whether length, words, labels or the model before training part members from others beyond their intervals."""
    return any(map(above, of_texts(done)))


def silent(done: Sequence[Record], plan: Mapping[str, Any]) -> tuple[str, ...]:
    """Why no figure of ``done`` says anything of the model, above guessing or not; empty where they do."""
    found = [tell("members and others differ as texts")] if done and off(done) else []
    return (*found, *untrained(plan))


def untrained(plan: Mapping[str, Any]) -> tuple[str, ...]:
    """That no training shows in the model, in words; empty where it does."""
    return (tell("the model answers as the one on which its training began"),) if plan.get("untrained") else ()


def headline(real: Sequence[Record], rates: Sequence[str]) -> tuple[str, Record]:
    """The rate and the attack of the first sentence: the largest rate at which any is above guessing, and of these attacks
    the one that finds most."""
    found = {rate: [r for r in real if rate in finds(r["scores"])] for rate in rates}
    rate = next((rate for rate in rates if found[rate]), rates[0])
    return rate, max(found[rate] or real, key=lambda r: r["scores"][rate]["mean"])


def strongest(real: Sequence[Record]) -> Record:
    """The attack of the headline where no rate was measured: of those above guessing, on either side, the one farthest from
    it; where none is, the one with the highest AUC."""
    if apart := [r for r in real if above(r["scores"])]:
        return max(apart, key=lambda r: abs(r["scores"]["auc"]["mean"] - 0.5))
    return max(real, key=lambda r: r["scores"]["auc"]["mean"])


def conclusion(real: Sequence[Record], rates: Sequence[str], missing: Sequence[str], nothing: Sequence[str]) -> str:
    """What the attacks that gave a figure say together: each above guessing, or nothing, if none is ``missing``.
    ``nothing``: why no figure says anything of the model (``silent``)."""
    if nothing:
        return _sentence(nothing)
    if any(finds(r["scores"]) for r in real):
        return tell("Above guessing: the model reveals which texts it was trained on.")
    ranked = [r["attack"] for r in real if above(r["scores"])]
    if ranked:
        few = "There are too few texts to measure how many members are found at a low false positive rate."
        with_one = tell("Above guessing: {attacks} separates members from others beyond the level of chance.",
            attacks=ranked[0])  # fmt: skip
        with_more = tell("Above guessing: {attacks} separate members from others beyond the level of chance.",
            attacks=", ".join(ranked))  # fmt: skip
        said = with_one if len(ranked) == 1 else with_more
        return said + (f" {recorded(few)}" if rates else "")
    if missing:
        return _sentence(missing)
    n = real[0]["scores"]["auc"]["n"]
    return tell(
        "Not told from guessing: with {n} texts, an AUC of up to {high:.3f} is not ruled out, and another attack may do "
        "better.", n=n, high=_not_ruled_out(real),
    )  # fmt: skip


def _sentence(missing: Sequence[str]) -> str:
    told = unmeasured(missing)
    return f"{told[0].upper()}{told[1:]}."


def _not_ruled_out(real: Sequence[Record]) -> float:
    most = max(max(r["scores"]["auc"]["high"], 1 - r["scores"]["auc"]["low"]) for r in real)
    return percent_above(most, 1) / 100


def by_epsilon(done: Sequence[Record], plan: Mapping[str, Any], missing: Sequence[str]) -> list[str]:
    """What the stated epsilon permits, and which attacks on the model are above it: by the AUC, and at every rate."""
    real = [r for r in done if r["attack"] != "blind"]
    tells = [] if untrained(plan) else real  # no guarantee fails by a model in which no training shows
    epsilon, delta = plan["epsilon"], plan.get("delta", 0.0)
    bound = auc_bound(epsilon, delta)
    shown = {"epsilon": number(epsilon, "g"), "delta": f", delta {number(delta, 'g')}" if delta else ""}
    given = {**shown, "bound": percent_above(bound, 1) / 100}
    out = []
    ranked = [r["attack"] for r in tells if max((auc := r["scores"]["auc"])["low"], 1 - auc["high"]) > bound]
    if ranked:
        out.append(
            tell(
                "Epsilon {epsilon}{delta} permits an AUC of at most {bound:.3f}, and {attacks} is above it: the "
                "guarantee does not hold, or the texts differ.", attacks=", ".join(ranked), **given,
            )
        )  # fmt: skip
    for name, fpr in rates_of({k: v for r in tells for k, v in r["scores"].items()}).items():
        most = tpr_bound(fpr, epsilon, delta)
        finding = [r["attack"] for r in tells if name in r["scores"] and r["scores"][name]["low"] > most]
        if finding:
            out.append(
                tell(
                    "Epsilon {epsilon}{delta} permits finding at most {most} % of the members at {rate:g} % false alarms, "
                    "and {attacks} is above it: the guarantee does not hold, or the texts differ.",
                    most=number(percent_above(most, 2), "g"), rate=100 * fpr, attacks=", ".join(finding), **shown,
                )
            )  # fmt: skip
    if out and plan.get("n_repeated"):
        out.append(
            tell(
                "A guarantee is for one row. Rows are repeated here: if the training had them too, a text in several rows "
                "may exceed it although it holds."
            )
        )
    if out:
        return out
    if not real or missing or silent(done, plan):
        return [
            tell(
                "Epsilon {epsilon}{delta} permits an AUC of at most {bound:.3f}; this run does not tell whether attacks "
                "stay below it.", **given,
            )
        ]  # fmt: skip
    return [
        tell(
            "Epsilon {epsilon}{delta} permits an AUC of at most {bound:.3f}; no attack is shown to exceed it, and an AUC of "
            "up to {high:.3f} is not ruled out.", high=_not_ruled_out(real), **given,
        )
    ]  # fmt: skip
