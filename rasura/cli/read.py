"""``rasura read``: what an update that was captured elsewhere gives away."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rasura.cli.candidates import Candidates, SimulatedRounds, candidates_read
from rasura.cli.shared import AsJson, Budget, Entries, StepDevice, TextTask, app, device_named, err, numbers, out
from rasura.core.errors import InputError

if TYPE_CHECKING:
    from rasura.runs.reading import ReadResult

Update = Annotated[Path, typer.Argument(help="file or folder that a framework wrote; see docs/reading.md")]
Model = Annotated[str, typer.Option(help="the model that produced the update: folder or hub id")]
Attack = Annotated[str, typer.Option(help="attack to run; best tries several in turn")]
BatchSize = Annotated[int | None, typer.Option(help="number of texts in the update, if known")]
Labels = Annotated[str | None, typer.Option(help="their labels, if known: 0,1")]
Lengths = Annotated[str | None, typer.Option(help="their lengths in tokens, if known: 12,9")]
Dropout = Annotated[float, typer.Option(help="dropout probability when the update was computed")]
FrozenEmbeddings = Annotated[bool, typer.Option("--frozen-embeddings", help="do not use the gradients of the embeddings")]
Reference = Annotated[Path | None, typer.Option(help="file with texts of the same kind")]
Scorer = Annotated[str | None, typer.Option(help="causal model that scores the order of words")]
Kind = Annotated[str, typer.Option("--update", help="kind of update; see: rasura list update-kinds")]
Before = Annotated[Path | None, typer.Option(help="weights before the round, if UPDATE holds those after it")]
BeforeRound = Annotated[int | None, typer.Option(help="the round of these weights, found beside UPDATE")]
NamesFrom = Annotated[Path | None, typer.Option(help="adapter or model that names the arrays of a list")]
Hidden = Annotated[
    Path | None, typer.Option(help="safetensors file of bool tensors, true where an entry of the update is hidden")
]
MaxMemory = Annotated[int, typer.Option(help="memory limit of an attack in MiB")]
HeadLabels = Annotated[int, typer.Option(help="number of classes of a new head, if the folder has no head")]
Seed = Annotated[int, typer.Option(help="seed of the attack (and of a new head)")]
AllowPickle = Annotated[bool, typer.Option("--allow-pickle", help="load pickled weights, which can execute code")]


@app.command()
def read(
    update: Update,
    model: Model,
    task: TextTask = "classification",
    attack: Attack = "best",
    batch_size: BatchSize = None,
    labels: Labels = None,
    lengths: Lengths = None,
    dropout: Dropout = 0.0,
    frozen_embeddings: FrozenEmbeddings = False,
    reference: Reference = None,
    language_model: Scorer = None,
    how: Kind = "fedsgd",
    before: Before = None,
    before_round: BeforeRound = None,
    names_from: NamesFrom = None,
    hidden: Hidden = None,
    candidates: Candidates = None,
    simulated_rounds: SimulatedRounds = 0,
    budget: Budget = "default",
    max_memory: MaxMemory = 4096,
    entries: Entries = None,
    num_labels: HeadLabels = 2,
    seed: Seed = 0,
    device: StepDevice = "auto",
    as_json: AsJson = False,
    allow_pickle: AllowPickle = False,
) -> None:
    """Recover text from an update that was captured elsewhere.

    Example: rasura read update.safetensors --model ./my-model --batch-size 2 --dropout 0.1
    """
    from rasura.core import interfaces
    from rasura.core.options import known
    from rasura.runs.reading import ReadRequest, adapter_among, read_update
    from rasura.victims.loading import load

    kind = _text_task(task)
    level: Any = known("budget", budget, ("quick", "default", "paper"))
    if not update.exists():
        raise InputError(f"{update} does not exist; expected an update file or the folder of a checkpoint")
    victim = load(
        model, kind, num_labels=num_labels, seed=seed, device=device_named(device), allow_pickle=allow_pickle,
        adapter=adapter_among(model, before, names_from),
    )  # fmt: skip
    request = ReadRequest(
        attack=attack, batch_size=batch_size, labels=numbers(labels, "labels"), lengths=numbers(lengths, "lengths"),
        dropout=dropout, frozen_embeddings=frozen_embeddings, hidden=hidden, reference=reference,
        language_model=language_model, update=how, budget=interfaces.Budget(level, max_memory, entries), seed=seed,
        before=before, before_round=before_round, names_from=names_from,
    )  # fmt: skip
    if candidates is not None:
        return candidates_read(update, candidates, victim, request, simulated_rounds, as_json)
    with err.status("reading"):
        found = read_update(update, victim, request)
    return _told(found, as_json)


def _text_task(task: str) -> Any:
    from typing import get_args

    from rasura.core.options import known
    from rasura.core.values import Task

    if known("task", task, get_args(Task)) == "vision":
        raise InputError("read recovers text only; for images, use rasura audit FOLDER --task vision")
    return task


def _told(found: ReadResult, as_json: bool) -> None:
    for line in found.file:
        err.print(line, markup=False, highlight=False, soft_wrap=True)
    if as_json:
        sys.stdout.write(json.dumps(found.to_dict(), ensure_ascii=False) + "\n")
        return
    for line in found.texts:
        out.print(line, markup=False, highlight=False)
    if not found.texts:
        out.print(f"nothing was recovered: {found.reason or 'the attack returned no text'}", markup=False)
        return
    out.print(f"\n{found.confidence} by {found.attack} in {found.seconds:.1f} s", markup=False)
