"""``rasura protect ghost`` and ``train``: apply protections and measure their cost."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from rasura.cli.shared import (
    AsJson,
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
    protect,
    say,
    split,
    task_named,
    training_device,
    watched,
)
from rasura.core.errors import InputError, MissingExtra
from rasura.core.options import known
from rasura.core.rounding import above


class Rate:
    """Rows per second since the first call, and the remaining time."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None

    def __call__(self, done: int, total: int) -> str:
        now = time.monotonic()
        if self.first is None:
            self.first = (done, now)
        rows, seconds = done - self.first[0], now - self.first[1]
        if not rows or seconds <= 0:
            return "starting"
        left = (total - done) * seconds / rows
        return f"{rows / seconds:.2f} rows/s, {left / 60:.1f} minutes left"


Overlap = Annotated[
    float | None, typer.Option(help="largest fraction of neighbours that a token and its substitute may share")
]
RoundTrip = Annotated[
    bool,
    typer.Option(
        "--round-trip", help="use only whole-word substitutes that survive a round trip through text and tokenizer"
    ),
]
Language = Annotated[
    str | None, typer.Option(help="language of the lemmas, as in simplemma: en, de ...; none turns lemmas off")
]


@protect.command()
def ghost(
    source: Annotated[str, typer.Argument(help="JSONL, CSV or Parquet file, or data set id")],
    target: Annotated[Path, typer.Argument(help="file to write: .jsonl, .csv or .parquet")],
    model: Annotated[str, typer.Option(help="the model that will be trained: folder or hub id")] = "minilm",
    k: Annotated[int | None, typer.Option(help="nearest tokens to search for a substitute")] = None,
    overlap: Overlap = None,
    group: Annotated[int | None, typer.Option(help="tokens that share substitutes; 1: as published, 8: balanced")] = None,
    beam: Annotated[int, typer.Option(help="beam width of the substitute search")] = 1,
    keep_punctuation: Annotated[bool, typer.Option("--keep-punctuation", help="leave punctuation unchanged")] = False,
    keep_numbers: Annotated[bool, typer.Option("--keep-numbers", help="leave numbers unchanged")] = False,
    round_trip: RoundTrip = False,
    language: Language = None,
    table: Annotated[Path | None, typer.Option(help="file that caches the search; written if it does not exist")] = None,
    seed: Annotated[int, typer.Option(help="seed for the initial substitutes")] = 0,
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    as_json: AsJson = False,
) -> None:
    """Obfuscate a data set before training: replace tokens by nearby tokens with a different meaning.

    The same command resumes an interrupted run.

    Example: rasura protect ghost notes.jsonl hidden.jsonl --model minilm
    """
    from dataclasses import asdict

    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from rasura.data.columns import Columns
    from rasura.ghost.table import ShadowSettings
    from rasura.runs.ghost_file import obfuscate_file

    given = {"k": k, "overlap": overlap, "group": group}
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if k is not None:
        asked["max_k"] = max(k, ShadowSettings.max_k)
    if language is not None:
        asked["language"] = None if language == "none" else language
    flags = {"keep_punctuation": keep_punctuation, "keep_numbers": keep_numbers, "round_trip": round_trip}
    asked |= {name: True for name, value in flags.items() if value}
    there = table is not None and table.exists()
    with watched(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()) as bar:
        task = bar.add_task("loading the model and searching for substitutes", total=None)
        rate = Rate()
        found = obfuscate_file(
            source, target, model=model, table=table, shadows=asked, beam=beam, seed=seed,
            columns=Columns(text_column, pair_column, label_column),
            progress=lambda done, total: bar.update(task, completed=done, total=total, description=rate(done, total)),
        )  # fmt: skip
    if there:
        say(f"settings of {table}: {found.settings}", to=err)
    if as_json:
        sys.stdout.write(json.dumps({**asdict(found), "path": str(found.path), "card": str(found.card)}) + "\n")
        return
    out.print(f"{found.rows} texts, {found.tokens} tokens: {found.weak} with a weak substitute, {found.unchanged} unchanged")
    if found.unchanged:
        say(f"unchanged: {found.kept} have no substitute, the settings keep the others; the report says which")
    say(f"data: {found.path}\ncard: {found.card}")


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
Models = Annotated[Path, typer.Option("--out", help="folder for the models; the same command resumes the run")]
one_of: Any = known  # whose answers a recipe takes for its literals


@app.command()
def train(
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
    unit: Annotated[
        str | None, typer.Option(help="column that says whose each text is: dp-sgd then protects persons")
    ] = None,
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

    kind = task_named(task, model, num_labels)
    recipe = Recipe(
        epochs, batch_size, learning_rate, patience=patience, optimizer=one_of("optimizer", optimizer, ("adamw", "sgd")),
        precision=one_of("precision", precision, ("float32", "bf16")), keep=one_of("epoch to keep", keep, ("best", "last")),
        seed=seed, noise="seeded" if seeded_noise else "secure", warmup=warmup, physical_batch_size=physical_batch_size,
        schedule=schedule,  # type: ignore[arg-type]  # Recipe checks it
    )  # fmt: skip
    plan = TrainPlan(
        data, test, model, kind, split(defense) or ("none",), limit, holdout, num_labels, lora, truncate, max_length, seeds,
        delta, recipe, service, text_column, pair_column, label_column, target_epsilon=target_epsilon, unit=unit,
        gradient_canaries=gradient_canaries,
    )  # fmt: skip
    trained(prepared(plan if update is None else following(plan, update), folder, training_device(device)), as_json)


def following(plan: Any, update: str) -> Any:
    """``plan``, a ``TrainPlan``, with the local training of ``update``. Raises ``InputError`` for other kinds of update."""
    from dataclasses import replace

    from rasura.registry import parse_update
    from rasura.victims.recipe import Recipe

    local, wire = parse_update(update)
    course = local.plan
    if course is None or wire:
        raise InputError(f"update is {update!r}; expected a full local training, such as local:epochs=1/batch=8/lora=16")
    old = plan.recipe
    recipe = Recipe.following(course, patience=course.epochs, keep="last", seed=old.seed, noise=old.noise)
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
            bar.update(line, description=f"{what} {now}", completed=done, total=total)

        results = list(training.run(told))
    if as_json:
        sys.stdout.write(json.dumps(results) + "\n")
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
