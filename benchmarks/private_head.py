"""What a head learns privately: accuracy at target epsilons and without privacy, with a measured lower bound of epsilon.

python benchmarks/private_head.py DATA/sst2.train.parquet DATA/sst2.validation.parquet
python benchmarks/private_head.py DATA/sst2.train.parquet DATA/sst2.validation.parquet --linear
python benchmarks/private_head.py DATA/sst2.train.parquet DATA/sst2.validation.parquet --defenses dp-sgd dp-ftrl:band=4

A pooler and classifier (BERT's), or with ``--linear`` a single linear layer, are trained on MiniLM's frozen first states,
computed once, through ``rasura.protect_training`` with a target epsilon and noise from the operating system. Every setting
has the same optimizer, rate and batch size; ``--defenses`` are compared at equal epsilon (``dp-ftrl`` in a fixed order,
without sampling). ``--states`` keeps the states for the next run. Of the training texts, ``--canaries`` carry the wrong
label; a fair coin says for each whether it is trained on. The bound (Steinke, Nasr and Jagielski 2023) guesses the canaries
with the lowest loss in and those with the highest out. The interval of an accuracy is that of one model over the test texts.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from frozen_setting import first, frozen
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.modeling_outputs import SequenceClassifierOutput

import rasura
from rasura.accounting import one_run_bound
from rasura.core.rng import derive, generator
from rasura.data.text import load_examples
from rasura.metrics.intervals import proportion_interval
from rasura.victims.loading import Victim, load


class Head(nn.Module):
    """BERT's pooler and classifier on given first states, or the classifier alone."""

    def __init__(self, width: int, seed: int, linear: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive(seed, "head"))
            self.pooler = None if linear else nn.Linear(width, width)
            self.classifier = nn.Linear(width, 2)

    def forward(self, states: Tensor, labels: Tensor) -> SequenceClassifierOutput:
        """The loss and the logits ``(batch, 2)``."""
        logits = self.classifier(states if self.pooler is None else torch.tanh(self.pooler(states)))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def states(victim: Victim, source: str, limit: int | None, seed: int) -> tuple[Tensor, Tensor]:
    """MiniLM's first state of each text ``(texts, width)``, and the labels; texts drawn at random, none twice."""
    every = list({e.text: e for e in load_examples(source)}.values())
    order = torch.randperm(len(every), generator=generator(seed, "texts"))[:limit].tolist()
    some = [every[k] for k in order]
    return frozen(victim, some, first), torch.tensor([int(e.label or 0) for e in some])


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Rows as the inputs of ``Head``."""
    return {"states": torch.stack([s for s, _ in rows]), "labels": torch.stack([y for _, y in rows])}


def kept_states(victim: Victim, options: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """``states`` of the training texts and of the test texts, read from ``options.states`` if it is there."""
    if options.states is not None and options.states.exists():
        found = torch.load(options.states)
    else:
        found = [states(victim, options.data, options.texts, 0), states(victim, options.test, None, 0)]
    if options.states is not None:
        torch.save(found, options.states)
    if len(found[0][0]) != options.texts:
        raise SystemExit(f"{options.states} holds {len(found[0][0])} texts; expected {options.texts}")
    return found[0], found[1]


def trained(known: Tensor, labels: Tensor, defense: str, target: float, options: Any, seed: int) -> tuple[nn.Module, float]:
    """A head trained under ``defense`` to ``target`` epsilon (0: without privacy), and the epsilon that was counted."""
    model: Any = Head(known.shape[1], seed, options.linear)
    kind: Any = torch.optim.SGD if options.sgd else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=options.learning_rate)
    data = list(zip(known, labels))
    rng = generator(seed, "order")
    loader: Any = DataLoader(data, options.batch_size, shuffle=True, collate_fn=collate, generator=rng)  # type: ignore[arg-type]  # a list has a length
    ledger = None
    if target:
        model, _, loader, ledger = rasura.protect_training(
            model, optimizer, loader, f"{defense}{'/' if ':' in defense else ':'}clip={options.clip}",
            epochs=options.epochs, target_epsilon=target,
        )  # fmt: skip
    for _ in range(options.epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model, 0.0 if ledger is None else ledger.epsilon


def main() -> None:
    """Train every setting from every seed and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("test")
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--canaries", type=int, default=400)
    parser.add_argument("--guesses", type=int, default=200, help="canaries that the bound guesses, half of them in")
    parser.add_argument("--targets", type=float, nargs="+", default=[3.0, 8.0, 0.0], help="0: no privacy")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=500)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--linear", action="store_true", help="train a linear layer alone")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--defenses", nargs="+", default=["dp-sgd"], help="without their noise, such as dp-ftrl:band=4")
    parser.add_argument("--sgd", action="store_true", help="plain SGD in place of AdamW")
    parser.add_argument("--states", type=Path, help="file of the frozen states; written if it does not exist")
    options = parser.parse_args()
    start = time.process_time()
    (known, labels), (test, truth) = kept_states(load("minilm", "classification"), options)
    majority = float(torch.bincount(truth).max() / len(truth))
    print(f"{len(known)} texts, {options.canaries} of them canaries; tested on {len(test)}; majority class {majority:.3f}; "
          f"{time.process_time() - start:.0f} s CPU so far", flush=True)  # fmt: skip
    print("| protection | target epsilon | counted | accuracy, mean | each seed | lower bounds of epsilon |")
    print("|---|---|---|---|---|---|")
    n = options.canaries
    cells = [(t, d) for t in options.targets for d in (options.defenses if t else ["none"])]
    for target, defense in cells:
        right, bounds, counted = [], [], []
        for seed in range(options.seeds):
            inside = torch.rand(n, generator=generator(seed, "coins")) < 0.5
            wrong = 1 - labels[:n]
            kept = torch.cat([known[:n][inside], known[n:]]), torch.cat([wrong[inside], labels[n:]])
            model, spent = trained(*kept, defense, target, options, seed)
            counted.append(spent)
            with torch.no_grad():
                said = model(states=test, labels=truth).logits
                losses = nn.functional.cross_entropy(model(states=known[:n], labels=wrong).logits, wrong, reduction="none")
            right.append(float((said.argmax(1) == truth).double().mean()))
            order = losses.argsort()
            half = options.guesses // 2
            hits = int(inside[order[:half]].sum() + (~inside[order[-half:]]).sum())
            bounds.append(one_run_bound(n, 2 * half, hits, 0.1 / len(kept[0]) if target else 0.0).epsilon)
        mean = sum(right) / len(right)
        low, high = proportion_interval(round(mean * len(test)), len(test))
        row = f"| {defense} | {target or 'none'} | {max(counted) or '-'} | {mean:.3f} [{low:.3f}, {high:.3f}] |"
        print(row, ", ".join(f"{r:.3f}" for r in right), "|", ", ".join(f"{b:.2f}" for b in bounds), "|", flush=True)
    print(f"{time.process_time() - start:.0f} s CPU")


if __name__ == "__main__":
    main()
