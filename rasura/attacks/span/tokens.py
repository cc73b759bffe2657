"""Which tokens stand where: the plain span test, and the robust one that active dropout does not stop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.span.rows import Inputs, RowSpace
from rasura.values import Vocabulary

TOLERANCE = 1e-4
"""Largest plain residual of a true token: float32 leaves 1e-7 to 1e-5, the next best token of a trained model 1e-2."""


@dataclass(frozen=True)
class Row:
    """One private token, with the layer input ``(hidden,)`` that it had, its dropped coordinates zero."""

    position: int
    token: int
    segment: int
    input: Tensor
    residual: float


def candidates(vocabulary: Vocabulary) -> Tensor:
    """All ids that text can hold, special ones included."""
    return torch.tensor([i for i in range(vocabulary.size) if i not in vocabulary.unused_ids])


def plain(space: RowSpace, inputs: Inputs, ids: Tensor, position: int) -> list[Row]:
    """Tokens whose input at ``position`` lies in the row space, best first (DAGER's first-layer test)."""
    tolerance = min(1e-2, max(TOLERANCE, 10 * space.floor))
    for segment in range(inputs.types):
        hits, states, residual = inputs.within(space, ids, position, tolerance, segment)
        if len(hits):
            found = zip(ids[hits].tolist(), states, residual.tolist())
            return [Row(position, token, segment, state, r) for token, state, r in found]
    return []


@dataclass(frozen=True)
class Fit:
    """Robust fits of candidates: the fitted inputs ``(k, hidden)``, and the shares of kept and of dropped coordinates."""

    inputs: Tensor
    kept: Tensor
    dropped: Tensor

    def accepted(self) -> list[int]:
        """Candidates whose every coordinate is either exactly right or exactly zero: dropout's signature, hence no chance
        hit."""
        good = (self.kept + self.dropped > 0.97) & (self.kept > 0.5)
        return [int(i) for i in good.nonzero().flatten()]


def robust_fit(
    space: RowSpace, targets: Tensor, *, weights: Tensor | None = None, iterations: int = 70, drop_hopeless: bool = True
) -> Fit:
    """Fit each row of ``targets`` ``(k, hidden)`` by the row space where dropped coordinates are sparse errors.

    Iteratively reweighted least squares, annealed: L1 weights ``1 / (r + eps)`` for the first third, then ``1 / (r^2 +
    eps^2)`` with ``eps`` shrinking to the numerical floor, so that what remains is fitted exactly. ``weights``
    ``(k, hidden)`` starts elsewhere: copies of one token in several texts differ only by their masks, and other starts
    find them.
    """
    basis = space.basis
    rank, count = space.rank, len(targets)
    tolerance = max(1e-5, 300 * space.floor)
    eps = targets.abs().mean(1, keepdim=True)
    scale = eps.clone()
    eye = 1e-13 * torch.eye(rank, dtype=basis.dtype)
    fitted = torch.zeros_like(targets)
    alive = torch.arange(count)
    e, w0, width = targets, weights, eps
    for step in range(iterations):
        r = (e - fitted[alive]).abs()
        if step == 0 and w0 is not None:
            w = w0
        elif step < iterations // 3 and w0 is None:
            w = 1 / (r + width)
        else:
            w = 1 / (r * r + width * width)
        w = w / w.mean(1, keepdim=True)
        normal = (basis.T * w[:, None, :]) @ basis + eye
        c = torch.linalg.solve(normal, (w * e) @ basis)
        fitted[alive] = c @ basis.T
        width = torch.clamp(width * 0.75, min=1e-9)
        if drop_hopeless and step == iterations // 2:
            # A true token has most coordinates at the floor by now; leave the others where they are.
            r = (e - fitted[alive]).abs()
            going = (r < 0.02 * scale[alive]).double().mean(1) > 0.3
            alive, e, width = alive[going], e[going], width[going]
        if not len(alive):
            break
    r = (targets - fitted).abs()
    return Fit(
        fitted,
        (r < tolerance * scale).double().mean(1),
        ((fitted.abs() < tolerance * scale) & (r >= tolerance * scale)).double().mean(1),
    )


def robust(
    space: RowSpace,
    inputs: Inputs,
    ids: Tensor,
    position: int,
    *,
    copies: int,
    prefilter: int,
    starts: int,
    rng: torch.Generator,
) -> list[Row]:
    """Tokens at ``position`` with dropout active: prefilter by plain residual, then robust fits from several starts.

    ``copies`` is how many texts the batch holds: the same token may stand at this position in each of them.
    """
    for segment in range(inputs.types):
        missing = inputs.scan(space, ids, position, segment)
        best = ids[missing.topk(min(prefilter, len(ids)), largest=False).indices]
        targets = inputs.first(best, position, segment).double()
        rows: list[Row] = []
        for index, x in _fits(space, targets, copies, starts, rng):
            known = [row for row in rows if row.token == int(best[index])]
            if all(float((row.input - x).norm()) > 1e-2 * float(x.norm()) for row in known):
                rows.append(Row(position, int(best[index]), segment, x, 0.0))
        if rows:
            return rows
    return []


def _fits(space: RowSpace, targets: Tensor, copies: int, starts: int, rng: torch.Generator) -> Iterator[tuple[int, Tensor]]:
    fit = robust_fit(space, targets)
    first = fit.accepted()
    yield from ((i, fit.inputs[i]) for i in first)
    if copies == 1:
        return
    # Copies of tokens already found, and near misses of the first pass, from random weights.
    again = sorted(set(first) | set(range(min(len(targets), copies + 24))))
    subset = targets[again]
    for _ in range(starts):
        weights = torch.rand(subset.shape, generator=rng, dtype=subset.dtype) ** 3 + 1e-3
        fit = robust_fit(space, subset, weights=weights)
        yield from ((again[i], fit.inputs[i]) for i in fit.accepted())
