"""A lock that one process holds at a time: of a store, and of a job's data. No torch."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rasura.core.errors import InputError


@contextmanager
def exclusive(path: Path, seconds: float, what: str) -> Iterator[None]:
    """Hold ``path`` exclusively for this process. It is released as soon as the process ends, however it ends.

    A lock of SQLite, since the operating systems' own differ. Raises ``InputError`` after ``seconds``.
    """
    db = sqlite3.connect(path, timeout=seconds, isolation_level=None)
    try:
        try:
            db.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            raise InputError(f"{what} is in use by another process") from None
        yield
    finally:
        db.close()
