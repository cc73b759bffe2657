"""The model service: a real server in a process of its own, a tiny model, and what its clients get."""

from __future__ import annotations

import asyncio
import json
import pickle
import runpy
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from commands import rasura_command, refused_process
from service_setting import (
    ALICE,
    BOB,
    EXAMPLES,
    TEXTS,
    Server,
    Setting,
    container,
    make_models,
    setting,
    token_file,
)

import rasura
from rasura.core.errors import InputError
from rasura.core.values import Task
from rasura.server.client import Client
from rasura.server.container import Outgoing
from rasura.server.inference import Decoding, Prompt
from rasura.server.limits import Refused
from rasura.testing.tiny import SEP, batch_for, tiny
from rasura.victims.adapters import with_partial_adapter

__all__ = ["setting"]


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
def test_the_papers_recipe_trains_the_first_two_blocks_and_the_last_whole(family: str, task: Task) -> None:
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


@pytest.mark.slow
def test_a_job_goes_on_after_the_server_was_killed(tmp_path: Path) -> None:
    make_models(tmp_path)
    server = Server(tmp_path / "store", token_file(tmp_path / "tokens"), tmp_path / "log")
    server.start()
    setting = Setting(server, tmp_path)
    try:
        with setting.client() as client:
            client.upload(tmp_path / "bert", "notes")
            settings: dict[str, Any] = {
                "epochs": 60,
                "patience": 1000,
                "learning_rate": 2e-3,
                "batch_size": 8,
                "holdout": 0.3,
            }
            settings |= {"method": "lora", "rank": 4}
            job = client.train("notes", EXAMPLES * 8, "tuned", **settings)
            waiting = client.train("notes", EXAMPLES, "second", epochs=1)
            while (seen := client.status(job["id"]))["epoch"] < 2:
                assert seen["state"] in ("queued", "running"), seen
                time.sleep(0.02)
        server.end(signal.SIGKILL)
        assert seen["state"] == "running" and seen["epoch"] < 60
        (server.store / "incoming" / ("0" * 16)).mkdir()  # an upload that the kill cut off
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


@pytest.mark.slow
def test_a_trained_model_comes_back_whole(setting: Setting, tmp_path: Path) -> None:
    with setting.client() as client:
        uploaded = client.download("notes", tmp_path / "same")
        for name in ("config.json", "model.safetensors"):
            assert (uploaded / name).read_bytes() == (setting.folder / "bert" / name).read_bytes()
        client.wait(client.train("notes", EXAMPLES, "mine", epochs=2, learning_rate=1e-2)["id"], seconds=300, every=0.1)
        answers = client.classify("mine", TEXTS)
        folder = client.download("mine", tmp_path / "mine")
        client.delete("mine")
        with pytest.raises(InputError, match="already exists"):
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
    refused = httpx.get(f"{setting.server.url}/v1/models/notes/files", trust_env=False)
    assert refused.status_code == 401


def test_labels_that_are_text_must_be_classes_that_the_model_names(setting: Setting, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "w1", "label": "d"}')
    named = shutil.copytree(setting.folder / "bert", tmp_path / "named")
    config = json.loads((named / "config.json").read_text())
    config |= {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    (named / "config.json").write_text(json.dumps(config))
    with setting.client() as client:
        assert client.model("notes")["classes"] == []
        with pytest.raises(InputError, match="the labels are text, and notes does not name its classes; give the numbers"):
            client.train("notes", data, "wrong")
        client.upload(named, "named")
        assert client.model("named")["classes"] == ["a", "b", "c"]
        with pytest.raises(InputError, match="has the classes a, b, c; give the numbers"):
            client.train("named", data, "wrong")
        data.write_text("".join(json.dumps({"text": f"w{n}", "label": n}) + "\n" for n in (1, 2, 3)))
        with pytest.raises(InputError, match=r"row 3: label 3 is none of the classes 0 \.\. 2 of named; give the numbers"):
            client.train("named", data, "wrong")
        client.delete("named")


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
        (container({}, {**files, "model.safetensors": pickle.dumps([1] * 100)}), 0, "not a safetensors file"),
        (container({}, {**files, "model.safetensors": weights[:-10]}), 0, "not a safetensors file"),
        (b"<html>a proxy's page</html>", 0, "not a Rasura container"),
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_commands_on_the_clients_side(setting: Setting, tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("\n".join(json.dumps({"text": e.text, "label": e.label}) for e in EXAMPLES))
    common = ["--url", setting.server.url, "--token-file", str(token_file(tmp_path / "token", BOB))]
    key = ["--key", str(setting.folder / "bert.key")]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return rasura_command("client", *arguments, *common)

    assert "classification, 300 tokens" in run("upload", str(setting.folder / "bert"), "mine").stdout
    found = run("train", "mine", str(data), "mine-1", *key, "--epochs", "1", "--wait", "--json")
    assert json.loads(found.stdout)["state"] == "done", found.stderr
    assert "mine -> mine-1, done" in run("status").stdout
    answers = json.loads(run("classify", "mine-1", str(data), *key, "--json").stdout)
    assert len(answers) == len(EXAMPLES) and sum(answers[0]["probabilities"]) == pytest.approx(1)
    assert run("download", "mine-1", str(tmp_path / "mine")).returncode == 0
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == ["config.json", "model.safetensors"]
    assert run("delete", "mine-1").returncode == 0
    again = refused_process("client", "delete", "mine-1", *common)
    assert again.strip() == "rasura: the server refused (404): there is no such model"


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


@pytest.mark.slow
def test_fifty_clients_at_once(tmp_path: Path) -> None:
    # By its path: another library installs a package of the name benchmarks.
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "service.py"
    found = runpy.run_path(str(path))["load"](tmp_path, model=None, clients=50, seconds=10.0)
    assert found["errors"] == 0 and found["requests"] >= 50
