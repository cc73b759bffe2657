"""The discrete pass: from a near miss to the text, by trying tokens, swaps and moves until the residual is at the floor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rasura.attacks.span_matching.objective import Objective


def rearrangements(current: Tensor, spot: tuple[int, int], free: Sequence[tuple[int, int]]) -> Tensor:
    """All texts that swap ``spot`` with another free position, or move its token there within its own text.

    ``current`` is ``(batch, length)``; returns ``(count, batch, length)``.
    """
    b, i = spot
    out = []
    for c, j in free:
        if (c, j) == spot:
            continue
        swapped = current.clone()
        swapped[b, i], swapped[c, j] = current[c, j], current[b, i]
        out.append(swapped)
        if c == b and abs(i - j) > 1:
            row = current[b].tolist()
            row.insert(j, row.pop(i))
            moved = current.clone()
            moved[b] = torch.tensor(row)
            out.append(moved)
    return torch.stack(out) if out else current.new_zeros(0, *current.shape)


def improve(
    objective: Objective,
    start: Tensor,
    pool: Tensor,
    free: Sequence[tuple[int, int]],
    *,
    floor: float,
    rng: torch.Generator,
    sweeps: int,
) -> tuple[Tensor, float]:
    """Coordinate descent from ``start`` ``(batch, length)``: at each free position the tokens of ``pool``, swaps, moves.

    Stops when the residual is under ``floor`` or a sweep changes nothing. Returns the text and its residual.
    """
    current, best = start.clone(), float(objective.ids(start[None])[0])
    for _ in range(sweeps):
        before = best
        for index in torch.randperm(len(free), generator=rng).tolist():
            b, i = free[index]
            replaced = current.expand(len(pool), -1, -1).clone()
            replaced[:, b, i] = pool
            tried = torch.cat([replaced, rearrangements(current, (b, i), free)])
            scores = objective.ids(tried)
            k = int(scores.argmin())
            if float(scores[k]) < best * (1 - 1e-6):
                current, best = tried[k].clone(), float(scores[k])
            if best < floor:
                return current, best
        if best >= before:
            break
    return current, best


def repair(
    objective: Objective,
    text: Tensor,
    free: Sequence[tuple[int, int]],
    table: Tensor,
    ordinary: Tensor,
    *,
    rate: float,
    holes: int = 24,
    steps: int = 80,
    nearest: int = 4,
) -> Tensor:
    """Get out of a stuck text: take a token away, open a hole elsewhere in the same text, and optimise what fills it.

    All (taken, opened) pairs are scored with a neutral hole; the best ``holes`` are filled by gradient descent on the
    hole's embedding alone, and its ``nearest`` tokens are tried. Returns the best text found, ``text`` itself at worst.
    Copies of a word and words that no restart found need this: no single replacement, swap or move mends them.
    """
    layouts: list[Tensor] = []
    spots: list[tuple[int, int]] = []
    for b, i in free:
        for c, j in free:
            if c == b:
                row = text[b].tolist()
                row.pop(i)
                row.insert(j, int(ordinary[0]))
                changed = text.clone()
                changed[b] = torch.tensor(row)
                layouts.append(changed)
                spots.append((b, j))
    tried = torch.stack(layouts)
    where = torch.tensor(spots)
    embedded = table[tried]
    embedded[torch.arange(len(tried)), where[:, 0], where[:, 1]] = table[ordinary].mean(0)
    with torch.no_grad():
        scores = torch.cat([objective.embeddings(e, 0.0) for e in torch.split(embedded, 64)])
    best = scores.topk(min(holes, len(scores)), largest=False).indices
    rows = torch.arange(len(best))
    texts, columns = where[best, 0], where[best, 1]
    base = embedded[best]
    hole = base[rows, texts, columns].clone().requires_grad_(True)
    optimizer = torch.optim.Adam([hole], lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        e = base.clone()
        e[rows, texts, columns] = hole
        (hole.grad,) = torch.autograd.grad(objective.embeddings(e, 0.0).sum(), hole)
        optimizer.step()
    unit = torch.nn.functional.normalize(table[ordinary], dim=1)
    near = ordinary[(torch.nn.functional.normalize(hole.detach(), dim=1) @ unit.T).topk(nearest, dim=1).indices]
    filled = tried[best].repeat_interleave(nearest, 0)
    wide = [x.repeat_interleave(nearest) for x in (texts, columns)]
    filled[torch.arange(len(filled)), wide[0], wide[1]] = near.flatten()
    every = torch.cat([text[None], filled])
    return every[int(objective.ids(every).argmin())]
