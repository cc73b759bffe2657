"""An audit whose attacks are listened to: what they read so far comes between the Records."""

from __future__ import annotations

from collections.abc import Generator
from queue import SimpleQueue
from threading import Event, Thread

from rasura.core.records import Record
from rasura.core.so_far import SoFar, listening
from rasura.runs.audit import Audit
from rasura.runs.cells import Cell

Heard = Cell | SoFar | Record


class _Left(BaseException):
    """Nobody listens any more. Not an ``Exception``, so that no attack counts it as its own failure."""


def listened(audit: Audit) -> Generator[Heard, None, None]:
    """All cells of ``audit``: each ``Cell`` when it begins, what its attack has read so far, then its Record.

    The attacks run in a thread of their own. Closing this generator ends them at the next thing that they tell. Raises what
    the audit raises.
    """
    queue: SimpleQueue[Heard | BaseException | None] = SimpleQueue()
    left = Event()

    def hear(heard: Heard) -> None:
        if left.is_set():
            raise _Left
        queue.put(heard)

    def run() -> None:
        end: BaseException | None = None
        try:
            with listening(hear):
                for record in audit.records(audit.cells, hear):
                    hear(record)
        except _Left:
            pass
        except BaseException as error:  # raised to who listens
            end = error
        queue.put(end)

    thread = Thread(target=run, daemon=True)
    thread.start()
    try:
        while (one := queue.get()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one
    finally:
        left.set()
        thread.join()
