"""``rasura compare``, ``bundle`` and ``reproduce``: what changed between runs, and whether figures come back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from rasura.cli.shared import StepDevice, app, device_named, err, out, say, say_json
from rasura.core.rounding import percent, percent_above, percent_below

if TYPE_CHECKING:
    from rasura.report.compare import Comparison

Folder = Annotated[Path, typer.Argument(help="the --out folder of a run")]
Json = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@app.command()
def compare(first: Folder, second: Folder, as_json: Json = False) -> None:
    """Say what changed between two audits of the same kind, beyond noise.

    If both audits read the same texts, each text is compared with itself. Exit code 3: a verdict became worse, or more was
    read. 4: a comparison could not be made, as where an attack crashed or was not run in one of the audits, or of too few
    texts.

    Example: rasura compare runs/before runs/after
    """
    from rasura.report.compare import compared
    from rasura.report.page import opened

    found = compared(opened(first), opened(second))
    if as_json:
        told = asdict(found) | {"says": found.says, "exit": found.exit}
        say_json(told)
    else:
        _print(found)
    if found.exit:
        raise typer.Exit(found.exit)


def _print(found: Comparison) -> None:
    for line in found.settings:
        say(f"different: {line}")
    verdicts = [v for v in found.verdicts if v[1] != v[2]]
    for column, was, now in verdicts:
        said = f"{column}: {was or 'not in the first run'}; then {now or 'not in the second run'}"
        say(f"{'worse verdict' if column in found.worse else 'verdict'} on {said}")
    table = Table("attack", "protection", "before, %", "after, %", "difference, points", "n", "", header_style="bold")
    table.caption = "An attack that gave up counts as guessing. Where all gave up, the figure is that of guessing."
    for c in found.changes:
        mean = ["–" if v is None else f"{percent(v):.0f}" for v in (c.before, c.after)]
        span = "–" if c.low is None or c.high is None else f"{percent_below(c.low):+.0f} to {percent_above(c.high):+.0f}"
        n = str(c.n[0]) if c.n[0] == c.n[1] else f"{c.n[0]}, {c.n[1]}"
        word = f"{c.word}: {c.why}" if c.why else c.word
        table.add_row(c.attack, f"{c.column} ({c.where})" if c.where else c.column, *mean, span, n, word)
    out.print(table)
    out.print(found.says)


@app.command(name="bundle")
def bundle_run(
    folder: Folder,
    file: Annotated[Path | None, typer.Option("--out", help="file to write")] = None,
) -> None:
    """Write the records, plan, versions and hashes of a run into one file.

    Example: rasura bundle runs/audit --out audit.json
    """
    from rasura.runs.bundles import bundle, missing, read_bundle

    path = bundle(folder, file or folder / "bundle.json")
    say(f"bundle: {path}")
    if gap := missing(read_bundle(path)):
        say(gap)
    err.print("The bundle is personal data, as the run is.")


@app.command()
def reproduce(
    file: Annotated[Path, typer.Argument(metavar="BUNDLE", help="a file that rasura bundle wrote")],
    attack: Annotated[str | None, typer.Option(help="only cells of this attack")] = None,
    defense: Annotated[str | None, typer.Option(help="only cells of this defense")] = None,
    cells: Annotated[
        int, typer.Option(help="number of cells to run again, the quickest first; 0: all with a figure", min=0)
    ] = 3,
    data: Annotated[str | None, typer.Option(help="the data file of the run, if it is elsewhere")] = None,
    model: Annotated[str | None, typer.Option(help="the model of the run, if it is elsewhere")] = None,
    reference: Annotated[str | None, typer.Option(help="the reference text of the run, if it is elsewhere")] = None,
    device: StepDevice = "auto",
    as_json: Json = False,
) -> None:
    """Run cells of a bundled audit again and say whether their figures come back.

    A cell in which the attack gave up has a figure too, that of guessing. Cells of guessing itself are left out unless
    --attack names it, and cells without a figure unless there are no others. What is left out is counted. The command
    refuses data, reference text or weights that are not those of the run, and says where the run is unfinished. Exit
    code 1: a figure did not come back, or no cell has one.

    Example: rasura reproduce audit.json --attack span --cells 2
    """
    from rasura.runs.bundles import DIFFERENT, NOTHING, Reproduction, missing, read_bundle

    content = read_bundle(file)
    with err.status("loading the model and the data"):
        again = Reproduction(content, data=data, model=model, reference=reference, device=device_named(device))
    chosen = again.cells(attack, defense, cells or None)
    found = []
    for cell in chosen:
        found.append(again.again(cell))
        if not as_json:
            one = found[-1]
            line = f"{one.word}: {one.attack} under {one.defense} ({one.key}): {one.says}"
            say(line)
    for line in again.unchecked:
        say(f"not checked: {line}", to=err)
    lost, empty = (sum(one.word == word for one in found) for word in (DIFFERENT, NOTHING))
    compared, left = len(found) - empty, again.not_run(chosen)
    if as_json:
        told = {"cells": [asdict(one) for one in found], "unchecked": list(again.unchecked), "different": lost}
        say_json({**told, "compared": compared, "missing": missing(content), "not_run": left})
    else:
        without = f"; {empty} more have no score, so there is nothing to compare" if empty else ""
        out.print(f"{compared - lost} of {compared} cells came back{without}")
        if left:
            ended = ", ".join(f"{count} {how}" for how, count in left.items())
            say(f"not run: {sum(left.values())} of the bundle's {len(again.records)} cells ({ended})")
        if gap := missing(content):
            say(gap)
    if lost or not compared:
        raise typer.Exit(1)
