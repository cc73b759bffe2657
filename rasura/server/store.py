"""The models and jobs of the service: SQLite for their state, and a folder for the files of each. It survives a kill at any
point. No torch.

``STORE/service.sqlite``; ``models/ID`` (config.json, model.safetensors); ``jobs/ID`` (the data and the training's
checkpoints, removed when the job ends); ``incoming/ID`` for incomplete uploads. The server chooses IDs, never a client.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.server.judged import judged
from rasura.server.limits import ID, MIB, Refused

SCHEMA = """
CREATE TABLE IF NOT EXISTS models (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, about TEXT NOT NULL, bytes INTEGER NOT NULL,
  created REAL NOT NULL, UNIQUE (tenant, name));
CREATE TABLE IF NOT EXISTS jobs (
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL, name TEXT NOT NULL, output TEXT NOT NULL,
  settings TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL, epochs TEXT NOT NULL, starts INTEGER NOT NULL,
  created REAL NOT NULL);
"""
OPEN = ("queued", "running")
"""States of a job that is not at its end; the others: done, failed, cancelled."""


@dataclass(frozen=True)
class Model:
    """A stored model: what its tenant calls it, and ``about`` it: kind, vocabulary, max_length, labels, classes, pad, ends,
    pair."""

    id: str
    tenant: str
    name: str
    about: Mapping[str, Any]
    bytes: int

    @property
    def trained(self) -> int:
        """Bytes that a model trained from this one takes, at most. Older stores do not tell: twice as many where this one
        is in half precision."""
        return int(self.about.get("trained", 2 * self.bytes + MIB))

    def to_dict(self) -> dict[str, Any]:
        """The description for its tenant."""
        return {"name": self.name, "bytes": self.bytes, **self.about}


@dataclass(frozen=True)
class Job:
    """A fine-tuning job: trains ``model`` (an id; ``name`` to its tenant) into a new one named ``output``."""

    id: str
    tenant: str
    model: str
    name: str
    output: str
    settings: Mapping[str, Any]
    state: str
    reason: str
    epochs: list[dict[str, float | None]]
    starts: int
    kept: int | None = None
    held_out: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """The description for its tenant."""
        return {
            "id": self.id, "model": self.name, "output": self.output, "state": self.state, "reason": self.reason,
            "epoch": len(self.epochs), "of": self.settings["epochs"], **judged(self.epochs, self.kept, self.held_out),
        }  # fmt: skip


class Store:
    """The folder of a service. Several processes may open it; each change is one transaction."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            for name in ("models", "jobs", "incoming"):
                (self.folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            self._db = sqlite3.connect(
                self.folder / "service.sqlite", timeout=30, check_same_thread=False, isolation_level=None
            )
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise InputError(f"the store {folder} cannot be opened ({error}); choose another --store") from None
        self._lock = threading.RLock()

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """A new folder, which is removed after the block unless it was moved to its place."""
        place = self.folder / "incoming" / secrets.token_hex(8)
        place.mkdir(mode=0o700)
        try:
            yield place
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def sweep(self) -> None:
        """At a start: remove what the server made and no row names, and queue the jobs that a killed server left running."""
        with self._transaction() as db:
            db.execute("UPDATE jobs SET state = 'queued' WHERE state = 'running'")
        kept = {row[0] for row in self._rows("SELECT id FROM models UNION SELECT id FROM jobs WHERE state = 'queued'")}
        for kind in ("models", "jobs", "incoming"):
            for place in (self.folder / kind).iterdir():
                if ID.fullmatch(place.name) and (kind == "incoming" or place.name not in kept):
                    shutil.rmtree(place, ignore_errors=True)

    # models

    def add_model(self, tenant: str, name: str, about: Mapping[str, Any], place: Path, *, by: str | None = None) -> Model:
        """Take the files in ``place`` as a model. ``by``: the job that made it, which is done with that.

        Raises ``Refused`` for a name that is taken, or that a job has reserved, and where the job is at its end already.
        """
        size = sum(file.stat().st_size for file in place.iterdir())
        model = Model(secrets.token_hex(8), tenant, name, about, size)
        target = self.folder / "models" / model.id
        try:
            with self._transaction() as db:
                self._check_free(tenant, name, by)
                row = (model.id, tenant, name, json.dumps(about), size, time.time())
                db.execute("INSERT INTO models VALUES (?, ?, ?, ?, ?, ?)", row)
                if by is not None:
                    if size > self.model_by_id(self.job(by).model).trained:
                        raise Refused(413, "the trained model takes more bytes than its job was given")
                    query = "UPDATE jobs SET state = 'done' WHERE id = ? AND state IN (?, ?)"
                    if not db.execute(query, (by, *OPEN)).rowcount:
                        raise Refused(409, "the job has ended")
                os.replace(place, target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return model

    def check_free(self, tenant: str, name: str) -> None:
        """Raises ``Refused`` where the tenant has a model of this name, or a job that will make one."""
        with self._lock:
            self._check_free(tenant, name, None)

    def _check_free(self, tenant: str, name: str, by: str | None) -> None:
        if self._rows("SELECT 1 FROM models WHERE tenant = ? AND name = ?", tenant, name):
            raise Refused(409, f"there is a model named {name}; delete it or choose another name")
        query = "SELECT 1 FROM jobs WHERE tenant = ? AND output = ? AND state IN (?, ?) AND id != ?"
        if self._rows(query, tenant, name, *OPEN, by or ""):
            raise Refused(409, f"a job will make a model named {name}; choose another name")

    def models(self, tenant: str) -> list[Model]:
        """The tenant's models, the oldest first."""
        return [_model(row) for row in self._rows(f"{_MODEL} WHERE tenant = ? ORDER BY created", tenant)]

    def model(self, tenant: str, name: str) -> Model:
        """Raises ``Refused`` (404) if this tenant has none of this name, even if others have."""
        rows = self._rows(f"{_MODEL} WHERE tenant = ? AND name = ?", tenant, name)
        if not rows:
            raise Refused(404, "there is no such model")
        return _model(rows[0])

    def model_by_id(self, number: str) -> Model:
        """For jobs, which know the id of their model. Raises ``Refused`` where it is gone."""
        rows = self._rows(f"{_MODEL} WHERE id = ?", number)
        if not rows:
            raise Refused(404, "the model is gone")
        return _model(rows[0])

    def path(self, model: Model) -> Path:
        """The folder of its files."""
        return self.folder / "models" / model.id

    def bytes_of(self, tenant: str) -> int:
        """Bytes of the tenant's models, and of those that open jobs will make."""
        with self._lock:
            sources = self._rows("SELECT model FROM jobs WHERE tenant = ? AND state IN (?, ?)", tenant, *OPEN)
            made = sum(self.model_by_id(number).trained for (number,) in sources)
            return made + sum(model.bytes for model in self.models(tenant))

    def delete_model(self, tenant: str, name: str) -> Model:
        """Remove a model. Raises ``Refused`` for none, and while a job needs it."""
        with self._transaction() as db:
            model = self.model(tenant, name)
            if self._rows("SELECT 1 FROM jobs WHERE model = ? AND state IN (?, ?)", model.id, *OPEN):
                raise Refused(409, "a job trains from this model; cancel it first")
            db.execute("DELETE FROM models WHERE id = ?", (model.id,))
        shutil.rmtree(self.path(model), ignore_errors=True)
        return model

    # jobs

    def add_job(self, model: Model, output: str, settings: Mapping[str, Any], place: Path, max_open: int, room: int) -> Job:
        """Queue a job whose data are in ``place``. Raises ``Refused`` beyond ``max_open`` open jobs, for a name that is
        taken, and where the tenant's models with those of its jobs would have more than ``room`` bytes."""
        job = Job(secrets.token_hex(8), model.tenant, model.id, model.name, output, settings, "queued", "", [], 0)
        target = self.folder / "jobs" / job.id
        try:
            with self._transaction() as db:
                self.model_by_id(model.id)
                self._check_free(model.tenant, output, None)
                count = self._rows("SELECT COUNT(*) FROM jobs WHERE tenant = ? AND state IN (?, ?)", model.tenant, *OPEN)
                if count[0][0] >= max_open:
                    raise Refused(429, f"{max_open} jobs are not finished; wait until one ends")
                if self.bytes_of(model.tenant) + model.trained > room:
                    raise Refused(413, "there is no room for the model that this job will make; delete one first")
                row = (job.id, job.tenant, job.model, job.name, output, json.dumps(settings), time.time())
                db.execute("INSERT INTO jobs VALUES (?, ?, ?, ?, ?, ?, 'queued', '', '[]', 0, ?)", row)
                os.replace(place, target)
        except BaseException:
            shutil.rmtree(target, ignore_errors=True)
            raise
        return job

    def jobs(self, tenant: str) -> list[Job]:
        """The tenant's jobs, the oldest first."""
        return [_job(row) for row in self._rows(f"{_JOB} WHERE tenant = ? ORDER BY created", tenant)]

    def job(self, number: str, tenant: str | None = None) -> Job:
        """Raises ``Refused`` (404) where there is none, or it is another tenant's."""
        rows = self._rows(f"{_JOB} WHERE id = ?", number)
        if not rows or tenant not in (None, rows[0][1]):
            raise Refused(404, "there is no such job")
        return _job(rows[0])

    def job_path(self, number: str) -> Path:
        """The folder of its data and checkpoints."""
        return self.folder / "jobs" / number

    def next_job(self) -> Job | None:
        """The oldest queued job, which runs from now on."""
        with self._transaction() as db:
            rows = self._rows(f"{_JOB} WHERE state = 'queued' ORDER BY created LIMIT 1")
            if not rows:
                return None
            db.execute("UPDATE jobs SET state = 'running', starts = starts + 1 WHERE id = ?", (rows[0][0],))
        return self.job(rows[0][0])

    def progress(self, number: str, epochs: list[dict[str, float]], kept: int, held_out: int) -> None:
        """Note the figures of the ``epochs`` so far, one that is not finite as None; the rest as in ``judged``."""
        finite = [{name: value if math.isfinite(value) else None for name, value in one.items()} for one in epochs]
        told = {"epochs": finite, "kept": kept, "held_out": held_out}
        with self._transaction() as db:
            db.execute("UPDATE jobs SET epochs = ? WHERE id = ?", (json.dumps(told), number))

    def move_job(self, number: str, state: str, reason: str = "", *, uncounted: bool = False) -> bool:
        """Move an open job to ``state``; ``uncounted``: its last start was none. False where it was at its end already."""
        with self._transaction() as db:
            query = "UPDATE jobs SET state = ?, reason = ?, starts = starts - ? WHERE id = ? AND state IN (?, ?)"
            return db.execute(query, (state, reason, int(uncounted), number, *OPEN)).rowcount > 0

    def end_job(self, number: str, state: str, reason: str = "") -> None:
        """Move a job to its last ``state``, unless it was at its end already, and remove its data."""
        self.move_job(number, state, reason)
        shutil.rmtree(self.job_path(number), ignore_errors=True)


_MODEL = "SELECT id, tenant, name, about, bytes FROM models"
_JOB = "SELECT id, tenant, model, name, output, settings, state, reason, epochs, starts FROM jobs"


def _model(row: Any) -> Model:
    return Model(row[0], row[1], row[2], json.loads(row[3]), row[4])


def _job(row: Any) -> Job:
    number, tenant, model, name, output, settings, state, reason, epochs, starts = row
    told = found if isinstance(found := json.loads(epochs), dict) else {"epochs": found}  # a list: none yet, or an old store
    return Job(number, tenant, model, name, output, json.loads(settings), state, reason, starts=starts, **told)
