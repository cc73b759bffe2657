"""The run store: what is stored stays, once; what does not fit is refused."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from rasura.interfaces import InputError
from rasura.records import Record, RunStore, canonical, cell_key, write_whole

PLAN = {"model": "m", "seeds": 1}


def record(key: str = "k", **more: object) -> Record:
    return Record(key, "span", "none", "honest-server", "m", "d", 1, 0, 0, "ok", **more)  # type: ignore[arg-type]


def test_round_trip_and_resume(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run", PLAN)
    store.add(record("a", scores={"rouge1": {"mean": float("nan"), "per_record": [0.5]}}))
    store.close()
    again = RunStore(tmp_path / "run", PLAN)
    assert "a" in again and "b" not in again and len(again) == 1
    assert next(iter(again))["scores"] == {"rouge1": {"mean": None, "per_record": [0.5]}}
    again.add(record("a", reason="twice"))
    assert len(again) == 1 and next(iter(again))["reason"] == ""
    assert again.plan == PLAN


def test_another_plan_a_newer_schema_and_no_run_are_refused(tmp_path: Path) -> None:
    RunStore(tmp_path / "run", PLAN).close()
    with pytest.raises(InputError, match=r"another plan's results \(different: seeds\)"):
        RunStore(tmp_path / "run", {**PLAN, "seeds": 2})
    with pytest.raises(InputError, match="holds no run"):
        RunStore(tmp_path / "nothing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="is a file"):
        RunStore(tmp_path / "file", PLAN)
    with sqlite3.connect(tmp_path / "run" / "run.sqlite") as db:
        db.execute("UPDATE meta SET value = '99' WHERE name = 'schema'")
    with pytest.raises(InputError, match="schema 99"):
        RunStore(tmp_path / "run", PLAN)


def test_a_full_disk_is_said_in_one_line(tmp_path: Path) -> None:
    store = RunStore(tmp_path, PLAN)
    store._db.execute(f"PRAGMA max_page_count = {store._db.execute('PRAGMA page_count').fetchone()[0] + 1}")
    with pytest.raises(InputError, match=r"could not be stored \(database or disk is full\)"):
        for k in range(50):
            store.add(record(str(k), reason="x" * 2000))
    assert all("reason" in r for r in store), "what was stored before is whole"


def test_export_is_whole(tmp_path: Path) -> None:
    store = RunStore(tmp_path, PLAN)
    for k in ("b", "a"):
        store.add(record(k))
    store.export({"x": float("inf")})
    lines = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [r["key"] for r in lines] == ["a", "b"] and lines[0]["schema"] == 1
    assert json.loads((tmp_path / "summary.json").read_text()) == {"x": None}
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "no" / "folder", "x")


def test_keys_are_the_same_in_every_process() -> None:
    here = cell_key(b=2, a="ü", c=[1.5])
    code = "from rasura.records import cell_key; print(cell_key(c=[1.5], a='ü', b=2))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert here == there
    assert canonical({"b": 1, "a": 2}) == '{"a":2,"b":1}'
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical(float("nan"))
