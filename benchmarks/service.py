"""The model service under load: clients that ask all the time, on loopback; latencies of classification, and errors.

python benchmarks/service.py --model minilm --clients 50 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rasura.server.client import Client
from rasura.service_protections.obfuslm.folder import obfuscate_model
from rasura.service_protections.obfuslm.settings import ObfuscationSettings

TOKENS = (8, 20)
"""Tokens of a text, from and to."""


def tiny_model(folder: Path) -> Path:
    """A random BERT of two blocks and width 64 with 300 tokens."""
    from rasura.testing.tiny import tiny, tokenizer_folder

    return tokenizer_folder(tiny("bert", "classification"), folder)


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


async def ask(url: str, token: str, size: int, until: float, seed: int, seconds: list[float], errors: list[str]) -> None:
    """One client: a request of one text after another."""
    draw = random.Random(seed)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False) as http:
        while time.monotonic() < until:
            ids = [draw.randrange(3, size) for _ in range(draw.randint(*TOKENS))]
            start = time.monotonic()
            try:
                answer = await http.post("/v1/models/loaded/classify", json={"inputs": [[1, *ids, 2]]})
                if answer.status_code != 200 or len(answer.json()["logits"]) != 1:
                    errors.append(str(answer.status_code))
            except httpx.HTTPError as error:
                errors.append(type(error).__name__)
            seconds.append(time.monotonic() - start)


def load(folder: Path, model: str | None, clients: int, seconds: float) -> dict[str, Any]:
    """Serve an obfuscated ``model`` (None: a tiny one) and let ``clients`` ask it for ``seconds``; milliseconds."""
    source = str(tiny_model(folder / "plain")) if model is None else model
    obfuscate_model(source, folder / "served", folder / "key", ObfuscationSettings(k=1), task="classification")
    token, port = secrets.token_hex(16), free_port()
    (folder / "tokens").write_text(f"bench:{token}\n")
    (folder / "tokens").chmod(0o600)
    command = [sys.executable, "-m", "rasura", "serve", "--store", str(folder / "store"), "--port", str(port)]
    command += ["--token-file", str(folder / "tokens"), "--rate", "100000"]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=dict(os.environ))
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                httpx.get(f"{url}/health", trust_env=False)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        with Client(url, token) as known:
            about = known.upload(folder / "served", "loaded")
        took: list[float] = []
        errors: list[str] = []

        async def everyone(until: float, times: list[float]) -> None:
            size = about["vocabulary"]
            await asyncio.gather(*(ask(url, token, size, until, k, times, errors) for k in range(clients)))

        asyncio.run(everyone(time.monotonic() + 1, []))  # the model is loaded at its first request
        start = time.monotonic()
        asyncio.run(everyone(start + seconds, took))
        wall = time.monotonic() - start
    finally:
        server.terminate()
        server.wait(30)
    p50, p95, most = (1000 * float(np.quantile(took, q)) for q in (0.5, 0.95, 1.0))
    return {
        "requests": len(took), "errors": len(errors), "kinds": sorted(set(errors)), "per_second": len(took) / wall,
        "p50_ms": p50, "p95_ms": p95, "longest_ms": most, "log_bytes": (folder / "log").stat().st_size,
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None, help="folder or minilm; a tiny random one if none")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(load(Path(place), given.model, given.clients, given.seconds))
