"""The next step for each protection of a run, as a command that can be copied. No torch."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rasura.core.options import names_of, opened, parts_of
from rasura.core.records import ACTIVE_THREATS, MASK
from rasura.report.language import recorded, tell
from rasura.report.matrix import SUMMED, Findings
from rasura.report.missing import HOLDS_WITHIN
from rasura.report.pooled import texts_needed
from rasura.report.sealed import federated, never_apply
from rasura.report.verdicts import ABOVE, READS, Verdict, plain

OPTIONS = {
    "reference": "reference", "language_model": "language-model", "entries": "entries", "model": "model", "task": "task",
    "attacks": "attack", "defenses": "defense", "updates": "update", "threats": "threat", "batch_sizes": "batch-size",
    "limit": "limit", "keys": "keys", "seeds": "seeds", "seed": "seed", "budget": "budget", "num_labels": "num-labels",
    "truncate": "truncate", "max_length": "max-length", "text_column": "text-column", "pair_column": "pair-column",
    "label_column": "label-column",
}  # fmt: skip
"""Fields of a plan, and the options of ``rasura audit`` that set them."""

USUAL: Mapping[str, Any] = {
    "model": "minilm", "updates": ["fedsgd"], "threats": ["honest-server"], "batch_sizes": [1],
    "seeds": 1, "seed": 0, "budget": "default", "num_labels": None, "truncate": False, "max_length": None,
}  # fmt: skip
"""Defaults of an audit of updates, which a command leaves out."""

OF_TRAINING = ("model", "task", "num_labels", "truncate", "max_length", "text_column", "pair_column", "label_column")
OF_CALIBRATION = (
    "reference", "language_model", "entries", "attacks", "updates", "threats", "batch_sizes", "seeds", "seed", "budget",
    *OF_TRAINING,
)  # fmt: skip
ACTIVE_ATTACK = "decepticons"
"""The attack that sends crafted weights."""

FILE, PUBLIC = "notes.jsonl", "public.jsonl"
"""Stand for files that the reader has to name."""


@dataclass(frozen=True)
class Step:
    """What to do next: ``says`` in words, and ``command``, empty where no command of this version does it."""

    says: str
    command: str = ""


def command(verb: str, plan: Mapping[str, Any], fields: Iterable[str] = tuple(OPTIONS), **changed: Any) -> str:
    """``rasura VERB`` with the settings of ``plan``: those of ``fields``, and those that are ``changed``. Private texts are
    masked."""
    service = plan.get("kind") == "service"
    found = {**plan, "defenses": plan.get("protections")} if service else plan
    wanted = {name: found[name] for name in fields if name in OPTIONS and found.get(name) is not None} | changed
    words = ["rasura", verb, *(["--service"] if service else [])]
    words += [str(plan["data"])] if plan.get("data") else []
    words += ["--text", MASK] * (0 if plan.get("data") else len(plan.get("texts", ())))
    if wanted.get("task") == "classification" and found.get("model", "minilm") == "minilm":
        del wanted["task"]  # what a command takes from the model
    for name, value in wanted.items():
        if value == (None if service else USUAL.get(name)) or value is False or value is None or value == []:
            continue
        text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        words += [f"--{OPTIONS.get(name, name)}"] + ([] if value is True else [text])
    return " ".join(word if word == MASK else shlex.quote(word) for word in words)


def next_step(
    v: Verdict, f: Findings, plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]], methods: Mapping[str, Any]
) -> Step:
    """What to do about a protection with the verdict ``v``. ``methods``: what the run stored about its protections."""
    step = _step(v, f, plan, records, methods)
    if MASK in step.command:
        step = Step(f"{step.says} {tell('Put your texts in place of {mask}.', mask=MASK)}", step.command)
    if step.command and plan.get("skip"):
        skipped = tell("This run skipped the first {count} texts; the command does not.", count=plan["skip"])
        return Step(f"{step.says} {skipped}", step.command)
    return step


def _step(
    v: Verdict, f: Findings, plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]], methods: Mapping[str, Any]
) -> Step:
    if plain(v.defense):
        compare = Step(tell("This is the baseline. Compare with the protections of this run."))
        return _another(tell("Test protections."), f, plan) or compare
    if v.word in (READS, ABOVE):
        return _strengthen(v, f, plan, methods)
    if v.missing and f.unfinished:
        return Step(tell("Finish this run first: give its command again, with the same folder."))
    if v.missing:
        return _measure(v, plan, records)
    if not v.holds:
        wanted = max(texts_needed(HOLDS_WITHIN), 2 * v.draws if v.draws >= texts_needed(HOLDS_WITHIN) else 0)
        many = recorded(v.many)
        keys: dict[str, Any] = {"keys": wanted} if v.keys else {}
        count = wanted * max(-(-one.n // (one.updates or one.n or 1)) for one in v.settings)
        if keys:
            says = tell("Measure at least {count} {many}, behind as many keys.", count=wanted, many=many)
        elif count > wanted:
            says = tell("Measure at least {count} {many}, in {updates} updates.", count=count, many=many, updates=wanted)
        else:
            says = tell("Measure at least {count} {many}.", count=wanted, many=many)
        made = command("audit", _named(plan), defenses=[v.defense], limit=max(count, v.n), out="runs/next", **keys)
        return Step(says + _own_file(plan), made)
    if plan.get("task") == "vision":
        return Step(
            tell("Measure what it costs in accuracy in your own training. No command of this version trains on images.")
        )
    if "sealing" in names_of(v.defense):
        says = tell("Measure what it costs in accuracy, in federated training: no other training takes it.")
        return Step(says, "\n".join(federated(v.defense)))
    says = tell("Measure what it costs in accuracy.") + _own_file(plan)
    return Step(says, command("train", _named(plan), OF_TRAINING, defenses=["none", v.defense]))


def applied(setting: str, plan: Mapping[str, Any], training: Mapping[str, Any]) -> list[str]:
    """The commands, and the Python line where a loop can take it, that apply ``setting`` and audit exactly that.
    ``training``: the data and the options of ``rasura train`` that a guarantee was stated for."""
    names = names_of(setting)
    lines = []
    if "sealing" in names:
        lines += federated(setting)
    elif plan.get("task") != "vision" and not plain(setting):
        of = {"data": training["data"]} if "data" in training else {}
        told = {name: value for name, value in training.items() if name != "data"}
        lines.append(command("train", {**_named(plan), **of}, OF_TRAINING, defenses=["none", setting], **told))
        if not {"ghost", "accumulate"} & set(names):
            call = f'rasura.protect_training(model, optimizer, loader, "{setting}")'
            lines.append(f"model, optimizer, loader, ledger = {call}")
    return [*lines, command("audit", plan, defenses=[setting], out="runs/applied")]


def _named(plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """``plan`` with a file in place of the demo notes or of texts on the command line, which are too few."""
    return {**plan, "data": plan.get("data") or FILE}


def _own_file(plan: Mapping[str, Any]) -> str:
    return "" if plan.get("data") else " " + tell("Put your own texts into {file}.", file=FILE)


def _untried(f: Findings) -> list[str]:
    """Protections of single updates that a run may add, without those that it has."""
    return [told.partition(",")[0] for told in _more(f) if told != SUMMED]


def _more(f: Findings) -> list[str]:
    return [told for part, told in f.words.more.items() if not any(part in c for c in f.columns)]


def _summing(f: Findings) -> str:
    """What is said of secure aggregation where the run has nothing like it: it protects sums, so that its audit is
    another."""
    if SUMMED not in _more(f):
        return ""
    return tell(
        "Where at least three clients train together, sum their updates (sealing:all/by=secagg) and audit the sum with "
        "--clients. With fewer, seal them (sealing:all/by=bfv): their shared key opens every update."
    )


def _of_sums(plan: Mapping[str, Any]) -> str:
    """The command that audits sums of clients."""
    fields = [name for name in OPTIONS if name not in ("defenses", "updates", "batch_sizes")]
    counts = [1, 4, 16]
    least = counts[-1] * texts_needed(HOLDS_WITHIN)  # what is read of a sum counts once
    return command("audit", _named(plan), fields, clients=counts, limit=max(least, plan.get("limit", 0)), out="runs/sums")


def _measure(v: Verdict, plan: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> Step:
    known = [r["known_by"] for r in records if r["defense"] == v.defense and r.get("known_by")]
    unknown = sorted({part for one in known for part in one.get("unknown", ())})
    if unknown or not known:
        names = ", ".join(unknown) or v.defense
        return Step(tell("No attack of this version knows {names}. No command can measure it.", names=names))
    left = {*plan["attacks"], *never_apply(v.defense)}
    absent = [a for a in dict.fromkeys(a for one in known for a in one["attacks"]) if a not in left]
    if not absent and ACTIVE_ATTACK not in plan["attacks"] and ACTIVE_THREATS & set(plan.get("threats", ())):
        says = tell("Add an attack that sends crafted weights.")
        return Step(
            says, command("audit", plan, attacks=[*plan["attacks"], ACTIVE_ATTACK], defenses=[v.defense], out="runs/next")
        )
    if not absent:
        return Step(tell("Read below why an attack has no result. No command of this version removes the reason by itself."))
    changed: dict[str, Any] = {"attacks": [*plan["attacks"], *absent], "defenses": [v.defense], "out": "runs/next"}
    says = tell("Add the attacks that know this protection.")
    if any(a.startswith("ghost-") for a in absent) and not plan.get("reference"):
        changed["reference"] = PUBLIC
        says += " " + tell("Put public texts of the same kind into {file}.", file=PUBLIC)
    return Step(says, command("audit", plan, **changed))


def _strengthen(v: Verdict, f: Findings, plan: Mapping[str, Any], methods: Mapping[str, Any]) -> Step:
    names, parts = names_of(v.defense), parts_of(v.defense)
    figured = [k for k, name in enumerate(names) if "figure" in methods.get(name, {})]
    place = figured[0] if len(figured) == 1 else None
    left = None if place is None else opened(parts[place], methods[names[place]]["figure"])
    if left is not None and plan.get("kind") != "service" and v.guess is not None:
        setting = "+".join(left if k == place else part for k, part in enumerate(parts))
        at_most = math.ceil(round(100 * (v.guess.mean + HOLDS_WITHIN), 6)) / 100
        if at_most < 1:
            made = {"attacks": [a for a in plan["attacks"] if a != "blind"], "defenses": [setting], "at-most": at_most}
            made["limit"] = max(texts_needed(HOLDS_WITHIN) * max(plan.get("batch_sizes", [1])), plan["limit"])
            says = tell("Find the weakest setting that holds.") + _own_file(plan)
            return Step(says, command("calibrate", _named(plan), OF_CALIBRATION, **made))
    choose = Step(tell("This setting does not stop the attacks of this run. Choose another protection."))
    return _another(tell("This setting does not stop the attacks. Test another protection."), f, plan) or choose


def _another(says: str, f: Findings, plan: Mapping[str, Any]) -> Step | None:
    """An audit of protections that this run did not try, told as ``says``, or of sums of clients; None where neither is
    left."""
    if untried := _untried(f):
        return Step(f"{says} {_summing(f)}".strip(), command("audit", plan, defenses=untried, out="runs/next"))
    return Step(_summing(f) + _own_file(plan), _of_sums(plan)) if _summing(f) else None
