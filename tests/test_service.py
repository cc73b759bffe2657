"""The model service: a real server in a process of its own, a tiny model, and all that a client may do wrong."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

import rasura
from rasura.data.text import Example
from rasura.errors import InputError
from rasura.obfuscation.folder import obfuscate_model
from rasura.obfuscation.settings import ObfuscationSettings
from rasura.rng import generator
from rasura.service.client import Client
from rasura.service.container import CONTENT_TYPE, Outgoing, header_bytes
from rasura.service.inference import Decoding, Prompt
from rasura.service.limits import Limits, Rates, Refused, Tenants
from rasura.service.server import application
from rasura.service.store import Store
from rasura.victims.loading import with_partial_adapter
from tests.tiny import SEP, batch_for, tiny, tokenizer_folder

ALICE, BOB = "alice-0123456789abcdef", "bob-fedcba9876543210"
TEXTS = [f"w{20 + k} the w{30 + k} of w{200 + k} and w77 w{100 + 3 * k}" for k in range(12)]
EXAMPLES = [Example(text, None, k % 3) for k, text in enumerate(TEXTS)]


@dataclass
class Server:
    """``rasura serve`` on a port of this machine."""

    store: Path
    tokens: Path
    log: Path
    options: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [sys.executable, "-m", "rasura", "serve", "--store", str(self.store), "--token-file", str(self.tokens)]
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port), *self.options], stdout=out, stderr=out, env=dict(os.environ)
            )
        for _ in range(1800):
            try:
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.1)
            assert self.process.poll() is None, self.log.read_text()
        raise AssertionError("the server did not start")

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(20)

    def files(self) -> list[str]:
        return sorted(
            str(p.relative_to(self.store)) for kind in ("models", "jobs", "incoming") for p in (self.store / kind).rglob("*")
        )


@dataclass
class Setting:
    server: Server
    folder: Path
    """The obfuscated models and their keys: ``bert``, ``bert.key``, ``llama``, ``llama.key``."""

    def client(self, token: str = ALICE, key: str | None = "bert") -> Client:
        return Client(self.server.url, token, key=None if key is None else self.folder / f"{key}.key")


def make_models(folder: Path) -> None:
    for family, task in (("bert", "classification"), ("llama", "causal")):
        plain = tokenizer_folder(tiny(family, task, blocks=4, hidden=32), folder / f"{family}-plain")
        settings = ObfuscationSettings(k=4, epsilon=1.0)
        obfuscate_model(plain, folder / family, folder / f"{family}.key", settings, num_labels=3, rng=generator(1, family))


def token_file(path: Path, text: str = f"alice:{ALICE}\nbob:{BOB}\n") -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("service")
    make_models(folder)
    server = Server(folder / "store", token_file(folder / "tokens"), folder / "log", ("--rate", "500", "--max-model", "2"))
    server.start()
    made = Setting(server, folder)
    with made.client() as client:
        client.upload(folder / "bert", "notes")
        client.upload(folder / "llama", "stories")
    yield made
    server.end()


def loaded(folder: Path, task: str) -> Any:
    kind = transformers.AutoModelForCausalLM if task == "causal" else transformers.AutoModelForSequenceClassification
    return kind.from_pretrained(folder).eval()


def test_classify_gives_what_the_obfuscated_model_gives(setting: Setting) -> None:
    with setting.client() as client:
        found = client.classify("notes", TEXTS)
        about = client.model("notes")
    assert about["kind"] == "classification" and about["vocabulary"] == 300 and about["labels"] == 3
    tokenizer, model = (
        rasura.ObfuscatedTokenizer(setting.folder / "bert.key"),
        loaded(setting.folder / "bert", "classification"),
    )
    for text, answer in zip(TEXTS, found):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        assert answer.probabilities == pytest.approx(logits.double().softmax(0).tolist(), abs=1e-5)
        assert answer.label == int(logits.argmax())


def test_generate_streams_what_the_obfuscated_model_says(setting: Setting) -> None:
    with setting.client(key="llama") as client:
        pieces = list(client.generate("stories", TEXTS[0], new_tokens=8))
        again = "".join(client.generate("stories", TEXTS[0], new_tokens=8, temperature=1.0, top_k=20, seed=4))
        assert again == "".join(client.generate("stories", TEXTS[0], new_tokens=8, temperature=1.0, top_k=20, seed=4))
    tokenizer, model = rasura.ObfuscatedTokenizer(setting.folder / "llama.key"), loaded(setting.folder / "llama", "causal")
    ids = tokenizer(TEXTS[0])["input_ids"][:-1]
    whole = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=SEP, pad_token_id=0)[0]
    expected = tokenizer.decode(whole, skip_special_tokens=True)[len(tokenizer.decode(ids, skip_special_tokens=True)) :]
    assert "".join(pieces) == expected and len(pieces) > 1


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_prompts_side_by_side_are_continued_as_alone(family: str) -> None:
    model = tiny(family, "causal", hidden=32)
    prompts = [[5, 9, 40, 41, 80], [7], [60, 61, 62]]
    together = Decoding(model, [Prompt(ids, 6) for ids in prompts], 0)
    steps = [together.step() for _ in range(6)]
    for k, ids in enumerate(prompts):
        alone = Decoding(model, [Prompt(ids, 6)], 0)
        assert [step[k] for step in steps] == [alone.step()[0] for _ in range(6)]


@pytest.mark.parametrize(("family", "task"), [("bert", "classification"), ("gpt2", "causal"), ("llama", "classification")])
def test_the_papers_recipe_trains_the_first_two_blocks_and_the_last_whole(family: str, task: str) -> None:
    pytest.importorskip("peft")
    model, batch = tiny(family, task, blocks=5, hidden=32), batch_for(task).inputs()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        loss = float(model(**batch).loss)
    made = with_partial_adapter(model, task, 4, 16, 0)
    with torch.no_grad():
        assert float(made(**batch).loss) == pytest.approx(loss, abs=1e-6)
    trained = [p for p in made.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.5)
    for _ in range(2):  # the first step moves B alone
        optimizer.zero_grad()
        made(**batch).loss.backward()
        optimizer.step()
    with torch.no_grad():
        loss = float(made(**batch).loss)
        merged = made.merge_and_unload()
        assert float(merged(**batch).loss) == pytest.approx(loss, abs=1e-5)
    changes = {n: (p - before[n]).detach() for n, p in merged.named_parameters()}
    whole = [n for n, p in before.items() if p.dim() == 2 and any(f".{k}." in n for k in (0, 1, 4))]
    inner = [n for n, p in before.items() if p.dim() == 2 and any(f".{k}." in n for k in (2, 3))]
    assert all(changes[n].abs().max() > 0 for n in [*whole, *inner])
    assert all(int(torch.linalg.matrix_rank(changes[n], rtol=1e-3)) <= 4 for n in inner)
    embeddings = merged.get_input_embeddings().weight
    assert any(torch.equal(embeddings, p) for n, p in before.items() if "embed" in n or "wte" in n)


def test_a_job_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    make_models(tmp_path)
    server = Server(tmp_path / "store", token_file(tmp_path / "tokens"), tmp_path / "log")
    server.start()
    setting = Setting(server, tmp_path)
    try:
        with setting.client() as client:
            client.upload(tmp_path / "bert", "notes")
            settings = {"epochs": 60, "patience": 1000, "learning_rate": 2e-3, "batch_size": 8, "holdout": 0.3}
            settings |= {"method": "lora", "rank": 4}
            job = client.train("notes", EXAMPLES * 8, "tuned", **settings)
            waiting = client.train("notes", EXAMPLES, "second", epochs=1)
            while (seen := client.status(job["id"]))["epoch"] < 2:
                assert seen["state"] in ("queued", "running"), seen
                time.sleep(0.02)
        server.end(signal.SIGKILL)
        assert seen["state"] == "running" and seen["epoch"] < 60
        (server.store / "incoming" / "half").mkdir()
        server.start()
        with setting.client() as client:
            done = client.wait(job["id"], seconds=300, every=0.2)
            assert done["epoch"] == 60 and done["epochs"][:2] == seen["epochs"][:2]
            assert client.wait(waiting["id"], seconds=300, every=0.2)["state"] == "done"
            answers = client.classify("tuned", TEXTS)
            assert {m["name"] for m in client.models()} == {"notes", "tuned", "second"}
            assert done["epochs"][-1]["train_loss"] < 0.5 * done["epochs"][0]["train_loss"]
            assert sum(a.label == e.label for a, e in zip(answers, EXAMPLES)) >= 10
            client.delete("second")
        assert not any(name.startswith(("jobs/", "incoming/")) for name in server.files())
        assert len([name for name in server.files() if name.endswith(".safetensors")]) == 2
    finally:
        server.end()
    secret = [*TEXTS, *(word for text in TEXTS for word in text.split() if len(word) > 3), ALICE, BOB]
    tokens = rasura.ObfuscatedTokenizer(tmp_path / "bert.key")
    ids = [json.dumps(tokens(text)["input_ids"]) for text in TEXTS]
    key = (tmp_path / "bert.key").read_bytes()[-2000:-1000]
    for path in [*server.store.rglob("*"), server.log]:
        if path.is_file():
            found = path.read_bytes()
            assert not any(s.encode() in found for s in [*secret, *ids]) and key not in found, path


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


def test_a_trained_model_comes_back_whole(setting: Setting, tmp_path: Path) -> None:
    with setting.client() as client:
        uploaded = client.download("notes", tmp_path / "same")
        for name in ("config.json", "model.safetensors"):
            assert (uploaded / name).read_bytes() == (setting.folder / "bert" / name).read_bytes()
        client.wait(client.train("notes", EXAMPLES, "mine", epochs=2, learning_rate=1e-2)["id"], seconds=300, every=0.1)
        answers = client.classify("mine", TEXTS)
        folder = client.download("mine", tmp_path / "mine")
        client.delete("mine")
        with pytest.raises(InputError, match="exists already"):
            client.download("notes", folder)
        with pytest.raises(InputError, match=r"\(404\)"):
            client.download("mine", tmp_path / "gone")
        with pytest.raises(InputError, match="cannot be written"):
            client.download("notes", tmp_path / "nowhere" / "mine")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "same"]
    tokenizer, model = (
        rasura.ObfuscatedTokenizer(setting.folder / "bert.key", model=folder),
        loaded(folder, "classification"),
    )
    for text, answer in zip(TEXTS, answers):
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt")).logits[0]
        assert answer.probabilities == pytest.approx(logits.double().softmax(0).tolist(), abs=1e-5)
    answer = httpx.get(f"{setting.server.url}/v1/models/notes/files", trust_env=False)
    assert answer.status_code == 401


def test_a_download_that_is_cut_or_wrong_leaves_nothing(setting: Setting, tmp_path: Path) -> None:
    weights = (setting.folder / "bert" / "model.safetensors").read_bytes()
    files = {"config.json": b"{}", "model.safetensors": weights}
    whole = container({"name": "x"}, files)
    wrong: list[tuple[bytes, int, str]] = [
        (whole[:-1000], len(whole), "no answer"),
        (whole[: len(whole) // 2], len(whole), "no answer"),
        (whole[:-1000], len(whole) - 1000, "do not add up"),
        (whole + b"x", len(whole) + 1, "do not add up"),
        (container({}, {**files, "../evil": b"x"}), 0, "config.json and model.safetensors"),
        (container({}, {"config.json": b"{}", "../model.safetensors": weights}), 0, "config.json and model.safetensors"),
        (container({}, {**files, "model.safetensors": pickle.dumps([1] * 100)}), 0, "no safetensors file"),
        (container({}, {**files, "model.safetensors": weights[:-10]}), 0, "no safetensors file"),
        (b"<html>a proxy's page</html>", 0, "no Rasura container"),
        (b"", 0, "ended early"),
    ]
    for body, length, reason in wrong:
        with answering(body, length or len(body)) as url, Client(url, ALICE) as client:
            with pytest.raises(InputError, match=reason):
                client.download("x", tmp_path / "mine")
            assert not list(tmp_path.iterdir()), reason
    with answering(whole, len(whole)) as url, Client(url, ALICE) as client:
        (tmp_path / "mine.part").mkdir()
        with pytest.raises(InputError, match="remove it"):
            client.download("x", tmp_path / "mine")
        (tmp_path / "mine.part").rmdir()
        assert (client.download("x", tmp_path / "mine") / "model.safetensors").read_bytes() == weights


@contextmanager
def answering(body: bytes, length: int) -> Iterator[str]:
    """A server that answers one request with ``body``, having announced ``length`` bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def run() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode() + body)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_a_download_that_was_begun_outlives_the_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 9000)
    body = Outgoing(tmp_path, {"name": "x"}, ("model.safetensors",))
    (tmp_path / "model.safetensors").unlink()

    async def read() -> bytes:
        return b"".join([chunk async for chunk in body])

    found = asyncio.run(read())
    assert len(found) == body.length and found.endswith(bytes(range(256)) * 9000)
    with pytest.raises(Refused, match="no such model"):
        Outgoing(tmp_path, {"name": "x"}, ("model.safetensors",))


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


