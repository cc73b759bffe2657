"""``rasura train``: measure what protections cost."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from rasura.cli.shared import (
    Device,
    FirstSeed,
    FreshLabels,
    LabelColumn,
    MaxLength,
    Optimizer,
    PairColumn,
    Seeds,
    TextColumn,
    TextTask,
    Truncate,
    app,
    err,
    out,
    say,
    say_json,
    split,
    task_named,
    training_device,
    watched,
)
from rasura.core.errors import InputError, MissingExtra
from rasura.core.options import known
from rasura.core.rounding import above

Schedule = Annotated[str, typer.Option(help="learning rate schedule: constant, linear or cosine; the last two decay to 0")]
Round = Annotated[
    str | None,
    typer.Option(
        "--update", help="local training of a client, as in rasura audit; sets epochs, batch size, optimizer and adapter"
    ),
]
ForService = Annotated[
    bool, typer.Option("--service", help="treat --defense as protections of a model service: none,obfuslm:k=10")
]
Unit = Annotated[str | None, typer.Option(help="column that says whose each text is: dp-sgd then protects persons")]
Models = Annotated[Path, typer.Option("--out", help="folder for the models; the same command resumes the run")]
one_of: Any = known  # whose answers a recipe takes for its literals


@app.command()
def train(
    context: typer.Context,
    data: Annotated[str, typer.Argument(help="training texts: JSONL, CSV or Parquet file, or data set id")],
    test: Annotated[str | None, typer.Option(help="original texts to evaluate the trained model on")] = None,
    model: Annotated[str, typer.Option(help="model folder or hub id")] = "minilm",
    task: TextTask = None,
    defense: Annotated[str, typer.Option(help="defenses, separated by commas; combine defenses with +")] = "none",
    epochs: Annotated[int, typer.Option(help="maximum number of epochs")] = 20,
    patience: Annotated[int, typer.Option(help="epochs without improvement before training stops")] = 5,
    keep: Annotated[str, typer.Option(help="weights to keep: best (of the best epoch) or last")] = "best",
    batch_size: Annotated[int, typer.Option(help="texts per step")] = 32,
    learning_rate: Annotated[float, typer.Option(help="learning rate of AdamW or SGD")] = 1e-4,
    schedule: Schedule = "constant",
    warmup: Annotated[float, typer.Option(help="fraction of the steps used for linear warm-up")] = 0.0,
    optimizer: Optimizer = "adamw",
    update: Round = None,
    lora: Annotated[int, typer.Option(help="rank of the LoRA adapters to train instead of the weights; 0: no adapters")] = 0,
    targets: Annotated[str, typer.Option(help="layers with adapters: attention (queries and values) or all")] = "attention",
    adapter_dropout: Annotated[float, typer.Option(help="dropout on the inputs of the adapters")] = 0.0,
    holdout: Annotated[float, typer.Option(help="fraction of the training texts held out for early stopping")] = 0.1,
    limit: Annotated[int | None, typer.Option(help="number of training texts to use")] = None,
    seeds: Seeds = 1,
    seed: FirstSeed = 0,
    num_labels: FreshLabels = None,
    truncate: Truncate = False,
    max_length: MaxLength = None,
    service: ForService = False,
    precision: Annotated[str, typer.Option(help="precision: float32 or bf16")] = "float32",
    delta: Annotated[float | None, typer.Option(help="delta of a formal guarantee")] = None,
    target_epsilon: Annotated[float | None, typer.Option(help="epsilon that dp-sgd or dp-ftrl:band=B must keep to")] = None,
    seeded_noise: Annotated[bool, typer.Option("--seeded-noise", help="noise from the seed, without a guarantee")] = False,
    physical_batch_size: Annotated[int | None, typer.Option(help="texts in memory at once, under dp-sgd")] = None,
    gradient_canaries: Annotated[int, typer.Option(help="gradients that measure a lower bound of epsilon; 0: none")] = 0,
    unit: Unit = None,
    device: Device = "auto",
    folder: Models = Path("runs/train"),
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the results as JSON")] = False,
) -> None:
    """Fine-tune a model under each protection, and compare the models on original text.

    Example: rasura train train.jsonl --test test.jsonl --defense none,gaussian:0.001,ghost
    """
    from rasura.runs.train_plan import TrainPlan
    from rasura.victims.recipe import Recipe

    recipe = Recipe(
        epochs, batch_size, learning_rate, patience=patience, optimizer=one_of("optimizer", optimizer, ("adamw", "sgd")),
        precision=one_of("precision", precision, ("float32", "bf16")), keep=one_of("epoch to keep", keep, ("best", "last")),
        seed=seed, noise="seeded" if seeded_noise else "secure", warmup=warmup, physical_batch_size=physical_batch_size,
        schedule=schedule,  # type: ignore[arg-type]  # Recipe checks it
    )  # fmt: skip
    plan = TrainPlan(
        data, test, model, task_named(task, model, num_labels), split(defense) or ("none",), limit, holdout, num_labels,
        lora, truncate, max_length, seeds, delta, recipe, service, text_column, pair_column, label_column, targets,
        adapter_dropout, target_epsilon=target_epsilon, unit=unit, gradient_canaries=gradient_canaries,
    )  # fmt: skip
    trained(prepared(following(plan, update, _given(context)), folder, training_device(device)), as_json)


def _given(context: typer.Context) -> list[str]:
    """The parameters that the user set."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name != "DEFAULT"]


