"""WeightSynth: every row is replaced by a noisy mean of its cluster (ObfusLM, appendix B, Algorithm 2).

The dense matrix of weights is never formed: its blocks are one small square a cluster. In line 9 ``t`` is read as ``s``, the
rows of the cluster.

``calibrated_synth`` is ours: the same means with noise of one width a cluster, wide enough that what the paper's definition
promises holds (``max_success``).
"""

from __future__ import annotations

import math
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


def calibrated_synth(table: Tensor, clusters: Clusters, epsilon: float, rng: Randomness) -> Weights:
    """As ``weight_synth``, with noise of one width a cluster for which ``max_success`` holds.

    Of row i: u_i = epsilon * (cosines - their median) / 2, Laplace noise of scale b on each entry, and softmax. Two rows of
    the cluster that trade places change the weights of both. So b = 2 max_ij |u_i - u_j|_1 / epsilon makes what is seen at
    most e^epsilon times as likely. b depends on the cluster's public rows alone, and on ``epsilon`` not at all.
    """
    flat = laplace((int(clusters.sizes.square().sum()),), rng)
    for members, places in _alike(clusters, table.shape[1] * 4):
        size = members.shape[1]
        where = places[:, None] + torch.arange(size * size)
        noise = flat[where].view(-1, size, size)
        signal = centred(table.detach()[members])
        flat[where] = (epsilon / 2 * signal + width(signal) * noise).softmax(2).flatten(1)
    return Weights(clusters, flat)


def centred(rows: Tensor) -> Tensor:
    """The cosines of ``rows`` ``(clusters, size, columns)`` with each other, those of a row less their median, float64."""
    unit = nn.functional.normalize(rows if rows.dtype == torch.float64 else rows.float(), dim=2)
    cosines = (unit @ unit.mT).double()
    return cosines - cosines.median(2, keepdim=True).values


def width(signal: Tensor) -> Tensor:
    """The scale of the noise in clusters of this ``centred`` ``signal``, ``(clusters, 1, 1)``: their largest L1 distance."""
    return torch.cdist(signal, signal, p=1).amax((1, 2), keepdim=True)


def max_success(epsilon: float, size: int) -> float:
    """How often at most a row's own token is named, out of ``size`` rows in its cluster, behind ``calibrated_synth``.

    Of somebody who sees all new rows, the old ones and the clusters, to whom all orders within a cluster are equally
    likely; what else is known of a token, such as its frequency, is not counted. Every order in which a row is token i is,
    by one trade, an order in which it is token j, and at most e^epsilon times as likely. So no token has more than
    e^epsilon / (e^epsilon + size - 1) of the probability.
    """
    return 1 / (1 + (size - 1) * math.exp(-epsilon))


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
