"""An audit on several cores: processes that are forked from the one which loaded the model, and share its memory.

A step's tensors are small, so two cells side by side finish earlier than one cell on two threads, which also wait for each
other beside other busy processes. The threads of all processes together are as many as torch would take alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from rasura.core.errors import InputError
from rasura.core.limits import memory_here
from rasura.core.records import Record
from rasura.runs.cells import Cell


class Prepared(Protocol):
    """What the processes run: an audit. ``unavailable``: metrics that this machine lacks, with the reason."""

    unavailable: dict[str, str]

    def records(self, cells: Sequence[Cell]) -> Iterator[Record]:
        """The Records of ``cells``, which share a step."""


def fitting(steps: int, max_memory: int, asked: int | None, threads: int, device: str = "cpu", beside: int = 0) -> int:
    """The number of processes for an audit of so many ``steps`` left.

    As many as ``asked``, or as ``threads`` that torch would take, but no more than the memory here holds attacks of
    ``max_memory`` MiB and ``beside`` bytes, which each process has of its own; in both cases no more than steps. 1 where
    processes cannot be forked safely: outside Linux, and beside an accelerator.
    """
    if sys.platform != "linux" or device != "cpu" or torch.accelerator.is_available():
        return 1
    room = (memory_here() or 0) // ((max_memory << 20) + beside)
    return max(1, min(asked or min(threads, room), steps))


class Workers:
    """``count`` processes, each of which runs cells of ``prepared`` on ``threads`` threads.

    Make them while this process runs no other thread, and before torch used more than one. ``close`` ends them at once.
    """

    def __init__(self, prepared: Prepared, count: int, threads: int) -> None:
        context: Any = multiprocessing.get_context("fork")
        self.prepared = prepared
        self._processes: dict[Connection, Any] = {}
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(prepared, theirs, [*self._processes, ours], threads))
            process.start()
            theirs.close()  # so that the end of the process ends the pipe
            self._processes[ours] = process

    def run(self, steps: Sequence[Sequence[Cell]], progress: Callable[[Cell], None] | None = None) -> Iterator[Record]:
        """The Records of all ``steps``, whose cells share a step, in the order in which they end.

        Raises what a step raised, and ``InputError`` if a process was ended from outside; what it had sent comes before.
        """
        waiting, idle = list(reversed(steps)), list(self._processes)
        running: dict[Connection, Sequence[Cell]] = {}
        while waiting or running:
            while waiting and idle:
                worker = idle.pop()
                running[worker] = waiting.pop()
                if progress is not None:
                    progress(running[worker][0])
                worker.send(running[worker])
            ready = wait(list(running))
            for worker in [w for w in running if w in ready]:
                try:
                    found = worker.recv()
                except (EOFError, ConnectionError):
                    first = running[worker][0]
                    raise InputError(
                        f"the process of {first.defense} at batch size {first.batch_size} was ended from outside, "
                        "most likely for lack of memory; what is finished is kept. Run again with --workers 1"
                    ) from None
                if isinstance(found, BaseException):
                    raise found
                if isinstance(found, Record):
                    yield found
                else:  # the end of the step
                    self.prepared.unavailable.update(found)
                    del running[worker]
                    idle.append(worker)

    def close(self) -> None:
        """End all processes, whatever they are at."""
        for process in self._processes.values():
            process.terminate()
        for ours, process in self._processes.items():
            process.join()
            ours.close()


def _work(prepared: Prepared, theirs: Connection, inherited: Sequence[Connection], threads: int) -> None:
    for end in inherited:
        end.close()  # so that this process ends when the first one is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process, which ends this one
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(threads)
    while True:
        try:
            cells = theirs.recv()
        except EOFError:
            return
        try:
            for record in prepared.records(cells):
                theirs.send(record)
            told: Any = prepared.unavailable
        except Exception as error:
            told = error
        theirs.send(told)