def ask(setting: Setting, method: str, path: str, token: str = ALICE, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} | options.pop("headers", {})
    return httpx.request(method, setting.server.url + path, headers=headers, trust_env=False, **options)


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


def container(about: dict[str, Any], files: dict[str, bytes]) -> bytes:
    return header_bytes(about, {name: len(data) for name, data in files.items()}) + b"".join(files.values())


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
    for _ in range(100):
        if setting.server.files() == before:
            break
        time.sleep(0.05)
    assert setting.server.files() == before
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


def test_a_job_can_be_cancelled_and_holds_its_model(setting: Setting) -> None:
    with setting.client() as client:
        job = client.train("notes", EXAMPLES, "long", epochs=1000, patience=1000)
        while client.status(job["id"])["epoch"] == 0:
            time.sleep(0.05)
        for call, reason in (
            (lambda: client.delete("notes"), "cancel it first"),
            (lambda: client.upload(setting.folder / "bert", "long"), "a job will"),
        ):  # fmt: skip
            with pytest.raises(InputError, match=reason):
                call()
        client.cancel(job["id"])
        assert client.status(job["id"])["state"] == "cancelled"
        with pytest.raises(InputError, match=r"\(409\)"):
            client.cancel(job["id"])
    assert not any(name.startswith("jobs/") for name in setting.server.files())


