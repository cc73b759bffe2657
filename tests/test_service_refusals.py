"""The model service and all that a client may do wrong: the right status, and nothing is stored."""

from __future__ import annotations

import asyncio
import io
import json
import pickle
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest
import torch
from service_setting import (
    ALICE,
    BOB,
    EXAMPLES,
    TEXTS,
    Server,
    Setting,
    ask,
    container,
    setting,
    token_file,
)

from rasura.core.errors import InputError
from rasura.server.app import application
from rasura.server.container import CONTENT_TYPE
from rasura.server.limits import Limits, Rates, Tenants
from rasura.server.store import Store

__all__ = ["setting"]


def test_tenants_are_apart(setting: Setting, tmp_path: Path) -> None:
    with setting.client(BOB) as bob, setting.client() as alice:
        assert bob.models() == [] and bob.jobs() == []
        job = alice.train("notes", EXAMPLES, "apart", epochs=1)
        for call in (
            lambda: bob.model("notes"), lambda: bob.delete("notes"), lambda: bob.classify("notes", TEXTS),
            lambda: bob.train("notes", EXAMPLES, "mine"), lambda: bob.download("notes", tmp_path / "mine"),
            lambda: bob.status(job["id"]), lambda: bob.cancel(job["id"]),
        ):  # fmt: skip
            with pytest.raises(InputError, match=r"\(404\)"):
                call()
        bob.upload(setting.folder / "bert", "notes")
        assert alice.status(job["id"])["model"] == "notes"
        alice.cancel(job["id"])
        bob.delete("notes")
        assert alice.model("notes")["pair"] and bob.models() == [] and not list(tmp_path.iterdir())


def test_downloads_at_the_same_time_are_limited(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with store.incoming() as place:
        for name in ("config.json", "model.safetensors"):
            (place / name).write_bytes(b"{}")
        store.add_model("alice", "notes", {}, place)
    tenants = Tenants.read(token_file(tmp_path / "tokens"))
    app = application(store, tenants, Limits(downloads=2))
    headers = [(b"authorization", f"Bearer {ALICE}".encode())]
    scope = {"type": "http", "method": "GET", "path": "/v1/models/notes/files", "headers": headers, "query_string": b""}

    async def all_of_them() -> list[int]:
        go, statuses = asyncio.Event(), []

        async def receive() -> dict[str, Any]:
            await go.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            elif message["body"].startswith(b"{"):
                await go.wait()

        async def one() -> None:
            await app({**scope, "state": {}}, receive, send)

        first = [asyncio.create_task(one()) for _ in range(2)]
        while len(statuses) < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        third = asyncio.create_task(one())
        while len(statuses) < 3:
            await asyncio.sleep(0.01)
        go.set()
        await asyncio.gather(*first, third)
        await one()
        return statuses

    assert asyncio.run(all_of_them()) == [200, 200, 429, 200]
    store.close()


def answered(
    tmp_path: Path, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})
) -> int:
    """The status of a request to an application in this process, which has one model whose files are gone."""
    store = Store(tmp_path / "store")
    about = {"kind": "classification", "vocabulary": 50, "max_length": 64, "labels": 2, "pad": 0, "ends": [2], "pair": None}
    about |= {"hidden": 16, "blocks": 2, "heads": 2, "inner": 32, "parameters": 1000}
    with store.incoming() as place:
        store.add_model("alice", "notes", about, place)
    app = application(store, Tenants({"alice": ALICE}), Limits())
    given = {
        "authorization": f"Bearer {ALICE}",
        "content-length": str(len(body)),
        "content-type": "application/json",
        **headers,
    }
    scope = {
        "type": "http", "method": method, "path": path, "query_string": b"",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
    }  # fmt: skip
    statuses: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    asyncio.run(app(scope, receive, send))
    store.close()
    return statuses[0]


@pytest.mark.parametrize("length", ["x", "-1", "", "\xff", "1e3", "+5", " 5"])
def test_a_length_that_is_no_number_is_refused(tmp_path: Path, length: str) -> None:
    assert answered(tmp_path, "POST", "/v1/models/notes/classify", headers={"content-length": length}) == 400


def test_a_length_of_too_many_digits_and_a_path_that_is_not_text(tmp_path: Path) -> None:
    assert answered(tmp_path, "POST", "/v1/models", headers={"content-length": "9" * 5000}) == 413
    assert answered(tmp_path / "2", "GET", "/v1/models/\ud800") == 400


