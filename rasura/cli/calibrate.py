"""``rasura calibrate``: find how much protection is enough."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rasura.cli.shared import (
    AnyTask,
    AsJson,
    AttackedModel,
    Budget,
    Entries,
    FirstSeed,
    FreshLabels,
    LabelColumn,
    LanguageModel,
    MaxLength,
    Out,
    PairColumn,
    Reference,
    ReportLanguage,
    Seeds,
    Source,
    StepDevice,
    TextColumn,
    TruncateAll,
    app,
    device_named,
    err,
    out,
    say,
    say_json,
    split,
    task_named,
    watched,
)
from rasura.core.errors import InputError

if TYPE_CHECKING:
    from rasura.core.values import Task

Families = Annotated[str, typer.Option(help="protections without their parameters, separated by commas: gaussian,pruning")]
Attacks = Annotated[
    str | None,
    typer.Option(help="attacks, separated by commas; see: rasura list attacks"),
]
Risk = Annotated[str | None, typer.Option(help="risk metric; see: rasura list metrics")]
AtMost = Annotated[float, typer.Option(help="largest fraction that the upper 95 % bound of the risk may reach")]
Steps = Annotated[int, typer.Option(help="bisection steps between the last setting that fails and the first that holds")]
Utility = Annotated[
    str | None, typer.Option(help="also measure this utility at the setting found: accuracy, f1, mcc, loss or perplexity")
]
TrainBatch = Annotated[int, typer.Option(help="examples per step, for training and for the formal guarantee")]
Attacked = Annotated[
    int | None, typer.Option(help="number of examples to attack; up to twice as many others are read to verify")
]


@app.command()
def calibrate(
    file: Source = None,
    text: Annotated[list[str] | None, typer.Option(help="a text to attack (repeatable), instead of FILE")] = None,
    defense: Families = "gaussian",
    attack: Attacks = None,
    risk: Risk = None,
    at_most: AtMost = 0.1,
    steps: Steps = 3,
    utility: Utility = None,
    train: Annotated[str | None, typer.Option(help="texts to train on for --utility")] = None,
    test: Annotated[str | None, typer.Option(help="texts to evaluate the trained model on")] = None,
    train_limit: Annotated[int | None, typer.Option(help="number of texts to train on")] = None,
    epochs: Annotated[int, typer.Option(help="epochs of training and of the formal guarantee")] = 3,
    train_batch_size: TrainBatch = 32,
    learning_rate: Annotated[float, typer.Option(help="learning rate for training")] = 1e-4,
    reference: Reference = None,
    language_model: LanguageModel = None,
    model: AttackedModel = None,
    task: AnyTask = None,
    update: Annotated[str, typer.Option(help="kind of update; see: rasura list update-kinds")] = "fedsgd",
    threat: Annotated[str, typer.Option(help="the threat model; see: rasura list threats")] = "honest-server",
    batch_size: Annotated[int, typer.Option(help="examples per update")] = 1,
    limit: Attacked = None,
    seeds: Seeds = 1,
    seed: FirstSeed = 0,
    budget: Budget = "default",
    max_memory: Annotated[int, typer.Option(help="memory of an attack in MiB, beside model and update")] = 4096,
    entries: Entries = None,
    num_labels: FreshLabels = None,
    truncate: TruncateAll = False,
    max_length: MaxLength = None,
    folder: Out = Path("runs/calibrate"),
    device: StepDevice = "auto",
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    report_language: ReportLanguage = "en",
    as_json: AsJson = False,
) -> None:
    """Find the weakest protection that keeps the attacks below a target fraction, and measure its cost.

    Exit code 2: no protection reaches the target. 4: the target could not be judged, because there are too few examples or
    an attack is missing.

    Example: rasura calibrate notes.jsonl --defense gaussian,pruning --attack span --risk rougeL --at-most 0.1
    """
    from rasura.runs.calibration_plan import CalibrationPlan
    from rasura.runs.plans import Plan
    from rasura.victims.recipe import Recipe

    kind = task_named(task, model, num_labels)
    plan = Plan(
        model or Plan.model, kind, file, _one_source(file, text), reference, language_model, _attacks(attack, defense, kind),
        split(defense) or (), (update,), (threat,), (batch_size,), seeds=seeds, seed=seed, max_memory=max_memory,
        limit=(len(text or ()) or 8) if limit is None else limit, truncate=truncate, max_length=max_length, entries=entries,
        num_labels=num_labels, budget=budget, text_column=text_column, pair_column=pair_column, label_column=label_column,
    )  # fmt: skip
    recipe = Recipe(epochs, train_batch_size, learning_rate, patience=epochs, seed=seed)
    wanted = CalibrationPlan(plan, risk or _usual_risk(kind), at_most, steps, utility, train, test, train_limit, recipe)
    run_calibration(wanted, folder, device_named(device), as_json, report_language)


def _usual_risk(task: str) -> str:
    return "ssim" if task == "vision" else "rougeL"


def _one_source(file: str | None, text: list[str] | None) -> tuple[str, ...]:
    """The texts of ``--text``. Raises ``InputError`` if FILE was given as well."""
    if file and text:
        raise InputError("FILE and --text were both given; pass one of them")
    return tuple(text or ())


def _attacks(named: str | None, defense: str, task: Task) -> tuple[str, ...]:
    """The attacks of ``--attack``, or the usual ones for the task and those that know the protections."""
    from rasura.registry import ATTACKS, adversaries, for_task

    knowing = adversaries(defense.replace(",", "+"), task=task).attacks
    if task == "vision":
        return split(named) or for_task(ATTACKS, "vision")
    return split(named) or tuple(dict.fromkeys(("embedding-rows", "span", *knowing)))


def run_calibration(wanted: Any, folder: Path, device: str, as_json: bool, language: str = "en") -> None:
    """Run ``wanted``, a ``CalibrationPlan``, into ``folder``; print the result and write the report in ``language``."""
    from rasura.core.options import known
    from rasura.report.calibration import REACHED
    from rasura.report.commands import applied
    from rasura.report.head import duration
    from rasura.report.language import LANGUAGES
    from rasura.report.page import write_report
    from rasura.runs.calibration import Calibration

    known("language", language, LANGUAGES)
    with err.status("loading the model and the data"):
        prepared = Calibration(wanted, folder, device=device)
    say(
        f"{prepared.n_texts} examples, verified on {prepared.which}; roughly {duration(prepared.estimate())} of CPU time "
        "if the run starts from the beginning",
        to=err,
    )
    for said in prepared.too_few():
        say(said, to=err)
    with watched(close=prepared.close) as bar:
        line = bar.add_task("", total=None)
        result = prepared.run(lambda c: bar.update(line, description=f"{c.attack} / {c.defense}"))
    path = write_report(folder, language=language)
    found = [f["setting"] for f in result["families"] if f["status"] in REACHED]
    apply = {setting: applied(setting, wanted.plan.canonical(), result["training"]) for setting in found}
    if as_json:
        say_json({**result, "apply": apply, "report": str(path)})
    else:
        _print(result, path)
        for setting, lines in apply.items():
            out.print(f"\nto apply {setting}, and to audit exactly that:", markup=False, highlight=False)
            for one in lines:
                say(f"    {one}")
    statuses = {f["status"] for f in result["families"]}
    if not statuses & set(REACHED) and "not measured" in statuses:
        say(f"not judged: {result['recommendation']} Report: {path}", to=err)
        raise typer.Exit(4)
    if not statuses & set(REACHED):
        raise InputError(f"{result['recommendation']} Report: {path}")


def _print(result: dict[str, Any], path: Path) -> None:
    from rasura.report.calibration import REACHED, cost, doubt, rows
    from rasura.report.training import chose

    if any(f["status"] in REACHED for f in result["families"]):
        out.print(result["recommendation"], markup=False, highlight=False, style="bold")
    table = Table("protection")
    table.add_column("setting", no_wrap=True)
    for name in ("risk (95 %), n", "verified (95 %), n", "sent", "s", "cost"):
        table.add_column(name)
    for row, part in zip(rows(result), result["families"]):
        table.add_row(
            row["family"], row["setting"], row["risk"], row["again"], row["sent"], row["seconds"], cost(part, short=True)
        )
    out.print(table)
    for row, part in zip(rows(result), result["families"]):
        if part["status"] not in REACHED:
            out.print(row["says"], markup=False, highlight=False)
        promised = [row["promise"], *row["warnings"]] if part["status"] in REACHED else []
        for line in (*row["yardsticks"], *promised, doubt(part)):
            out.print(f"{row['family']}: {line}" if line else "", markup=False, highlight=False)
    told = [f["utility"] for f in result["families"] if "cost" in (f.get("utility") or {})]
    for line in filter(None, (*result["checks"], chose(told))):
        out.print(line, markup=False, highlight=False)
    say(f"\nreport: {path}")
