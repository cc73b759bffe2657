"""WeightSynth: every row is replaced by a noisy mean of its cluster (ObfusLM, appendix B, Algorithm 2).

The dense matrix of weights is never formed: its blocks are one small square a cluster. In line 9 ``t`` is read as ``s``, the
rows of the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rasura.core.rng import Randomness, laplace
from rasura.service_protections.obfuslm.clusters import Clusters

BLOCK_BYTES = 1 << 26
"""Size of the rows of a block of clusters."""


@dataclass(frozen=True)
class Weights:
    """The weights of all clusters, row by row, one cluster after the other: ``flat`` ``(sum of squared sizes,)`` float64."""

    clusters: Clusters
    flat: Tensor

    def matrix(self, number: int) -> Tensor:
        """The weights of one cluster ``(size, size)``: row i makes the new row of its i-th member."""
        places = _starts(self.clusters)
        size = int(self.clusters.sizes[number])
        return self.flat[int(places[number]) : int(places[number]) + size * size].view(size, size)

    def apply(self, table: Tensor) -> Tensor:
        """``W @ table`` for ``table`` ``(rows, ...)``: new rows, of the same kind; rows of no cluster stay.

        A row that stands in several clusters (as printed) is the sum over them.
        """
        flat = table.detach().reshape(len(table), -1)
        out = flat.clone()
        out[self.clusters.members] = 0
        kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
        for members, places in _alike(self.clusters, flat.shape[1] * 4):
            size = members.shape[1]
            weights = self.flat[places[:, None] + torch.arange(size * size)].view(-1, size, size)
            made = weights.to(kind) @ flat[members].to(kind)
            out.index_add_(0, members.flatten(), made.flatten(0, 1).to(out.dtype))
        return out.view(table.shape)


def weight_synth(table: Tensor, clusters: Clusters, epsilon: float, rng: Randomness) -> Weights:
    """Weights that make each row of ``table`` ``(rows, width)`` a noisy mean of its cluster.

    Of a row: u = log softmax(epsilon * cosine / 2) over its cluster, Laplace noise of scale (max u - min u) / epsilon on
    each entry, and softmax again. That scale is half the spread of the cosines, whatever ``epsilon`` is, which only scales
    the signal; and it depends on the data. Noise from ``rng``, for experiments, or from the operating system.
    """
    flat = laplace((int(clusters.sizes.square().sum()),), rng)
    for members, places in _alike(clusters, table.shape[1] * 4):
        size = members.shape[1]
        where = places[:, None] + torch.arange(size * size)
        rows = table.detach()[members]
        rows = nn.functional.normalize(rows if rows.dtype == torch.float64 else rows.float(), dim=2)
        u = (epsilon / 2 * (rows @ rows.mT).double()).log_softmax(2)
        spread = u.amax(2, keepdim=True) - u.amin(2, keepdim=True)
        noise = flat[where].view(-1, size, size)
        flat[where] = (u + spread / epsilon * noise).softmax(2).flatten(1)
    return Weights(clusters, flat)


def _starts(clusters: Clusters) -> Tensor:
    squares = clusters.sizes.square()
    return squares.cumsum(0) - squares


def _alike(clusters: Clusters, row_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of clusters of one size: their members ``(clusters, size)`` and where their weights begin."""
    sizes, starts = clusters.sizes, _starts(clusters)
    for size in sorted(set(sizes.tolist())):
        those = (sizes == size).nonzero().flatten()
        for some in torch.split(those, max(1, BLOCK_BYTES // (size * row_bytes))):
            yield clusters.members[clusters.offsets[some][:, None] + torch.arange(size)], starts[some]
