"""Which public rows an obfuscated row was mixed from, exactly: matching pursuit that ends where nothing of the row is left.

Served rows are single precision, and a mixture of few public rows is no other mixture of few rows. So where public rows with
positive weights leave nothing of a served row, they are its cluster's. Weights below that precision are lost, but rows of
one cluster have the same members: what one does not show, the others do. Special tokens keep their rows, so these tell how
exact a table is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

FINEST, COARSEST = 1e-6, 1e-5
"""Part of a row that may be left: single precision leaves 1e-7, and dimensions that were mixed and put right again up to
5e-6. It is also the least weight of a public row that is surely part of a mixture: what fits the rest has less."""

ABOVE = 4.0
"""So many times what is left of special tokens may be left of other rows."""

BLOCK = 256
"""Rows that are pursued at once."""

MIN_STEPS = 32
"""Public rows looked for in a row, at least: merged clusters are much larger than announced."""

ENOUGH = 0.75
"""Part of the announced members that rows must show on average; otherwise all served rows are looked at."""

LINK_STEPS = 24
"""Public rows looked for in each of all served rows, which only have to show some of their members."""

Found = dict[int, float]
"""A row's members, public tokens, and their weights."""


def exactness(served: Tensor, table: Tensor, special: Sequence[int]) -> float:
    """The part of a ``served`` row that may be left, by what differs in the rows of the ``special`` tokens."""
    known = [i for i in special if bool(table[i].any())]
    away = (served[known] - table[known]).norm(dim=1) / table[known].norm(dim=1)
    worst = float(away.max()) if known else 0.0
    return min(COARSEST, max(FINEST, ABOVE * worst)) if math.isfinite(worst) else COARSEST


def pursued(rows: Tensor, table: Tensor, usable: Tensor, steps: int, exact: float) -> list[Found | None]:
    """For each of ``rows`` ``(n, hidden)`` which ``usable`` rows of the public ``table`` it was mixed from, with their
    weights: orthogonal matching pursuit of at most ``steps`` of them. None where so few leave more than the part ``exact``.
    """
    usable = usable[table[usable].isfinite().all(1)]
    public = table[usable]
    units = nn.functional.normalize(public, dim=1)
    # More than half as many as dimensions would leave nothing of any row.
    most = min(steps, table.shape[1] // 2, len(usable))
    out: list[Found | None] = []
    for some in torch.split(rows, BLOCK):
        found: list[Found | None] = [None] * len(some)
        at = some.isfinite().all(1).nonzero().flatten()
        left, chosen = some[at], torch.empty(len(at), 0, dtype=torch.int64)
        for _ in range(most if len(at) else 0):
            fit = (left @ units.T).scatter(1, chosen, -torch.inf)
            chosen = torch.cat([chosen, fit.argmax(1, keepdim=True)], 1)
            wanted, parts = some[at].double(), public[chosen].double().mT
            weights = torch.linalg.lstsq(parts, wanted[:, :, None]).solution
            rest = wanted - (parts @ weights)[:, :, 0]
            ended = rest.norm(dim=1) <= exact * wanted.norm(dim=1)
            for k in (ended & (weights[:, :, 0] > 0).all(1)).nonzero().flatten().tolist():
                found[int(at[k])] = dict(zip(usable[chosen[k]].tolist(), weights[k, :, 0].tolist()))
            left, at, chosen = rest.float()[~ended], at[~ended], chosen[~ended]
            if not len(at):
                break
        out += found
    return out


def joined(supports: Sequence[Found | None], sure: float) -> dict[int, tuple[int, ...]]:
    """For each token that a row was mixed from its cluster: all tokens that weights above ``sure`` connect it with."""
    parent: dict[int, int] = {}

    def root(token: int) -> int:
        while parent.setdefault(token, token) != token:
            parent[token] = token = parent[parent[token]]
        return token

    shown = [[t for t, weight in one.items() if weight > sure] for one in supports if one is not None]
    for first, *others in filter(None, shown):
        for other in others:
            parent[root(other)] = root(first)
    groups: dict[int, list[int]] = {}
    for token in chain.from_iterable(shown):
        groups.setdefault(root(token), []).append(token)
    together = {start: tuple(dict.fromkeys(group)) for start, group in groups.items()}
    return {token: group for group in together.values() for token in group}


def members(rows: Tensor, served: Tensor, table: Tensor, usable: Tensor, k: int, exact: float) -> list[Found | None]:
    """For each of ``rows``, some of those of ``served``, its whole cluster with its weights, 0 where they are lost; None
    where it is not a mixture. ``k``: the announced size of clusters; ``exact``: see ``exactness``. All of ``served`` are
    pursued only where ``rows`` alone show too few members."""
    found = pursued(rows, table, usable, max(3 * k, MIN_STEPS), exact)
    shown = [len(one) for one in found if one is not None]
    few = bool(shown) and sum(shown) < ENOUGH * k * len(shown)
    clusters = joined([*found, *(pursued(served[usable], table, usable, LINK_STEPS, exact) if few else ())], exact)
    return [one and dict.fromkeys(clusters.get(max(one, key=lambda t: one[t]), ()), 0.0) | one for one in found]
