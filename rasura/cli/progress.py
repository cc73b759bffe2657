"""The progress of a run on the command line: elapsed and remaining time, and a sign of life inside a long cell."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from rasura.cli.shared import clock, watched


def remaining(elapsed: float, done: float, left: float, processes: int) -> float:
    """Seconds that a run still takes by the clock, where its cells done and left were estimated at so many CPU seconds.

    The speed so far corrects the estimate once a tenth of it is done.
    """
    if done >= (done + left) / 10 and done > 0:
        return left * elapsed / done
    return left / processes


class _Times(ProgressColumn):
    """Elapsed and remaining time, and how long the current cell runs already."""

    def render(self, task: Task) -> Text:
        told: Cells = task.fields["told"]
        return Text(told.times())


class Cells:
    """The cells of a run: ``estimated`` CPU seconds by key of those that are left, on so many ``processes``."""

    def __init__(self, estimated: Mapping[str, float], processes: int) -> None:
        self.estimated, self.processes = dict(estimated), processes
        self.done, self.left = 0.0, sum(estimated.values())
        self.began = self.cell = time.monotonic()

    def times(self) -> str:
        """Elapsed, remaining, and the time in the current cell, in the width that a terminal has left."""
        now = time.monotonic()
        left = remaining(now - self.began, self.done, self.left, self.processes)
        return f"{clock(now - self.began)}, ~{clock(left)} left, cell {clock(now - self.cell)}"

    def start(self) -> None:
        """A cell begins."""
        self.cell = time.monotonic()

    def end(self, key: str) -> None:
        """The cell ``key`` has ended."""
        seconds = self.estimated.get(key, 0.0)
        self.done, self.left = self.done + seconds, max(0.0, self.left - seconds)


class Bar:
    """What a command tells a bar of its cells."""

    def __init__(self, bar: Any, line: Any, cells: Cells) -> None:
        self._bar, self._line, self._cells = bar, line, cells

    def start(self, what: str) -> None:
        """The cell ``what`` begins."""
        self._cells.start()
        self._bar.update(self._line, description=what)

    def end(self, key: str) -> None:
        """The cell ``key`` has ended."""
        self._cells.end(key)
        self._bar.advance(self._line)


def columns() -> tuple[ProgressColumn, ...]:
    """The columns of a bar: its cell, and its times, which are never cut."""
    name = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=21))
    return SpinnerColumn(), name, BarColumn(bar_width=8), MofNCompleteColumn(), _Times()


@contextmanager
def cells_watched(total: int, estimated: Mapping[str, float], processes: int, close: Any) -> Iterator[Bar]:
    """A bar of at most 80 columns over ``total`` cells; the rest as in ``watched``."""
    cells = Cells(estimated, processes)
    with watched(*columns(), close=close) as bar:
        line = bar.add_task("", total=total, completed=total - len(estimated), told=cells)
        yield Bar(bar, line, cells)
