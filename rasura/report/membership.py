"""What attacks on a trained model found, in words, as a table and as a page with their ROC curves. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.rounding import percent, percent_above, percent_below
from rasura.metrics.membership import auc_bound
from rasura.report.commands import OF_TRAINING, Step, command
from rasura.report.head import Made, duration, machine, origin, settings
from rasura.report.language import number, recorded, tell
from rasura.report.missing import of_a_trained_model
from rasura.report.roc import roc_plot
from rasura.report.template import filled
from rasura.report.verdicts import names_of, plain, unmeasured


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
    return tell("{mean:.3f} ({low:.3f} to {high:.3f})", **{end: float(score[end]) for end in ("mean", "low", "high")})


def _own(score: Mapping[str, Any]) -> str:
    return tell("does not set a threshold") if score["mean"] is None else _auc(score)


def _largest(score: Mapping[str, Any]) -> str:
    value, chance = float(score["mean"]), float(score["chance"])
    if value > chance:
        return tell("{value:.3f} (above chance, {chance:.3f})", value=value, chance=chance)
    return tell("{value:.3f} (not above chance, {chance:.3f})", value=value, chance=chance)


def _name(fpr: str) -> str:
    return tell("found at {rate:g} % false alarms", rate=100 * float(fpr.removeprefix("tpr@")))


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
    columns = (tell("attack"), "AUC", *map(_name, rates), tell("leakage"), tell("largest leakage"))
    missing = _missing(records, plan)
    sentences = _sentences(done, rates, plan, missing)
    return Found(tuple(sentences), columns, tuple(rows), tuple(_checks(done, plan, missing)), tuple(reasons), missing)


def _missing(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any]) -> tuple[str, ...]:
    defense = str(plan.get("defense", "none"))
    parts = () if plain(defense) else names_of(defense)
    return tuple(of_a_trained_model(parts, records, plan["attacks"], plan["n_members"] + plan["n_others"]))


def _sentences(
    done: Sequence[Mapping[str, Any]], rates: Sequence[str], plan: Mapping[str, Any], missing: Sequence[str]
) -> list[str]:
    real = [r for r in done if r["attack"] != "blind"]
    if not real:
        return [tell("No attack on the model gave a result: not measured.")]
    out = _figures(real, rates, plan, missing, _off(done))
    if _off(done):
        out.append(
            tell(
                "Members and others differ as texts, without any model. No figure here says how much of the difference "
                "the model adds."
            )
        )
    return out


def _off(done: Sequence[Mapping[str, Any]]) -> bool:
    """Whether length or words alone part members from others beyond their intervals."""
    beside = done[0]["blind"]
    return any(_apart(s) for s in (beside.get("auc"), beside["words"]) if s is not None)


def _apart(auc: Mapping[str, Any]) -> bool:
    """Whether the interval of an AUC excludes guessing, on either side."""
    return bool(auc["low"] > 0.5 or auc["high"] < 0.5)


def _figures(
    real: Sequence[Mapping[str, Any]], rates: Sequence[str], plan: Mapping[str, Any], missing: Sequence[str], off: bool
) -> list[str]:
    members, others = plan["n_members"], plan["n_others"]
    if not rates:
        best = _strongest(real)
        return [
            tell(
                "Asked about {members} texts that the model was trained on and {others} other texts, {attack} ranks a "
                "member above another text with a chance of {auc}; guessing is .5.", members=members, others=others,
                attack=best["attack"], auc=_auc(best["scores"]["auc"]),
            ),
            _verdict(real, None, missing, off),
            tell(
                "There are too few texts to measure how many members are found at a low false positive rate: a rate of 1 % "
                "needs 100 texts of each kind."
            ),
        ]  # fmt: skip
    best = max(real, key=lambda r: r["scores"][rates[0]]["mean"])
    score, fpr = best["scores"][rates[0]], float(rates[0][4:])
    says = tell(
        "Asked about {members} texts that the model was trained on and {others} other texts, the best attack ({attack}) "
        "finds {rate} of the members. It takes {fpr:g} % of the others for members; guessing then finds {fpr:g} %.",
        members=members, others=others, attack=best["attack"], rate=_rate(score), fpr=100 * fpr,
    )  # fmt: skip
    return [says, _verdict(real, rates[0], missing, off)]


def _verdict(real: Sequence[Mapping[str, Any]], rate: str | None, missing: Sequence[str], off: bool) -> str:
    """What the attacks that gave a figure say together: each beyond its interval, or nothing, if none is ``missing``. Where
    the texts themselves are ``off``, a figure says nothing of the model."""
    if off:
        return tell("Not measured: members and others differ as texts.")
    if rate is not None and any(r["scores"][rate]["low"] > float(rate[4:]) for r in real):
        return tell("Above guessing: the model reveals which texts it was trained on.")
    ranked = [r["attack"] for r in real if _above(r)]
    if ranked:
        few = "There are too few texts to measure how many members are found at a low false positive rate."
        with_one = tell("Above guessing: {attacks} separates members from others, and its interval excludes guessing.",
            attacks=ranked[0])  # fmt: skip
        with_more = tell("Above guessing: {attacks} separate members from others, and their intervals exclude guessing.",
            attacks=", ".join(ranked))  # fmt: skip
        said = with_one if len(ranked) == 1 else with_more
        return said + (f" {recorded(few)}" if rate is not None else "")
    if missing:
        told = unmeasured(missing)
        return f"{told[0].upper()}{told[1:]}."
    n = real[0]["scores"]["auc"]["n"]
    high = max(max(r["scores"]["auc"]["high"], 1 - r["scores"]["auc"]["low"]) for r in real)
    return tell(
        "Not told from guessing: with {n} texts, an AUC of up to {high:.3f} is not ruled out, and another attack may do "
        "better.", n=n, high=float(high),
    )  # fmt: skip


def _strongest(real: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The attack of the headline: of those that rank members apart, on either side, the one farthest from guessing; where
    none does, the one with the highest AUC."""
    apart = [r for r in real if _above(r)]
    if apart:
        return max(apart, key=lambda r: abs(r["scores"]["auc"]["mean"] - 0.5))
    return max(real, key=lambda r: r["scores"]["auc"]["mean"])