OF_A_ROUND = (
    "epochs", "patience", "keep", "batch_size", "learning_rate", "schedule", "warmup", "optimizer", "lora", "targets",
    "adapter_dropout", "precision",
)  # fmt: skip
"""Parameters of ``train`` that a client's round sets."""


def following(plan: Any, update: str | None, given: Collection[str] = ()) -> Any:
    """``plan``, a ``TrainPlan``, with the local training of ``update``, if there is one. Raises ``InputError`` for other
    kinds of update, and where what it sets was ``given`` as an option, too."""
    from dataclasses import replace

    from rasura.registry import parse_update
    from rasura.victims.recipe import Recipe

    if update is None:
        return plan
    local, wire = parse_update(update)
    course = local.plan
    if course is None or wire:
        raise InputError(f"update is {update!r}; expected a full local training, such as local:epochs=1/batch=8/lora=16")
    for name in (*OF_A_ROUND, *(("limit",) if course.examples else ())):
        if name in given:
            option = f"--{name.replace('_', '-')}"
            raise InputError(f"--update says how the client trains, and {option} would be ignored; leave one of the two out")
    old = plan.recipe
    recipe = Recipe.following(
        course, patience=course.epochs, keep="last", seed=old.seed, noise=old.noise,
        physical_batch_size=old.physical_batch_size,
    )  # fmt: skip
    return replace(
        plan, recipe=recipe, lora=course.lora, targets=course.targets, adapter_dropout=course.dropout,
        limit=course.examples or plan.limit,
    )  # fmt: skip


def prepared(plan: Any, folder: Path, device: str = "cpu") -> Any:
    """The training of ``plan``, a ``TrainPlan``, with its model and texts loaded."""
    from rasura.runs.training import Training

    with err.status("loading the model and the texts"):
        return Training(plan, folder, device=device)


def trained(training: Any, as_json: bool) -> list[dict[str, Any]]:
    """Run a training from ``prepared``, print a row for each defense and seed, and return the rows. The exit code is 3 if
    canaries refute a guarantee."""
    with watched() as bar:
        line = bar.add_task("training", total=None)

        def told(what: str, done: int, total: int, figures: Any) -> None:
            shown = {k: v for k, v in figures.items() if k in ("train_loss", "accuracy", "loss", "epsilon")}
            now = " ".join(f"{k} {above(v) if k == 'epsilon' else f'{v:.3f}'}" for k, v in shown.items())
            bar.update(line, description=f"{what} {now}".strip(), completed=done, total=total)

        results = list(training.run(told))
    if as_json:
        say_json(results)
    else:
        tabled(results, training.folder)
    if any(r["canaries"]["refuted"] for r in results if "canaries" in r):
        raise typer.Exit(3)
    return results


def tabled(results: list[dict[str, Any]], folder: Path) -> None:
    """Print a row for each defense and seed, what is guaranteed and measured, and where the report is."""
    from rasura.metrics.learned import accuracy_interval, has_figures, without_figures
    from rasura.report.learning import unlearned
    from rasura.report.page import write_report
    from rasura.report.promises import alone, stated
    from rasura.report.training import optimistic, sides

    names = list(results[0]["after"])
    table = Table(Column("defense", overflow="fold"), "seed", *names, "before", "epochs")
    for r in results:
        start = f"{r['before'][names[0]]:.3f}" if has_figures(r, "before") else "not measured"
        shown = {n: f"{r['after'][n]:.3f}" if has_figures(r) else "not measured" for n in names}
        if "accuracy" in shown and (ends := accuracy_interval(r)) is not None:
            shown["accuracy"] += "\n({:.2f} to {:.2f})".format(*ends)
        table.add_row(r["defense"], str(r["seed"]), *shown.values(), start, str(r["epochs"]))
    out.print(table)
    for said in [*without_figures(results), *unlearned(results)]:
        say(said, style="bold")
    for side in sides(results):
        for line in stated(side.results):
            say(f"{side.name}: {line}")
    for said in filter(None, (alone(results), optimistic(results))):
        say(said)
    for unit in [r["unit"] for r in results if "unit" in r][:1]:
        say(
            f"a person is all texts with one value of the column {unit['column']}: {unit['persons']} persons, "
            f"{unit['most_texts']} texts or less each"
        )
    left = results[0].get("n_left_out", 0)
    less = f" ({left} more are left out: repeated, or trained on)" if left else ""
    for r in (r for r in results if "canaries" in r):
        say(f"{r['defense']}, seed {r['seed']}: {r['canaries']['statement']}")
    say(f"evaluated on {results[0]['n_test']} texts of the {results[0]['tested_on']}{less}; models: {folder}")
    try:
        say(f"report: {write_report(folder)}")
    except MissingExtra as missing:  # the trainings are stored
        say(str(missing), to=err)
