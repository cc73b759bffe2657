"""The results of studies in Markdown: ours with intervals and n, the baseline, the paper's figures beside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rasura.core.files import write_whole
from rasura.core.records import CLIENT
from rasura.core.rounding import above
from rasura.metrics.learned import accuracy_interval, epochs_compared
from rasura.metrics.membership import auc_bound
from rasura.metrics.utility import HIGHER_IS_BETTER
from rasura.report.promises import stated
from rasura.report.training import sides
from rasura.runs.plans import Plan
from rasura.runs.service_plan import ServicePlan
from rasura.runs.train_plan import TrainPlan
from rasura.studies.files import CELL, FOLDER, Study
from rasura.studies.metric_values import NAMES, keyed_level, level_text, row_of, seeds_of, spread_text, values_of
from rasura.studies.reasons import reasons_of

RESULTS = FOLDER / "RESULTS.md"

ENDED = "gave up / crashed / not applicable"
"""Head of the column that counts the cells without a guess, each kind apart."""

COSTS = 0.05
"""Seconds of a protection above which its cost is told."""


def section(study: Study, plan: Plan, records: Iterable[Mapping[str, Any]]) -> str:
    """The study's part of the results, in Markdown: our means with 95 % intervals, n, seeds, blind, the paper's figure."""
    rows = sorted(records, key=_place(plan))
    heads = [NAMES.get(m, m) for m in study.metrics]
    paper = f"paper ({' / '.join(heads)})"
    costly = any(r.get("defense_seconds", 0) > COSTS for r in rows)
    cost = ["MB sent", "s to protect"] if costly else []
    columns = ["attack", "behind", "batch", "n", "seeds", *heads, f"blind {heads[0]}", ENDED, "CPU s", *cost, paper]
    about = f"data {Path(plan.data or 'demo').name}, budget {plan.budget}, seeds from {plan.seed}"
    lines = head(study, plan, about, columns)
    for cell, group in groupby(rows, key=lambda r: tuple(r[k] for k in CELL)):
        some = list(group)
        where = dict(zip(CELL, cell))
        values = [values_of(some, m, "scores") for m in study.metrics]
        ours = [v.text(m) for v, m in zip(values, study.metrics)]
        blind = values_of(some, study.metrics[0], "blind").text(study.metrics[0])
        behind = ", ".join(dict.fromkeys(str(where[k]) for k in ("defense", "update", "threat") if where[k] not in _USUAL))
        timed = [r for r in some if r.get("device", "cpu") == "cpu"] or some  # a GPU's share of the work is no CPU time
        seconds = sum(r["cpu_seconds"] for r in timed) / len(timed)
        first = [where["attack"], behind or "none", where["batch_size"], values[0].texts, seeds_of(some)]
        spent = []
        if costly:
            sent, took = (sum(r.get(k, 0) for r in some) / len(some) for k in ("sent_bytes", "defense_seconds"))
            spent = [f"{sent / 1e6:.1f}", f"{took:.1f}"]
        last = [ended(some), f"{seconds:.0f}", *spent]
        last.append(study.figure(where, study.metrics))
        lines.append(row_of([*first, *ours, blind, *last]))
    return "\n".join([*lines, "", *reasons_of(rows), ""]).replace("\n\n\n", "\n\n")


def with_rest(text: str, done: int, cells: int) -> str:
    """The section ``text``; where only ``done`` of the ``cells`` of its run were run, it says so."""
    rest = "cells were run so far, so rows may be missing; the same command goes on"
    return text if done >= cells else f"{text.rstrip()}\n\n- {done} of {cells} {rest}\n"


def ended(records: Sequence[Mapping[str, Any]]) -> str:
    """How many of ``records`` hold no guess, in the order of ``ENDED``."""
    counts = [sum(r["status"] == status for r in records) for status in ("failed", "crashed", "not_applicable")]
    return " / ".join(map(str, counts)) + f" of {len(records)}"


def training_section(study: Study, plan: TrainPlan, results: Iterable[Mapping[str, Any]]) -> str:
    """As ``section``, of a training: figures on original text, mean over seeds with their range, and before training."""
    rows = list(results)
    heads = [NAMES.get(m, m) for m in study.metrics]
    columns = ["behind", "seeds", *heads, f"untrained {heads[0]}", "epochs", "CPU s", f"paper ({' / '.join(heads)})"]
    sizes = f"{rows[0]['n_train']} training texts of {Path(plan.data).name}, judged on {rows[0]['n_test']}"
    half = _chance(study.metrics, rows)
    lines = head(study, plan, f"{sizes} of {Path(plan.test or 'the holdout').name}{half}", columns)
    spent = {"epochs": 0, "cpu_seconds": 0}
    told = _trained(rows, study.metrics, spent, lambda d: study.figure({"defense": d}, study.metrics))
    return "\n".join([*lines, *told, ""])


def _trained(
    results: Iterable[Mapping[str, Any]], metrics: Sequence[str], spent: Mapping[str, int], paper: Callable[[str], str]
) -> Iterator[str]:
    """A row for each protection: figures after training and the first before, the means of ``spent`` to so many digits."""
    for defense, group in groupby(results, key=lambda r: str(r["defense"])):
        some = list(group)
        ours = [spread_text([r["after"][m] for r in some], m) for m in metrics]
        before = spread_text([r["before"][metrics[0]] for r in some], metrics[0])
        cost = [f"{sum(r[k] for r in some) / len(some):.{digits}f}" for k, digits in spent.items()]
        yield row_of([defense, len(some), *ours, before, *cost, paper(defense)])


def tradeoff_section(
    study: Study, plan: Plan, records: Sequence[Mapping[str, Any]], training: TrainPlan, results: Sequence[Mapping[str, Any]]
) -> str:
    """Utility against risk: one row a protection, the trained model's figures, then what each attack reads behind it."""
    useful = [m for m in study.metrics if m in HIGHER_IS_BETTER]
    risky = [m for m in study.metrics if m not in useful]
    sizes = sorted({r["batch_size"] for r in records})
    heads = [NAMES.get(m, m) for m in useful]
    risks = [(a, b, m) for a in plan.attacks for b in sizes for m in risky]
    columns = ["trained behind", "audited behind", "seeds", *heads]
    columns += [f"{a}{f', batch {b}' if len(sizes) > 1 else ''}: {NAMES.get(m, m)} (n)" for a, b, m in risks]
    columns += [f"paper ({' / '.join(NAMES.get(m, m) for m in risky)})"] * bool(study.figures)
    first = results[0]
    half = _chance(useful, results)
    about = (
        f"trained on {first['n_train']} texts of {Path(training.data).name}, judged on {first['n_test']}{half}; audited on "
        f"{Path(plan.data or 'demo').name}, budget {plan.budget}, {plan.seeds} seed(s) from {plan.seed}"
    )
    lines = head(study, plan, about, columns)
    for trained, audited in zip(training.defenses, plan.defenses):
        some = [r for r in results if r["defense"] == trained]
        row = [trained, audited, len(some), *(spread_text([r["after"][m] for r in some], m) for m in useful)]
        for attack, size, metric in risks:
            cells = [r for r in records if (r["attack"], r["batch_size"], r["defense"]) == (attack, size, audited)]
            values = values_of(cells, metric, "scores")
            row.append(f"{values.text(metric)} ({values.texts})")
        paper = [study.figure({"attack": plan.attacks[0], "defense": audited}, risky)] * bool(study.figures)
        lines.append(row_of([*row, *paper]))
    said = {side.name: stated(side.results) for side in sides(results)}
    return "\n".join([*lines, "", *(f"- {name}: {'; '.join(some)}" for name, some in said.items() if some), ""])


