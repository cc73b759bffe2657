"""What a training under each protection cost in utility, in words, as a table and as a page. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.provenance import Sitting
from rasura.core.rounding import percent, percent_above, percent_below
from rasura.metrics.learned import accuracy_interval, epochs_compared, has_figures, one_class
from rasura.report.commands import Step, command
from rasura.report.head import Made, duration, machine, origin, settings
from rasura.report.language import number, recorded, tell
from rasura.report.learning import not_learned, remedy, unlearned
from rasura.report.promises import alone, promises
from rasura.report.template import COLOURS, filled
from rasura.report.verdicts import plain

LESS, NOT_LESS, CHANCE, UNKNOWN = "less accurate", "not told from none", "not told from chance", "not judged"
UNMEASURED = "not measured"

JUDGED = ("defense", "seed", "n_test", "tested_on", "epochs_compared", "majority", "before", "after")
"""What of a training's result ``unproven`` goes by."""


@dataclass(frozen=True)
class Side:
    """All trainings under one protection: ``level`` is the mean accuracy of the seeds and the widest of their intervals;
    None where the task has no accuracy, or one of them has no interval."""

    name: str
    results: tuple[Mapping[str, Any], ...]
    level: tuple[float, float, float] | None

    @property
    def at_chance(self) -> bool:
        """Whether any of its trainings is not told from chance, or did not lower the loss."""
        return bool(not_learned(self.results))


def is_training(folder: str | Path) -> bool:
    """Whether ``folder`` holds trainings of ``rasura train``."""
    place = Path(folder)
    return not (place / "run.sqlite").is_file() and (place / "plan.json").is_file() and (place / "rows.json").is_file()


def trainings(folder: str | Path) -> tuple[Mapping[str, Any], list[Mapping[str, Any]]]:
    """The plan and the finished trainings in ``folder``, those without protection first. Raises ``InputError`` if none is
    finished."""
    plan: Mapping[str, Any] = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))["plan"]
    found = [json.loads(p.read_text(encoding="utf-8")) for p in sorted(Path(folder).glob("*/result.json"))]
    if not found:
        raise InputError(f"{folder} holds no finished training; run the same command again to finish one")
    return plan, sorted(found, key=lambda r: (not plain(r["defense"]), r["defense"], r["seed"]))


