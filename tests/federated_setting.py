"""The app that ``rasura new federated`` writes, with a small model, in this process."""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flower_setting import LocalGrid

from rasura.testing.tiny import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model with a tokenizer, and texts."""
    from transformers import BertTokenizerFast

    place = tmp_path / "model"
    tiny("bert", "classification", num_labels=2, hidden=32).save_pretrained(str(place))  # type: ignore[operator]
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"w{k}" for k in range(5, 300))]
    (place / "vocab.txt").write_text("\n".join(words) + "\n")
    BertTokenizerFast(vocab=str(place / "vocab.txt"), model_max_length=64).save_pretrained(str(place))
    rows = [{"text": f"w{20 + k} w{60 + 3 * k} w{100 + 5 * k} w{30 + k}", "label": k % 2} for k in range(10)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return tmp_path


@pytest.fixture
def app_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    from rasura.integrations.flower.new_app import new_app

    place = new_app(folder / "app", 3, by="bfv")
    monkeypatch.syspath_prepend(str(place))
    yield place
    for name in [n for n in sys.modules if n.split(".")[0] == "federated"]:
        del sys.modules[name]


def configured(place: Path, folder: Path, **given: Any) -> dict[str, Any]:
    """The configuration of a run of the app in ``place``, with the small model and ``given`` settings."""
    config: dict[str, Any] = tomllib.loads((place / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    return {**config, "model": str(folder / "model"), **given}


def simulated(place: Path, folder: Path, nodes: Any = ({}, {}), **given: Any) -> dict[str, Any]:
    """Two rounds of the generated app in this process, with two clients or one for each configuration in ``nodes``."""
    import importlib

    from flwr.app import Context, RecordDict

    told: dict[str, Any] = {"num-server-rounds": 2, "data": str(folder / "texts.jsonl"), "min-clients": 2}
    told |= {"allow-few-clients": True, "results": str(folder / "results.json"), **given}
    config = configured(place, folder, **told)
    client, server = (importlib.import_module(f"federated.{n}_app") for n in ("client", "server"))
    contexts = {
        k: Context(1, k, {"partition-id": k, "num-partitions": len(nodes), **own}, RecordDict(), config)
        for k, own in enumerate(nodes)
    }  # fmt: skip
    server.app(
        LocalGrid(range(len(nodes)), lambda node, message: client.app(message, contexts[node])),
        Context(1, 0, {}, RecordDict(), config),
    )
    return dict(json.loads((folder / "results.json").read_text())["rounds"])
