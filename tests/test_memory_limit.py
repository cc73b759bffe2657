"""How much memory this process may use: the machine's, or less where a container limits it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rasura.core.memory import memory_here
from rasura.runs.processes import fitting

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def limited(folder: Path, line: str, limits: dict[str, str]) -> int | None:
    """What a process whose cgroup is ``line`` may use, with ``limits`` by file."""
    folder.mkdir(exist_ok=True)
    (folder / "of").write_text(f"{line}\n")
    for name, limit in limits.items():
        file = folder / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return memory_here(folder / "of", folder / "groups")


@pytest.mark.parametrize(
    ("line", "limits", "expected"),
    [
        ("0::/", {}, WHOLE),
        ("0::/", {"memory.max": "max"}, WHOLE),
        ("0::/", {"memory.max": "1048576"}, 1 << 20),
        ("0::/jobs/one", {"jobs/memory.max": "2097152", "jobs/one/memory.max": "4194304"}, 2 << 20),
        ("0::/../..", {"memory.max": "1048576"}, 1 << 20),  # a container whose place is outside of what it sees
        ("4:memory:/jobs", {"memory/jobs/memory.limit_in_bytes": "1048576"}, 1 << 20),
        ("4:cpu,memory:/elsewhere", {"memory/memory.limit_in_bytes": "1048576"}, 1 << 20),
        ("4:memory:/", {"memory/memory.limit_in_bytes": "9223372036854771712"}, WHOLE),
        ("3:cpu:/jobs", {"memory/jobs/memory.limit_in_bytes": "1048576"}, WHOLE),
        ("nonsense", {"memory.max": "1048576"}, WHOLE),
    ],
)
def test_a_limit_of_the_group_counts_where_it_is_lower(
    tmp_path: Path, line: str, limits: dict[str, str], expected: int
) -> None:
    assert limited(tmp_path / "here", line, limits) == expected


def test_a_system_without_groups_has_the_machines_memory(tmp_path: Path) -> None:
    assert memory_here(tmp_path / "none", tmp_path / "none") == WHOLE


def test_fewer_processes_where_the_limit_or_the_model_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rasura.runs.processes.memory_here", lambda: 9 << 30)
    assert fitting(steps=9, max_memory=4096, asked=None, threads=8) == 2
    assert fitting(steps=9, max_memory=4096, asked=None, threads=8, beside=1 << 30) == 1
    assert fitting(steps=9, max_memory=4096, asked=3, threads=8, beside=1 << 30) == 3, "as many as were asked for"
    monkeypatch.setattr("rasura.runs.processes.memory_here", lambda: None)
    assert fitting(steps=9, max_memory=4096, asked=None, threads=8) == 1, "unknown memory is not taken for enough"
