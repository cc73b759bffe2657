"""A real server of models in a process of its own, with tiny models: what the tests of the service build on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from rasura.core.rng import generator
from rasura.data.text import Example
from rasura.server.client import Client
from rasura.server.container import header_bytes
from rasura.service_protections.obfuslm.folder import obfuscate_model
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.testing.tiny import tiny, tokenizer_folder

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


def ask(setting: Setting, method: str, path: str, token: str = ALICE, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} | options.pop("headers", {})
    return httpx.request(method, setting.server.url + path, headers=headers, trust_env=False, **options)


def container(about: dict[str, Any], files: dict[str, bytes]) -> bytes:
    return header_bytes(about, {name: len(data) for name, data in files.items()}) + b"".join(files.values())
