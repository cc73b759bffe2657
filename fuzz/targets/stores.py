"""Run stores: damaged databases, and records of other types whose digests are right."""

from __future__ import annotations

import hashlib
import json
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from random import Random

from fuzz.mutations import as_json, damaged, retyped
from fuzz.target import Target, write_shared
from rasura.core.records import Record
from rasura.core.run_store import RunStore
from rasura.report.page import write_report

RAW, RECORDS = b"R", b"J"


class Stores(Target):
    """``RunStore`` for reading, and ``write_report`` on what it holds."""

    name, share = "stores", 12

    def _store(self, plan: dict[str, object], records: Sequence[Record]) -> list[bytes]:
        folder = self.folder / "made"
        with closing(RunStore(folder, plan)) as store:
            for record in records:
                store.add(record)
            text = json.dumps({"plan": plan, "records": list(store)})
        raw = (folder / "run.sqlite").read_bytes()
        shutil.rmtree(folder)
        return [RAW + raw, RECORDS + text.encode()]

    def seeds(self) -> list[bytes]:
        score = {"per_record": [0.5, None], "mean": 0.5, "low": 0.1, "high": 0.9, "worst": 0.5, "n": 2, "unit": "share"}
        seen = {"words": [["Ann", True, True], ["sat", False, False]], "read": "Ann stood", "score": 0.5}
        records = [
            Record(
                f"k{k}", attack, defense, "honest-server", "m", "d", 1, 0, k, status, reason="why" * (status != "ok"),
                scores={"token_recall": score, "sensitive": score} if status == "ok" else {}, blind={"token_recall": score},
                recovered=[seen] if status == "ok" else [], threat_plain="a server", sent_bytes=1000 + k,
                versions={"torch": "2"}, confidence="span",
            )
            for k, (attack, defense, status) in enumerate(
                [
                    ("blind", "none", "ok"), ("span", "none", "ok"), ("span", "pruning:0.9", "failed"),
                    ("span", "pruning:0.5", "ok"), ("best", "none", "not_applicable"),
                ]
            )
        ]  # fmt: skip
        plan: dict[str, object] = {"attacks": ["blind", "span", "best"], "defenses": ["none", "pruning:0.5", "pruning:0.9"]}
        many = [Record(f"{k:04d}", "span", "none", "t", "m", "d", 1, 0, k, "failed", reason="x" * 200) for k in range(60)]
        return [*self._store(plan, records), *self._store({**plan, "task": "vision"}, records[:1]), *self._store(plan, many)]

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        seed = rng.choice(seeds)
        if seed[:1] == RECORDS:
            return RECORDS + as_json(retyped(rng, json.loads(seed[1:])))
        out = bytearray(seed[1:])
        for _ in range(rng.choice((0, 1, 4))):
            page = 4096 * rng.randrange(max(1, len(out) // 4096))
            at = min(len(out) - 1, page + rng.randrange(rng.choice((128, 4096))))
            out[at] = rng.randrange(256)
        return RAW + damaged(rng, bytes(out), ())

    def read(self, data: bytes) -> None:
        folder = self.folder / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if data[:1] == RAW:
            write_shared(folder / "run.sqlite", data[1:])
        else:
            self._write(json.loads(data[1:]))
        with closing(RunStore(folder)) as store:
            list(store)
        if data[:1] == RECORDS:
            write_report(folder)

    def _write(self, told: object) -> None:
        """A store with these values, each under its right digest."""
        with closing(RunStore(self.folder / "run", {})):
            pass
        plan = told.get("plan") if isinstance(told, dict) else told
        records = told.get("records") if isinstance(told, dict) else None
        rows = records if isinstance(records, list) else [records]
        with closing(sqlite3.connect(self.folder / "run" / "run.sqlite")) as db, db:
            text = json.dumps(plan)
            db.execute("UPDATE meta SET value = ?, digest = ? WHERE name = 'plan'", (text, _digest("plan", text)))
            for number, row in enumerate(rows):
                key = row["key"] if isinstance(row, dict) and isinstance(row.get("key"), str) else str(number)
                key = key.encode("utf-8", "replace").decode()
                text = json.dumps(row)
                db.execute("INSERT OR IGNORE INTO records VALUES (?, ?, ?)", (key, text, _digest(key, text)))


def _digest(name: str, text: str) -> str:
    return hashlib.sha256(f"{name}\n{text}".encode()).hexdigest()[:32]
