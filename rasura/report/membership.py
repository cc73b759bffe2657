"""What attacks on a trained model found, in words, as a table and as a page with their ROC curves. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.options import names_of
from rasura.core.rounding import percent, percent_above, percent_below
from rasura.report.head import Made, duration, machine, origin, settings
from rasura.report.language import number, recorded, tell
from rasura.report.membership_step import membership_step
from rasura.report.membership_verdict import (
    by_chance,
    by_epsilon,
    conclusion,
    finds,
    headline,
    level_of,
    of_texts,
    off,
    ranks,
    rates_of,
    separates,
    silent,
    strongest,
    untrained,
)
from rasura.report.missing import of_a_trained_model
from rasura.report.roc import roc_plot
from rasura.report.template import filled
from rasura.report.verdicts import plain, unmeasured


@dataclass(frozen=True)
class Found:
    """The page's content: sentences first, a row an attack, and what the figures must be held against. ``missing``: why
    nothing can be said for the model, in words."""

    sentences: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    checks: tuple[str, ...]
    reasons: tuple[str, ...]
    missing: tuple[str, ...] = ()


def _share(value: float) -> str:
    return f"{number(percent(value, 1), '.1f')} %"


def _rate(score: Mapping[str, Any]) -> str:
    low, high = percent_below(score["low"], 1), percent_above(score["high"], 1)
    return tell("{mean} ({low:.1f} to {high:.1f})", mean=_share(score["mean"]), low=low, high=high)


def _auc(score: Mapping[str, Any]) -> str:
    low, high = percent_below(score["low"], 1) / 100, percent_above(score["high"], 1) / 100
    return tell("{mean:.3f} ({low:.3f} to {high:.3f})", mean=float(score["mean"]), low=low, high=high)


def _own(score: Mapping[str, Any]) -> str:
    return tell("does not set a threshold") if score["mean"] is None else _auc(score)


def _largest(scores: Mapping[str, Any]) -> str:
    value, chance = (float(scores["largest_leakage"][name]) for name in ("mean", "chance"))
    if separates(scores):
        return tell("{value:.3f} (above chance, {chance:.3f})", value=value, chance=chance)
    return tell("{value:.3f} (not above chance, {chance:.3f})", value=value, chance=chance)


def _name(fpr: str) -> str:
    return tell("found at {rate:g} % false alarms", rate=100 * float(fpr.removeprefix("tpr@")))


def membership_findings(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> Found:
    """From the records of one run to what a person needs to know; intervals are of 95 %."""
    order = {name: k for k, name in enumerate(plan["attacks"])}
    done = sorted((r for r in records if r["status"] == "ok"), key=lambda r: order[r["attack"]])
    rates = list(rates_of({m: None for r in done for m in r["scores"]}))
    rows = [
        (r["attack"], _auc(s["auc"]), *(_rate(s[m]) for m in rates), _own(s["leakage"]), _largest(s))
        for r in done
        for s in (r["scores"],)
    ]
    reasons = [f"{r['attack']}: {r['reason']}" for r in records if r["status"] != "ok"]
    columns = (tell("attack"), "AUC", *map(_name, rates), tell("leakage"), tell("largest leakage"))
    missing = _missing(records, plan)
    sentences = _sentences(done, rates, plan, missing)
    return Found(tuple(sentences), columns, tuple(rows), tuple(_checks(done, rates, plan, missing)), tuple(reasons), missing)


def _missing(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> tuple[str, ...]:
    defense = str(plan.get("defense", "none"))
    parts = () if plain(defense) else names_of(defense)
    return (*untrained(plan), *of_a_trained_model(parts, records, plan["attacks"], plan["n_members"] + plan["n_others"]))


def _sentences(
    done: Sequence[Mapping[str, Any]], rates: Sequence[str], plan: Mapping[str, Any], missing: Sequence[str]
) -> list[str]:
    real = [r for r in done if r["attack"] != "blind"]
    if not real:
        return [tell("No attack on the model gave a result: not measured.")]
    out = _figures(real, rates, plan, missing, silent(done, plan))
    if off(done):
        out.append(
            tell(
                "Members and others differ as texts, without any training on them. No figure here says how much of the "
                "difference the training adds."
            )
        )
    return out


def _figures(
    real: Sequence[Mapping[str, Any]],
    rates: Sequence[str],
    plan: Mapping[str, Any],
    missing: Sequence[str],
    nothing: Sequence[str],
) -> list[str]:
    """What the attacks found, and what follows; where nothing follows, that comes first."""
    members, others = plan["n_members"], plan["n_others"]
    concluded = conclusion(real, rates, missing, nothing)
    if rates:
        name, best = headline(real, rates)
        score, fpr = best["scores"][name], rates_of(best["scores"])[name]
        says = tell(
            "Asked about {members} texts that the model was trained on and {others} other texts, the best attack ({attack}) "
            "finds {rate} of the members. It takes {fpr:g} % of the others for members; guessing then finds {fpr:g} %.",
            members=members, others=others, attack=best["attack"], rate=_rate(score), fpr=100 * fpr,
        )  # fmt: skip
        return [concluded, says] if nothing else [says, concluded]
    best = strongest(real)
    says = tell(
        "Asked about {members} texts that the model was trained on and {others} other texts, {attack} ranks a "
        "member above another text with a chance of {auc}; guessing is .5.", members=members, others=others,
        attack=best["attack"], auc=_auc(best["scores"]["auc"]),
    )  # fmt: skip
    few = tell(
        "There are too few texts to measure how many members are found at a low false positive rate: a rate of 1 % "
        "needs 100 texts of each kind."
    )
    return [*([concluded, says] if nothing else [says, concluded]), few]


def _without_the_model(done: Sequence[Mapping[str, Any]]) -> list[str]:
    """How well texts alone part members from others, and whether they differ."""
    beside = done[0]["blind"]
    blind, by_words = beside.get("auc"), beside["words"]
    by_length = tell("(not measured)") if blind is None else _auc(blind)
    out = [
        tell(
            "Without the model, length separates members from others with AUC {length}, words with AUC {words}.",
            length=by_length, words=_auc(by_words),
        )
    ]  # fmt: skip
    if "labels" in beside:
        labels, both = _auc(beside["labels"]), _auc(beside["words_and_labels"])
        out.append(
            tell(
                "Labels separate them with AUC {labels}, words and labels together with AUC {both}.",
                labels=labels,
                both=both,
            )
        )
    if "base" in beside:
        out.append(
            tell(
                "The model on which the training began, before it learned from the members, separates them with AUC {auc}.",
                auc=_auc(beside["base"]),
            )
        )
    by_rate = [(s[name], rates_of(s)[name]) for s in of_texts(done) for name in finds(s)]
    for found, fpr in by_rate[:1]:
        out.append(
            tell(
                "Length alone finds {found} of the members at {rate:g} % false alarms, more than guessing.",
                found=_rate(found), rate=100 * fpr,
            )
        )  # fmt: skip
    if off(done):
        out.append(
            tell(
                "This differs from guessing: members and others differ as texts, and every figure here also measures that "
                "difference. Draw both at random from the same source."
            )
        )
    return out


def _checks(
    done: Sequence[Mapping[str, Any]], rates: Sequence[str], plan: Mapping[str, Any], missing: Sequence[str]
) -> list[str]:
    if not done:
        return []
    out, level = _without_the_model(done), level_of(done[0]["scores"])
    out.append(
        tell(
            "Each interval holds on its own, with 95 %. An attack that knows nothing seems to find members, by chance, in "
            "at most {share:g} % of runs.",
            share=100 * by_chance(len(rates), level),
        )
    )
    out.append(
        tell(
            "Leakage is the true minus the false positive rate at the attack's own threshold, as the papers report it; it "
            "may be negative. The largest over all thresholds is above 0 by chance: random guessing stays at or below "
            "{chance:.3f} in {share:g} % of draws with this number of texts.",
            chance=float(done[0]["scores"]["largest_leakage"]["chance"]),
            share=100 * level,
        )
    )
    if plan.get("n_repeated"):
        out.append(
            tell(
                "{count} repeated rows were left out. A text counts once, as the model sees it, with its label.",
                count=plan["n_repeated"],
            )
        )
    if plan.get("others_chose"):
        out.append(
            tell(
                "The others chose which epoch's weights the model has, so the model may answer better on them than on new "
                "texts. Members then stand out less. Pass texts that chose nothing as --non-members."
            )
        )
    if plan.get("epsilon") is not None:
        out += by_epsilon(done, plan, missing)
    if len([r for r in done if r["attack"] != "blind"]) > 1:
        out.append(
            tell(
                "The best of several attacks was selected after the results were known; its interval does not account "
                "for that selection."
            )
        )
    return out


def render_membership(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], made: Made | None = None) -> str:
    """The page as a string. ``made``: what the run stored about itself."""
    made = made or Made()
    seconds = duration(sum(r["wall_seconds"] for r in records))
    means = tell("all attacks together took {duration} on {machine}", duration=seconds, machine=machine(made))
    who = recorded(str(records[0]["threat_plain"])) if records else ""
    missing, done = _missing(records, plan), [r for r in records if r["status"] == "ok"]
    nothing = silent(done, plan)
    return filled(
        "membership.html", f=membership_findings(records, plan), plan=plan, plot=roc_plot(records, plan), made=made,
        lines=[_line(r, missing, nothing) for r in sorted(records, key=lambda r: plan["attacks"].index(r["attack"]))],
        head=origin(plan, records, made, who=who, means=means, source=str(plan["members"])), settings=settings(plan),
        step=membership_step(records, plan, missing),
    )  # fmt: skip


def _word(scores: Mapping[str, Any], missing: Sequence[str], nothing: Sequence[str]) -> str:
    """What the figures of an attack say, in the plot of verdicts."""
    if nothing:
        return unmeasured(nothing)
    if ranks(scores):
        return tell("above guessing")
    if found := finds(scores):
        return tell("above guessing at {rate:g} % false alarms", rate=100 * rates_of(scores)[found[0]])
    if separates(scores):
        return tell("above guessing by its largest leakage")
    return tell("not told from guessing by this attack alone") if missing else tell("not told from guessing")


def _line(record: Mapping[str, Any], missing: Sequence[str], nothing: Sequence[str]) -> dict[str, Any]:
    """An attack in the plot of verdicts: its AUC in percent."""
    word, dot = tell("not measured"), None
    if record["status"] == "ok":
        word = _word(record["scores"], missing, nothing)
        dot = tuple(100 * record["scores"]["auc"][end] for end in ("mean", "low", "high"))
    name, baseline = record["attack"], record["attack"] == "blind"
    return {"name": name, "anchor": f"attack-{name}", "word": word, "dot": dot, "baseline": baseline, "chosen": False}
