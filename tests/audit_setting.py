"""A small model on disk and plans that audit it: what several tests build on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from rasura.core.run_store import RunStore
from rasura.runs.plans import Plan
from rasura.testing.tiny import tiny

NAMES = ["alpha", "bravo", "carol", "delta", "echo", "the", "met", "in", "paid", "."]


TEXTS = ("Alpha met Bravo in Delta .", "Carol paid the echo .", "Delta paid 7 .")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *NAMES, *map(str, range(10)), *(f"w{i}" for i in range(275))]
    (folder / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    tiny("bert", "classification", num_labels=2).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A decoder with the words of ``model_folder``."""
    folder = tmp_path_factory.mktemp("causal")
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(folder)
    tiny("gpt2", "causal").save_pretrained(folder)
    return folder


def plan_for(folder: Path, **more: Any) -> Plan:
    fields: dict[str, Any] = {
        "model": str(folder), "texts": TEXTS, "limit": 3, "attacks": ("blind", "embedding-rows", "span"),
        "defenses": ("none", "frozen-embeddings", "gaussian:0.1"), "metrics": ("rouge1", "token_recall", "sensitive"),
        "budget": "quick",
    }  # fmt: skip
    return Plan(**{**fields, **more})


def comparable(folder: Path) -> list[dict[str, Any]]:
    """The Records without what depends on the machine's mood."""
    moody = {"wall_seconds", "cpu_seconds", "peak_mb", "defense_seconds"}
    store = RunStore(folder)
    try:
        return [{k: v for k, v in r.items() if k not in moody} for r in store]
    finally:
        store.close()