def membership_section(
    study: Study, plan: TrainPlan, results: Sequence[Mapping[str, Any]], records: Sequence[Sequence[Mapping[str, Any]]]
) -> str:
    """As ``section``, of the models of a training: ``records`` are those of the attacks on each of ``results``."""
    assert study.membership is not None
    attacks = study.membership.attacks or tuple(sorted({r["attack"] for some in records for r in some}))
    columns = ["trained behind", "epsilon", "accuracy", "attack", *(NAMES.get(m, m) for m in study.metrics)]
    columns += ["AUC permitted", f"paper ({' / '.join(NAMES.get(m, m) for m in study.metrics)})"]
    first = results[0]
    about = (
        f"trained on {first['n_train']} texts of {Path(plan.data).name}, {first['n_holdout']} others, judged on "
        f"{first['n_test']}; {study.membership.shadow_models} shadow models"
    )
    lines = head(study, plan, about, columns)
    for result, some in zip(results, records):
        promised = result["privacy"]
        # What a seed voids would hold with secret noise: the figure that the paper has.
        holds = "epsilon" in promised
        spent = (promised["epsilon"], promised["delta"]) if holds else promised.get("otherwise")
        bound = 1.0 if spent is None else auc_bound(*spent)
        behind = result["defense"] + (f", seed {result['seed']}" if plan.seeds > 1 else "")
        epsilon = "–" if spent is None else above(spent[0], 3) + ("" if holds else " (were the noise secret)")
        right = spread_text([result["after"]["accuracy"]], "accuracy")
        for r in sorted(some, key=lambda r: attacks.index(r["attack"])):
            ours = [_rate(r["scores"].get(m)) for m in study.metrics]
            last = [f"{100 * bound:.1f}", study.figure(r, study.metrics)]
            lines.append(row_of([behind, epsilon, right, r["attack"], *ours, *last]))
    return "\n".join([*lines, "", *reasons_of(r for some in records for r in some), ""]).replace("\n\n\n", "\n\n")