def test_a_model_whose_files_are_gone_is_not_there(tmp_path: Path) -> None:
    assert answered(tmp_path, "POST", "/v1/models/notes/classify", b'{"inputs": [[1, 5, 2]]}') == 404


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong-0123456789abcdef", f"Basic {ALICE}"])
def test_a_missing_or_wrong_token(setting: Setting, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path in ("/v1/models", "/v1/models/notes", "/nowhere", "/v1/jobs"):
        answer = httpx.get(setting.server.url + path, headers=headers, trust_env=False)
        assert answer.status_code == 401
    if header is None:
        assert answer.headers["www-authenticate"] == "Bearer"
        assert httpx.get(setting.server.url + "/openapi.json", trust_env=False).json()["paths"]
        assert "classify" in httpx.get(setting.server.url + "/docs", trust_env=False).text


def config_of(setting: Setting, **changes: Any) -> bytes:
    return json.dumps({**json.loads((setting.folder / "bert" / "config.json").read_text()), **changes}).encode()


def test_bad_uploads_are_refused_and_leave_nothing(setting: Setting) -> None:
    weights = (setting.folder / "bert" / "model.safetensors").read_bytes()
    good = config_of(setting)
    stream = io.BytesIO()
    torch.save({"a": torch.ones(2)}, stream)
    before = setting.server.files()

    def body(config: bytes = good, tensors: bytes = weights, name: Any = "bad") -> bytes:
        return container({"name": name}, {"config.json": config, "model.safetensors": tensors})

    def named(files: dict[str, bytes]) -> bytes:
        return container({"name": "bad"}, {"config.json": good, **files})

    typed = {"Content-Type": CONTENT_TYPE}
    wrong: list[tuple[int, bytes, dict[str, str]]] = [
        (415, body(tensors=pickle.dumps({"a": [1] * 100})), typed),
        (415, body(tensors=stream.getvalue()), typed),
        (415, body(tensors=b"PK\x03\x04" + bytes(100)), typed),
        (415, body(tensors=weights[:-10]), typed),
        (415, body(tensors=(1 << 60).to_bytes(8, "little") + weights[8:]), typed),
        (415, body(), {"Content-Type": "multipart/form-data; boundary=x"}),
        (415, body(), {}),
        (415, body(), {**typed, "Content-Encoding": "gzip"}),
        (415, pickle.dumps([1, 2, 3]), typed),
        (415, b"\xff" * 40, typed),
        (422, container({"name": "bad"}, {"config.json": good, "pytorch_model.bin": weights}), typed),
        (422, container({"name": "bad"}, {"config.json": good, "../../model.safetensors": weights}), typed),
        (
            422,
            container({"name": "bad"}, {"config.json": good, "model.safetensors": weights, "tokenizer.json": b"{}"}),
            typed,
        ),
        (422, container({"name": "bad"}, {"config.json": good, "model.safetensors": b""}), typed),
        (422, body()[:-1], typed),
        (422, body() + b"x", typed),
        *((422, body(name=name), typed) for name in ("../bad", "a/b", "/etc/x", "..", "", "a" * 65, "a\x00", None, 3)),
        (409, body(name="notes"), typed),
        (422, body(b"not json"), typed),
        (422, body(config_of(setting, model_type="evil")), typed),
        (422, body(config_of(setting, model_type={"a": 1})), typed),
        (422, body(config_of(setting, auto_map={"AutoModel": "evil.Model"})), typed),
        (422, body(config_of(setting, hidden_size=64)), typed),
        (422, body(config_of(setting, num_hidden_layers=200)), typed),
        (422, body(config_of(setting, num_hidden_layers=10**9)), typed),
        (422, body(config_of(setting, vocab_size=10**6)), typed),
        (422, body(config_of(setting, architectures=["BertModel"])), typed),
        (413, body(tensors=bytes(3 << 20)), typed),
    ]
    for status, data, headers in wrong:
        answer = ask(setting, "POST", "/v1/models", content=data, headers=headers)
        assert answer.status_code == status and "\n" not in answer.json()["detail"], (status, answer.text)
    assert ask(setting, "POST", "/v1/models", content=iter([body()]), headers=typed).status_code == 411
    # Announced and refused, before any of it is sent.
    with socket.create_connection(("127.0.0.1", setting.server.port), 10) as raw:
        head = f"POST /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\n"
        raw.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413")
    # Cut off in the middle.
    with socket.create_connection(("127.0.0.1", setting.server.port), 10) as raw:
        head = f"POST /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {ALICE}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        raw.sendall(f"{head}Content-Length: {len(body())}\r\n\r\n".encode() + body()[:50000])
    clean = 0  # looks in a row: the server may not have begun with the upload at the first one
    for _ in range(600):
        clean = clean + 1 if set(setting.server.files()) <= set(before) else 0
        if clean == 20:
            break
        time.sleep(0.05)
    assert clean == 20, setting.server.files()
    assert {m["name"] for m in ask(setting, "GET", "/v1/models").json()} == {"notes", "stories"}


def test_bad_requests(setting: Setting) -> None:
    before = setting.server.files()
    one = {"inputs": [[1, 5, 2]]}
    wrong: list[tuple[int, str, Any]] = [
        (422, "notes/classify", {"inputs": [[1, 300, 2]]}),
        (422, "notes/classify", {"inputs": [[1, -1, 2]]}),
        (422, "notes/classify", {"inputs": [["1"]]}),
        (422, "notes/classify", {"inputs": [[1.5]]}),
        (422, "notes/classify", {"inputs": [[10**30]]}),
        (422, "notes/classify", {"inputs": [[]]}),
        (422, "notes/classify", {"inputs": []}),
        (422, "notes/classify", {"inputs": [[1] * 65]}),
        (422, "notes/classify", {"inputs": [[1]] * 257}),
        (422, "notes/classify", {**one, "types": [[0, 1]]}),
        (422, "notes/classify", {"texts": ["a private w77 text"]}),
        (409, "stories/classify", one),
        (409, "notes/generate", {"input": [1]}),
        (422, "stories/generate", {"input": [300]}),
        (422, "stories/generate", {"input": []}),
        (422, "stories/generate", {"input": [1], "new_tokens": 64}),
        (422, "stories/generate", {"input": [1], "temperature": -1}),
        (404, "none/classify", one),
        (404, "..%2Fnotes/classify", one),
    ]  # fmt: skip
    for status, path, data in wrong:
        answer = ask(setting, "POST", f"/v1/models/{path}", json=data)
        assert answer.status_code == status and "w77" not in answer.text and "300" not in answer.json()["detail"], (
            answer.text
        )
    answer = ask(setting, "POST", "/v1/models/notes/classify", content=b"[" * 2_000_000)
    assert answer.status_code == 413
    assert ask(setting, "POST", "/v1/models/notes/classify", content=b"[" * 100_000).status_code in (400, 422)
    assert ask(setting, "GET", "/v1/jobs/nothing").status_code == 404
    assert setting.server.files() == before
    assert "Traceback" not in setting.server.log.read_text()


def test_bad_jobs_are_refused_and_leave_nothing(setting: Setting) -> None:
    from safetensors.torch import save

    before = setting.server.files()
    good = {
        "ids": torch.tensor([1, 5, 2, 1, 6, 2], dtype=torch.int32),
        "lengths": torch.tensor([3, 3], dtype=torch.int32),
        "labels": torch.tensor([0, 1], dtype=torch.int32),
    }

    def part(name: str, values: list[int], dtype: torch.dtype = torch.int32) -> bytes:
        return save({**good, name: torch.tensor(values, dtype=dtype)})

    empty = {name: torch.zeros(0, dtype=torch.int32) for name in good}
    wrong: list[tuple[int, bytes, dict[str, Any]]] = [
        (422, save(empty), {}),
        (422, part("ids", [1, 5, 2, 1, 300, 2]), {}),
        (422, part("ids", [1, 5, 2, 1, -3, 2]), {}),
        (422, part("ids", [1, 5, 2]), {}),
        (422, part("lengths", [6]), {}),
        (422, part("lengths", [-1, 7]), {}),
        (422, part("lengths", [3, 3], torch.int64), {}),
        (422, part("labels", [0, 3]), {}),
        (422, part("labels", [0]), {}),
        (422, part("text", [0]), {}),
        (422, part("types", [0, 0, 0, 0, 0, 2], torch.uint8), {}),
        (422, save({"ids": good["ids"], "lengths": good["lengths"]}), {}),
        (415, pickle.dumps(good), {}),
        (422, save(good), {"output": "../out"}),
        (409, save(good), {"output": "notes"}),
        (422, save(good), {"settings": {"epochs": 0}}),
        (422, save(good), {"settings": {"epochs": True}}),
        (422, save(good), {"settings": {"rank": 33}}),
        (422, save(good), {"settings": {"method": "none"}}),
        (422, save(good), {"settings": {"learning_rate": float("nan")}}),
        (422, save(good), {"settings": {"code": "x"}}),
        (422, save(good), {"settings": [1]}),
    ]
    for status, data, about in wrong:
        body = container({"output": "bad", **about}, {"data.safetensors": data})
        answer = ask(setting, "POST", "/v1/models/notes/jobs", content=body, headers={"Content-Type": CONTENT_TYPE})
        assert answer.status_code == status, (status, about, answer.text)
    with setting.client() as client:
        with pytest.raises(InputError, match=r"\(422\): the data set holds 0 texts"):
            client.train("notes", [], "bad")
        assert all(job["output"] != "bad" for job in client.jobs())
    assert setting.server.files() == before


def test_the_key_of_another_model_is_refused_before_anything_is_sent(setting: Setting) -> None:
    with setting.client(key="llama") as client, pytest.raises(InputError, match="the key belongs to the obfuscated model"):
        client.classify("notes", TEXTS)
    with setting.client() as client, pytest.raises(InputError, match="is not obfuscated"):
        client.upload(setting.folder / "bert-plain", "plain")


@pytest.mark.slow
def test_too_many_requests(tmp_path: Path) -> None:
    server = Server(tmp_path / "store", token_file(tmp_path / "tokens"), tmp_path / "log", ("--rate", "0.01"))
    server.start()
    try:
        codes = [ask(Setting(server, tmp_path), "GET", "/v1/models").status_code for _ in range(3)]
        assert codes == [200, 429, 429]
        assert ask(Setting(server, tmp_path), "GET", "/v1/models", BOB).status_code == 200
        second = [sys.executable, "-m", "rasura", "serve", "--store", str(server.store), "--token-file", str(server.tokens)]
        done = subprocess.run([*second, "--port", "1"], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and "is in use by another process" in done.stderr
    finally:
        server.end()
    with sqlite3.connect(server.store / "service.sqlite") as db:
        assert db.execute("SELECT COUNT(*) FROM models").fetchone() == (0,)
    assert oct(server.store.stat().st_mode)[-3:] == "700"


def test_a_bucket_fills_at_its_rate() -> None:
    rates = Rates(2.0, 3)
    assert [rates.wait("a", 0.0) for _ in range(4)] == [0, 0, 0, 0.5]
    assert rates.wait("b", 0.0) == 0 and rates.wait("a", 0.4) > 0 and rates.wait("a", 0.5) == 0


@pytest.mark.parametrize(
    "text", ["", "alice\n", "alice:short\n", "../x:0123456789abcdef\n", f"a:{ALICE}\nb:{ALICE}\n", f"a:{ALICE}\na:{BOB}\n"]
)
def test_bad_token_files(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError):
        Tenants.read(token_file(tmp_path / "tokens", text))


def test_a_token_file_that_others_can_read(tmp_path: Path) -> None:
    path = token_file(tmp_path / "tokens")
    assert Tenants.read(path).name(f"Bearer {BOB}".encode()) == "bob"
    path.chmod(0o640)
    with pytest.raises(InputError, match="chmod 600"):
        Tenants.read(path)


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"not json", b"[]", b"{}", b'{"logits": 3}', b'{"logits": [[1, "a"]]}', b'{"logits": [[1], [1, 2]]}',
        b'{"logits": [[NaN, 1]]}', b'{"logits": []}', b'{"logits": [[1, 2], [3, 4]]}',
        b'{"logits": [[1e999, 1]]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_what_is_no_answer_of_a_server_is_said_in_one_line(setting: Setting, answer: bytes) -> None:
    from rasura.service_protections.obfuslm.key import Key

    pair = Key.load(setting.folder / "bert.key").pair
    about = {"kind": "classification", "max_length": 64, "labels": 3, "pair": pair}

    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=json.dumps(about).encode() if request.method == "GET" else answer)

    with setting.client() as client:
        client._server._http = httpx.Client(transport=httpx.MockTransport(handle), base_url="http://x")
        with pytest.raises(InputError) as found:
            client.classify("notes", [TEXTS[0]])
    assert "\n" not in str(found.value) and "w20" not in str(found.value)