def _above(record: Mapping[str, Any]) -> bool:
    """Whether the attack ranks members apart from others, by its interval."""
    return _apart(record["scores"]["auc"])


def _checks(done: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], missing: Sequence[str]) -> list[str]:
    if not done:
        return []
    out = []
    beside = done[0]["blind"]
    blind, by_words = beside.get("auc"), beside["words"]
    by_length = tell("(not measured)") if blind is None else _auc(blind)
    out.append(
        tell(
            "Without the model, length separates members from others with AUC {length}, words with AUC {words}.",
            length=by_length, words=_auc(by_words),
        )
    )  # fmt: skip
    if _off(done):
        out.append(
            tell(
                "This differs from .5: members and others differ as texts, and every figure here also measures that "
                "difference. Draw both at random from the same source."
            )
        )
    out.append(
        tell(
            "Leakage is the true minus the false positive rate at the attack's own threshold, as the papers report it; it "
            "may be negative. The largest over all thresholds is above 0 by chance: random guessing stays at or below "
            "{chance:.3f} in 19 of 20 draws with this number of texts.",
            chance=float(done[0]["scores"]["largest_leakage"]["chance"]),
        )
    )
    if plan.get("n_repeated"):
        out.append(
            tell(
                "{count} repeated rows were left out. A text counts once, as the model sees it, with its label.",
                count=plan["n_repeated"],
            )
        )
    if plan.get("epsilon") is not None:
        out.append(_by_epsilon(done, plan, missing))
    if len([r for r in done if r["attack"] != "blind"]) > 1:
        out.append(
            tell(
                "The best of several attacks was selected after the results were known; its interval does not account "
                "for that selection."
            )
        )
    return out


