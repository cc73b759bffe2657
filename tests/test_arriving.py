"""Updates that arrive in a watched folder: each once it is whole, and again when it was written anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from rasura.core.errors import InputError
from rasura.runs.arriving import arriving


class Ended(Exception):
    pass


def told(folder: Path, *happens: Callable[[], object]) -> list[str]:
    """What arrives in ``folder`` until two looks after the last of what ``happens``, one thing between two looks."""
    left = [*happens, lambda: None, lambda: None]

    def wait(seconds: float) -> None:
        assert 0 < seconds < 1
        if not left:
            raise Ended
        left.pop(0)()

    found: list[str] = []
    with pytest.raises(Ended):
        for path in arriving(folder, wait):
            found.append(path.name)
    return found


def test_files_come_in_the_order_of_their_names_and_once(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.npz"):
        (tmp_path / name).write_text("whole")
    assert told(tmp_path, lambda: (tmp_path / "c.pt").write_text("later")) == ["a.npz", "b.safetensors", "c.pt"]


def test_a_file_that_still_grows_does_not_come(tmp_path: Path) -> None:
    path, sizes = tmp_path / "slow.pt", []

    def more() -> None:
        path.write_text(path.read_text() + "more" if path.exists() else "begun")
        sizes.append(path.stat().st_size)

    left: Iterator[Callable[[], object]] = iter([more, more, more, lambda: None, lambda: None])
    (first,) = islice(arriving(tmp_path, lambda _: next(left)()), 1)
    assert first == path and path.stat().st_size == sizes[-1] and len(sizes) == 3


def test_a_file_that_was_written_anew_comes_again(tmp_path: Path) -> None:
    path = tmp_path / "one.pt"
    path.write_text("first")
    later = path.stat().st_mtime_ns + 10**9

    def anew() -> None:
        path.write_text("other")
        os.utime(path, ns=(later, later))

    assert told(tmp_path, lambda: None, anew) == ["one.pt", "one.pt"]


def test_what_is_no_finished_file_does_not_come(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in (".hidden", "x.safetensors.part", "y.tmp", "z.partial"):
        (tmp_path / name).write_text("not yet")
    assert told(tmp_path, lambda: (tmp_path / "x.safetensors.part").rename(tmp_path / "x.safetensors")) == ["x.safetensors"]


def test_a_file_is_no_folder_to_watch(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is not a folder"):
        next(arriving(tmp_path / "file"))