def _rate(score: Mapping[str, Any] | None) -> str:
    if score is None or score["mean"] is None:
        return "–"
    ends = f" [{100 * score['low']:.0f}, {100 * score['high']:.0f}]" if "low" in score else ""
    return f"{100 * score['mean']:.1f}{ends}"


def service_section(
    study: Study, plan: ServicePlan, records: Iterable[Mapping[str, Any]], worth: Sequence[Mapping[str, Any]] = ()
) -> str:
    """As ``section``, of a model service: its utility under each protection, of the trainings ``worth`` if any, and what
    each attack reads there."""
    useful = [m for m in study.metrics if m in HIGHER_IS_BETTER]
    risky = [m for m in study.metrics if m not in useful]
    heads = [NAMES.get(m, m) for m in risky]
    told = len(plan.weights) > 1 or bool(worth)
    columns = ["protection", "attack", *(["weights"] * told), *heads, "CPU s", f"paper ({' / '.join(heads)})"]
    theirs = f"{plan.references} at most of {Path(plan.reference).name} for the adversary"
    about = f"{plan.limit} texts of {Path(plan.data).name}, {theirs}"
    if worth:
        about += f"; trained on {worth[0]['n_train']} of these, judged on {worth[0]['n_test']} of {Path(plan.data).name}"
        about += _chance(useful, worth)
    behind = f", {study.keys} keys{' for the uploaded weights' * bool(worth)}" if study.keys > 1 else ""
    lines = head(study, plan, f"{about}, budget {plan.budget}, seed {plan.seed}{behind}", columns)
    if worth:
        lines = [*lines[:-2], *_worth_of_services(study, useful, worth), "", *lines[-2:]]
    shown: list[Mapping[str, Any]] = []
    for (defense, attack, weights), group in groupby(sorted(records, key=service_place(plan)), key=_service_cell):
        behind_keys = list(group)[: 1 if attack == "blind" else None]  # guessing knows no key
        shown += behind_keys
        some = [r for r in behind_keys if r["status"] != "not_applicable"]
        if not some:
            continue
        ours = [level_text(keyed_level(some, m), m) for m in risky]
        where = {"protection": defense, "attack": attack, "weights": weights}
        first = [v for k, v in where.items() if told or k != "weights"]
        seconds = sum(r["cpu_seconds"] for r in some) / len(some)
        lines.append(row_of([*first, *ours, f"{seconds:.0f}", study.figure(where, risky)]))
    return "\n".join([*lines, "", *reasons_of(shown), ""])


def _service_cell(record: Mapping[str, Any]) -> tuple[str, str, str]:
    return record["defense"], record["attack"], record["update"]


def _worth_of_services(study: Study, useful: Sequence[str], worth: Sequence[Mapping[str, Any]]) -> list[str]:
    """A table of trainings behind protections of a service. The paper's figures are those of the attack ``training``."""
    heads = [NAMES.get(m, m) for m in useful]
    columns = ["protection", "seeds", *heads, f"untrained {heads[0]}", "epochs", "CPU s to tokenize", "to protect", "in all"]
    lines = [row_of([*columns, f"paper ({' / '.join(heads)})"]), "|" + "---|" * (len(columns) + 1)]
    spent = {"epochs": 0, "encode_seconds": 1, "protect_seconds": 1, "cpu_seconds": 1}
    rows = _trained(worth, useful, spent, lambda p: study.figure({"protection": p, "attack": "training"}, useful))
    return [*lines, *rows]


