"""``rasura calibrate``: how much protection is enough."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rasura.cli.shared import LabelColumn, PairColumn, TextColumn, app, device_named, err, out, split, watched
from rasura.core.errors import InputError


@app.command()
def calibrate(
    file: Annotated[
        str | None, typer.Argument(help="JSONL, CSV or Parquet file, data set id, or a folder of images")
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="a text to attack (repeatable), instead of FILE")] = None,
    defense: Annotated[
        str, typer.Option(help="protections without their parameter, separated by commas: gaussian,pruning")
    ] = "gaussian",
    attack: Annotated[
        str | None, typer.Option(help="attacks, separated by commas; default: a few, and those that know the protections")
    ] = None,
    risk: Annotated[str | None, typer.Option(help="metric of what is read back (default rougeL; for images ssim)")] = None,
    at_most: Annotated[float, typer.Option(help="the fraction that the upper 95 % bound of the risk may reach")] = 0.1,
    steps: Annotated[int, typer.Option(help="halvings between the last setting that fails and the first that holds")] = 3,
    utility: Annotated[
        str | None, typer.Option(help="also measure accuracy, f1, mcc, loss or perplexity under the setting found")
    ] = None,
    train: Annotated[str | None, typer.Option(help="texts to train on for --utility; default FILE")] = None,
    test: Annotated[str | None, typer.Option(help="texts to judge the trained model on")] = None,
    train_limit: Annotated[int | None, typer.Option(help="number of texts to train on")] = None,
    epochs: Annotated[int, typer.Option(help="epochs of the training and of the formal guarantee")] = 3,
    train_batch_size: Annotated[int, typer.Option(help="texts per step, for the training and the formal guarantee")] = 32,
    learning_rate: Annotated[float, typer.Option(help="learning rate of the training")] = 1e-4,
    reference: Annotated[
        str | None, typer.Option(help="a file with other texts of the same kind, which the adversary has")
    ] = None,
    language_model: Annotated[
        str | None, typer.Option(help="a causal model that the adversary uses as language model")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="model folder or hub id (default minilm); for images lenet or cnn")
    ] = None,
    task: Annotated[str, typer.Option(help="classification, causal or vision")] = "classification",
    update: Annotated[str, typer.Option(help="kind of update; see: rasura list updates")] = "fedsgd",
    threat: Annotated[str, typer.Option(help="the threat model; see: rasura list threats")] = "honest-server",
    batch_size: Annotated[int, typer.Option(help="texts per update")] = 1,
    limit: Annotated[
        int | None, typer.Option(help="number of texts to attack, and as many others to verify (default 8)")
    ] = None,
    seeds: Annotated[int, typer.Option(help="number of repetitions, each with its own seed")] = 1,
    seed: Annotated[int, typer.Option(help="first seed")] = 0,
    budget: Annotated[str, typer.Option(help="work per attack: quick, default or paper")] = "default",
    max_memory: Annotated[int, typer.Option(help="memory limit of an attack in MiB")] = 4096,
    entries: Annotated[
        float | None, typer.Option(help="fraction of the entries that matching attacks form for L1 and masks")
    ] = None,
    num_labels: Annotated[int | None, typer.Option(help="number of classes of a fresh head")] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="truncate texts that are too long, crop and scale images")
    ] = False,
    folder: Annotated[Path, typer.Option("--out", help="folder for the results; the same command resumes the run")] = Path(
        "runs/calibrate"
    ),
    device: Annotated[
        str, typer.Option(help="device of the training step: auto, cpu, cuda or mps (attacks use the CPU)")
    ] = "auto",
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Find the least protection that keeps what attacks read below a fraction, and what it costs.

    Exit code 2: no protection reaches the target. 4: it could not be judged, because texts or an attack are missing.

    Example: rasura calibrate notes.jsonl --defense gaussian,pruning --attack span --risk rougeL --at-most 0.1
    """
    from rasura.registry import ATTACKS, adversaries, for_task
    from rasura.runs.calibration import CalibrationPlan
    from rasura.runs.plans import Plan
    from rasura.victims.train import Recipe

    if file and text:
        raise InputError("FILE and --text were both given; pass one of them")
    images = task == "vision"
    knowing = adversaries(defense.replace(",", "+")).attacks
    usual = for_task(ATTACKS, "vision") if images else tuple(dict.fromkeys(("embedding-rows", "span", *knowing)))
    attacks = split(attack) or usual
    plan = Plan(
        model or Plan.model, task, file, tuple(text or ()), reference, language_model, attacks, split(defense) or (),
        (update,), (threat,), (batch_size,), limit=limit or (len(text) if text else 8), seeds=seeds, seed=seed,
        budget=budget, truncate=truncate, num_labels=num_labels, max_memory=max_memory, entries=entries,
        text_column=text_column, pair_column=pair_column, label_column=label_column,
    )  # fmt: skip
    recipe = Recipe(epochs, train_batch_size, learning_rate, patience=epochs, seed=seed)
    wanted = CalibrationPlan(
        plan, risk or ("ssim" if images else "rougeL"), at_most, steps, utility, train, test, train_limit, recipe
    )
    run_calibration(wanted, folder, device_named(device), as_json)


