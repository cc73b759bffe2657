"""How good measured bounds of epsilon are on MiniLM's head: how often they exceed the claim, and how much they show.

python benchmarks/canary_validity.py DATA/sst2.train.parquet --out FILE

Each run trains a fresh pooler and classifier (148,610 weights) on MiniLM's frozen first states, through
``rasura.protect_training`` with noise from the operating system: 20 steps at rate 0.5, delta 0.00001. White box: gradient
canaries in every step (``rasura.GradientCanaries``). Black box: ``--texts`` phrases with a random label, each in the
training by a fair coin; the score is how far the final model's loss is below that of the untrained one. All bounds are at
confidence .95 (Steinke, Nasr and Jagielski 2023; the Gaussian ones: Mahloujifar, Melis and Chaudhuri 2024).
"""

from __future__ import annotations

import argparse
import copy
import time
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from lora_setting import Lines
from private_head import Head, collate, states
from torch import Tensor, nn
from torch.utils.data import DataLoader

import rasura
from rasura.accounting import gaussian_run_bound, one_run_bound, right_guesses
from rasura.core.rng import bernoulli, secret_generator
from rasura.metrics.intervals import mean_interval, proportion_interval
from rasura.victims.loading import load

MULTIPLIERS = {1: 8.548, 4: 2.633, 10: 1.325}
"""Noise multipliers whose epsilon is just below the key, for 20 steps at rate 0.5."""
STEPS, DELTA = 20, 1e-5


@torch.no_grad()
def losses(model: nn.Module, known: Tensor, labels: Tensor) -> Tensor:
    """The loss of each text ``(texts,)``."""
    logits = model(states=known, labels=labels).logits
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def one_run(known: Tensor, claim: int, options: Any, seed: int) -> dict[str, Any]:
    """Train one head, and measure its epsilon in both ways."""
    rng, start = secret_generator(), time.process_time()
    labels = bernoulli(0.5, (len(known),), rng).long()
    inside = bernoulli(0.5, (len(known),), rng).bool()
    rows: Any = [row for row, there in zip(zip(known, labels), inside.tolist()) if there]
    model: Any = Head(known.shape[1], seed, linear=False)
    before = losses(copy.deepcopy(model), known, labels)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate)
    canaries = rasura.GradientCanaries(options.canaries)
    loader: Any = DataLoader(rows, len(rows) // 2, collate_fn=collate)
    model, _, loader, ledger = rasura.protect_training(
        model,
        optimizer,
        loader,
        f"dp-sgd:{MULTIPLIERS[claim]}",
        epochs=STEPS // 2,
        max_steps=STEPS,
        delta=DELTA,
        canaries=canaries,
    )
    for batch in islice(chain.from_iterable(repeat(loader)), STEPS):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    white = canaries.measure(ledger)
    asked = len(known) // 10 * 2
    right = right_guesses((before - losses(model, known, labels)).double().numpy(), inside.numpy(), asked)
    figures = (len(known), asked, right, DELTA)
    return {
        "claim": claim, "seed": seed, "stated": white.stated, "white": white.bound.epsilon,
        "white_gaussian": white.gaussian.epsilon, "black": one_run_bound(*figures).epsilon,
        "black_gaussian": gaussian_run_bound(*figures).epsilon, "cpu_seconds": time.process_time() - start,
    }  # fmt: skip


def largest_of(name: str, options: Any) -> float:
    """The bound where all guesses are right."""
    white, gaussian = name.startswith("white"), name.endswith("gaussian")
    count = options.canaries if white else options.texts
    bound = gaussian_run_bound if gaussian else one_run_bound
    return bound(count, count // 10 * 2, count // 10 * 2, DELTA, 0.975 if white else 0.95).epsilon


def table(lines: Lines, options: Any) -> None:
    """Mean bounds, and the share of bounds above the claim, with 95 % intervals."""
    print("| claim | runs | bound | mean | above the claim |\n|---|---|---|---|---|")
    for claim in MULTIPLIERS:
        rows = [row for row in lines.rows if row["claim"] == claim]
        for name in ("white", "white_gaussian", "black", "black_gaussian"):
            found = [row[name] for row in rows]
            if not found:
                continue
            wrong = sum(f > row["stated"] for f, row in zip(found, rows))
            low, high = proportion_interval(wrong, len(found))
            largest = max(largest_of(name, options), *found)
            mean, least, most = mean_interval(found, high=largest)
            print(f"| {claim} | {len(found)} | {name} | {mean:.2f} [{least:.2f}, {most:.2f}], "
                  f"{min(found):.2f} to {max(found):.2f} | {wrong} ({100 * low:.1f} to {100 * high:.1f} %) |")  # fmt: skip


def main() -> None:
    """Make all runs that the file lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, required=True, help="file of JSON lines; what it holds is not done again")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--canaries", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=0.5)
    options = parser.parse_args()
    lines = Lines(options.out)
    lacking = [(seed, claim) for seed in range(options.runs) for claim in MULTIPLIERS]
    lacking = [(seed, claim) for seed, claim in lacking if not lines.has(claim=claim, seed=seed)]
    if lacking:
        known, _ = states(load("minilm", "classification"), options.data, options.texts, 0)
        for seed, claim in lacking:
            lines.add(one_run(known, claim, options, seed))
    table(lines, options)


if __name__ == "__main__":
    main()
