"""Code that the commands share. Commands import heavy modules when they run, so that ``--help`` is fast."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rasura.core.errors import InputError
from rasura.core.strict_json import strict_json

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    suggest_commands=hasattr(typer, "_click"),  # earlier versions of typer use click, which does
)
protect = typer.Typer(no_args_is_help=True, help="Apply a protection: ghost to texts, or obfuslm to a model.")
app.add_typer(protect, name="protect")
out = Console(emoji=False)
err = Console(stderr=True, emoji=False)

TextColumn = Annotated[str | None, typer.Option(help="column of the text, if its name is not recognised")]
PairColumn = Annotated[str | None, typer.Option(help="column of the second text of a pair; none ignores it")]
LabelColumn = Annotated[str | None, typer.Option(help="column of the label, a number or a name; none ignores it")]
Source = Annotated[str | None, typer.Argument(help="JSONL, CSV or Parquet file, data set id, or a folder of images")]
Reference = Annotated[str | None, typer.Option(help="file with other texts of the same kind, known to the adversary")]
LanguageModel = Annotated[str | None, typer.Option(help="causal model that the adversary uses as a language model")]
AttackedModel = Annotated[str | None, typer.Option(help="model folder, hub id or a name of: rasura list models")]
Budget = Annotated[str, typer.Option(help="effort per attack: quick, default or paper")]
Entries = Annotated[
    float | None, typer.Option(help="fraction of the entries on which matching attacks evaluate L1 and masks")
]
Limit = Annotated[int | None, typer.Option(help="number of examples to use")]
Seeds = Annotated[int, typer.Option(help="number of repetitions, each with its own seed")]
FirstSeed = Annotated[int, typer.Option(help="first seed")]
FreshLabels = Annotated[int | None, typer.Option(help="number of classes; another than the head has draws a new head")]
TruncateAll = Annotated[bool, typer.Option("--truncate", help="truncate texts that are too long; crop and scale images")]
Truncate = Annotated[bool, typer.Option("--truncate", help="truncate texts that are too long")]
MaxLength = Annotated[int | None, typer.Option(help="maximum text length in tokens")]
Optimizer = Annotated[str, typer.Option(help="optimizer: adamw or sgd")]
TextTask = Annotated[str | None, typer.Option(help="classification or causal")]
AnyTask = Annotated[str | None, typer.Option(help="classification, causal or vision")]
Out = Annotated[Path, typer.Option("--out", help="folder for the results; the same command resumes the run")]
Device = Annotated[str, typer.Option(help="device: cpu, cuda, cuda:1 or mps; auto is cuda if there is one")]
StepDevice = Annotated[
    str,
    typer.Option(help="device of training steps and, if CUDA, of gradient matching: cpu, cuda, cuda:1, mps; auto is cpu"),
]
ReportLanguage = Annotated[str, typer.Option("--language", help="language of the report: en, de or fr")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON")]


@contextmanager
def starting() -> Iterator[None]:
    """Inside the block, which imports modules and loads models, no garbage is collected, and what it made is never looked
    through again. Once in a process: a million objects come to stay, and looking for garbage among them takes a fifth of the
    time. Torch's threads do not spin while they wait for each other, which costs most beside other busy processes.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if gc.get_freeze_count() or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def split(text: str | None) -> tuple[str, ...] | None:
    """The names of an option, which are separated by commas; None for None.

    >>> split("blind, span")
    ('blind', 'span')
    """
    return None if text is None else tuple(part.strip() for part in text.split(",") if part.strip())


def numbers(text: str | None, name: str) -> tuple[int, ...] | None:
    """The whole numbers of the option ``--name``; None for None. Raises ``InputError`` for anything else.

    >>> numbers("0,1", "labels")
    (0, 1)
    """
    parts = split(text)
    if parts is None:
        return None
    try:
        return tuple(int(p) for p in parts)
    except ValueError:
        raise InputError(f"--{name} is {text!r}; expected whole numbers separated by commas") from None


