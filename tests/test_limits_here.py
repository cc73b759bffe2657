"""Memory and cores that this process may use: the machine's, or fewer where a container limits them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commands import rasura_command

from rasura.core.limits import cores_here, memory_here
from rasura.runs.processes import fitting

WHOLE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def told(folder: Path, line: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Where a process in the control group ``line`` reads that, and its ``limits``, by file."""
    folder.mkdir(exist_ok=True)
    (folder / "of").write_text(f"{line}\n")
    for name, limit in limits.items():
        file = folder / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return folder / "of", folder / "groups"


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
    assert memory_here(*told(tmp_path / "here", line, limits)) == expected


@pytest.mark.parametrize(
    ("line", "limits", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "20000 100000"}, 1),
        ("0::/jobs/one", {"jobs/cpu.max": "250000 100000", "jobs/one/cpu.max": "400000 100000"}, 3),
        ("0::/", {"cpu.max": "1600000 100000"}, 8),
        ("0::/", {"cpu.max": ""}, 8),
        ("0::/", {"cpu.max": "100000 0"}, 8),
        ("5:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 2),
        ("5:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_a_share_of_the_time_counts_as_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, limits: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert cores_here(*told(tmp_path / "here", line, limits)) == expected


def test_a_command_takes_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rasura.cli.cores_here", lambda: 3)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    for given, expected in ((None, "3"), ("5", "5")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        rasura_command("--version")
        assert os.environ["OMP_NUM_THREADS"] == expected
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("rasura.cli.cores_here", lambda: 64)
    rasura_command("--version")
    assert "OMP_NUM_THREADS" not in os.environ


def test_a_system_without_groups_has_the_machines_memory(tmp_path: Path) -> None:
    assert memory_here(tmp_path / "none", tmp_path / "none") == WHOLE


def test_fewer_processes_where_the_limit_or_the_model_leaves_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rasura.runs.processes.memory_here", lambda: 9 << 30)
    assert fitting(steps=9, max_memory=4096, asked=None, threads=8) == 2
    assert fitting(steps=9, max_memory=4096, asked=None, threads=8, beside=1 << 30) == 1
    assert fitting(steps=9, max_memory=4096, asked=3, threads=8, beside=1 << 30) == 3, "as many as were asked for"
    monkeypatch.setattr("rasura.runs.processes.memory_here", lambda: None)
    assert fitting(steps=9, max_memory=4096, asked=None, threads=8) == 1, "unknown memory is not taken for enough"
