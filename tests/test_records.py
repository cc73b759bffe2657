"""The run store: what is stored stays, once; what does not fit is refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sqlite3
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rasura.core.files import write_whole
from rasura.core.interfaces import InputError
from rasura.core.records import STATES, Record, canonical, cell_key
from rasura.core.run_store import RunStore
from rasura.report.page import write_report

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
    with pytest.raises(InputError, match=r"the results of another plan \(different: seeds\)"):
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
    assert [r["key"] for r in lines] == ["a", "b"] and lines[0]["schema"] == 3
    assert json.loads((tmp_path / "summary.json").read_text()) == {"x": None}
    with pytest.raises(InputError, match="cannot be written"):
        write_whole(tmp_path / "no" / "folder", "x")


def test_what_a_run_writes_is_its_owners_alone(tmp_path: Path) -> None:
    umask = os.umask(0o022)
    try:
        store = RunStore(tmp_path / "run", PLAN)
        store.add(record(scores={"token_recall": {"mean": 0.5, "per_record": [0.5], "low": 0.0, "high": 1.0, "worst": 0.5}}))
        modes = {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "run").iterdir()}
        store.close()
        write_report(tmp_path / "run")
        modes |= {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "run").iterdir()}
        # A store that others could read is theirs no longer once it is written to.
        (tmp_path / "run" / "run.sqlite").chmod(0o644)
        RunStore(tmp_path / "run", PLAN).close()
        modes["again"] = (tmp_path / "run" / "run.sqlite").stat().st_mode & 0o777
    finally:
        os.umask(umask)
    names = {"run.sqlite", "run.sqlite-wal", "run.sqlite-shm", "records.jsonl", "summary.json", "report.html", "again"}
    assert modes == dict.fromkeys(names, 0o600)


def test_every_field_and_every_status_is_known_where_records_are_read(tmp_path: Path) -> None:
    store = RunStore(tmp_path, PLAN)
    for status in ("ok", "failed", "crashed", "not_applicable"):
        store.add(replace(record(status), status=status, examples=[3, 1], batch=2))
    assert {r["status"]: r["examples"] for r in store} == {status: [3, 1] for status in STATES} and len(store) == 4


def altered(folder: Path, table: str, column: str, value: object, digest: bool) -> None:
    """Change a stored value, with the digest that fits it or without."""
    with sqlite3.connect(folder / "run.sqlite") as db:
        db.execute(f"UPDATE {table} SET {column} = ?", (value,))
        if digest:
            name = db.execute(f"SELECT * FROM {table}").fetchone()[0]
            told = hashlib.sha256(f"{name}\n{value}".encode()).hexdigest()[:32]
            db.execute(f"UPDATE {table} SET digest = ?", (told,))
    db.close()


def test_a_changed_figure_is_never_reported(tmp_path: Path) -> None:
    store = RunStore(tmp_path, PLAN)
    store.add(record(scores={"token_recall": {"mean": 0.91, "per_record": [0.91]}}))
    text = json.dumps(next(iter(store))).replace("0.91", "0.11")
    store.close()
    altered(tmp_path, "records", "record", text, digest=False)
    with pytest.raises(InputError, match=r"run.sqlite is damaged \(record 'k': it was changed\)"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("status", "perfect"), ("status", None), ("scores", []), ("scores", {"token_recall": 1}), ("seed", "1"),
        ("scores", {"token_recall": {"per_record": "0.5"}}), ("scores", {"token_recall": {"per_record": ["0.5"]}}),
        ("blind", {"token_recall": {"mean": []}}), ("recovered", [1]), ("recovered", {}), ("wall_seconds", None),
        ("batch_size", True), ("batch_size", -1), ("crafted", 1), ("versions", {"torch": 2}), ("details", []),
        ("wall_seconds", float("inf")), ("attack", 5), ("examples", ["a"]), ("examples", None),
    ],
)  # fmt: skip
def test_a_record_of_wrong_types_is_refused(tmp_path: Path, field: str, value: object) -> None:
    store = RunStore(tmp_path, PLAN)
    store.add(record())
    found = next(iter(store))
    store.close()
    altered(tmp_path, "records", "record", json.dumps({**found, field: value}), digest=True)
    with pytest.raises(InputError, match=f"its {field} is not as expected"):
        write_report(tmp_path)
    altered(tmp_path, "records", "record", json.dumps({k: v for k, v in found.items() if k != field}), digest=True)
    with pytest.raises(InputError, match=f"its {field} is not as expected"):
        list(RunStore(tmp_path))


@pytest.mark.parametrize("value", ["[1]", "{", "[" * 100_000, "3", '{"key": "\\ud800"}'])
def test_a_plan_or_record_that_is_not_an_object_is_refused(tmp_path: Path, value: str) -> None:
    store = RunStore(tmp_path, PLAN)
    store.add(record())
    store.close()
    altered(tmp_path, "records", "record", value, digest=True)
    with pytest.raises(InputError, match=r"it was changed|it is not a record"):
        list(RunStore(tmp_path))
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        told = hashlib.sha256(f"plan\n{value}".encode()).hexdigest()[:32]
        db.execute("UPDATE meta SET value = ?, digest = ? WHERE name = 'plan'", (value, told))
    for plan in (None, PLAN):
        with pytest.raises(InputError, match="its plan is not a plan"):
            RunStore(tmp_path, plan)


def test_a_report_of_what_it_does_not_know_is_refused_in_one_line(tmp_path: Path) -> None:
    store = RunStore(tmp_path, {"kind": "membership"})
    store.add(record(scores={"auc": {"mean": 0.5}}))
    store.close()
    with pytest.raises(InputError, match=r"do not have the form that this version writes \(KeyError\)"):
        write_report(tmp_path)


def test_other_tables_and_views_are_not_looked_at(tmp_path: Path) -> None:
    RunStore(tmp_path, PLAN).close()
    with sqlite3.connect(tmp_path / "run.sqlite") as db:
        db.execute("DROP TABLE records")
        # It never ends.
        forever = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS key, i AS record, i AS digest"
        db.execute(f"CREATE VIEW records AS {forever} FROM n")
    for plan in (None, PLAN):
        with pytest.raises(InputError, match="is not a run store of this version"):
            RunStore(tmp_path, plan)


def test_a_damaged_store_is_read_as_it_was_or_refused(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "run", PLAN)
    for k in range(12):
        store.add(record(f"k{k:02d}", reason="x" * (300 * k), scores={"token_recall": {"mean": 0.5, "per_record": [0.5]}}))
    whole = list(store)
    store.close()
    good = (tmp_path / "run" / "run.sqlite").read_bytes()
    draw = random.Random(7)
    refused = 0
    for number in range(400):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 8)):
            # Half of them where SQLite keeps its own structure.
            at = (
                draw.randrange(len(bad))
                if draw.random() < 0.5
                else 4096 * draw.randrange(len(bad) // 4096) + draw.randrange(64)
            )
            bad[at] = draw.randrange(256)
        if number % 4 == 0:
            del bad[draw.randrange(len(bad)) :]
        folder = tmp_path / "bad"
        folder.mkdir(exist_ok=True)
        (folder / "run.sqlite").write_bytes(bad)
        try:
            found = RunStore(folder)
            assert list(found) == whole and found.plan == PLAN
            found.close()
        except InputError as error:
            refused += 1
            assert "\n" not in str(error)
        for beside in folder.iterdir():
            beside.unlink()
    assert refused > 300


def test_keys_are_the_same_in_every_process() -> None:
    here = cell_key(b=2, a="ü", c=[1.5])
    code = "from rasura.core.records import cell_key; print(cell_key(c=[1.5], a='ü', b=2))"
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert here == there
    assert canonical({"b": 1, "a": 2}) == '{"a":2,"b":1}'
    with pytest.raises(ValueError, match="JSON compliant"):
        canonical(float("nan"))
