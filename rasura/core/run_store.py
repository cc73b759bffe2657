"""The run store: one Record per finished cell, in SQLite, one transaction each. It survives a kill and knows its plan. No
torch."""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.core.files import write_whole
from rasura.core.provenance import Sitting, sitting
from rasura.core.records import SCHEMA, Record, canonical, wrong_in
from rasura.core.strict_json import strict_json

LONGEST = 1 << 28
"""Maximum bytes of one stored value."""

BROKEN = (sqlite3.Error, UnicodeDecodeError, OverflowError, MemoryError)
"""The errors that Python's SQLite raises for a damaged file."""

TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL, digest TEXT NOT NULL)",
    "CREATE TABLE records (key TEXT PRIMARY KEY, record TEXT NOT NULL, digest TEXT NOT NULL)",
)


class RunStore:
    """The records of one run, in ``folder/run.sqlite``. Open it with the plan to write, without a plan to read. Only their
    owner can read its files, since records are about private texts. Every row is stored with a digest, so a damaged row is
    never taken for a result. Raises ``InputError`` if the folder holds another plan, or if the store has another schema, is
    damaged, or cannot be written.
    """

    def __init__(self, folder: str | Path, plan: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.path = self.folder / "run.sqlite"
        self._sitting = None if plan is None else sitting()
        if plan is None and not self.path.is_file():
            raise InputError(f"{self.folder} holds no run (no run.sqlite); expected the --out folder of an audit")
        if plan is not None and self.folder.exists() and not self.folder.is_dir():
            raise InputError(f"{self.folder} is a file; expected a folder for the results")
        try:
            self._open(plan)
        except (OSError, *BROKEN) as error:
            raise InputError(f"{self.path} cannot be used ({error}); check the disk and the folder's permissions") from None
        try:
            self._check(plan)
        except BaseException:
            self.close()
            raise

    def _open(self, plan: Mapping[str, Any] | None) -> None:
        if plan is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            # SQLite gives the files beside it the rights of the database.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600))
            for beside in ("", "-wal", "-shm", "-journal"):
                with suppress(FileNotFoundError):
                    os.chmod(f"{self.path}{beside}", 0o600)
        self._db = sqlite3.connect(self.path)
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
        self._db.execute("PRAGMA trusted_schema=OFF")
        if plan is not None:
            self._db.execute("PRAGMA journal_mode=WAL")
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                if not self._db.execute("SELECT 1 FROM sqlite_master").fetchall():
                    for table in TABLES:
                        self._db.execute(table)
                    for name, value in (("schema", str(SCHEMA)), ("plan", canonical(plan))):
                        self._db.execute("INSERT INTO meta VALUES (?, ?, ?)", (name, value, _digest(name, value)))

    def _check(self, plan: Mapping[str, Any] | None) -> None:
        tables = {sql for (sql,) in self._rows("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if tables != set(TABLES):
            raise InputError(f"{self.path} is not a run store of this version; run again with another --out")
        if self._rows("PRAGMA integrity_check(1)") != [("ok",)]:
            raise self._damaged("its pages are inconsistent")
        schema = self._rows("SELECT value FROM meta WHERE name = 'schema'")
        if schema != [(str(SCHEMA),)]:
            found = str(schema[0][0])[:9] if schema else "none"
            raise InputError(f"{self.path} has schema {found}, this version reads {SCHEMA}; run again with another --out")
        held = self.plan
        if plan is not None and self._meta("plan") != canonical(plan):
            new = json.loads(canonical(plan))
            differs = ", ".join(sorted(k for k in {*held, *new} if held.get(k) != new.get(k)))
            raise InputError(f"{self.folder} holds the results of another plan (different: {differs}); choose another --out")

    def _damaged(self, why: str) -> InputError:
        return InputError(f"{self.path} is damaged ({why}); restore it from a copy, or run again with another --out")

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            return self._db.execute(query, values).fetchall()
        except BROKEN as error:
            raise self._damaged(str(error)) from None

    def _meta(self, name: str) -> str:
        rows = self._rows("SELECT value, digest FROM meta WHERE name = ?", name)
        if len(rows) != 1 or rows[0][1] != _digest(name, rows[0][0]):
            raise self._damaged(f"its {name} was changed")
        return str(rows[0][0])

    def _object(self, name: str) -> dict[str, Any]:
        found = _parsed(self._meta(name))
        if not isinstance(found, dict):
            raise self._damaged(
                f"its {name} is not a {name}" if name == "plan" else f"its entry {name!r} is not as expected"
            )
        return found

    @property
    def plan(self) -> dict[str, Any]:
        """The plan with which the run was started."""
        return self._object("plan")

    def __contains__(self, key: str) -> bool:
        return bool(self._rows("SELECT 1 FROM records WHERE key = ?", key))

    def __getitem__(self, key: str) -> dict[str, Any]:
        """The record of a finished cell. Raises ``KeyError`` if there is none."""
        for found in self._found("SELECT key, record, digest FROM records WHERE key = ?", key):
            return found
        raise KeyError(key)

    def add(self, record: Record) -> None:
        """Store a finished cell. Raises ``InputError`` if it cannot be written to disk."""
        text = strict_json(record.to_dict(), sort=True)
        try:
            with self._db:
                if self._sitting is not None:
                    self._write(f"sitting {self._sitting['began']}", canonical(self._sitting))
                    self._sitting = None
                row = (record.key, text, _digest(record.key, text))
                self._db.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?)", row)
        except sqlite3.Error as error:
            raise InputError(
                f"{self.folder}: a record could not be stored ({error}); free some disk space and resume the run"
            ) from None

    def _write(self, name: str, value: str) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?, ?)", (name, value, _digest(name, value)))

    @property
    def sittings(self) -> list[Sitting]:
        """Each time that a command added records, the first one first. Empty for runs of versions that did not store it."""
        names = self._rows("SELECT name FROM meta WHERE name LIKE 'sitting %' ORDER BY name")
        return [self._object(name) for (name,) in names]

    @property
    def about(self) -> dict[str, Any]:
        """What the run said with ``describe``; empty for runs of versions that did not store it."""
        return self._object("about") if self._rows("SELECT 1 FROM meta WHERE name = 'about'") else {}

    def describe(self, facts: Mapping[str, Any], *, fixed: Sequence[str] = ()) -> None:
        """Store ``facts`` about the run beside those stored before; mappings are merged. Raises ``InputError`` if a fact
        named in ``fixed``, or an entry of it, differs from the stored one, or is missing beside records: the folder then
        holds the results of something else, or does not say of what."""
        held = self.about
        for name in fixed:
            if name not in held and len(self):
                raise InputError(f"{self.folder} does not say of which {name} its results are; choose another --out")
            if said := changed(held.get(name, {}), facts[name]):
                raise InputError(f"{self.folder} holds the results of another {name} ({said}); choose another --out")
        merged = {k: {**held.get(k, {}), **v} if isinstance(v, Mapping) else v for k, v in facts.items()}
        told = {**held, **merged}
        if canonical(told) == canonical(held):
            return  # a run that is only looked at again stays as it is
        try:
            with self._db:
                self._write("about", canonical(told))
        except sqlite3.Error as error:
            raise InputError(f"{self.folder}: the run could not be described ({error}); free some disk space") from None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self._found("SELECT key, record, digest FROM records ORDER BY key")

    def _found(self, query: str, *values: str) -> Iterator[dict[str, Any]]:
        for key, text, digest in self._rows(query, *values):
            found = _parsed(text) if digest == _digest(key, text) else None
            wrong = "it was changed" if found is None else wrong_in(found)
            if wrong or found is None:
                raise self._damaged(f"record {str(key)[:24]!r}: {wrong}")
            yield found

    def __len__(self) -> int:
        return int(self._rows("SELECT COUNT(*) FROM records")[0][0])

    def export(self, summary: Mapping[str, Any]) -> None:
        """Write ``records.jsonl`` and ``summary.json`` beside the store, each completely or not at all."""
        lines = "".join(json.dumps(r, sort_keys=True, ensure_ascii=False) + "\n" for r in self)
        write_whole(self.folder / "records.jsonl", lines)
        write_whole(self.folder / "summary.json", strict_json(dict(summary), indent=2) + "\n")

    def close(self) -> None:
        """Close the store."""
        self._db.close()


def changed(was: str | Mapping[str, str], now: str | Mapping[str, str]) -> str:
    """The first difference between two values of a fact, or between entries that both have, in words; empty without any."""
    before, after = (one if isinstance(one, Mapping) else {"": one} for one in (was, now))
    for part in after:
        if part in before and before[part] != after[part]:
            return f"{f'{part}:' if part.isidentifier() else 'fingerprint'} {before[part]}, now {after[part]}"
    return ""


@contextmanager
def refused_if_damaged(folder: str | Path) -> Iterator[None]:
    """For code that reports on a run: records whose contents do not have the expected form raise ``InputError``."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the results in {folder} do not have the form that this version writes ({type(error).__name__}); "
            "restore them from a copy, or run again with another --out"
        ) from error


def _digest(name: object, text: object) -> str:
    return hashlib.sha256(f"{name}\n{text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _parsed(text: object) -> Any:
    """The JSON value of ``text``, or None; also None if it holds a lone surrogate, which no text file can."""
    if not isinstance(text, str):
        return None
    try:
        found = json.loads(text)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return found
