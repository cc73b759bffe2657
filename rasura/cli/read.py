"""``rasura read``: what an update that was captured elsewhere gives away."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rasura.cli.candidates import Candidates, SimulatedRounds, candidates_read
from rasura.cli.shared import (
    AsJson,
    Budget,
    Entries,
    FreshLabels,
    StepDevice,
    TextTask,
    app,
    device_named,
    err,
    numbers,
    out,
    say,
    say_json,
    starting,
    task_named,
)
from rasura.core.errors import FAULTS, InputError, broken

if TYPE_CHECKING:
    from rasura.core.so_far import Stage
    from rasura.runs.reading import ReadRequest, ReadResult
    from rasura.victims.loading import Victim

Updates = Annotated[list[Path] | None, typer.Argument(help="files or folders that a framework wrote; see docs/reading.md")]
Watch = Annotated[Path | None, typer.Option(help="read every update that is written into this folder, until Ctrl-C")]
Model = Annotated[str, typer.Option(help="the model that produced the update: folder or hub id")]
Attack = Annotated[str, typer.Option(help="attack to run; best tries several in turn")]
BatchSize = Annotated[int | None, typer.Option(help="number of texts in the update, if known")]
Labels = Annotated[str | None, typer.Option(help="their labels, if known, from 0: 0,1")]
Lengths = Annotated[str | None, typer.Option(help="their lengths in tokens with special ones: 12,9")]
Dropout = Annotated[float, typer.Option(help="dropout probability when the update was computed")]
FrozenEmbeddings = Annotated[bool, typer.Option("--frozen-embeddings", help="do not use the gradients of the embeddings")]
Reference = Annotated[Path | None, typer.Option(help="file with texts of the same kind")]
Scorer = Annotated[str | None, typer.Option(help="causal model that scores the order of words")]
Kind = Annotated[str | None, typer.Option("--update", help="kind of update; see: rasura list update-kinds")]
Before = Annotated[Path | None, typer.Option(help="weights before the round, if UPDATE holds those after it")]
BeforeRound = Annotated[int | None, typer.Option(help="the round of these weights, found beside UPDATE")]
NamesFrom = Annotated[Path | None, typer.Option(help="adapter or model that names the arrays of a list")]
Hidden = Annotated[Path | None, typer.Option(help="file of bool tensors, true where an entry of the update is hidden")]
MaxMemory = Annotated[int, typer.Option(help="memory of an attack in MiB, beside model and update")]
Seed = Annotated[int, typer.Option(help="seed of the attack (and of a new head)")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="load pickled weights, which can execute code")]


@app.command()
def read(
    model: Model,
    updates: Updates = None,
    watch: Watch = None,
    task: TextTask = None,
    attack: Attack = "best",
    batch_size: BatchSize = None,
    labels: Labels = None,
    lengths: Lengths = None,
    dropout: Dropout = 0.0,
    frozen_embeddings: FrozenEmbeddings = False,
    reference: Reference = None,
    language_model: Scorer = None,
    how: Kind = None,
    before: Before = None,
    before_round: BeforeRound = None,
    names_from: NamesFrom = None,
    hidden: Hidden = None,
    candidates: Candidates = None,
    simulated_rounds: SimulatedRounds = 0,
    budget: Budget = "default",
    max_memory: MaxMemory = 4096,
    entries: Entries = None,
    num_labels: FreshLabels = None,
    seed: Seed = 0,
    device: StepDevice = "auto",
    as_json: AsJson = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Recover text from updates that were captured elsewhere.

    The model is loaded once for all of them. Options describe every update alike. With several updates or --watch, --json
    prints one line each. Exit code 2: an update could not be read in. 0: all could, whatever was recovered.

    Example: rasura read updates/*.safetensors --model ./my-model --batch-size 2 --dropout 0.1
    """
    with starting():
        from rasura.core import interfaces
        from rasura.core.options import known
        from rasura.runs.arriving import arriving
        from rasura.runs.reading import ReadRequest, adapter_among
        from rasura.victims.loading import load

        level: Any = known("budget", budget, ("quick", "default", "paper"))
        kind, paths = _text_task(task, model, num_labels), _checked(updates or [], watch, candidates, reference)
        victim = load(
            model, kind, num_labels=num_labels, seed=seed, device=device_named(device),
            allow_pickle=allow_pickle, adapter=adapter_among(model, before, names_from),
        )  # fmt: skip
        work = interfaces.Budget(level, max_memory, entries, interfaces.attacking_device(device))
        request = ReadRequest(
            attack=attack, batch_size=batch_size, labels=numbers(labels, "labels"), lengths=numbers(lengths, "lengths"),
            dropout=dropout, frozen_embeddings=frozen_embeddings, hidden=hidden, reference=reference, update=how, seed=seed,
            language_model=language_model, budget=work, before=before, before_round=before_round, names_from=names_from,
        ).checked(victim)  # fmt: skip
    if candidates is not None:
        return candidates_read(paths[0], candidates, victim, request, simulated_rounds, as_json)
    if watch is None and len(paths) == 1:
        return _told(_alone(paths[0], victim, request), as_json)
    return _each(paths if watch is None else arriving(watch), victim, request, as_json)


