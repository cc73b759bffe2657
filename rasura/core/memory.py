"""How much memory this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def memory_here(group: Path = GROUP, groups: Path = GROUPS) -> int | None:
    """The memory of the machine in bytes, or the limit of this process's control group where it is lower: containers have
    one. None on a system that does not tell.

    ``group``, ``groups``: where Linux says in which group the process is, and what the groups may use (versions 1 and 2).
    """
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    return min([machine, *_limits(group, groups)])


def _limits(group: Path, groups: Path) -> Iterator[int]:
    """The limits of the process's own group and of those that hold it."""
    try:
        lines = group.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, kinds, place = (*line.split(":", 2), "", "")[:3]
        if line.startswith("0::"):
            root, name = groups, "memory.max"
        elif "memory" in kinds.split(","):
            root, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        inside = [part for part in place.split("/") if part not in ("", "..")]
        for depth in range(len(inside) + 1):
            try:
                told = root.joinpath(*inside[:depth], name).read_text(encoding="utf-8").strip()
            except (OSError, ValueError):
                continue
            if told.isdecimal():  # "max" is no limit
                yield int(told)
