"""``rasura canaries``: a lower bound of epsilon from one training, by texts that are in it or not by a coin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import (
    AsJson,
    LabelColumn,
    PairColumn,
    TextColumn,
    TextTask,
    app,
    err,
    out,
    say,
    say_json,
    starting,
    text_task,
)
from rasura.core.errors import InputError
from rasura.core.rounding import below

canaries = typer.Typer(no_args_is_help=True, help="Measure a lower bound of epsilon: draw canary texts, train, measure.")
app.add_typer(canaries, name="canaries")

Folder = Annotated[Path, typer.Argument(help="folder of the canaries")]


@canaries.command()
def draw(
    folder: Folder,
    model: Annotated[str, typer.Option(help="model that will be trained: folder or hub id")],
    data: Annotated[str | None, typer.Option(help="training texts that the canaries are mixed into")] = None,
    number: Annotated[int, typer.Option(help="number of canaries; half of them are trained on")] = 500,
    task: TextTask = None,
    num_labels: Annotated[int | None, typer.Option(help="number of classes, if the model folder does not state it")] = None,
    unit: Annotated[
        str | None, typer.Option(help="column of --data that says whose each text is, kept for rasura train")
    ] = None,
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    as_json: AsJson = False,
) -> None:
    """Write the texts to train on (train.jsonl), and the canaries with their coins, which must stay secret (canaries.json).

    Example: rasura canaries draw canaries --model minilm --data notes.jsonl --number 500
    """
    with starting(), err.status("drawing"):
        from rasura.data.columns import Columns
        from rasura.runs.canaries import COINS, MIXED
        from rasura.runs.canaries import draw as drawn

        kind: Any = text_task(task, model, num_labels)
        columns = Columns(text_column, pair_column, label_column, unit)
        made = drawn(model, data, number, folder, task=kind, num_labels=num_labels, columns=columns)
    inside = sum(one.included for one in made)
    if as_json:
        about = {"canaries": len(made), "included": inside, "train": str(folder / MIXED), "coins": str(folder / COINS)}
        say_json(about)
        return
    out.print(f"{len(made)} canaries, {inside} of them in the training texts")
    for what, name in (("train on all of", MIXED), ("keep secret", COINS)):
        say(f"{what}: {folder / name}")


@canaries.command()
def measure(
    folder: Folder,
    model: Annotated[str, typer.Option(help="the trained model: folder or hub id")],
    base: Annotated[str | None, typer.Option(help="model that training started from; none scores by the loss alone")] = None,
    delta: Annotated[float | None, typer.Option(help="delta of the guarantee; without --epsilon, default: 1e-5")] = None,
    guesses: Annotated[int | None, typer.Option(help="number of guesses, even; default: a fifth of the canaries")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="stated epsilon, with its --delta; exit code 3 if the bound is above it")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what the trained model shows about the canaries: a lower bound of epsilon at confidence 0.95.

    Choose --guesses before you look at any result. Exit code 3: the stated epsilon at this delta is refuted.

    Example: rasura canaries measure canaries --model runs/train/dp-sgd-1.0-0/model --base minilm --epsilon 8 --delta 1e-5
    """
    if epsilon is not None and not epsilon >= 0:
        raise InputError(f"--epsilon is {epsilon}; expected at least 0")
    if epsilon is not None and delta is None:
        raise InputError(
            "--epsilon is stated at a delta, and a bound at another one says nothing about it; also pass --delta"
        )
    with starting(), err.status("measuring"):
        from rasura.runs.canaries import measure as measured

        found = measured(folder, model, base=base, delta=1e-5 if delta is None else delta, guesses=guesses)
    bound, refuted = found.bound, epsilon is not None and found.bound.epsilon > epsilon
    if as_json:
        say_json({**found.to_dict(), "stated": epsilon, "refuted": refuted})
    else:
        out.print(
            f"{bound.right} of {bound.guesses} guesses right, on {bound.canaries} canaries (chance: {bound.guesses / 2:g})"
        )
        out.print(f"epsilon is at least {below(bound.epsilon)} at delta {bound.delta:g} (confidence {bound.confidence:g})")
        if found.gaussian is not None:
            out.print(f"if the training hides a text as Gaussian noise does: at least {below(found.gaussian.epsilon)}")
        if found.exposure is not None:
            out.print(f"exposure: {found.exposure:.2f} bits on average; texts left out: {found.chance:.2f}")
        if (told := found.extracted) is not None:
            out.print(
                f"written to the end, word for word, after their first half: {told.included} of {told.trained} canaries; of "
                f"those left out {told.left_out} of {told.others}"
            )
        if not bound.epsilon:
            start = "Without that assumption the" if found.gaussian is not None and found.gaussian.epsilon else "The"
            out.print(f"{start} guesses show nothing. That does not prove that the training is private.")
        if refuted:
            out.print(f"The stated epsilon {epsilon:g} at delta {bound.delta:g} is refuted.", style="bold")
    if refuted:
        raise typer.Exit(3)