def left_over(sizes: Iterable[int], count: int, limit: int | None = None) -> list[str]:
    """A line for each batch size that ``count`` examples do not fill; ``limit``: how many of a file were taken at most.

    >>> left_over((4, 5, 40), 12)
    ['--batch-size 5: 2 of 12 examples are left over and not used', '--batch-size 40: only 12 examples, all in one update']
    >>> left_over((40,), 4, limit=4)
    ['--batch-size 40: only 4 examples were taken (--limit 4), all in one update']
    """
    only = f"only {count} examples" + (f" were taken (--limit {limit})" if count == limit else "")
    few = {s: f"{only}, all in one update" for s in sizes if s > count}
    left = {s: f"{count % s} of {count} examples are left over and not used" for s in sizes if s <= count and count % s}
    return [f"--batch-size {size}: {says}" for size, says in sorted({**few, **left}.items())]


def training_device(name: str) -> str:
    """As ``device_named``, but ``auto`` is a CUDA GPU if there is one: where models are trained or served."""
    import torch

    return "cuda" if name == "auto" and torch.cuda.is_available() else device_named(name)


def device_named(name: str) -> str:
    """The device that ``--device`` names. Raises ``InputError`` if this machine does not have it."""
    import torch

    kind, numbered, number = name.partition(":")
    if kind not in ("auto", "cpu", "cuda", "mps") or (numbered and not (kind == "cuda" and number.isdecimal())):
        raise InputError(f"--device is {name!r}; expected auto, cpu, cuda, cuda:1 or mps")
    if name == "auto":
        # A step takes a fraction of a second, and most attacks keep their linear algebra in float64 on the CPU.
        return "cpu"
    cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    there = {"cpu": True, "cuda": int(number or 0) < cards, "mps": torch.backends.mps.is_available()}
    if not there[kind]:
        raise InputError(f"--device {name} is not available on this machine; pass --device cpu")
    return name


def say(text: object, *, to: Console = out, style: str | None = None) -> None:
    """Print ``text`` as it is: no markup, no colours of its own, and no line of it is broken."""
    to.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def say_json(value: object) -> None:
    """Print ``value`` as one line of JSON."""
    sys.stdout.write(strict_json(value) + "\n")
    sys.stdout.flush()


EVERY = 60.0
"""Seconds between two lines where there is no terminal to draw a bar on."""


def clock(seconds: float) -> str:
    """``0:42``, ``12:05`` or ``3:07:09``.

    >>> clock(42), clock(725), clock(11229)
    ('0:42', '12:05', '3:07:09')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def watched(
    *columns: ProgressColumn, close: Callable[[], None] = lambda: None, resumable: bool = True
) -> Iterator[Progress]:
    """A progress bar that moves inside a long step, too; without a terminal, a line every minute. Ctrl-C exits with code
    130, after a notice if the work is ``resumable``; ``close`` is always called."""
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    over = Event()
    try:
        usual = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
        with Progress(*(columns or usual), console=err, transient=True) as bar:
            if not err.is_terminal:
                Thread(target=_lines, args=(bar, over), daemon=True).start()
            yield bar
    except KeyboardInterrupt:
        if resumable:
            err.print("interrupted; finished work is kept, and the same command resumes the run")
        raise typer.Exit(130) from None
    finally:
        over.set()
        close()


def _lines(bar: Progress, over: Event) -> None:
    """How far the tasks of ``bar`` are, a line each, until the work is ``over``."""
    while not over.wait(EVERY):
        for task in bar.tasks:
            count = f"{task.completed:.0f} of {task.total:.0f}" if task.total else ""
            cells = task.fields.get("told")
            left = "" if task.time_remaining is None else f"~{clock(task.time_remaining)} left"
            usual = [task.description, count, clock(task.elapsed or 0.0), left]
            told = [f"{count} cells", cells.times()] if cells else usual
            say(", ".join(filter(None, told)), to=err)


def task_named(task: str | None, model: str | None, num_labels: int | None = None) -> Any:
    """The ``task`` that was given, or what the model's folder states (``task_for``)."""
    from rasura.victims.weights import task_for

    return task_for(task, model, num_labels)


def text_task(task: str | None, model: str, num_labels: int | None = None) -> Any:
    """``task_named``, of language models. Raises ``InputError`` for another task."""
    from rasura.core.options import known

    return known("task", task_named(task, model, num_labels), ("classification", "causal"))
