"""Directional against Gaussian noise at equal epsilon: a linear head on the frozen states of MiniLM.

python benchmarks/directional.py DATA/sst2.train.parquet --test DATA/sst2.validation.parquet

A text is the mean of its last states, whitened with the mean and covariance of 2,000 further texts that count as public,
at norm 1. The head is a logistic regression with a bias. Every step takes all texts, so neither mechanism gains by
sampling, and epsilon is that of as many releases. Neighbours differ in one text replaced by another: for Gaussian noise
twice the clip. Settings are chosen on the public texts with their labels. Noise is seeded here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean as average
from typing import Any

import torch
from frozen_setting import frozen, mean
from torch import Tensor

from rasura.accounting.directional import directional_epsilon
from rasura.accounting.epsilon import sigma_for
from rasura.core.rng import generator
from rasura.data.text import load_examples
from rasura.defenses.von_mises_fisher import summed
from rasura.studies.plots import Curve, Plot, write
from rasura.victims.loading import load

PUBLIC = 2000

CLIPS = (0.25, 0.5)
"""Norms to clip to. At the first step every gradient has norm .5."""

RATES = (100.0, 300.0, 1000.0, 3000.0)
"""Learning rates of ``dp-sgd``. With two classes and a linear head the direction of a text's gradient does not depend on the
head, so the other two learn the same at every rate."""

Step = Callable[[Tensor, torch.Generator], Tensor]
"""From gradients ``(texts, entries)`` to what is released of their mean ``(entries,)``."""


def whitened(rows: Tensor, public: Tensor) -> Tensor:
    """``rows`` by the mean and covariance of ``public``, each at norm 1, and a last entry for the bias."""
    centre = public.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(public.T.double()))
    turn = vectors * (values.clamp_min(1e-3 * float(values[-1]))).rsqrt()
    made = torch.nn.functional.normalize((rows - centre).double() @ turn, dim=1)
    bias = torch.full((len(made), 1), 0.1, dtype=made.dtype)
    return torch.nn.functional.normalize(torch.cat([made, bias], 1), dim=1).float()


def gaussian(sigma: float, clip: float) -> Step:
    """DP-SGD: each gradient clipped to ``clip``, noise of ``sigma * clip`` on the sum."""

    def step(gradients: Tensor, rng: torch.Generator) -> Tensor:
        norms = gradients.norm(dim=1, keepdim=True).clamp_min(1e-12)
        total = (gradients * (clip / norms).clamp(max=1)).sum(0)
        return (total + sigma * clip * torch.randn(total.shape, generator=rng)) / len(gradients)

    return step


def normalised(sigma: float) -> Step:
    """Each gradient at norm 1, Gaussian noise of ``sigma`` on the sum."""

    def step(gradients: Tensor, rng: torch.Generator) -> Tensor:
        total = torch.nn.functional.normalize(gradients, dim=1).sum(0)
        return (total + sigma * torch.randn(total.shape, generator=rng)) / len(gradients)

    return step


def directional(kappa: float) -> Step:
    """DirDP-SGD: each gradient replaced by a draw around its direction; ``kappa`` inf for the direction itself."""

    def step(gradients: Tensor, rng: torch.Generator) -> Tensor:
        return summed(torch.nn.functional.normalize(gradients, dim=1), kappa, rng) / len(gradients)

    return step


def fitted(rows: Tensor, labels: Tensor, step: Step, steps: int, rate: float, seed: int) -> Tensor:
    """The head ``(entries,)`` after ``steps`` of gradient descent from zero."""
    head, rng = torch.zeros(rows.shape[1]), generator(seed, "noise")
    for _ in range(steps):
        wrong = torch.sigmoid(rows @ head) - labels
        head = head - rate * step(wrong[:, None] * rows, rng)
    return head


def accuracy(head: Tensor, rows: Tensor, labels: Tensor) -> float:
    """The fraction of texts that ``head`` gets right."""
    return float(((rows @ head > 0).float() == labels).float().mean())


def kappa_for(target: float, entries: int, steps: int, delta: float) -> float:
    """The largest kappa, to a thousandth, whose ``steps`` releases cost at most ``target``."""
    low, high = 1e-6, 1e9
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        if directional_epsilon(middle, [entries], steps, delta) <= target:
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    """Print a row for each epsilon, and write the plot if ``--plot`` is given."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data")
    parser.add_argument("--test", required=True)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--texts", type=int, default=12_000)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epsilon", default="0.1,1,3,10,30,100,300,1000")
    parser.add_argument("--states", type=Path, help="file that keeps the states")
    parser.add_argument("--plot", type=Path)
    told = parser.parse_args()
    private, tested = load_examples(told.data, limit=told.texts + PUBLIC), load_examples(told.test)
    if told.states and told.states.exists():
        found = torch.load(told.states, weights_only=True)
    else:
        victim = load(told.model, "classification")
        found = [frozen(victim, some, mean) for some in (private, tested)]
        if told.states:
            torch.save(found, told.states)
    rows, test = (whitened(some, found[0][told.texts :]) for some in found[:2])
    labels = torch.tensor([float(e.label or 0) for e in private])
    goal = torch.tensor([float(e.label or 0) for e in tested])
    held, held_labels, rows, labels = rows[told.texts :], labels[told.texts :], rows[: told.texts], labels[: told.texts]
    delta, entries = 0.1 / told.texts, rows.shape[1]
    larger = max(float(goal.mean()), 1 - float(goal.mean()))
    print(f"{len(rows)} texts, {len(held)} public, {len(goal)} tested (larger class {100 * larger:.1f}), {entries} entries")

    def best(makers: Sequence[tuple[Any, Step, float]]) -> tuple[list[float], Any]:
        """Accuracy of every seed with the setting that is best on the public texts with another seed."""

        def held_out(maker: tuple[Any, Step, float]) -> float:
            return accuracy(fitted(rows, labels, maker[1], told.steps, maker[2], 1000), held, held_labels)

        setting, step, rate = max(makers, key=held_out) if len(makers) > 1 else makers[0]
        seeds = range(told.seeds)
        return [accuracy(fitted(rows, labels, step, told.steps, rate, s), test, goal) for s in seeds], (setting, rate)

    results: dict[str, list[tuple[float, list[float]]]] = {"dp-sgd": [], "normalised": [], "directional": []}
    plain = [(c, gaussian(0.0, c), r) for c in (*CLIPS, 1.0) for r in RATES]
    for name, makers in (("plain", plain[-len(RATES) :]), ("normalised", [("", normalised(0.0), 1.0)])):
        values, chosen = best(makers)
        print(json.dumps({"without noise": name, "accuracy": round(100 * average(values), 1), "chosen": chosen}), flush=True)
    for epsilon in map(float, told.epsilon.split(",")):
        # A replaced text moves the sum by twice the clip.
        sigma = 2 * sigma_for(epsilon, 1.0, told.steps, delta)
        kappa = kappa_for(epsilon, entries, told.steps, delta)
        ways: dict[str, list[tuple[Any, Step, float]]] = {
            "dp-sgd": [(c, gaussian(sigma, c), r) for c in CLIPS for r in RATES],
            "normalised": [("", normalised(sigma), 1.0)],
            "directional": [("", directional(kappa), 1.0)],
        }
        for name, makers in ways.items():
            values, chosen = best(makers)
            results[name].append((epsilon, values))
            told_values = [round(100 * v, 1) for v in values]
            line = {"epsilon": epsilon, "way": name, "mean": round(100 * average(values), 1), "seeds": told_values}
            print(json.dumps({**line, "sigma": round(sigma, 3), "kappa": round(kappa, 4), "chosen": chosen}), flush=True)
    if told.plot:
        curves = [
            Curve(name, [(e, 100 * average(v), 100 * min(v), 100 * max(v)) for e, v in points])
            for name, points in results.items()
        ]
        write(Plot(curves, "epsilon", "accuracy"), told.plot)


if __name__ == "__main__":
    main()
