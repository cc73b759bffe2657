"""``rasura membership``: which texts was a model trained on?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from rasura.cli.shared import (
    Device,
    LabelColumn,
    MaxLength,
    Out,
    PairColumn,
    ReportLanguage,
    TextColumn,
    Truncate,
    app,
    err,
    out,
    say,
    say_json,
    split,
    training_device,
    watched,
)
from rasura.core.errors import InputError


@app.command()
def membership(
    model: Annotated[str, typer.Argument(help="the trained model: folder or hub id")],
    members: Annotated[str, typer.Option(help="texts that it was trained on: JSONL, CSV or Parquet file, or data set id")],
    non_members: Annotated[str | None, typer.Option(help="texts of the same kind that it was not trained on")] = None,
    rows: Annotated[
        str | None, typer.Option(help="rows.json of the training run, which names the rows used and held out")
    ] = None,
    base: Annotated[str | None, typer.Option(help="public model that training started from")] = None,
    reference: Annotated[str | None, typer.Option(help="more texts of the same kind, known to the adversary")] = None,
    task: Annotated[str | None, typer.Option(help="classification or causal")] = None,
    attack: Annotated[
        str | None, typer.Option(help="attacks, separated by commas; see: rasura list membership-attacks")
    ] = None,
    shadow_models: Annotated[int, typer.Option(help="number of shadow models that the adversary trains; must be even")] = 8,
    defense: Annotated[str, typer.Option(help="the protection under which the model was trained")] = "none",
    epochs: Annotated[
        int | None, typer.Option(help="epochs of the shadow models; use the same number as for the model")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="texts per step of the shadow models")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="learning rate of the shadow models")] = None,
    optimizer: Annotated[str | None, typer.Option(help="optimizer: adamw or sgd")] = None,
    fpr: Annotated[str | None, typer.Option(help="false positive rates, separated by commas")] = None,
    epsilon: Annotated[float | None, typer.Option(help="epsilon of a guarantee to compare the results with")] = None,
    delta: Annotated[float, typer.Option(help="delta of that guarantee")] = 0.0,
    limit: Annotated[int | None, typer.Option(help="number of members and of non-members to ask about")] = None,
    num_labels: Annotated[int | None, typer.Option(help="number of classes, if the model folder does not state it")] = None,
    truncate: Truncate = False,
    max_length: MaxLength = None,
    seed: Annotated[int, typer.Option(help="random seed")] = 0,
    folder: Out = Path("runs/membership"),
    device: Device = "auto",
    text_column: TextColumn = None,
    pair_column: PairColumn = None,
    label_column: LabelColumn = None,
    report_language: ReportLanguage = "en",
    as_json: Annotated[bool, typer.Option("--json", help="print the records as JSON")] = False,
) -> None:
    """Measure how well an adversary with query access to a trained model can tell which texts it was trained on.

    Example: rasura membership my-adapter --members train.jsonl --non-members other.jsonl
    """
    from rasura.core.options import known
    from rasura.report.language import LANGUAGES
    from rasura.runs.membership_plan import MembershipPlan
    from rasura.runs.membership_rows import learned

    kind = None if optimizer is None else known("optimizer", optimizer, ("adamw", "sgd"))
    asked = {"epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate, "optimizer": kind}
    recipe = learned(model, members, rows, seed, {name: value for name, value in asked.items() if value is not None})
    try:
        rates = tuple(float(part) for part in split(fpr) or ())
    except ValueError:
        raise InputError(f"--fpr is {fpr!r}; expected fractions separated by commas, for example 0.01,0.001") from None
    plan = MembershipPlan(
        model, members, non_members, rows, base, task, split(attack), reference, defense, shadow_models,
        rates, epsilon, delta, limit, num_labels, truncate, max_length, text_column, pair_column, label_column, recipe,
    )  # fmt: skip
    known("language", report_language, LANGUAGES)
    told(plan, folder, training_device(device), as_json, report_language)


def judged(plan: Any, folder: Path, device: str) -> tuple[Any, list[Any]]:
    """The identity of the run and a record of each attack."""
    from rasura.core.run_store import RunStore
    from rasura.runs.membership import MembershipAudit

    with err.status("loading the model and the texts"):
        prepared = MembershipAudit(plan, folder, device=device)
        store = RunStore(folder, prepared.identity)
    with watched(close=store.close) as bar:
        line = bar.add_task("", total=None)
        for _ in prepared.run(
            store, lambda what, done, all_: bar.update(line, description=what, completed=done, total=all_)
        ):
            pass
        return prepared.identity, list(store)


def told(plan: Any, folder: Path, device: str, as_json: bool, language: str = "en") -> None:
    """Run ``plan``, a ``MembershipPlan``, into ``folder``; print the results and write the report in ``language``."""
    from rasura.report.membership import membership_findings
    from rasura.report.page import write_report

    identity, records = judged(plan, folder, device)
    path = write_report(folder, language=language)
    if as_json:
        say_json(records)
        return
    found = membership_findings(records, identity)
    for sentence in found.sentences:
        out.print(sentence, markup=False, highlight=False, style="bold")
    table = Table(*found.columns)
    for row in found.rows:
        table.add_row(*row)
    out.print(table)
    for line_ in (*found.checks, *found.reasons):
        out.print(line_, markup=False, highlight=False)
    say(f"\nreport: {path}")
