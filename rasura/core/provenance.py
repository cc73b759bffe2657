"""Where a run comes from: when, with which command, code, packages and machine it was made. No torch."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import TypeAlias

from rasura.core.limits import memory_here
from rasura.core.records import MASK

Sitting: TypeAlias = Mapping[str, str | Mapping[str, str]]
"""One time that a command added results to a run: ``began`` (UTC, ISO 8601), ``command``, ``code`` (16 hex digits),
``packages`` (name to version) and ``machine``."""

PACKAGE = __name__.partition(".")[0]

_PRIVATE = ("--text",)
"""Options whose value is a private text."""


def sitting() -> Sitting:
    """The facts about this process, as plain values."""
    return {
        "began": datetime.now(UTC).isoformat(timespec="microseconds"),
        "command": command(sys.argv),
        "code": code_hash(),
        "packages": dict(packages()),
        "machine": machine(),
    }


def command(argv: Sequence[str]) -> str:
    """The command line with texts masked; ``from Python`` with the name of the script if it was not the command line."""
    head = Path(argv[0] if argv else "")
    ours = head.stem == "rasura" or head.parts[-2:] == ("rasura", "__main__.py")
    if not ours:
        return f"from Python ({head.name})" if head.name else "from Python"
    return " ".join(["rasura", *(word if MASK in word else shlex.quote(word) for word in _masked(argv[1:]))])


def _masked(words: Sequence[str]) -> Iterator[str]:
    private = False
    for word in words:
        name, equals, _ = word.partition("=")
        yield MASK if private else f"{name}={MASK}" if equals and name in _PRIVATE else word
        private = not private and word in _PRIVATE


@cache
def code_hash() -> str:
    """Sixteen hex digits that identify the code of the package."""
    root, found = Path(__file__).resolve().parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


@cache
def packages() -> tuple[tuple[str, str], ...]:
    """Python, this package, and those of its dependencies that are installed, each with its version."""
    try:
        needed = [line for line in requires(PACKAGE) or () if "dev" not in line.partition(";")[2]]
        wanted = [m[0] for line in needed if (m := re.match(r"[\w.-]+", line))]
    except PackageNotFoundError:
        wanted = []
    found = {"python": platform.python_version()}
    for name in (PACKAGE, *sorted(set(wanted), key=str.lower)):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return tuple(found.items())


@cache
def machine() -> str:
    """The processor, its number of logical cores, memory and operating system, in words."""
    cores, memory = os.cpu_count() or "an unknown number of", memory_here()
    has = "memory not known" if memory is None else f"{memory / 2**30:.0f} GiB of memory"
    return ", ".join([_processor(), f"{cores} logical cores", has, platform.system()])


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine() or "processor not known"
