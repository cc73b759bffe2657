"""``rasura protect ghost``: obfuscate a file of texts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rasura.cli.shared import AsJson, LabelColumn, PairColumn, TextColumn, err, out, protect, say, say_json, watched


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
        say_json({**asdict(found), "path": str(found.path), "card": str(found.card)})
        return
    out.print(f"{found.rows} texts, {found.tokens} tokens: {found.weak} with a weak substitute, {found.unchanged} unchanged")
    if found.unchanged:
        say(f"unchanged: {found.kept} have no substitute, the settings keep the others; the report says which")
    say(f"data: {found.path}\ncard: {found.card}")