def sides(results: Sequence[Mapping[str, Any]]) -> list[Side]:
    """The trainings by protection."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for r in results:
        by_name.setdefault(r["defense"], []).append(r)
    found = []
    for name, some in by_name.items():
        level = None
        ends = [e for r in some if "accuracy" in r["after"] and (e := accuracy_interval(r, len(some))) is not None]
        if len(ends) == len(some):
            mean = sum(r["after"]["accuracy"] for r in some) / len(some)
            level = (mean, min(low for low, _ in ends), max(high for _, high in ends))
        found.append(Side(name, tuple(some), level))
    return found


def verdict(side: Side, baseline: Side | None) -> tuple[str, str]:
    """The verdict on the cost of a protection, and in a sentence what it rests on.

    The accuracies differ only if their 95 % intervals do not touch, which is stricter than an interval of the difference.
    Where the texts chose the epoch, both intervals allow for it. The widest interval of several seeds holds for their mean:
    it fails only if that of the best or worst seed does, and which one that is, texts that chose have a say in, too.
    """
    if not all(has_figures(r) for r in side.results):
        return UNMEASURED, tell("The output of at least one trained model is not a number.")
    if side.level is None:
        name = "accuracy" if all("accuracy" in r["after"] for r in side.results) else "loss"
        figure = sum(r["after"][name] for r in side.results) / len(side.results)
        if name == "loss":
            says = tell("Loss {loss:.3f}; it has no interval, so no verdict rests on it.", loss=float(figure))
            return UNKNOWN, f"{says} {tell('In at least one training it did not fall.')}" if side.at_chance else says
        says = tell("Accuracy {mean:.1f} %, with no interval:", mean=percent(float(figure), 1))
        return UNKNOWN, f"{says} {tell('the run does not say among how many epochs its texts chose.')}"
    mean, low, high = (f(x, 1) for f, x in zip((percent, percent_below, percent_above), side.level, strict=True))
    says = tell("Accuracy {mean:.1f} % (95 %: {low:.1f} to {high:.1f}).", mean=mean, low=low, high=high)
    if side.at_chance:
        says += " " + tell("At least one training is not told from naming the most frequent class.")
        alike = any(map(one_class, side.results))
        return CHANCE, f"{says} {tell('The texts that judge it have one class.')}" if alike else says
    if baseline is None or baseline.level is None or baseline.at_chance:
        return UNKNOWN, f"{says} {tell('There is no training without protection that learned, to compare with.')}"
    if not _judged_alike([*side.results, *(baseline.results if baseline is not side else ())]):
        return UNKNOWN, f"{says} {tell('It may have been judged on other texts than the training without protection.')}"
    if side is baseline:
        return tell("baseline"), says
    most = percent_above(max(0.0, baseline.level[2] - side.level[1]), 1)
    if side.level[2] < baseline.level[1]:
        least = percent_below(baseline.level[1] - side.level[2], 1)
        cost = tell("It costs {least:.1f} to {most:.1f} points of accuracy.", least=least, most=most)
        return LESS, f"{says} {cost}"
    return NOT_LESS, f"{says} {tell('A cost of up to {most:.1f} points is not ruled out.', most=most)}"


def unproven(trained: Sequence[Mapping[str, Any]], metric: str) -> str:
    """What speaks against a cost in ``metric`` by two trainings, without and under a protection; empty where nothing does.
    Where a model did not learn, they compare little; and they only differ if the intervals of the accuracy are apart."""
    said = [line if line.endswith(".") else f"{line}." for line in unlearned(trained)]
    if (trained and _nothing(trained)) or len(trained) == 1:  # one: the protection is none
        return " ".join(said)
    ends = [accuracy_interval(r) for r in trained] if metric == "accuracy" else []
    known = sorted(e for e in ends if e is not None)
    if len(known) < 2 or known[0][1] >= known[1][0]:
        said.append(tell("Whether it costs any {metric} is not told from chance.", metric=recorded(metric)))
    return " ".join(said)


def chose(results: Sequence[Mapping[str, Any]]) -> str:
    """What is to be said of trainings whose texts chose the epoch that they judge; empty where none did."""
    if all(epochs_compared(r) == 1 for r in results):
        return ""
    return tell("The texts that judge a model also chose the epoch that was kept, so its figures are optimistic.")


def optimistic(results: Sequence[Mapping[str, Any]]) -> str:
    """As ``chose``, and what follows from it for intervals."""
    says = chose(results)
    if says and any(accuracy_interval(r) for r in results if "accuracy" in r["after"]):
        says += " " + tell("The intervals allow for that choice.")
    return says and f"{says} {tell('Pass --test for texts that chose nothing.')}"


def _judged_alike(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ``results`` are of the same texts. Results of earlier versions do not say which they are of."""
    found = {r.get("test") for r in results}
    return len(results) == 1 or (len(found) == 1 and None not in found)


def render_training(folder: str | Path) -> str:
    """The page of the trainings in ``folder``, as a string."""
    plan, results = trainings(folder)
    made = Made(
        _sittings(results),
        {"model": results[0]["weights"]} if "weights" in results[0] else {},
    )
    seconds = duration(sum(r["wall_seconds"] for r in results))
    head = origin(
        plan, results[:1], made,
        who=tell("no adversary was assumed: a training measures cost, and rasura audit measures risk"),
        means=tell("all trainings together took {duration}, on {machine}", duration=seconds, machine=machine(made)),
        source=str(plan["data"]),
    )  # fmt: skip
    return filled("training.html", f=_findings(Path(folder), plan, results), made=made, head=head, settings=settings(plan))


def _sittings(results: Sequence[Mapping[str, Any]]) -> list[Sitting]:
    """Each command that trained here, once, the first one first."""
    found = {str(r["sitting"]["began"]): r["sitting"] for r in results if "sitting" in r}
    return [found[began] for began in sorted(found)]


