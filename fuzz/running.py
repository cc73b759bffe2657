"""Runs a target on numbered inputs in a process of its own, and keeps what failed."""

from __future__ import annotations

import json
import mmap
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from fuzz.target import Target
from rasura.core.errors import InputError

SECONDS = 20
"""That one input may take."""

ROOM = 1 << 30
"""Bytes of address space beyond what a process has at its start: more ends in ``MemoryError``, which is a failure."""

MAX_GROWTH = 300 << 20
KEPT = 20
"""Failing inputs that are kept of a target."""

EVERY = 500
"""Inputs between two notes of how far a run came."""


@dataclass
class State:
    """How far a target came. ``failures``: input number and what was raised where; ``growth``: bytes, the most of a process
    that ran it."""

    done: int = 0
    refused: int = 0
    seconds: float = 0.0
    growth: int = 0
    failed: int = 0
    failures: list[tuple[int, str]] = field(default_factory=list)

    @classmethod
    def read(cls, place: Path) -> State:
        file = place / "state.json"
        found = cls(**json.loads(file.read_text())) if file.is_file() else cls()
        found.failures = [(number, why) for number, why in found.failures]
        return found

    def write(self, place: Path) -> None:
        part = place / "state.json.part"
        part.write_text(json.dumps(asdict(self)))
        part.replace(place / "state.json")

    def fail(self, place: Path, number: int, data: bytes, why: str) -> None:
        self.failed += 1
        if len(self.failures) < KEPT:
            self.failures.append((number, why))
            (place / f"failure-{number}.bin").write_bytes(data)


def kept_seeds(target: Target, place: Path) -> list[bytes]:
    """The seeds of a run: made at its start, since keys are random, and the same ever after."""
    folder = place / "seeds"
    if not folder.is_dir():
        part = place / "seeds.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        for number, data in enumerate(target.seeds()):
            (part / f"{number:03d}.bin").write_bytes(data)
        part.rename(folder)
    return [file.read_bytes() for file in sorted(folder.iterdir())]


def input_of(target: Target, seeds: list[bytes], seed: int, number: int) -> bytes:
    """Input ``number`` of a run."""
    return target.mutated(Random(f"{seed}/{target.name}/{number}"), seeds)


class TooSlow(BaseException):
    """An input took longer than ``SECONDS``."""


def _alarm(*_: Any) -> None:
    raise TooSlow


def attempt(target: Target, data: bytes) -> tuple[bool, str]:
    """Whether ``data`` was refused, and what else was raised: its kind and the last place in the package."""
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        target.read(data)
        return False, ""
    except InputError as error:
        line = str(error)
        return True, "" if "\n" not in line else f"a refusal of several lines: {line[:200]!r}"
    except (Exception, TooSlow) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "/rasura/" in f.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "outside"
        return False, f"{type(error).__name__} at {where}: {str(error)[:200]!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_here(target: Target, place: Path, seed: int, until: int, *, limited: bool = True, warm: int = 200) -> State:
    """Run inputs up to ``until`` in this process, from where the last run ended; ``warm`` others before memory counts."""
    seeds, state = kept_seeds(target, place), State.read(place)
    signal.signal(signal.SIGALRM, _alarm)
    for data in seeds:
        refused, why = attempt(target, data)
        if refused or why:
            raise RuntimeError(f"{target.name}: a sound seed is refused or fails ({why})")
    # Imports and caches are no growth.
    for number in range(warm):
        attempt(target, input_of(target, seeds, seed, -1 - number))
    if limited:
        _limit()
    start, begun, before = _max_bytes(), time.perf_counter(), state.seconds
    current = _Current(place)
    while state.done < until:
        number = state.done
        data = input_of(target, seeds, seed, number)
        current.note(number)
        refused, why = attempt(target, data)
        state.done += 1
        state.refused += refused
        if why:
            state.fail(place, number, data, why)
        if state.done % EVERY == 0 or state.done == until or why:
            state.seconds = before + time.perf_counter() - begun
            state.growth = max(state.growth, _max_bytes() - start)
            state.write(place)
    return state


class _Current:
    """The number of the input that is being read, which outlasts the process."""

    def __init__(self, place: Path) -> None:
        file = place / "current"
        if not file.is_file():
            file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._held = mmap.mmap(opened.fileno(), 8)

    def note(self, number: int) -> None:
        self._held[:] = number.to_bytes(8, "little")

    @property
    def number(self) -> int:
        return int.from_bytes(self._held[:], "little")


def _max_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        most = pages * resource.getpagesize() + ROOM
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run(name: str, place: Path, seed: int, until: int) -> State:
    """Run a target in a process of its own; one that dies is started again behind the input that ended it."""
    place.mkdir(parents=True, exist_ok=True)
    shared = Path("/dev/shm")
    while (state := State.read(place)).done < until:
        with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None, prefix="fuzz-") as folder:
            command = [sys.executable, "-m", "fuzz.worker", name, str(place), str(seed), str(until), folder]
            ended = subprocess.run(command, check=False).returncode
        after = State.read(place)
        if ended == 0:
            continue
        if ended > 0:
            raise RuntimeError(f"{name}: the fuzzer itself failed; see above")
        number = _Current(place).number
        after.done = number + 1
        after.fail(place, number, b"", f"the process died of signal {-ended}; repeat input {number}")
        after.write(place)
    return state