def _checked(updates: list[Path], watch: Path | None, candidates: Path | None, reference: Path | None) -> list[Path]:
    """The ``updates`` to read, which are there, as are the files of texts."""
    from rasura.data.rows import Source

    if bool(updates) == (watch is not None):
        raise InputError("give the updates to read, or --watch FOLDER")
    if candidates is not None and len(updates) != 1:
        raise InputError("--candidates takes one update")
    if watch is not None and not watch.is_dir():
        raise InputError(f"--watch {watch} is not a folder; expected the folder that updates are written into")
    for update in updates:
        if not update.exists():
            raise InputError(f"{update} does not exist; expected an update file or the folder of a checkpoint")
    for file in filter(None, (candidates, reference)):
        Source(file, list)  # refuses the name of no file of texts
    return updates


def _one(path: Path, victim: Victim, request: ReadRequest, stops: bool = False) -> ReadResult:
    """The texts of one update. ``stops``: Ctrl-C ends with the best guess so far, and the running attack is named."""
    from rasura.runs.reading import read_update

    with err.status("reading") as status:

        def begun(stage: Stage) -> None:
            so_far = "" if stage.guess is None else f"; so far {stage.guess.confidence}, which Ctrl-C shows"
            status.update(f"reading: {stage.attack}{so_far}")
            if not err.is_terminal:
                say(f"reading: {stage.attack}{so_far}", to=err)

        return read_update(path, victim, request, begun if stops else None)


def _alone(path: Path, victim: Victim, request: ReadRequest) -> ReadResult:
    """The texts of the one update that is read. Where reading breaks, the command ends with one sentence."""
    try:
        return _one(path, victim, request, stops=True)
    except FAULTS as error:
        if isinstance(error, InputError) or type(error).__name__ == "OutOfMemoryError":
            raise
        raise InputError(f"{path}: reading crashed: {broken(error)}") from error


def _each(paths: Iterable[Path], victim: Victim, request: ReadRequest, as_json: bool) -> None:
    """Read ``paths`` one after the other. One that is refused, or at which reading breaks, does not end the others; the
    exit code tells."""
    refused = 0
    for path in paths:
        if not as_json:
            say(f"{path}:")
        try:
            found = _one(path, victim, request)
        except FAULTS as error:
            refused += 1
            kind, reason = ("refused", str(error)) if isinstance(error, InputError) else ("crashed", broken(error))
            say(f"rasura: {path}: {reason if kind == 'refused' else f'reading crashed: {reason}'}", to=err, style="bold")
            if as_json:
                say_json({"update": str(path), kind: reason})
            continue
        _told(found, as_json, path)
    if refused:
        raise typer.Exit(2)


def _text_task(task: str | None, model: str, num_labels: int | None) -> Any:
    from typing import get_args

    from rasura.core.options import known
    from rasura.core.values import Task

    if known("task", named := task_named(task, model, num_labels), get_args(Task)) == "vision":
        raise InputError("read recovers text only; for images, use rasura audit FOLDER --task vision")
    return named


def _told(found: ReadResult, as_json: bool, path: Path | None = None) -> None:
    """Print what was ``found``, in JSON with the update's ``path`` where there are several."""
    for line in found.file:
        say(line, to=err)
    if as_json:
        say_json(found.to_dict() if path is None else {"update": str(path), **found.to_dict()})
        return
    for line in found.lines:
        out.print(line, markup=False, highlight=False)
    if not found.texts:
        out.print(found.without_texts, markup=False)
        return
    for line in found.notes:
        out.print(f"\n{line}", markup=False, highlight=False)
    out.print(f"\n{found.claim}", markup=False)