def _findings(folder: Path, plan: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = sides(results)
    baseline = next((side for side in found if plain(side.name)), None)
    judged = [(side, *verdict(side, baseline)) for side in found]
    first = results[0]
    rows = [
        {
            "name": side.name, "baseline": side is baseline, "word": recorded(word), "says": says,
            "facts": _facts(side), "step": _step(folder, plan, side, word),
        }
        for side, word, says in judged
    ]  # fmt: skip
    lines = [
        {
            "name": row["name"], "anchor": f"protection-{place}", "word": row["word"], "baseline": row["baseline"],
            "chosen": False, "dot": side.level and tuple(100 * x for x in side.level),
        }
        for place, (row, side) in enumerate(zip(rows, found), 1)
    ]  # fmt: skip
    band = None if baseline is None or baseline.level is None else (100 * baseline.level[1], 100 * baseline.level[2])
    majority = 100 * first["majority"] if "majority" in first else None
    columns, table = _table(results)
    curves, most, epochs = _curves(found)
    return {
        "sentence": _sentence(judged), "warning": unlearned(results)[0] if _nothing(results) else "",
        "rows": rows, "lines": lines, "band": band, "majority": majority, "classified": "accuracy" in first["after"],
        "columns": columns, "table": table, "curves": curves, "most": most, "epochs": epochs, "model": first["model"],
        "task": first["task"], "n_train": first["n_train"], "n_test": first["n_test"],
        "alone": alone(results), "optimistic": optimistic(results),
    }  # fmt: skip


def _nothing(results: Sequence[Mapping[str, Any]]) -> bool:
    """Whether no training is told from chance, or lowered the loss."""
    return len(not_learned(results)) == len(results)


def _sentence(judged: Sequence[tuple[Side, str, str]]) -> str:
    costly = [side.name for side, word, _ in judged if word == LESS]
    free = [side.name for side, word, _ in judged if word == NOT_LESS]
    said = [tell("{names} makes the model less accurate.", names=", ".join(costly))] if costly else []
    said += [tell("Of {names} no cost in accuracy was found.", names=", ".join(free))] if free else []
    lost = [side.name for side, word, _ in judged if word == CHANCE]
    said += [tell("Under {names} the model is not told from chance.", names=", ".join(lost))] if lost else []
    missing = [side.name for side, word, _ in judged if word == UNMEASURED]
    said += [tell("Under {names} nothing was measured.", names=", ".join(missing))] if missing else []
    return " ".join(said) or tell("What protection costs was not judged.")


def _less(result: Mapping[str, Any]) -> str:
    """That some texts are left out of a test; nothing where none is."""
    count = result.get("n_left_out", 0)
    return " " + tell("({count} more are left out: repeated, or trained on)", count=count) if count else ""


def _facts(side: Side) -> list[tuple[str, str]]:
    first, n = side.results[0], len(side.results)
    least, most = (end(r["epochs"] for r in side.results) for end in (min, max))
    epochs = str(most) if least == most else f"{least}–{most}"
    seconds = duration(sum(r["wall_seconds"] for r in side.results) / n)
    about = [
        (tell("seeds"), ", ".join(str(r["seed"]) for r in side.results)),
        (tell("test texts"), str(first["n_test"]) + _less(first)),
        (tell("time"), tell("{duration} a training, {epochs} epochs", duration=seconds, epochs=epochs)),
    ]
    return [*about, (tell("guarantee"), "; ".join(promises(side.results)))]


def _step(folder: Path, plan: Mapping[str, Any], side: Side, word: str) -> Step:
    if word == UNMEASURED:
        return Step(tell("Train at a lower learning rate."))
    if side.at_chance:
        return Step(remedy(not_learned(side.results)))
    saved = sorted(folder.glob(f"*-{side.results[0]['seed']}/result.json"))
    place = next((p.parent for p in saved if json.loads(p.read_text(encoding="utf-8"))["defense"] == side.name), None)
    if place is None or not (place / "model").is_dir():
        return Step(tell("Measure what it prevents with rasura audit."))
    attacked = {**plan, "data": place / "model", "task": None if plan["task"] == "classification" else plan["task"]}
    trained = {"members": plan["data"], "rows": folder / "rows.json", "defense": None if plain(side.name) else side.name}
    return Step(
        tell("Measure what the trained model reveals about its training texts."),
        command("membership", attacked, ("task", "text_column", "pair_column", "label_column"), **trained),
    )


def _table(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    names = list(results[0]["after"])
    columns = [tell("protection"), tell("seed"), *names, tell("{metric} before", metric=names[0]), tell("epochs")]
    figures = {"after": names, "before": names[:1]}
    rows = [
        [r["defense"], str(r["seed"]),
         *(number(r[when][n] if has_figures(r, when) else None, ".3f") for when, some in figures.items() for n in some),
         str(r["epochs"])]
        for r in results
    ]  # fmt: skip
    return columns, rows


def _curves(found: Sequence[Side]) -> tuple[list[dict[str, Any]], float, int]:
    """Training loss by epoch of the first seed of each protection, in pixels; its maximum and the number of epochs."""
    losses = {s.name: [e["train_loss"] for e in s.results[0]["history"] if e.get("train_loss") is not None] for s in found}
    losses = {name: some for name, some in losses.items() if len(some) > 1}
    most, epochs = max((max(some) for some in losses.values()), default=1.0), max(map(len, losses.values()), default=0)
    curves = []
    for number_, (name, some) in enumerate(losses.items()):
        points = " ".join(f"{60 + 430 * k / (epochs - 1):.1f},{200 - 175 * v / most:.1f}" for k, v in enumerate(some))
        curves.append({"name": name, "points": points, "colour": COLOURS[number_ % len(COLOURS)]})
    return curves, most, epochs
