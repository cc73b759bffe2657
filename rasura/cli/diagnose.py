"""``rasura diagnose``: what will go wrong in a private training, said before its first step."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from statistics import median
from typing import Annotated, Any

import typer

from rasura.cli.shared import (
    AsJson,
    FreshLabels,
    LabelColumn,
    MaxLength,
    Optimizer,
    PairColumn,
    TextColumn,
    TextTask,
    Truncate,
    app,
    out,
    say,
    say_json,
    starting,
    text_task,
)


@app.command()
def diagnose(
    data: Annotated[str, typer.Argument(help="texts to look at: JSONL, CSV or Parquet file, or data set id")],
    examples: Annotated[int, typer.Option(help="number of texts that will be trained on")],
    public: Annotated[bool, typer.Option("--public/--private", help="whether the texts of DATA are public")],
    model: Annotated[str, typer.Option(help="model folder or hub id")] = "minilm",
    task: TextTask = None,
    defense: Annotated[str, typer.Option(help="dp-sgd or normalised, as in rasura train")] = "dp-sgd",
    target_epsilon: Annotated[float | None, typer.Option(help="epsilon that dp-sgd without a number must keep to")] = None,
    epochs: Annotated[int, typer.Option(help="number of epochs")] = 20,
    batch_size: Annotated[int, typer.Option(help="texts per step")] = 32,
    learning_rate: Annotated[float, typer.Option(help="learning rate of AdamW or SGD")] = 1e-4,
    optimizer: Optimizer = "adamw",
    lora: Annotated[int, typer.Option(help="rank of the LoRA adapters to train instead of the weights; 0: no adapters")] = 0,
    texts: Annotated[int, typer.Option(help="number of texts to look at, drawn at random")] = 30,
    delta: Annotated[float | None, typer.Option(help="delta of the guarantee")] = None,
    num_labels: FreshLabels = None,
    truncate: Truncate = False,
    max_length: MaxLength = None,
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    as_json: AsJson = False,
) -> None:
    """Look at the gradients of a few texts, and say what will go wrong in a private training: clip, noise, rate, layers.

    Example: rasura diagnose public.jsonl --public --examples 5000 --target-epsilon 8 --batch-size 256 --epochs 3
    """
    from rasura.core.options import known
    from rasura.data.columns import Columns
    from rasura.runs.diagnosed_file import diagnose_file
    from rasura.victims.recipe import Recipe

    kind: Any = text_task(task, model, num_labels)
    rule: Any = known("optimizer", optimizer, ("adamw", "sgd"))
    with starting():
        found = diagnose_file(
            data, model, defense, Recipe(epochs, batch_size, learning_rate, optimizer=rule), task=kind, examples=examples,
            public=public, texts=texts, target_epsilon=target_epsilon, delta=delta, lora=lora, num_labels=num_labels,
            truncate=truncate, max_length=max_length, columns=Columns(text_column, pair_column, label_column),
        )  # fmt: skip
    if as_json:
        say_json(asdict(found))
        return
    for number, finding in enumerate(found.findings, 1):
        say(f"{number}. {finding}")
    if not found.findings:
        say("Nothing was found. That is not a promise.")
    norms = found.norms
    out.print(
        f"clip {found.clip:g}, noise multiplier {found.sigma:.4g}, {found.steps} steps, {found.trained} trained weights"
    )
    if all(map(isfinite, norms)):
        out.print(f"norms of a text's gradient: {min(norms):.3g} to {max(norms):.3g}, median {median(norms):.3g}")
    if found.signal_to_noise is not None and found.after is not None:
        least = f", at least {found.least:.2g} by the 95 % interval" if found.least else ""
        out.print(f"signal over noise: {found.signal_to_noise:.2g} in a step, {found.after:.2g} after all steps{least}")