def run_calibration(wanted: Any, folder: Path, device: str, as_json: bool) -> None:
    """Run ``wanted``, a ``CalibrationPlan``, into ``folder``; print what it found and write the report."""
    from rasura.report.calibration import REACHED
    from rasura.report.page import write_report
    from rasura.runs.calibration import Calibration

    with err.status("loading the model and the texts"):
        prepared = Calibration(wanted, folder, device=device)
    minutes = prepared.estimate() / 60
    err.print(
        f"{prepared.n_texts} texts or images, verified on {prepared.which}; roughly {max(0.1, minutes):.1f} CPU minutes "
        "for a small model if nothing is done yet", markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip
    for said in prepared.too_few():
        err.print(said, markup=False, highlight=False, soft_wrap=True)
    with watched(close=prepared.close) as bar:
        line = bar.add_task("", total=None)
        result = prepared.run(lambda c: bar.update(line, description=f"{c.attack} / {c.defense}"))
    path = write_report(folder)
    if as_json:
        sys.stdout.write(json.dumps({**result, "report": str(path)}, ensure_ascii=False) + "\n")
    else:
        _print(result, path)
    statuses = {f["status"] for f in result["families"]}
    if not statuses & set(REACHED) and "not measured" in statuses:
        err.print(f"not judged: {result['recommendation']} Report: {path}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(4)
    if not statuses & set(REACHED):
        raise InputError(f"{result['recommendation']} Report: {path}")


def _print(result: dict[str, Any], path: Path) -> None:
    from rasura.report.calibration import REACHED, cost, rows

    if any(f["status"] in REACHED for f in result["families"]):
        out.print(result["recommendation"], markup=False, highlight=False, style="bold")
    table = Table("protection")
    table.add_column("setting", no_wrap=True)
    for name in ("risk (95 %), n", "afresh (95 %), n", "MB sent", "s", "cost"):
        table.add_column(name)
    for row, part in zip(rows(result), result["families"]):
        table.add_row(
            row["family"], row["setting"], row["risk"], row["again"], row["mb"], row["seconds"], cost(part, short=True)
        )
    out.print(table)
    for row, part in zip(rows(result), result["families"]):
        if part["status"] not in REACHED:
            out.print(row["says"], markup=False, highlight=False)
        for line in (*row["yardsticks"], row["promise"] if part["status"] in REACHED else ""):
            out.print(f"{row['family']}: {line}" if line else "", markup=False, highlight=False)
    for line in result["checks"]:
        out.print(line, markup=False, highlight=False)
    out.print(f"\nreport: {path}", markup=False, highlight=False, soft_wrap=True)
