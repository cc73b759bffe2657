"""The run store: one Record a finished cell, in SQLite, one transaction each. Survives a kill; knows its plan. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rasura.errors import InputError

SCHEMA = 1


@dataclass(frozen=True)
class Record:
    """One cell: an attack on one batch behind one defense under one threat model.

    ``scores`` and ``blind``: metric -> per_record, mean, low, high, worst, n, unit, higher_is, bounds. ``status``: ok,
    failed or not_applicable, with ``reason``; scores are empty unless ok. ``recovered`` is masked unless asked for.
    ``sent_bytes``: of the message on the wire where something is sealed, else of its entries; ``defense_seconds``: wall, of
    the protections on data and message. ``crafted``: the server sent weights of its own making.
    """

    key: str
    attack: str
    defense: str
    threat: str
    model: str
    data: str
    batch_size: int
    seed: int
    batch: int
    status: str
    update: str = "fedsgd"
    reason: str = ""
    confidence: str = "none"
    scores: Mapping[str, Any] = field(default_factory=dict)
    blind: Mapping[str, Any] = field(default_factory=dict)
    recovered: list[dict[str, Any]] = field(default_factory=list)
    details: Mapping[str, Any] = field(default_factory=dict)
    n_tokens: int = 0
    sent_bytes: int = 0
    defense_seconds: float = 0.0
    threat_plain: str = ""
    crafted: bool = False
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mb: float = 0.0
    device: str = "cpu"
    versions: Mapping[str, str] = field(default_factory=dict)
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def canonical(value: Any) -> str:
    """Canonical JSON: the same text for the same value, in every process. Refuses what JSON does not have."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def cell_key(**coordinates: Any) -> str:
    """Names a cell by its coordinates, the same in every process."""
    return hashlib.sha256(canonical(coordinates).encode()).hexdigest()[:24]


class RunStore:
    """The records of one run, in ``folder/run.sqlite``. Open it with the plan to write, without one to read.

    Raises ``InputError`` for a folder that holds another plan, a store of a newer schema, or one that cannot be written.
    """

    def __init__(self, folder: str | Path, plan: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        path = self.folder / "run.sqlite"
        if plan is None and not path.is_file():
            raise InputError(f"{self.folder} holds no run (no run.sqlite); expected the --out folder of an audit")
        if plan is not None and self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder} is a file; expected a folder for the results")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path)
            self._db.execute("PRAGMA journal_mode=WAL")
            with self._db:
                self._db.execute("CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL)")
                self._db.execute("CREATE TABLE IF NOT EXISTS records (key TEXT PRIMARY KEY, record TEXT NOT NULL)")
                self._db.execute("INSERT OR IGNORE INTO meta VALUES ('schema', ?)", (str(SCHEMA),))
                if plan is not None:
                    self._db.execute("INSERT OR IGNORE INTO meta VALUES ('plan', ?)", (canonical(plan),))
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"{path} cannot be used ({error}); check the disk and the folder's rights") from None
        schema = int(self._meta("schema"))
        if schema > SCHEMA:
            raise InputError(f"{path} has schema {schema}, this version reads up to {SCHEMA}; update rasura")
        if plan is not None and self._meta("plan") != canonical(plan):
            old, new = json.loads(self._meta("plan")), json.loads(canonical(plan))
            differs = ", ".join(sorted(k for k in {*old, *new} if old.get(k) != new.get(k)))
            raise InputError(f"{self.folder} holds another plan's results (different: {differs}); choose another --out")

    def _meta(self, name: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return str(row[0]) if row else ""

    @property
    def plan(self) -> dict[str, Any]:
        """The plan that the run was started with."""
        found: dict[str, Any] = json.loads(self._meta("plan") or "{}")
        return found

    def __contains__(self, key: str) -> bool:
        return self._db.execute("SELECT 1 FROM records WHERE key = ?", (key,)).fetchone() is not None

    def add(self, record: Record) -> None:
        """Store a finished cell. Raises ``InputError`` when the disk does not take it."""
        text = json.dumps(_finite(record.as_dict()), sort_keys=True, ensure_ascii=False, allow_nan=False)
        try:
            with self._db:
                self._db.execute("INSERT OR IGNORE INTO records VALUES (?, ?)", (record.key, text))
        except sqlite3.Error as error:
            raise InputError(f"{self.folder}: a record could not be stored ({error}); free some space, resume") from None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for (text,) in self._db.execute("SELECT record FROM records ORDER BY key").fetchall():
            yield json.loads(text)

    def __len__(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM records").fetchone()[0])

    def export(self, summary: Mapping[str, Any]) -> None:
        """Write ``records.jsonl`` and ``summary.json`` beside the store, each whole or not at all."""
        lines = "".join(json.dumps(r, sort_keys=True, ensure_ascii=False) + "\n" for r in self)
        write_whole(self.folder / "records.jsonl", lines)
        write_whole(self.folder / "summary.json", json.dumps(_finite(dict(summary)), indent=2, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the store."""
        self._db.close()


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` so that a reader, or a kill, finds the old file or the new one."""
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written ({error})") from None


def _finite(value: Any) -> Any:
    """JSON has no NaN: a value that does not exist is null."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value
