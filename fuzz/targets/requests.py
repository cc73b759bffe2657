"""Requests to the service, in this process: an answer of 500 is a failure."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutations import as_json, damaged, retyped
from fuzz.target import Target
from rasura.server.app import application
from rasura.server.container import CONFIG, CONTENT_TYPE, WEIGHTS
from rasura.server.limits import Limits, Tenants
from rasura.server.store import Store

TOKEN = "0123456789abcdef"
ABOUT = {
    "vocabulary": 50, "max_length": 64, "labels": 2, "pad": 0, "ends": [2], "hidden": 16, "blocks": 2, "heads": 2,
    "inner": 32, "parameters": 1000, "pair": None,
}  # fmt: skip
PATHS = (
    "/v1/models", "/v1/models/notes", "/v1/models/notes/classify", "/v1/models/stories/generate", "/v1/models/notes/jobs",
    "/v1/jobs", "/v1/jobs/x", "/v1/models/notes/files", "/v1/models/..%2F..", "/v1/models/\ud800", "/health", "/docs",
    "/nowhere",
)  # fmt: skip


class Requests(Target):
    """The application behind its guard: method, path, headers and body are damaged. The models are not there, so that what
    passes every check is answered by 404."""

    name, share = "requests", 30

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.store = Store(folder / "store")
        for name, kind in (("notes", "classification"), ("stories", "causal")):
            with self.store.incoming() as place:
                for file in (CONFIG, WEIGHTS):
                    (place / file).write_bytes(b"{}")
                made = self.store.add_model("alice", name, {**ABOUT, "kind": kind}, place)
            for file in (CONFIG, WEIGHTS):
                (self.store.path(made) / file).unlink()
        limits = Limits(rate=1e9, burst=10**9, jobs=10**9, tenant_waiting=10**6)
        self.app = application(self.store, Tenants({"alice": TOKEN}), limits)
        self.loop = asyncio.new_event_loop()

    def close(self) -> None:
        self.loop.close()
        self.store.close()

    def seeds(self) -> list[bytes]:
        def one(method: str, path: str, body: Any = None, **headers: str) -> bytes:
            text = "" if body is None else json.dumps(body)
            return json.dumps({"method": method, "path": path, "headers": headers, "body": text}).encode()

        return [
            one("POST", PATHS[2], {"inputs": [[1, 5, 2], [7]], "types": None}),
            one("POST", PATHS[2], {"inputs": [[1, 5, 2]], "types": [[0, 0, 1]]}),
            one("POST", PATHS[3], {"input": [1, 5], "new_tokens": 4, "temperature": 0.5, "top_k": 3, "seed": 1}),
            one("POST", PATHS[3], {"input": [1], "new_tokens": 1}),
            one("GET", PATHS[0]), one("GET", PATHS[1]), one("GET", PATHS[5]), one("DELETE", PATHS[6]), one("GET", PATHS[7]),
            one("POST", PATHS[0], None, **{"content-type": CONTENT_TYPE}),
            one("POST", PATHS[4], {"output": "new"}, **{"content-type": CONTENT_TYPE}),
        ]  # fmt: skip

    def mutated(self, rng: Random, seeds: Sequence[bytes]) -> bytes:
        told = json.loads(rng.choice(seeds))
        body = told["body"]
        if body and rng.random() < 0.7:
            told["body"] = as_json(retyped(rng, json.loads(body))).decode("latin-1")
        elif rng.random() < 0.6:
            told["body"] = damaged(rng, body.encode(), ()).decode("latin-1")
        what = rng.random()
        if what < 0.1:
            told["path"] = rng.choice(PATHS)
        elif what < 0.2:
            told["method"] = rng.choice(("GET", "POST", "DELETE", "HEAD", "PUT", "OPTIONS", "PATCH"))
        elif what < 0.3:
            name = rng.choice(
                ("content-length", "transfer-encoding", "content-encoding", "content-type", "expect", "authorization")
            )
            told["headers"][name] = rng.choice(
                ("", "-1", "x", "1e3", "9" * 30, "chunked", "gzip", "Bearer", "application/json", "\xff")
            )
        return json.dumps(told).encode()

    def read(self, data: bytes) -> None:
        told = json.loads(data)
        body = told["body"].encode("latin-1", "replace")
        given = {"authorization": f"Bearer {TOKEN}", "content-length": str(len(body)), "content-type": "application/json"}
        headers = [(n.encode(), v.encode("latin-1")) for n, v in {**given, **told["headers"]}.items()]
        status = self.loop.run_until_complete(self._answer(told["method"], told["path"], headers, body))
        assert status < 500, f"answered by {status}"

    async def _answer(self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes) -> int:
        sent: list[int] = []
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                sent.append(message["status"])

        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode("utf-8", "replace"), "headers": headers,
            "query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        await self.app(scope, receive, send)
        return sent[0]
