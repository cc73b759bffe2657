"""A short fine-tuning run and its rows: what several tests build on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS

from rasura.core.batches import Batch
from rasura.core.rng import generator
from rasura.metrics.utility import classification
from rasura.registry import parse_defense
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.outputs import predictions
from rasura.victims.recipe import Recipe
from rasura.victims.train import FineTuning

RECIPE = Recipe(epochs=3, batch_size=4, learning_rate=1e-3, seed=5)


def rows(task: str = "classification", count: int = 10) -> list[Batch]:
    """Texts whose label is in their first word, of different lengths."""
    out = []
    for k in range(count):
        middle = torch.randint(20, 200, (3 + k % 4,), generator=generator(k)).tolist()
        out.append(batch_of([[CLS, 10 + k % 2, *middle, SEP]], task, [k % 2]))
    return out


def figures(model: torch.nn.Module, some: list[Batch]) -> dict[str, float]:
    return classification(predictions(model, some, 0), [int(r.labels[0]) for r in some])


def fine_tuning(
    folder: Path, defense: str = "none", seed: int = 0, recipe: Recipe = RECIPE, device: str = "cpu",
    hidden: list[Batch] | None = None, **options: Any,
) -> FineTuning:  # fmt: skip
    """``hidden``: what is trained on in place of ``rows``, which judge."""
    some = rows()
    return FineTuning(
        tiny("bert", "classification", num_labels=2, seed=seed).to(device), hidden or some, parse_defense(defense), recipe,
        folder, task="classification", vocabulary=VOCABULARY, evaluate=lambda m: figures(m, some), watched="accuracy",
        higher=True, **options,
    )  # fmt: skip


class Stopped(Exception):
    """What ``stopped`` ends a training with."""


def stopped(run: FineTuning, after: int) -> list[tuple[int, int, Mapping[str, float]]]:
    """Train ``run`` and stop it when so many batches are done; returns what it told of its progress until then."""
    heard: list[tuple[int, int, Mapping[str, float]]] = []

    def told(done: int, total: int, about: Mapping[str, float]) -> None:
        heard.append((done, total, about))
        if done == after:
            raise Stopped

    with pytest.raises(Stopped):
        run.run(told)
    return heard


def notes(folder: Path, name: str = "notes.jsonl", count: int = 12, start: int = 0) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps({"text": text(k), "label": k % 2}) + "\n" for k in range(start, start + count)))
    return path


def text(k: int) -> str:
    """The text number ``k``; all are different, as the model sees them."""
    return TEXTS[k] if k < len(TEXTS) else f"{TEXTS[k % len(TEXTS)]} w{k}"