def _chance(metrics: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """How far a 95 % interval of the accuracy goes at most, where it is among ``metrics``, at its widest over ``rows``; or,
    in its place, that the texts chose the epoch, so that there is no such interval."""
    if any(epochs_compared(r) != 1 for r in rows):
        return ", which also chose the epoch, so that figures are optimistic"
    ends = [(r["after"]["accuracy"], accuracy_interval(r)) for r in rows] if "accuracy" in metrics else []
    widest = max((max(right - e[0], e[1] - right) for right, e in ends if e is not None), default=None)
    return "" if widest is None else f", where 95 % of chance is ±{100 * widest:.1f} of accuracy"


def head(study: Study, plan: Plan | TrainPlan | ServicePlan, about: str, columns: Sequence[str]) -> list[str]:
    """The lines of a section down to the head of its table."""
    model, given, command = _name(plan.model), _given(study, plan), study.command or f"rasura study {study.name}"
    return [
        f"## {study.name}: {study.title}",
        "",
        f"After {study.source}. Model {model}, {about}. Command: `{command}{given}`.",
        "",
        *(f"- {line}" for line in (*_other(study, model, given), *study.notes)),
        "",
        row_of(columns),
        "|" + "---|" * len(columns),
    ]


def _other(study: Study, model: str, given: str) -> list[str]:
    """What is to be said where the run, by its ``model`` and the options ``given``, is not of what the notes are about."""
    other = model.split("/")[0] != _name(study.plan.model)
    parts = ["another model"] * other + ["other texts"] * (" --data " in given)
    return [f"this run took {' and '.join(parts)} than the study: the notes below are about the study's own"] * bool(parts)


def _name(model: str) -> str:
    """The end of the path to ``model``; where that is ``model``, what ``rasura train`` writes, more of it."""
    path = Path(model)
    return path.name if path.name != "model" else "/".join(path.parts[-4:])


_USUAL = ("fedsgd", "with-labels-and-lengths")


def _place(plan: Plan) -> Any:
    order = {"attack": plan.attacks, "update": plan.updates, "defense": plan.defenses, "threat": plan.threats}
    return lambda r: (r["batch_size"], *(order[k].index(r[k]) for k in ("defense", "update", "threat", "attack")))


def service_place(plan: ServicePlan) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    """Where a record of the audit of a service stands in its table: as in the plan, what the client reads first."""
    order = {"defense": plan.protections, "update": plan.weights, "attack": plan.attacks}

    def place(r: Mapping[str, Any]) -> tuple[int, ...]:
        defense, *rest = (some.index(r[k]) if r[k] in some else len(some) for k, some in order.items())
        return defense, int(r["attack"] != CLIENT), *rest

    return place


def _given(study: Study, plan: Plan | TrainPlan | ServicePlan) -> str:
    """The options of the command that made ``plan`` of the study's own."""
    names = {
        "limit": "limit", "seeds": "seeds", "defenses": "defense", "protections": "defense", "budget": "budget",
        "attacks": "attack", "batch_sizes": "batch-size",
    }  # fmt: skip
    model = _name(plan.model)
    out = [] if study.command or model == _name(study.plan.model) else [f" --model {model}"]
    file, own = (Path(one.data or "").name for one in (plan, study.plan))
    out += [f" --data {file}"] * (file != own)
    for field, option in names.items():
        value = getattr(plan, field, None)
        if value != getattr(study.plan, field, None):
            out.append(f" --{option} {','.join(map(str, value)) if isinstance(value, tuple) else value}")
    return "".join(out)


def write_section(text: str, path: Path = RESULTS) -> None:
    """Put a section into the results, in place of an earlier one of the same study."""
    old = path.read_text(encoding="utf-8") if path.is_file() else "# Results of the studies\n"
    name = text.split("\n", 1)[0].split(":")[0]
    parts = re.split(r"(?m)^(?=## )", old)
    kept = [p.rstrip() + "\n" for p in parts if not p.startswith(name + ":")]
    write_whole(path, "\n".join([kept[0], *sorted([*kept[1:], text.rstrip() + "\n"])]), private=False)