def _by_epsilon(done: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], missing: Sequence[str]) -> str:
    """What the stated epsilon permits, and whether an attack on the model is above it."""
    real = [r["scores"]["auc"] | {"attack": r["attack"]} for r in done if r["attack"] != "blind"]
    bound = auc_bound(plan["epsilon"], plan.get("delta", 0.0))
    above = [auc["attack"] for auc in real if max(auc["low"], 1 - auc["high"]) > bound]
    delta = f", delta {number(plan['delta'], 'g')}" if plan.get("delta") else ""
    given = {"epsilon": number(plan["epsilon"], "g"), "delta": delta, "bound": float(bound)}
    if above:
        return tell(
            "Epsilon {epsilon}{delta} permits an AUC of at most {bound:.3f}, and {attacks} is above it: the "
            "guarantee does not hold, or the texts differ.", attacks=", ".join(above), **given,
        )  # fmt: skip
    if not real or missing or _off(done):
        return tell(
            "Epsilon {epsilon}{delta} permits an AUC of at most {bound:.3f}; this run does not tell whether attacks stay "
            "below it.", **given,
        )  # fmt: skip
    return tell(
        "Epsilon {epsilon}{delta} permits an AUC of at most {bound:.3f}; no attack is shown to exceed it, and an AUC of up "
        "to {high:.3f} is not ruled out.", high=float(max(max(auc["high"], 1 - auc["low"]) for auc in real)), **given,
    )  # fmt: skip


def render_membership(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], made: Made | None = None) -> str:
    """The page as a string. ``made``: what the run stored about itself."""
    made = made or Made()
    seconds = duration(sum(r["wall_seconds"] for r in records))
    means = tell(
        "all attacks together took {duration}, with {count} shadow models, on {machine}", duration=seconds,
        count=plan["shadow_models"], machine=machine(made),
    )  # fmt: skip
    who = recorded(str(records[0]["threat_plain"])) if records else ""
    missing, done = _missing(records, plan), [r for r in records if r["status"] == "ok"]
    off = bool(done) and _off(done)
    return filled(
        "membership.html", f=membership_findings(records, plan), plan=plan, plot=roc_plot(records, plan), made=made,
        lines=[_line(r, missing, off) for r in sorted(records, key=lambda r: plan["attacks"].index(r["attack"]))],
        head=origin(plan, records, made, who=who, means=means, source=str(plan["members"])), settings=settings(plan),
        step=_step(records, plan, missing),
    )  # fmt: skip


def _line(record: Mapping[str, Any], missing: Sequence[str], off: bool) -> dict[str, Any]:
    """An attack in the plot of verdicts: its AUC in percent."""
    if record["status"] != "ok":
        word, dot = tell("not measured"), None
    else:
        quiet = tell("not told from guessing by this attack alone") if missing else tell("not told from guessing")
        word = tell("above guessing") if _above(record) else quiet
        word = tell("not measured: members and others differ as texts") if off else word
        dot = tuple(100 * record["scores"]["auc"][end] for end in ("mean", "low", "high"))
    name, baseline = record["attack"], record["attack"] == "blind"
    return {"name": name, "anchor": f"attack-{name}", "word": word, "dot": dot, "baseline": baseline, "chosen": False}


def _step(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], missing: Sequence[str]) -> Step:
    """What to do next."""
    real = [r for r in records if r["status"] == "ok" and r["attack"] != "blind"]
    if not real:
        return Step(tell("Read below why an attack has no result."))
    if _off(real):
        return Step(tell("Draw members and others at random from the same source, and measure again."))
    if any(_above(r) for r in real):
        told = {**plan, "data": plan["members"], "model": plan.get("base") or plan["model"]}
        again = command("train", told, OF_TRAINING, defenses=["none", "dp-sgd:1.0"])
        return Step(tell("Train with a formal guarantee, and measure the trained model again."), again)
    if any(r["status"] != "ok" for r in records):
        return Step(tell("Read below why an attack has no result."))
    if missing:
        return Step(tell("Add the attacks that know this protection."))
    return Step(tell("Measure with more texts and more shadow models before you rely on this."))
