"""What ObfusLM's (k, epsilon)-anonymity is worth: how often a row's own token is named from the weights of its mixture.

python benchmarks/obfuslm_anonymity.py --keys 5
python benchmarks/obfuslm_anonymity.py --keys 5 --calibrated

The definition: a mixture is at most e^epsilon times as likely for one of the k rows of a cluster as for another. Who names
the likeliest is then right in at most e^epsilon / (e^epsilon + k - 1) of all cases. Here the adversary has the public table,
the cluster and a row's weights (public rows give them, ``attacks/services/mixture.py``), and computes the exact
likelihood of every member: by the row alone, and by all orders of the cluster's rows together.
"""

from __future__ import annotations

import argparse
import math

import torch
from scipy import stats
from torch import Tensor, nn

from rasura.core.rng import permutation, secret_generator
from rasura.service_protections.obfuslm.clusters import embed_cluster
from rasura.service_protections.obfuslm.synthesis import (
    calibrated_synth,
    centred,
    max_success,
    weight_synth,
)
from rasura.service_protections.obfuslm.synthesis import width as widest
from rasura.victims.loading import load


def log_likelihoods(weights: Tensor, table: Tensor, epsilon: float, calibrated: bool) -> Tensor:
    """Of rows' ``weights`` ``(clusters, k, k)`` if they were those of each member of ``table`` ``(clusters, k, hidden)``:
    ``(clusters, k, k)``, last the member.

    A weight's logarithm is known up to a constant, the same for a row, which is integrated out: between two of its kinks the
    density of the noise is an exponential.
    """
    signal = centred(table)
    u = epsilon / 2 * signal
    width = widest(signal)[:, 0].expand(u.shape[:2]) if calibrated else (u.amax(2) - u.amin(2)) / epsilon
    count = weights.shape[2]
    # (clusters, row, member, place): where the constant makes the noise of a place zero.
    kinks = (u[:, None] - weights.log()[:, :, None]).sort(3).values
    far = (kinks[..., :, None] - kinks[..., None, :]).abs().sum(4) / width[:, None, :, None]
    fall = far.diff(dim=3)
    inside = kinks.diff(dim=3) * torch.where(fall.abs() < 1e-9, 1.0, -torch.expm1(-fall) / fall)
    tails = (width / count)[:, None, :, None].expand_as(far[..., :1])
    parts = torch.cat([inside.log() - far[..., :-1], tails.log() - far[..., :1], tails.log() - far[..., -1:]], 3)
    return parts.logsumexp(3) - count * (2 * width.log())[:, None] / 2 - count * math.log(2)


def together(likelihoods: Tensor) -> Tensor:
    """The chance of each token in each row by all orders, from ``(clusters, k, k)`` log likelihoods; sums to one a row.

    Over sets of tokens: how the rows before can be filled with a set, times how those behind can be with the rest.
    """
    k = likelihoods.shape[2]
    each = (likelihoods - likelihoods.amax(2, keepdim=True)).exp()
    sets = torch.arange(1 << k)
    size = sum((sets >> t & 1) for t in range(k))

    def filled(rows: Tensor) -> Tensor:
        ways = rows.new_zeros(len(rows), 1 << k)
        ways[:, 0] = 1
        for row in range(rows.shape[1]):
            before = sets[size == row]
            for t in range(k):
                some = before[before >> t & 1 == 0]
                ways[:, some | 1 << t] += ways[:, some] * rows[:, row, t, None]
        return ways

    first, last = filled(each), filled(each.flip(1))
    chances = torch.zeros_like(each)
    for row in range(k):
        for t in range(k):
            some = sets[(size == row) & (sets >> t & 1 == 0)]
            rest = (1 << k) - 1 - (some | 1 << t)
            chances[:, row, t] = (first[:, some] * each[:, row, t, None] * last[:, rest]).sum(1)
    return chances / chances.sum(2, keepdim=True)


def measured(table: Tensor, k: int, epsilon: float, keys: int, calibrated: bool) -> dict[str, float]:
    """Over the clusters of ``k`` rows under several keys: rows, how many are named, how often the definition is broken."""
    rows = named = jointly = broken = 0
    synth = calibrated_synth if calibrated else weight_synth
    spreads = []
    for _ in range(keys):
        rng = secret_generator()
        shuffled = table[permutation(len(table), rng)]
        clusters = embed_cluster(shuffled, k, 0.99)
        weights = synth(shuffled, clusters, epsilon, rng)
        full = (clusters.sizes == k).nonzero().flatten()
        members = clusters.members[clusters.offsets[full][:, None] + torch.arange(k)]
        for some, numbers in zip(torch.split(members, 200), torch.split(full, 200)):
            each = torch.stack([weights.matrix(int(n)) for n in numbers])
            found = log_likelihoods(each, shuffled[some], epsilon, calibrated)
            rows += found.shape[0] * k
            named += int((found.argmax(2) == torch.arange(k)).sum())
            jointly += int((together(found).argmax(2) == torch.arange(k)).sum())
            broken += int((found.amax(2) - found.amin(2) > epsilon).sum())
            unit = nn.functional.normalize(shuffled[some].float(), dim=2)
            cosines = unit @ unit.mT
            spread = cosines.amax(2) - cosines.amin(2)
            spreads.append(spread.amax(1) / spread.amin(1))
    interval = stats.binomtest(named, rows).proportion_ci(0.95, "exact")
    ratio = torch.cat(spreads)
    return {
        "rows": rows, "jointly": jointly / rows, "named": named / rows, "low": interval.low, "high": interval.high,
        "allowed": max_success(epsilon, k), "broken": broken / rows,
        "widths": float(ratio.median()), "alike": float((ratio < 1.001).double().mean()),
    }  # fmt: skip


def main() -> None:
    """Print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--keys", type=int, default=5)
    parser.add_argument("--k", default="10")
    parser.add_argument("--epsilon", default="0.1,1,3")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--calibrated", action="store_true", help="noise of one width a cluster")
    told = parser.parse_args()
    table = load(told.model, "classification").model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    for k in map(int, told.k.split(",")):
        for epsilon in map(float, told.epsilon.split(",")):
            found = measured(table, k, epsilon, told.keys, told.calibrated)
            share = {name: f"{100 * value:.2f} %" for name, value in found.items()}
            parts = (
                f"k {k}, epsilon {epsilon:g}: own token named in {share['named']} of {found['rows']:.0f} rows",
                f"(95 %: {share['low']} to {share['high']}), {share['jointly']} by all orders, allowed {share['allowed']};",
                f"two members are told apart by more than e^epsilon in {share['broken']} of rows; a cluster's widest spread",
                f"of cosines is {found['widths']:.2f} times its narrowest (median), alike in {share['alike']}",
            )
            print(" ".join(parts), flush=True)


if __name__ == "__main__":
    main()
