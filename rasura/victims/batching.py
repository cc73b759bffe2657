"""Texts in batches: joining and splitting, the random order of an epoch, and Poisson sampling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rasura.core.batches import Batch, contents, places_of_each
from rasura.core.rng import Randomness, permutation, uniform

POOL = 16
"""Number of batches whose texts are sorted by length together."""


def joined(rows: Sequence[Batch], pad: int) -> Batch:
    """Several batches joined into one, padded on the right with ``pad`` to the longest text."""
    longest = max(row.input_ids.shape[1] for row in rows)

    def stacked(parts: Iterable[Tensor], fill: int) -> Tensor:
        return torch.cat([nn.functional.pad(p, (0, longest - p.shape[1]), value=fill) for p in parts])

    first = rows[0]
    types = None
    if first.token_type_ids is not None:
        types = stacked([r.token_type_ids for r in rows if r.token_type_ids is not None], 0)
    labels = stacked([r.labels for r in rows], -100) if first.labels.dim() == 2 else torch.cat([r.labels for r in rows])
    return Batch(
        stacked([r.input_ids for r in rows], pad),
        stacked([r.attention_mask for r in rows], 0),
        labels,
        tuple(t for r in rows for t in r.texts),
        tuple(t for r in rows for t in r.seen),
        types,
        first.special_ids,
    )


def split(batch: Batch) -> list[Batch]:
    """The texts of ``batch`` as batches of one, without padding."""
    out = []
    for k in range(len(batch)):
        n = batch.lengths[k]
        types = None if batch.token_type_ids is None else batch.token_type_ids[k : k + 1, :n]
        labels = batch.labels[k : k + 1]
        out.append(
            Batch(
                batch.input_ids[k : k + 1, :n],
                batch.attention_mask[k : k + 1, :n],
                labels[:, :n] if labels.dim() == 2 else labels,
                batch.texts[k : k + 1],
                batch.seen[k : k + 1],
                types,
                batch.special_ids,
            )
        )
    return out


def renamed(row: Batch, ids: Tensor) -> Batch:
    """The text ``row`` with ``ids`` ``(1, length)`` in place of its own, also as what a causal model predicts."""
    labels = torch.where(row.labels == -100, row.labels, ids) if row.labels.dim() == 2 else row.labels
    return replace(row, input_ids=ids, labels=labels)


def batches(lengths: Sequence[int], size: int, rng: Randomness) -> list[list[int]]:
    """Rows in random batches of ``size``, with similar ``lengths`` within a pool of ``POOL`` batches, to reduce padding."""
    order = permutation(len(lengths), rng).tolist()
    out = []
    for start in range(0, len(order), size * POOL):
        pool = sorted(order[start : start + size * POOL], key=lengths.__getitem__)
        out += [pool[k : k + size] for k in range(0, len(pool), size)]
    return [out[k] for k in permutation(len(out), rng).tolist()]


def drawn(count: int, size: int, rng: Randomness) -> list[list[int]]:
    """Rows for the batches of an epoch. Each row is in each batch with probability ``size / count`` (Poisson sampling), so
    batch sizes vary, and some may be empty."""
    steps = math.ceil(count / size)
    return [(uniform((count,), rng) < size / count).nonzero().flatten().tolist() for _ in range(steps)]


def in_order(count: int, size: int, rng: Randomness) -> list[list[int]]:
    """All rows in one random order, ``size`` at a time: the batches of every pass. The last one may be smaller."""
    order = permutation(count, rng).tolist()
    return [order[start : start + size] for start in range(0, count, size)]


def by_person(owners: Sequence[int]) -> list[list[int]]:
    """The rows of each person, from the number of the person of each row: all of ``0 .. persons - 1``."""
    rows: list[list[int]] = [[] for _ in range(1 + max(owners, default=-1))]
    for row, owner in enumerate(owners):
        rows[owner].append(row)
    return rows


def none_of(row: Batch) -> Batch:
    """An empty batch of the same kind as ``row``."""
    types = None if row.token_type_ids is None else row.token_type_ids[:0]
    return Batch(row.input_ids[:0], row.attention_mask[:0], row.labels[:0], (), (), types, row.special_ids)


def apart(rows: Sequence[Batch], others: Sequence[Batch]) -> list[Batch]:
    """Those of ``rows``, one text each, that the model sees as none of ``others`` and as none before them."""
    known = [one for row in others for one in contents(row)]
    return [rows[k] for k in places_of_each([one for row in rows for one in contents(row)], known)]
