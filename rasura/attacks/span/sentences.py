"""Encoders: sentences from tokens with known positions, checked by the row spaces of deeper blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rasura.attacks.span.rows import Inputs, RowSpace
from rasura.attacks.span.tokens import Row
from rasura.attacks.verify import pad

Choices = dict[int, list[tuple[int, int]]]
"""Position -> the (token, segment) pairs that may stand there."""


def choices(rows: Sequence[Row]) -> Choices:
    """The distinct tokens found at each position."""
    out: Choices = {}
    for row in rows:
        pair = (row.token, row.segment)
        if pair not in out.setdefault(row.position, []):
            out[row.position].append(pair)
    return out


class Checker:
    """Scores whole sequences by the residual of deeper blocks' inputs: at the float floor exactly for private texts."""

    def __init__(self, spaces: Mapping[int, RowSpace], inputs: Inputs, pad_id: int, blocks: int = 1) -> None:
        self.spaces = spaces
        self.inputs = inputs
        self.pad_id = pad_id
        self.deep = [b for b in inputs.parts.blocks if b.index in spaces and b.index > 0][:blocks]

    @torch.no_grad()
    def __call__(self, sequences: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
        """Mean residual over positions and blocks of each sequence of (token, segment) pairs."""
        ids, mask = pad([[t for t, _ in s] for s in sequences], self.pad_id)
        types, _ = pad([[g for _, g in s] for s in sequences], 0)
        out = []
        for start in range(0, len(ids), 128):
            rows = slice(start, start + 128)
            states = self.inputs.deep(ids[rows], mask[rows], self.deep, types[rows])
            each = [self.spaces[k.index].residual(states[k.index]) for k in self.deep]
            out.append((torch.stack(each).mean(0) * mask[rows]).sum(1) / mask[rows].sum(1))
        return torch.cat(out)


def descend(
    start: list[tuple[int, int]],
    allowed: Choices,
    score: Checker,
    *,
    ends: frozenset[int],
    rng: torch.Generator,
    sweeps: int = 8,
) -> tuple[list[tuple[int, int]], float]:
    """Coordinate descent over positions from ``start``; at a position all its tokens are tried at once.

    ``ends`` are the tokens that close a text: also tried is every length at which one of them can stand.
    """
    current = list(start)
    best = float(score([current])[0])
    for _ in range(sweeps):
        changed = False
        for index in torch.randperm(len(current), generator=rng).tolist():
            options = allowed.get(index, [])
            if index >= len(current) or len(options) < 2:
                continue
            tried = [[*current[:index], o, *current[index + 1 :]] for o in options if o != current[index]]
            result = score(tried)
            k = int(result.argmin())
            if float(result[k]) < best - 1e-9:
                current, best, changed = tried[k], float(result[k]), True
        shorter = range(1, min(len(allowed), len(current) - 1))
        lengths = [[*current[:n], o] for n in shorter for o in allowed[n] if o[0] in ends]
        if lengths:
            result = score(lengths)
            k = int(result.argmin())
            if float(result[k]) < best - 1e-9:
                current, best, changed = lengths[k], float(result[k]), True
        if not changed or best < 1e-6:
            break
    return current, best


def search(
    allowed: Choices,
    score: Checker,
    groups: Sequence[Sequence[Row]],
    *,
    ends: frozenset[int],
    size: int,
    floor: float,
    rng: torch.Generator,
    restarts: int,
) -> list[tuple[list[tuple[int, int]], float]]:
    """``size`` different texts from the tokens at each position: descent from each group of rows, then from random texts.

    A text is found when its residual is at ``floor``. What is left unfound is returned with its best residual.
    """
    stops = sorted(n for n, options in allowed.items() if any(t in ends for t, _ in options)) or [max(allowed)]
    starts: list[list[tuple[int, int]]] = []
    for group in groups:
        known = {r.position: (r.token, r.segment) for r in group}
        last = max((n for n, (t, _) in known.items() if t in ends), default=max(known))
        starts.append([known.get(n, allowed[n][0]) for n in range(last + 1) if n in allowed])
    found: dict[tuple[tuple[int, int], ...], float] = {}

    def attempt(start: list[tuple[int, int]]) -> None:
        text, residual = descend(start, allowed, score, ends=ends, rng=rng)
        found[tuple(text)] = residual

    def exact() -> int:
        return sum(r < floor for r in found.values())

    for start in starts:
        attempt(start)
    for _ in range(restarts):
        if exact() >= size:
            break
        covered = {(n, o) for text, r in found.items() if r < floor for n, o in enumerate(text)}
        stop = stops[int(torch.randint(len(stops), (1,), generator=rng))]
        text = []
        for n in range(stop + 1):
            # Tokens that no finished text holds must stand somewhere: start from them.
            options = [o for o in allowed[n] if (n, o) not in covered] or allowed[n]
            if n == stop:
                options = [o for o in allowed[n] if o[0] in ends] or options
            text.append(options[int(torch.randint(len(options), (1,), generator=rng))])
        attempt(text)
    return [(list(t), r) for t, r in sorted(found.items(), key=lambda item: item[1])[:size]]
