"""Who was an overfitted head trained on? Every membership attack against the same models, features computed once.

python benchmarks/membership.py DATA/sst2.train.parquet
python benchmarks/membership.py DATA/sst2.train.parquet --attack blind,loss,mia-n --models 2 --texts 500
python benchmarks/membership.py DATA/sst2.train.parquet --sigma 1.0 --epochs 30

A pooler and classifier on MiniLM's frozen features, trained until they know their texts by heart, half of the texts each.
Every model is the audited one in turn. The others are the adversary's shadow models, but for its partner on the other half.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Generator, Tensor, nn

from rasura.accounting import epsilon
from rasura.core.answers import Answers, ShadowModel
from rasura.core.batches import Batch
from rasura.core.rng import derive, generator
from rasura.core.threat import MODEL_USER, observe_model
from rasura.data.text import encode, load_examples
from rasura.metrics.intervals import mean_interval
from rasura.metrics.membership import auc, auc_bound, largest_leakage, needed, split_check, tpr_at
from rasura.registry import membership_attack
from rasura.victims.batching import joined, split
from rasura.victims.loading import Victim, load

BATCH = 64
"""Texts a step."""


class Features:
    """MiniLM's first hidden state of each text, computed once."""

    def __init__(self, victim: Victim) -> None:
        self.body = victim.model.base_model
        self.pad = victim.vocabulary.pad_id or 0
        self.kept: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, rows: Sequence[Batch]) -> Tensor:
        """``(rows, hidden)``."""
        new = {row.ids(0): row for row in rows if row.ids(0) not in self.kept}
        order = sorted(new, key=len)
        for start in range(0, len(order), 128):
            batch = joined([new[k] for k in order[start : start + 128]], self.pad)
            inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
            with torch.no_grad():
                found = self.body(**inputs).last_hidden_state[:, 0].clone()
            self.kept.update(zip(order[start : start + 128], found))
        return torch.stack([self.kept[row.ids(0)] for row in rows])


def private_gradient(head: nn.Sequential, features: Tensor, labels: Tensor, sigma: float, rng: Generator) -> None:
    """The gradient of DP-SGD: every text's clipped to norm 1, their sum in noise, over the texts expected in a step."""
    pooler, squash, classifier = head
    inner = pooler(features)
    outer = squash(inner)
    logits = classifier(outer)
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    # A linear layer's gradient of one text is an outer product: its norm is the product of two norms.
    back = torch.autograd.grad(losses.sum(), [inner, logits], retain_graph=True)
    squares = [(g.square().sum(1)) * (x.square().sum(1) + 1) for g, x in zip(back, (features, outer))]
    weights = (1 / sum(squares).detach().sqrt()).clamp(max=1)
    (weights * losses).sum().backward()
    for p in head.parameters():
        p.grad = (p.grad + sigma * torch.randn(p.shape, generator=rng)) / BATCH


