"""Completion of hidden entries: a gradient of N tokens has rank N, so enough visible entries determine the rest.

Where the largest entries are hidden, the visible ones fill whole rows and columns. A fully visible block gives the rank, and
rows and columns are added to it one by one, each by least squares. Where entries are hidden at random there is no such
block; alternating least squares from the singular vectors of what is visible finds the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rasura.attacks.updates.span.rows import GAP, masked_gradients
from rasura.core.values import Grant, Observation
from rasura.victims.models import Linear, parts

FITS = 1e-5
"""Largest relative error of a completion on visible entries: float32 gradients leave 1e-7 to 1e-6, a wrong rank 1e-2."""

FEW = 0.01
"""Share of hidden entries up to which they may be taken for zeros. With more, the search for prefixes may not end."""

SPARE = 1.2
"""Visible entries that a completion needs, relative to its unknowns. With fewer, a wrong completion fits as well."""


@dataclass(frozen=True)
class Completed:
    """``left`` ``(rows, rank)`` times ``right`` ``(rank, columns)``; ``rows`` and ``columns`` (bool): which are known."""

    left: Tensor
    right: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def rank(self) -> int:
        """Rank of the completion: the number of private tokens, as long as these are independent."""
        return int(self.right.shape[0])


def complete(entries: Tensor, visible: Tensor, ranks: Sequence[int] | None = None) -> Completed | None:
    """The low-rank matrix behind the ``visible`` (bool) part of ``entries``, both ``(rows, columns)``; None if not found.

    ``ranks``: ranks to try, smallest first. Rows or columns with too few visible entries stay unknown.
    """
    matrix = (entries * visible).double()
    # Rows differ by orders of magnitude: without scaling the largest alone would be fitted.
    rows = _inverse_size(matrix, visible, 1)
    matrix = matrix * rows[:, None]
    columns = _inverse_size(matrix, visible, 0)
    matrix = matrix * columns
    found = _from_block(matrix, visible) or _from_singular_vectors(matrix, visible, ranks)
    if found is None:
        return None
    return replace(found, left=found.left / rows[:, None], right=found.right / columns)


def _inverse_size(matrix: Tensor, visible: Tensor, dim: int) -> Tensor:
    size = (matrix.square().sum(dim) / visible.sum(dim).clamp_min(1)).sqrt()
    return 1 / torch.where(size > 0, size, torch.ones_like(size))


def _rank(matrix: Tensor, floor: float) -> int | None:
    """The rank by the widest gap of the singular values; None without a gap, or where the matrix is too small for one to
    show.

    Values below ``floor`` times the largest are noise.
    """
    values = torch.linalg.svdvals(matrix)
    max_rank = int(0.9 * min(matrix.shape))
    if max_rank < 1 or not float(values[0]) > 0:
        return None
    values = values.clamp_min(floor * float(values[0]))
    rank = int((values[:-1] / values[1:])[:max_rank].argmax()) + 1
    return rank if float(values[rank - 1] / values[rank]) > GAP else None


def _from_block(matrix: Tensor, visible: Tensor) -> Completed | None:
    """Grows the completion from the largest all-visible block of the fullest columns."""
    order = visible.sum(0).argsort(descending=True)
    whole = visible[:, order].long().cumprod(1).sum(1)  # how many of the fullest columns each row shows without a break
    sizes = torch.arange(1, len(order) + 1)
    heights = (whole[:, None] >= sizes).sum(0)
    area = torch.minimum(sizes, heights)
    for width in sorted({int(area.argmax()) + 1, *(int(area.argmax()) + 1 + 16 * k for k in (1, 2))}):
        if width > len(order) or heights[width - 1] < 2:
            continue
        inside = whole >= width
        block = matrix[inside][:, order[:width]]
        rank = _rank(block, 1e-9)
        if rank is None:
            continue
        right = torch.zeros(rank, matrix.shape[1], dtype=matrix.dtype)
        right[:, order[:width]] = torch.linalg.svd(block, full_matrices=False).Vh[:rank]
        known = torch.zeros(matrix.shape[1], dtype=torch.bool)
        known[order[:width]] = True
        found = _grow(matrix, visible, right, known)
        if found is not None:
            return found
    return None


def _solve(matrix: Tensor, visible: Tensor, right: Tensor) -> Tensor:
    """Each row of ``matrix`` as a combination of the rows of ``right`` by its visible entries: ``(rows, rank)``."""
    rank = len(right)
    products = (right[:, None, :] * right[None, :, :]).reshape(rank * rank, -1)
    normal = (visible.to(right.dtype) @ products.T).reshape(-1, rank, rank)
    scale = normal.diagonal(dim1=1, dim2=2).sum(1).clamp_min(1e-30) / rank
    normal = normal + 1e-12 * scale[:, None, None] * torch.eye(rank, dtype=right.dtype)
    out: Tensor = torch.linalg.solve(normal, (matrix * visible) @ right.T)
    return out


def _grow(matrix: Tensor, visible: Tensor, right: Tensor, columns: Tensor) -> Completed | None:
    rank = len(right)
    rows = torch.zeros(len(matrix), dtype=torch.bool)
    left = torch.zeros(len(matrix), rank, dtype=matrix.dtype)
    enough = rank + max(2, rank // 2)
    for _ in range(20):
        before = int(rows.sum()) + int(columns.sum())
        rows = (visible & columns).sum(1) >= enough
        left[rows] = _solve(matrix[rows][:, columns], visible[rows][:, columns], right[:, columns])
        columns = (visible & rows[:, None]).sum(0) >= enough
        right[:, columns] = _solve(matrix[rows][:, columns].T, visible[rows][:, columns].T, left[rows].T).T
        if int(rows.sum()) + int(columns.sum()) == before:
            break
    return _polished(matrix, visible, right, rows, columns, 20)


def _polished(matrix: Tensor, visible: Tensor, right: Tensor, rows: Tensor, columns: Tensor, steps: int) -> Completed | None:
    """Alternating least squares on the known rows and columns; None if the visible entries are not met."""
    if not bool(rows.any()) or not bool(columns.any()):
        return None
    inner, shown = matrix[rows][:, columns], visible[rows][:, columns]
    size = float((inner * shown).norm())
    if int(shown.sum()) < SPARE * len(right) * (int(rows.sum()) + int(columns.sum()) - len(right)):
        return None
    r, error = right[:, columns], float("inf")
    for step in range(steps):
        # An orthonormal side keeps the other's equations well posed.
        r = torch.linalg.qr(r.T).Q.T
        a = _solve(inner, shown, r)
        a = torch.linalg.qr(a).Q
        r = _solve(inner.T, shown.T, a.T).T
        last, error = error, float((shown * (a @ r - inner)).norm()) / size
        if error < 1e-7 or (error < FITS and error > 0.9 * last) or (step > 8 and error > 0.98 * last):
            break
    if error > FITS:
        return None
    left, right = matrix.new_zeros(len(matrix), len(right)), torch.zeros_like(right)
    left[rows], right[:, columns] = a, r
    return Completed(left, right, rows, columns)


def _from_singular_vectors(matrix: Tensor, visible: Tensor, ranks: Sequence[int] | None) -> Completed | None:
    rows, columns = visible.any(1), visible.any(0)
    share = float(visible.double().mean())
    filled = matrix * visible / max(share, 1e-9)
    start = torch.linalg.svd(filled, full_matrices=False).Vh
    max_rank = int(visible.sum()) / SPARE / (len(matrix) + matrix.shape[1])
    tries = ranks or sorted({round(6 * 1.3**k) for k in range(14)})
    for rank in tries:
        if rank > min(max_rank, 0.6 * min(matrix.shape)):
            break
        found = _polished(matrix, visible, start[:rank], rows, columns, 150)
        if found is not None:
            product = found.left @ found.right
            true = _rank(product, FITS)
            if true is None or true == rank:
                return found
            vectors = torch.linalg.svd(product, full_matrices=False).Vh[:true]
            return _polished(matrix, visible, vectors, rows, columns, 50) or found
    return None


def _filled(seen: Observation, linears: Sequence[Linear], ranks: Sequence[int] | None) -> tuple[dict[str, Tensor], int]:
    """Gradients of ``linears`` by parameter, float64, zero in rows and columns that stay unknown; and their rank. All are
    completed together, since they share their inputs. Without a completion: no gradients, and rank 0.
    """
    names = [lin for lin in linears if lin.weight in seen.gradients]
    gradients, masks = masked_gradients(seen, names)
    found = complete(torch.cat(gradients), torch.cat(masks), ranks)
    if found is None:
        return {}, 0
    split = torch.split(found.left @ found.right, [len(g) for g in gradients])
    return {lin.weight: part.T if lin.transposed else part for lin, part in zip(names, split)}, found.rank


def few_hidden(seen: Observation) -> bool:
    """Whether some entries are hidden, and so few that a row space hardly changes where they count as zeros."""
    total = sum(mask.numel() for mask in seen.visible.values())
    return 0 < total - sum(int(mask.sum()) for mask in seen.visible.values()) <= FEW * total


def uncovered(seen: Observation, max_blocks: int | None = None) -> Observation:
    """``seen`` with the hidden entries of query, key and value gradients filled in, in the first ``max_blocks`` blocks where
    that is possible. Rows and columns that cannot be completed are zero.
    """
    done = 0
    gradients, visible = dict(seen.gradients), dict(seen.visible)
    ranks = [sum(seen.lengths)] if Grant.LENGTHS in seen else None
    for block in parts(seen.model).blocks:
        if any(lin.weight in visible for lin in block.qkv):
            if max_blocks is not None and done >= max_blocks:
                break
            filled, rank = _filled(seen, block.qkv, ranks)
            done += bool(filled)
            gradients |= filled
            visible = {name: mask for name, mask in visible.items() if name not in filled}
            ranks = [rank] if rank else ranks  # the same tokens pass every block
    message = replace(seen.message, gradients=gradients, visible=visible)
    return replace(seen, message=message)