def test_the_key_of_another_model_is_refused_before_anything_is_sent(setting: Setting) -> None:
    with setting.client(key="llama") as client, pytest.raises(InputError, match="the key is for the obfuscated model"):
        client.classify("notes", TEXTS)
    with setting.client() as client, pytest.raises(InputError, match="is not obfuscated"):
        client.upload(setting.folder / "bert-plain", "plain")


def test_commands_on_the_clients_side(setting: Setting, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps({"text": e.text, "label": e.label}) for e in EXAMPLES))
    common = ["--url", setting.server.url, "--token-file", str(token_file(tmp_path / "token", BOB))]
    key = ["--key", str(setting.folder / "bert.key")]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "rasura", "client", *arguments, *common]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert "classification, 300 tokens" in run("upload", str(setting.folder / "bert"), "mine").stdout
    found = run("train", "mine", str(data), "mine-1", *key, "--epochs", "1", "--wait", "--json")
    assert json.loads(found.stdout)["state"] == "done", found.stderr
    assert "mine -> mine-1, done" in run("status").stdout
    answers = json.loads(run("classify", "mine-1", str(data), *key, "--json").stdout)
    assert len(answers) == len(EXAMPLES) and sum(answers[0]["probabilities"]) == pytest.approx(1)
    assert run("download", "mine-1", str(tmp_path / "mine")).returncode == 0
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["config.json", "model.safetensors"]
    assert run("delete", "mine-1").returncode == 0
    again = run("delete", "mine-1")
    assert again.returncode == 2 and again.stderr.strip() == "rasura: the server refused (404): there is no such model"


def test_requests_at_the_same_time_get_their_own_answers(setting: Setting) -> None:
    with setting.client() as client:
        expected = client.classify("notes", TEXTS)
    found: dict[int, Any] = {}

    def one(k: int) -> None:
        with setting.client() as mine:
            found[k] = mine.classify("notes", [TEXTS[k]])[0].probabilities

    threads = [threading.Thread(target=one, args=(k,)) for k in range(len(TEXTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, answer in enumerate(expected):
        assert found[k] == pytest.approx(answer.probabilities, abs=1e-5)


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


@pytest.mark.slow
def test_fifty_clients_at_once(tmp_path: Path) -> None:
    from benchmarks.service import load

    found = load(tmp_path, model=None, clients=50, seconds=10.0)
    assert found["errors"] == 0 and found["requests"] >= 50