def trained(features: Tensor, labels: Tensor, inside: Tensor, epochs: int, seed: int, sigma: float = 0.0) -> nn.Module:
    """A BERT head (pooler, tanh, classifier) trained on the texts ``inside``; with ``sigma`` by DP-SGD."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "head"))
        head = nn.Sequential(nn.Linear(features.shape[1], features.shape[1]), nn.Tanh(), nn.Linear(features.shape[1], 2))
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    rows = inside.nonzero()[:, 0]
    rng = generator(seed, "noise")
    steps = epochs * -(-len(rows) // BATCH)
    for _ in range(steps if sigma else 0):
        part = rows[torch.rand(len(rows), generator=rng) < BATCH / len(rows)]
        optimizer.zero_grad()
        private_gradient(head, features[part], labels[part], sigma, rng)
        optimizer.step()
    for epoch in range(0 if sigma else epochs):
        order = rows[torch.randperm(len(rows), generator=generator(seed, "order", epoch))]
        for part in order.split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(head(features[part]), labels[part]).backward()
            optimizer.step()
    return head.eval()


def answers_of(head: nn.Module, features: Tensor, labels: Tensor) -> Answers:
    """What the head says of each text."""
    with torch.no_grad():
        logits = head(features).double()
    margins = (logits[:, 1] - logits[:, 0]) * (2 * labels - 1)
    return Answers(nn.functional.softplus(-margins), margins, logits)


def labels_of(rows: Sequence[Batch]) -> Tensor:
    """``(rows,)``."""
    return torch.tensor([int(row.labels[0]) for row in rows])


def main() -> None:
    """Train the models, attack each, and print a table with intervals over the models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--sigma", type=float, default=0.0, help="noise multiplier of DP-SGD; 0: plain training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attack", default="blind,loss,mia,mia-r,lira,rmia", help="and mia-n")
    options = parser.parse_args()
    start = time.process_time()
    victim = load("minilm", "classification")
    found = {e.text: e for e in load_examples(options.data)}  # no text twice
    every = list(found.values())
    drawn = torch.randperm(len(every), generator=generator(options.seed, "texts"))[: options.texts].tolist()
    examples = [every[k] for k in drawn]
    rows = tuple(split(encode(examples, victim.tokenizer, "classification", max_length=128, num_labels=2, truncate=True)))
    features = Features(victim)
    known, labels = features(rows), labels_of(rows)
    inside, heads = [], []
    for number in range(options.models):
        order = torch.randperm(len(rows), generator=generator(options.seed, "half", number // 2))
        half = torch.zeros(len(rows), dtype=torch.bool)
        half[order[: len(rows) // 2] if number % 2 == 0 else order[len(rows) // 2 :]] = True
        inside.append(half)
        heads.append(trained(known, labels, half, options.epochs, derive(options.seed, number), options.sigma))
    if options.sigma:
        n = len(rows) // 2
        delta = 0.1 / n
        spent = epsilon(options.sigma, BATCH / n, options.epochs * -(-n // BATCH), delta)
        bound = auc_bound(spent, delta)
        print(f"DP-SGD, sigma {options.sigma:g}: epsilon {spent:.3g} at delta {delta:.2g}; AUC at most {bound:.3f}")
    said = [answers_of(head, known, labels) for head in heads]
    right = [(a.logits.argmax(1) == labels).double() for a in said]
    on = np.mean([float(r[i].mean()) for r, i in zip(right, inside)])
    off = np.mean([float(r[~i].mean()) for r, i in zip(right, inside)])
    print(f"{options.models} models, {len(rows) // 2} texts each; accuracy {on:.3f} on them, {off:.3f} on the others")
    words = [split_check([e.text for e in examples], i.tolist()).mean for i in inside[::2]]
    print(f"members told by words alone: AUC {np.mean(words):.3f}, mean of {len(words)} halves", flush=True)
    names = options.attack.split(",")
    figures: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
    for number, head in enumerate(heads):
        # Models come in pairs on opposite halves. If only the audited one were left out, members would be in fewer shadow
        # models than the others are, which would tell who they are: its partner is left out with it.
        shadows = tuple(ShadowModel(said[k], inside[k]) for k in range(options.models) if k // 2 != number // 2)

        def ask(asked: Sequence[Batch], head: nn.Module = head, number: int = number) -> Answers:
            return said[number] if asked is rows else answers_of(head, features(asked), labels_of(asked))

        seen = observe_model(
            MODEL_USER, "classification", ask=ask, candidates=rows, base=(victim.model, victim.vocabulary),
            shadow_models=lambda shadows=shadows: shadows,  # type: ignore[misc]  # mypy knows no defaults of lambdas
        )  # fmt: skip
        members = inside[number].tolist()
        for name in names:
            scores = membership_attack(name)(seen, rng=generator(options.seed, name)).scores.tolist()
            rates = (tpr_at(scores, members, f).mean if len(rows) >= 2 * needed(f) else np.nan for f in (0.01, 0.001))
            figures[name].append((auc(scores, members).mean, *rates, largest_leakage(scores, members)[0]))
    print("| attack | AUC | TPR at 1 % FPR | TPR at .1 % FPR | largest leakage |\n|---|---|---|---|---|")
    for name in names:
        cells = []
        for column in range(4):
            mean, low, high = mean_interval([row[column] for row in figures[name]])
            cells.append(
                f"{mean:.3f} [{low:.3f}, {high:.3f}]" if column in (0, 3) else f"{mean:.4f} [{low:.4f}, {high:.4f}]"
            )
        print(f"| {name} | {' | '.join(cells)} |")
    if {"loss", "rmia"} <= set(names):
        pairs = np.array([[figures[n][k][1] for n in ("rmia", "loss")] for k in range(options.models)])
        draws = np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))
        ratios = pairs[draws, 0].mean(1) / np.maximum(pairs[draws, 1].mean(1), 1e-9)
        low, high = np.quantile(ratios, [0.025, 0.975])
        whole = pairs[:, 0].mean() / pairs[:, 1].mean()
        print(f"RMIA over LOSS at 1 % FPR: {whole:.1f} [{low:.1f}, {high:.1f}] times")
    print(f"{time.process_time() - start:.0f} s CPU")


if __name__ == "__main__":
    main()
