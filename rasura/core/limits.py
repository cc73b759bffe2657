"""How much memory, and how many processor cores, this process may use. Containers are control groups with limits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUP, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
"""Where Linux says in which control group this process is, and what each group may use (versions 1 and 2)."""


def memory_here(group: Path = GROUP, groups: Path = GROUPS) -> int | None:
    """The memory of the machine in bytes, or the limit of this process where it is lower. None on a system that does not
    tell."""
    try:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
    told = [*_told("memory", "memory.max", group, groups), *_told("memory", "memory.limit_in_bytes", group, groups)]
    return min([machine, *(int(limit) for limit in told if limit.isdecimal())])  # "max" is no limit


def cores_here(group: Path = GROUP, groups: Path = GROUPS) -> int:
    """The cores that this process may run on, or the whole ones that its share of their time amounts to, rounded up."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    shares = [limit.split() for limit in _told("cpu", "cpu.max", group, groups)]
    quotas, periods = (_told("cpu", f"cpu.cfs_{what}_us", group, groups) for what in ("quota", "period"))
    shares += [list(pair) for pair in zip(quotas, periods)]
    told = [tuple(map(int, s)) for s in shares if len(s) == 2 and all(map(str.isdecimal, s))]
    whole = [math.ceil(used / period) for used, period in told if period]
    return max(1, min([cores, *whole]))


def _told(kind: str, name: str, group: Path, groups: Path) -> Iterator[str]:
    """What the file ``name`` says for the process's own control group of this ``kind``, and for those that hold it."""
    try:
        lines = group.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, kinds, place = (*line.split(":", 2), "", "")[:3]
        if not line.startswith("0::") and kind not in kinds.split(","):
            continue
        root = groups if line.startswith("0::") else groups / kind
        inside = [part for part in place.split("/") if part not in ("", "..")]
        for depth in range(len(inside) + 1):
            try:
                yield root.joinpath(*inside[:depth], name).read_text(encoding="utf-8").strip()
            except (OSError, ValueError):
                continue
