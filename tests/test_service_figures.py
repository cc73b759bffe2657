"""The figures that a job of the service states: those of the model that it stored, with the number of texts behind them."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from rasura.cli.service import _told
from rasura.core.rng import generator
from rasura.metrics.intervals import proportion_interval
from rasura.metrics.utility import classification
from rasura.server import data, models, worker
from rasura.server.data import JobSettings
from rasura.server.judged import judged
from rasura.server.limits import Limits
from rasura.server.store import Job, Store
from rasura.testing.tiny import tiny
from rasura.victims.outputs import predictions


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    with made.incoming() as part:
        tiny("bert", "classification", blocks=1, hidden=16).save_pretrained(part)  # type: ignore[operator]
        made.add_model("alice", "notes", models.checked(part), part)
    return made


def rows(numbers: list[int]) -> list[Any]:
    return [data.as_row(torch.tensor([1, 20 + k, 60 + k, 2]), k % 3, None) for k in numbers]


def trained(store: Store, texts: list[Any], **settings: Any) -> Job:
    source = store.model("alice", "notes")
    chosen = JobSettings.read(settings, source.about)
    with store.incoming() as part:
        data.write(texts, part / "data.safetensors")
        data.check(part, source.about, chosen, Limits())
        job = store.add_job(source, "tuned", asdict(chosen), part, 10, 1 << 30)
    assert store.next_job() is not None
    worker.train(store, store.job(job.id), "cpu")
    return store.job(job.id)


def test_the_figures_are_those_of_the_stored_model(store: Store) -> None:
    texts = rows(list(range(60)))
    job = trained(store, texts, epochs=4, learning_rate=0.1, holdout=0.2, batch_size=16)
    told = json.loads(json.dumps(job.to_dict()))
    kept = told["kept"]
    assert kept["held_out"] == 12 and kept["reason"] == "" and kept["figures"] == told["epochs"][kept["epoch"] - 1]
    assert kept["figures"]["accuracy"] == max(epoch["accuracy"] for epoch in told["epochs"])
    order = torch.randperm(60, generator=generator(0, "part")).tolist()[:12]
    model = models.opened(store.path(store.model("alice", "tuned")), "classification", "cpu")
    found = classification(predictions(model, [texts[k] for k in order], 0), [k % 3 for k in order])
    assert {name: kept["figures"][name] for name in found} == pytest.approx(found, abs=1e-6)
    right = round(12 * found["accuracy"])
    assert kept["accuracy_interval"] == pytest.approx(proportion_interval(right, 12, 1 - 0.05 / len(told["epochs"])))
    assert f"; kept: epoch {kept['epoch']}, train_loss " in _told(told) and "; held-out texts: 12, accuracy " in _told(told)


@pytest.mark.parametrize(("texts", "held_out"), [(list(range(6)), 1), ([k % 8 for k in range(80)], 0)])
def test_too_few_texts_state_no_figure(store: Store, texts: list[int], held_out: int) -> None:
    told = trained(store, rows(texts), epochs=2, learning_rate=1e-3).to_dict()
    assert told["kept"]["held_out"] == held_out and told["kept"]["accuracy_interval"] is None
    for figures in (told["kept"]["figures"], *told["epochs"]):
        assert figures["train_loss"] > 0 and len(figures) == 5
        assert {value for name, value in figures.items() if name != "train_loss"} == {None}
    line = _told(told)
    assert f"held-out texts: {held_out}, accuracy not measured, f1 not measured" in line
    assert line.endswith("(fewer than 5 different ones that are not trained on)")


def test_what_is_missing_is_said_in_words_and_nothing_is_rounded_up() -> None:
    job = {"id": "7", "model": "a", "output": "b", "state": "done", "reason": "", "epoch": 2, "of": 9}
    epochs: list[dict[str, float | None]] = [
        {"train_loss": 0.5, "loss": 4.2, "perplexity": 66.6},
        {"train_loss": 0.4, "loss": 4.0, "perplexity": None},
    ]
    assert _told(job | judged(epochs, 2, 30)) == (
        "job 7: a -> b, done, epoch 2 of at most 9; kept: epoch 2, train_loss 0.4; held-out texts: 30, loss 4, perplexity "
        "not measured (what is not measured is not a finite number)"
    )
    near = [{"train_loss": 0.00012345, "accuracy": 0.9996, "f1": 0.9996, "mcc": 0.9996, "loss": 0.0010004}]
    found = _told(job | judged(near, 1, 5000))
    assert "train_loss 0.000124; held-out texts: 5000, accuracy 0.999 (" in found
    assert "f1 0.999, mcc 0.999, loss 0.00101" in found
    assert _told(job | {"state": "queued"} | judged([], None, None)).endswith("queued, epoch 2 of at most 9")
    assert "best so far: epoch 1" in _told(job | {"state": "running"} | judged(near, 1, 5000))
    for older in ({}, judged(near, None, None)):
        assert "; not measured: " in _told(job | older) and "0.99" not in _told(job | older)
    failed = _told(job | {"state": "failed", "reason": "too little memory"} | judged(near, 1, 5000))
    assert failed.endswith("failed too little memory, epoch 2 of at most 9")


def test_a_job_of_an_older_store_is_read_without_figures(store: Store, tmp_path: Path) -> None:
    job = trained(store, rows(list(range(60))), epochs=1, holdout=0.2)
    store.close()
    db = sqlite3.connect(tmp_path / "store" / "service.sqlite")
    with db:
        db.execute("UPDATE jobs SET epochs = ?", (json.dumps(job.epochs),))
    db.close()
    told = Store(tmp_path / "store").job(job.id).to_dict()
    assert told["epoch"] == 1 and told["kept"]["epoch"] is None and told["epochs"][0]["accuracy"] is None
    assert "older server" in told["kept"]["reason"]
