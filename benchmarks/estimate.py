"""How close the estimate of an audit comes to its truth: twelve runs that differ in model, length of texts and attacks.

    python benchmarks/estimate.py DATA/ag_news.validation.parquet --models MODELS
    python benchmarks/estimate.py DATA/ag_news.validation.parquet --sums

Both are CPU seconds of one process on one thread; each run has a process of its own. ``MODELS`` holds the folders
distilbert, mpnet and smollm2; runs of a folder that is missing are left out. A last line does the same for a calibration.
``--sums``: of sums of clients' gradients instead.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from rasura.core.run_store import RunStore
from rasura.data.text import load_examples
from rasura.runs.audit import Audit
from rasura.runs.calibration import Calibration
from rasura.runs.calibration_plan import CalibrationPlan
from rasura.runs.plans import Plan


@dataclass(frozen=True)
class Run:
    """One audit of ``limit`` texts cut to so many ``words``."""

    model: str
    words: int
    attacks: tuple[str, ...]
    defenses: tuple[str, ...]
    budget: str = "default"
    limit: int = 1
    batch_size: int = 1
    task: str = "classification"


USUAL = ("blind", "embedding-rows", "span", "best")
DROPOUT = "frozen-embeddings+dropout:0.1"
RUNS = (
    Run("minilm", 8, USUAL, ("none",), "quick", 2),
    Run("minilm", 40, ("span",), ("none", DROPOUT), "quick", 2),
    Run("minilm", 150, USUAL, ("none",)),
    Run("minilm", 20, ("best",), ("gaussian:0.001",), "quick"),
    Run("minilm", 20, ("tag",), ("none",), "quick"),
    Run("minilm", 20, ("lamp-cos",), ("none",), "quick"),
    Run("minilm", 12, ("span-matching",), ("frozen-blocks:1",)),
    Run("minilm", 15, ("guided-grab",), ("dropout:0.1",)),
    Run("distilbert", 20, ("span", "best"), ("none",), limit=2),
    Run("distilbert", 60, ("span",), ("none",), limit=2, batch_size=2),
    Run("mpnet", 15, ("span",), (DROPOUT,)),
    Run("smollm2", 20, ("span",), ("none",), task="causal"),
)

SUMS = tuple(
    Run("minilm", 12, ("embedding-rows", "span"), ("none",), limit=k, batch_size=k) for k in (1, 2, 4, 8, 16, 32, 64)
)
"""Sums of the gradients of so many clients, as ``rasura audit --clients`` runs them, one text each."""


def measured(run: Run, texts: list[str], models: Path) -> tuple[float, float]:
    """CPU seconds: estimated and true."""
    cut = tuple(" ".join(text.split()[: run.words]) for text in texts[: run.limit])
    model = run.model if run.model == "minilm" else str(models / run.model)
    plan = Plan(
        model=model, task=run.task, texts=cut, limit=run.limit, attacks=run.attacks, defenses=run.defenses,
        budget=run.budget, batch_sizes=(run.batch_size,), truncate=True,
    )  # fmt: skip
    audit = Audit(plan, baseline=False)
    told = sum(audit.estimate().values())
    with tempfile.TemporaryDirectory() as folder:
        store = RunStore(folder, audit.plan.canonical())
        before = time.process_time()
        list(audit.run(store))
        true = time.process_time() - before
        store.close()
    return told, true


def calibrated(texts: list[str]) -> tuple[float, float]:
    """CPU seconds of a calibration: estimated and true."""
    plan = Plan(texts=tuple(" ".join(t.split()[:12]) for t in texts[:4]), limit=2, attacks=("embedding-rows", "span"),
                defenses=("gaussian",), budget="quick", truncate=True)  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        prepared = Calibration(CalibrationPlan(plan, at_most=0.5, steps=1), folder)
        told = prepared.estimate()
        before = time.process_time()
        prepared.run()
        true = time.process_time() - before
        prepared.close()
    return told, true


def row(number: int, data: str, models: Path, runs: tuple[Run, ...]) -> tuple[dict[str, Any], float]:
    """The row of the one of ``runs`` with this ``number``, from 1 on (the one after the last: the calibration), and estimate
    over truth."""
    torch.set_num_threads(1)
    texts = [e.text for e in load_examples(data) if len(e.text.split()) >= 40]
    if number > len(runs):
        told, true = calibrated(texts)
        about: dict[str, Any] = {"run": "calibrate"}
    else:
        run = runs[number - 1]
        some = (
            [" ".join(texts[:8])] if run.words > 40 and run.limit == 1 else [f"{a} {b}" for a, b in zip(texts, texts[20:])]
        )
        told, true = measured(run, some, models)
        about = {"run": number, "model": run.model, "words": run.words, "attacks": run.attacks, "defenses": run.defenses}
        about |= {"budget": run.budget, "texts": run.limit, "batch_size": run.batch_size}
    return {**about, "estimated": round(told, 1), "true": round(true, 1), "ratio": round(told / true, 2)}, told / true


def main() -> None:
    """Print a row for each run, and how many estimates lie within a factor of 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--models", type=Path, default=Path("models"))
    parser.add_argument("--only", type=int, default=0, help="run this number alone, from 1 on; 13: the calibration")
    parser.add_argument("--sums", action="store_true", help="of sums of clients' gradients instead, without a calibration")
    given = parser.parse_args()
    near = []
    runs = SUMS if given.sums else RUNS
    for number in range(1, len(runs) + 2 - given.sums):
        model = runs[number - 1].model if number <= len(runs) else "minilm"
        missing = model != "minilm" and not (given.models / model).is_dir()
        if missing or given.only not in (0, number):
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            told, ratio = process.submit(row, number, given.data, given.models, runs).result()
        print(json.dumps(told), flush=True)
        if number <= len(runs):
            near.append(0.5 <= ratio <= 2)
    print(f"within a factor of 2: {sum(near)} of {len(near)}")


if __name__ == "__main__":
    main()
