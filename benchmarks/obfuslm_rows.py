"""What rows of ObfusLM are worth to a linear model: published and calibrated noise behind the same keys and clusters.

python benchmarks/obfuslm_rows.py DATA/sst2.train.parquet --test DATA/sst2.validation.parquet --keys 3

A text is the mean of its tokens' rows of MiniLM's table as they are served, and a logistic regression learns from these. The
rows are not trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from statistics import mean

import torch
from torch import Tensor, nn

from rasura.core.rng import Randomness, generator, permutation
from rasura.data.text import load_examples
from rasura.service_protections.obfuslm.clusters import Clusters, embed_cluster
from rasura.service_protections.obfuslm.synthesis import Weights, calibrated_synth, weight_synth
from rasura.victims.loading import load

K, BETA, DECAY, STEPS = 10, 0.99, 1e-4, 60

SYNTHS: dict[str, Callable[[Tensor, Clusters, float, Randomness], Weights]] = {
    "published": weight_synth,
    "calibrated": calibrated_synth,
}


def means(texts: Sequence[Sequence[int]], table: Tensor) -> Tensor:
    """The mean row of each text ``(texts, hidden)``."""
    flat = torch.tensor([i for text in texts for i in text])
    starts = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0)[:-1]
    return nn.functional.embedding_bag(flat, table, starts, mode="mean")


def accuracy(train: Tensor, labels: Tensor, test: Tensor, goal: Tensor) -> float:
    """Of a logistic regression on standardised columns."""
    centre, spread = train.mean(0), train.std(0).clamp_min(1e-6)
    train, test = (train - centre) / spread, (test - centre) / spread
    head = torch.zeros(train.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([head], max_iter=STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        scores = train @ head[:-1] + head[-1]
        loss = nn.functional.binary_cross_entropy_with_logits(scores, labels) + DECAY * head[:-1].square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return float(((test @ head[:-1] + head[-1] > 0).float() == goal).float().mean())


def main() -> None:
    """Print a row for each epsilon and kind of noise."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data")
    parser.add_argument("--test", required=True)
    parser.add_argument("--texts", type=int, default=12_000)
    parser.add_argument("--keys", type=int, default=3)
    parser.add_argument("--epsilon", default="0.1,1,3")
    told = parser.parse_args()
    victim = load("minilm", "classification")
    table = victim.model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    data, tested = load_examples(told.data, limit=told.texts), load_examples(told.test)
    texts, others = ([victim.vocabulary.encode(e.text) for e in some] for some in (data, tested))
    labels, goal = (torch.tensor([float(e.label or 0) for e in some]) for some in (data, tested))

    def worth(rows: Tensor) -> float:
        return accuracy(means(texts, rows), labels, means(others, rows), goal)

    print(f"{len(texts)} texts, {len(others)} tested, public rows {100 * worth(table):.1f}", flush=True)
    found: dict[tuple[float, str], list[float]] = {}
    for key in range(told.keys):
        order = permutation(len(table), generator(key, "key"))
        shuffled, back = table[order], order.argsort()
        clusters = embed_cluster(shuffled, K, BETA)
        for epsilon in map(float, told.epsilon.split(",")):
            for name, synth in SYNTHS.items():
                served = synth(shuffled, clusters, epsilon, generator(key, "noise")).apply(shuffled)
                found.setdefault((epsilon, name), []).append(worth(served[back]))
                print(f"key {key}, epsilon {epsilon:g}, {name}: {100 * found[epsilon, name][-1]:.1f}", flush=True)
    for (epsilon, name), values in found.items():
        low, high = 100 * min(values), 100 * max(values)
        print(f"epsilon {epsilon:g}, {name}: {100 * mean(values):.1f} [{low:.1f}, {high:.1f}] over {len(values)} keys")


if __name__ == "__main__":
    main()
