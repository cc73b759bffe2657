"""Updates that arrive in a folder while it is watched."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rasura.core.errors import InputError

SECONDS = 0.2
"""Time between two looks at the folder."""

UNFINISHED = (".tmp", ".part", ".partial")
"""Ends of names that writers give to files which they have not finished."""


def arriving(folder: Path, wait: Callable[[float], object] = time.sleep) -> Iterator[Path]:
    """The files of ``folder``, those that are there first, in the order of their names; without end.

    A file comes once it did not change between two looks, and again each time it was rewritten. Hidden files, folders and
    ``UNFINISHED`` ones do not come. ``wait``: called with ``SECONDS`` between two looks. Raises ``InputError`` where
    ``folder`` is no folder.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; expected the folder that updates are written into")
    before: dict[Path, tuple[int, int]] = {}
    told: dict[Path, tuple[int, int]] = {}
    while True:
        now = _there(folder)
        for path, state in now.items():
            if before.get(path) == state != told.get(path):
                told[path] = state
                yield path
        before = now
        wait(SECONDS)


def _there(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of the last change of each file that may be an update."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.suffix in UNFINISHED:
            continue
        try:
            if path.is_file():
                about = path.stat()
                found[path] = (about.st_size, about.st_mtime_ns)
        except FileNotFoundError:  # taken away between the two lines
            continue
    return found
