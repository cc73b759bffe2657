"""What the commands share. Heavy modules are imported inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from rasura.core.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
protect = typer.Typer(no_args_is_help=True, help="Apply a protection: ghost to texts, obfuslm to a model.")
app.add_typer(protect, name="protect")
out = Console()
err = Console(stderr=True)


TextColumn = Annotated[str | None, typer.Option(help="column of the text, if its name is not a usual one")]
PairColumn = Annotated[str | None, typer.Option(help="column of the second text of a pair; none leaves it unread")]
LabelColumn = Annotated[str | None, typer.Option(help="column of the label, a number or a name; none leaves it unread")]


def split(text: str | None) -> tuple[str, ...] | None:
    """The names of an option, which stand with commas between them; None for None.

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
        raise InputError(f"--{name} is {text!r}; expected whole numbers with commas between them") from None


def device_named(name: str) -> str:
    """The device that ``--device`` names. Raises ``InputError`` where this machine has none of that kind."""
    import torch

    if name not in ("auto", "cpu", "cuda", "mps"):
        raise InputError(f"--device is {name!r}; expected auto, cpu, cuda or mps")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        # A step takes a fraction of a second, and the attacks keep their linear algebra in float64 on the CPU.
        return "cpu"
    if not there[name]:
        raise InputError(f"--device {name} is not available on this machine; pass --device cpu")
    return name


@contextmanager
def watched(*columns: ProgressColumn, close: Callable[[], None] = lambda: None) -> Iterator[Progress]:
    """A progress bar around work that keeps what is finished: Ctrl-C says so and exits with 130; ``close`` is called."""
    from rich.progress import Progress

    try:
        with Progress(*(columns or Progress.get_default_columns()), console=err, transient=True) as bar:
            yield bar
    except KeyboardInterrupt:
        err.print("interrupted; what is finished is kept, the same command resumes")
        raise typer.Exit(130) from None
    finally:
        close()
