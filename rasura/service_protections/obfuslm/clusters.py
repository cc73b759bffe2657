"""EmbedCluster: puts rows that are near each other into clusters (ObfusLM, appendix B, Algorithm 1).

Where this departs from the paper, each an option of ``embed_cluster``: rows that have a cluster are skipped (the printed
line 13 takes them again, against "each embedding will only be assigned to one cluster"), and clusters that stay smaller than
``k``, which the paper's definition of (k, epsilon)-anonymity does not allow, are merged into the nearest of full size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError

BLOCK_BYTES = 1 << 26
"""Size of a block of cosines."""

GROUP = 32
"""Columns whose maximum is taken first: the m largest of a row stand in the m groups of largest maximum."""


@dataclass(frozen=True)
class Clusters:
    """Cluster c holds the rows ``members[offsets[c]:offsets[c + 1]]``, the one that began it first; both int64.

    ``merged``: how many rows stood in clusters that were too small and were merged into another.
    """

    members: Tensor
    offsets: Tensor
    merged: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> Tensor:
        return self.members[int(self.offsets[number]) : int(self.offsets[number + 1])]

    @property
    def sizes(self) -> Tensor:
        """Rows of every cluster, int64."""
        return self.offsets.diff()


def clusters_of(groups: list[Tensor], merged: int = 0) -> Clusters:
    """The clusters that hold these rows."""
    sizes = torch.tensor([0, *(len(g) for g in groups)])
    return Clusters(torch.cat(groups) if groups else torch.empty(0, dtype=torch.int64), sizes.cumsum(0), merged)


def threshold_ratio(count: int, k: int, beta: float) -> float:
    """``beta``, lowered where it would leave fewer than ``k`` of ``count`` rows above the threshold."""
    return min(beta, 1 - k / count)


def embed_cluster(
    table: Tensor,
    k: int,
    beta: float,
    *,
    disjoint: bool = True,
    merge_leftovers: bool = True,
    block_bytes: int = BLOCK_BYTES,
) -> Clusters:
    """Clusters of ``k`` rows of ``table`` ``(rows, width)`` by cosine, begun row after row.

    A row that has no cluster takes the most similar others, most similar first, as long as their similarity reaches the
    quantile ``beta`` of its similarities to all rows (lowered where fewer than ``k`` would reach it). Only the rows that
    begin a cluster are compared with others, block by block, and a quantile is formed only where a count settles nothing.
    With ``disjoint=False`` rows that have a cluster may be taken again, as printed. Raises ``InputError`` for a ``k`` or
    ``beta`` that cannot be.
    """
    count = len(table)
    if not 1 <= k <= count:
        raise InputError(f"a cluster of {k} cannot be formed from {count} rows; pass k between 1 and {count}")
    if not 0 <= beta <= 1:
        raise InputError(f"beta is {beta}; expected a fraction between 0 and 1")
    if k == 1:
        return Clusters(torch.arange(count), torch.arange(count + 1))
    rows = _unit(table)
    search = _Search(rows, k, threshold_ratio(count, k, beta), block_bytes)
    free = torch.ones(count, dtype=torch.bool)
    groups: list[Tensor] = []
    start = 0
    while start < count:
        # Pivots of a block are guesses: one that an earlier pivot took in the meantime is left out.
        pivots = free[start:].nonzero().flatten()[: search.size] + start
        if not len(pivots):
            break
        found = search(pivots, free if disjoint else None)
        for pivot, cosines, near, values in zip(pivots.tolist(), *found):
            if not free[pivot]:
                continue
            if disjoint:
                left = free[near]
                # Neighbours that were found before the block began may all be taken by now.
                if int(left.sum()) < k and not bool(left.all() and len(near) >= int(free.sum()) - 1):
                    near, values = search.again(cosines, pivot, free)
                    left = free[near]
                near, values = near[left], values[left]
            near = near[: search.accepted(cosines, values[: k - 1])]
            group = torch.cat([torch.tensor([pivot]), near])
            free[group] = False
            groups.append(group)
        start = int(pivots[-1]) + 1
    if merge_leftovers and disjoint:
        return _merged(groups, rows, k)
    return clusters_of(groups)


def _unit(table: Tensor) -> Tensor:
    rows = table.detach()
    return nn.functional.normalize(rows if rows.dtype == torch.float64 else rows.float(), dim=1)


class _Search:
    """Blocks of cosines of pivots with all rows, and what is near in them."""

    def __init__(self, rows: Tensor, k: int, beta: float, block_bytes: int) -> None:
        self.rows, self.k, self.beta = rows, k, beta
        self.groups = -(-len(rows) // GROUP)
        self.size = max(1, block_bytes // (rows.element_size() * self.groups * GROUP))
        # Some of a pivot's neighbours are taken by other pivots of its block.
        self.wanted = min(2 * k + 8, len(rows) - 1)
        place = beta * (len(rows) - 1)
        self.surely = len(rows) - 1 - -(-place // 1)

    def __call__(self, pivots: Tensor, free: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Cosines ``(pivots, rows)``; of the ``free`` others the nearest, nearest first, with their cosines."""
        count = len(self.rows)
        cosines = self.rows[pivots] @ self.rows.T
        padded = torch.full((len(pivots), self.groups * GROUP), -torch.inf, dtype=cosines.dtype)
        if free is None:
            padded[:, :count] = cosines
        else:
            torch.add(cosines, torch.where(free, 0.0, -torch.inf).to(cosines.dtype), out=padded[:, :count])
        padded[torch.arange(len(pivots)), pivots] = -torch.inf
        if self.groups > self.wanted:
            grouped = padded.view(len(pivots), self.groups, GROUP)
            first = grouped.amax(2).topk(self.wanted, dim=1, sorted=False).indices
            narrow = grouped.gather(1, first[:, :, None].expand(-1, -1, GROUP)).flatten(1)
            columns = (first[:, :, None] * GROUP + torch.arange(GROUP)).flatten(1)
            values, places = narrow.topk(self.wanted, dim=1)
            return cosines, columns.gather(1, places).clamp_max(count - 1), values
        values, near = padded.topk(self.wanted, dim=1)
        return cosines, near.clamp_max(count - 1), values

    def again(self, cosines: Tensor, pivot: int, free: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest that are ``free`` now."""
        open_ = free.clone()
        open_[pivot] = False
        rest = open_.nonzero().flatten()
        values, places = cosines[rest].topk(min(self.k - 1, len(rest)))
        return rest[places], values

    def accepted(self, cosines: Tensor, values: Tensor) -> int:
        """How many of ``values``, falling cosines, reach the quantile of all ``cosines``."""
        values = values[values > -torch.inf]
        if not len(values):
            return 0
        # The last one's rank settles it in most cases, and a count is cheaper than a quantile.
        if int((cosines > values[-1]).sum()) <= self.surely:
            return len(values)
        return int((values >= quantile(cosines, self.beta)).sum())


def quantile(values: Tensor, share: float) -> Tensor:
    """The ``share`` quantile of ``values``, between neighbours in proportion, as NumPy and PyTorch have it."""
    place = share * (len(values) - 1)
    low = int(place)
    above = values.topk(len(values) - low).values if 2 * low > len(values) else values.sort(descending=True).values
    first = above[len(values) - 1 - low]
    second = above[max(len(values) - 2 - low, 0)]
    return first + (place - low) * (second - first)


def _merged(groups: list[Tensor], rows: Tensor, k: int) -> Clusters:
    """Clusters of fewer than ``k`` rows go to the full one whose mean direction is nearest to theirs."""
    full = [n for n, g in enumerate(groups) if len(g) >= k]
    small = [n for n, g in enumerate(groups) if len(g) < k]
    if not small:
        return clusters_of(groups)
    centres = torch.stack([nn.functional.normalize(rows[groups[n]].mean(0), dim=0) for n in full])
    joined = {n: [groups[n]] for n in full}
    for n in small:
        joined[full[int((centres @ rows[groups[n]].mean(0)).argmax())]].append(groups[n])
    return clusters_of([torch.cat(joined[n]) for n in full], sum(len(groups[n]) for n in small))
