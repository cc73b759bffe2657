"""ObfusLM: what obfuscating a table costs beside the plain reading of the algorithms.

python benchmarks/obfuslm.py cost
python benchmarks/obfuslm.py plan
python benchmarks/obfuslm.py whole
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from rasura.core.rng import generator
from rasura.service_protections.obfuslm.clusters import BLOCK_BYTES, Clusters, _Search, embed_cluster
from rasura.service_protections.obfuslm.synthesis import weight_synth
from rasura.victims.loading import load

T = TypeVar("T")


def timed(what: str, call: Callable[[], T]) -> tuple[T, float]:
    """What ``call`` gives, and the CPU seconds that it took, which are printed."""
    start, wall = time.process_time(), time.perf_counter()
    out = call()
    cpu = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what}: {cpu:.2f} s CPU, {time.perf_counter() - wall:.1f} s wall, peak so far {peak:.0f} MiB", flush=True)
    return out, cpu


def plain_clusters(table: Tensor, k: int, beta: float) -> list[list[int]]:
    """Algorithm 1 as it reads, rows that have a cluster skipped: all similarities, a sort and a quantile a cluster."""
    rows = nn.functional.normalize(table, dim=1)
    cosines = rows @ rows.T
    taken = torch.zeros(len(rows), dtype=torch.bool)
    out = []
    for i in range(len(rows)):
        if taken[i]:
            continue
        group, gamma = [i], torch.quantile(cosines[i], beta)
        values, order = cosines[i].sort(descending=True)
        for j, value in zip(order.tolist(), values.tolist()):
            if len(group) == k or value < gamma:
                break
            if j != i and not taken[j]:
                group.append(j)
        taken[group] = True
        out.append(group)
    return out


def cost(k: int, beta: float) -> None:
    """Clusters and weights of MiniLM's table, 30,522 x 384."""
    table = load("minilm", "classification").model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    ours, fast = timed("clusters", lambda: embed_cluster(table, k, beta, merge_leftovers=False))
    merged, _ = timed("clusters, leftovers merged", lambda: embed_cluster(table, k, beta))
    weights, _ = timed("weights", lambda: weight_synth(table, merged, 1.0, generator(0)))
    timed("new rows", lambda: weights.apply(table))
    plain, slow = timed("plain reading of the clusters", lambda: plain_clusters(table, k, beta))
    same = sum(ours[n].tolist() == group for n, group in enumerate(plain)) if len(plain) == len(ours) else 0
    largest = int(merged.sizes.max())
    print(f"{len(ours)} clusters ({len(merged)} after {merged.merged} tokens were merged, the largest {largest})")
    print(f"identical to the plain reading: {same} of {len(plain)}; {slow / fast:.1f} x less CPU")


def plan(tokens: int, hidden: int, k: int, share: int, pivots: float) -> None:
    """What a large table would cost, from one block against a ``share``-th of its rows."""
    rows = nn.functional.normalize(torch.randn(tokens // share, hidden), dim=1)
    size = _Search(rows[:1].expand(tokens, -1), k, 0.99, BLOCK_BYTES).size
    search = _Search(rows, k, 0.99, BLOCK_BYTES)
    _, cpu = timed(f"{size} rows against {len(rows)} x {hidden}", lambda: search(torch.arange(size), None))
    blocks = pivots * tokens / size
    print(f"{blocks:.0f} blocks of {size} against {tokens} rows: {blocks * cpu * share:.0f} s CPU")
    clusters = Clusters(torch.arange(len(rows) // k * k), torch.arange(0, len(rows) // k * k + 1, k))
    _, synth = timed("weights and new rows", lambda: weight_synth(rows, clusters, 1.0, generator(0)).apply(rows))
    print(f"for {tokens} rows: {synth * share:.0f} s CPU")
    table = tokens * hidden * 4 / 2**30
    blocks = 4 * BLOCK_BYTES / 2**30
    print(f"memory: table, its unit rows and the new one {3 * table:.1f} GiB (float32), blocks {blocks:.2f} GiB")


def whole(tokens: int, hidden: int, k: int, beta: float) -> None:
    """Clusters, weights and new rows of a large table of random words, ten about each of ``tokens / 10`` directions."""
    rng = generator(0)
    table = torch.randn(tokens, hidden, generator=rng)
    for part in table.split(tokens // 10):
        part += torch.randn(tokens // 10, hidden, generator=generator(1))[: len(part)]
    clusters, _ = timed(f"clusters of {tokens} x {hidden}", lambda: embed_cluster(table, k, beta))
    weights, _ = timed("weights", lambda: weight_synth(table, clusters, 1.0, rng))
    timed("new rows", lambda: weights.apply(table))
    print(f"{len(clusters)} clusters after {clusters.merged} tokens were merged, the largest {int(clusters.sizes.max())}")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("what", choices=["cost", "plan", "whole"])
    parser.add_argument("--beta", type=float, default=0.99)
    options = parser.parse_args()
    if options.what == "cost":
        cost(10, options.beta)
    elif options.what == "whole":
        whole(128_256, 4096, 10, options.beta)
    else:
        plan(128_256, 4096, 10, 16, 0.12)


if __name__ == "__main__":
    main()
