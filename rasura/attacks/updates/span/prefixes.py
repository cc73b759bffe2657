"""Decoders: grow prefixes token by token. Any one visible block is enough, since the input of block k at a position depends
only on the tokens up to it (DAGER extends with block 1 over the tokens of block 0; here from whichever block is visible)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.updates.span.rows import Inputs, RowSpace
from rasura.core.values import Observation

TOLERANCE = 1e-3
"""Largest residual of a true prefix: float32 through several blocks leaves 1e-7 to 1e-5, a wrong token 1e-2 and more."""

ROWS = 4096
"""Most token positions that run through the model at once."""


@dataclass(frozen=True)
class Prefix:
    """Tokens whose every position lies in the visible row spaces, and the largest residual over its tolerance among them."""

    tokens: tuple[int, ...]
    residual: float


class Grower:
    """Extends prefixes by all tokens that the visible blocks accept."""

    def __init__(self, seen: Observation, spaces: Mapping[int, RowSpace], inputs: Inputs, ids: Tensor) -> None:
        self.spaces = spaces
        self.inputs = inputs
        self.ids = ids
        self.deep = [b for b in inputs.parts.blocks if b.index in spaces and b.index > 0][:2]
        self.vocabulary = seen.vocabulary
        self._bag: dict[int, Tensor] = {}

    def allowed(self, position: int) -> Tensor:
        """Ids that block 0 accepts at ``position`` (all ids where block 0 is hidden)."""
        if 0 not in self.spaces:
            return self.ids
        key = position if self.inputs.parts.position_embedding is not None else 0
        if key not in self._bag:
            self._bag[key] = self.ids[self.inputs.within(self.spaces[0], self.ids, key, TOLERANCE)[0]]
        return self._bag[key]

    @torch.no_grad()
    def residuals(self, sequences: Tensor) -> Tensor:
        """Largest residual over its tolerance, over the deep visible blocks, of the last position of ``(k, length)``."""
        out = []
        for chunk in torch.split(sequences, max(1, ROWS // sequences.shape[1])):
            states = self.inputs.deep(chunk, torch.ones_like(chunk), self.deep)
            each = []
            for block in self.deep:
                space, x = self.spaces[block.index], states[block.index][:, -1].double()
                each.append(space.residual(x) / space.tolerance(x, TOLERANCE))
            out.append(torch.stack(each).amax(0))
        return torch.cat(out)

    def extensions(self, prefix: Prefix) -> list[Prefix]:
        """All prefixes one token longer that every visible block accepts, best first."""
        position = len(prefix.tokens)
        allowed = self.allowed(position)
        if position > 0 and self.vocabulary.prefix:
            # A run of start tokens repeats its own state in rotary models; text holds the start token once.
            start = self.vocabulary.prefix[0]
            allowed = allowed[allowed != start]
        elif position < len(self.vocabulary.prefix):
            allowed = allowed[allowed == self.vocabulary.prefix[position]]
        if not len(allowed):
            return []
        head = torch.tensor(prefix.tokens, dtype=torch.long).expand(len(allowed), -1)
        residual = self.residuals(torch.cat([head, allowed[:, None]], 1))
        order = residual.argsort()
        return [
            Prefix((*prefix.tokens, int(allowed[i])), max(prefix.residual, float(residual[i])))
            for i in order.tolist()
            if float(residual[i]) < 1
        ]


def grow(seen: Observation, spaces: Mapping[int, RowSpace], inputs: Inputs, ids: Tensor, *, longest: int) -> list[Prefix]:
    """All maximal prefixes that the visible blocks accept: the texts of the batch, up to a last token without gradient.

    Needs a visible block above the first. ``longest`` bounds the length in tokens.
    """
    grower = Grower(seen, spaces, inputs, ids)
    rank = max(space.rank for space in spaces.values())
    alive = [Prefix((), 0.0)]
    done: list[Prefix] = []
    for _ in range(longest):
        following: list[Prefix] = []
        for prefix in alive:
            extended = grower.extensions(prefix)
            if extended:
                following += extended
            elif prefix.tokens:
                done.append(prefix)
        # A true batch has no more live prefixes than tokens; beyond that the test does not tell tokens apart.
        alive = sorted(following, key=lambda p: p.residual)[: max(rank, 1)]
        if not alive:
            break
    return done + [p for p in alive if p.tokens]


def choose(prefixes: list[Prefix], batch_size: int | None, lengths: tuple[int, ...] | None) -> list[Prefix]:
    """The texts among the maximal prefixes: the longest and best fitting ``batch_size`` ones (all when it is not known)."""
    ranked = sorted(prefixes, key=lambda p: (-len(p.tokens), p.residual))
    if batch_size is None or len(ranked) <= batch_size:
        return ranked
    if lengths is not None:
        wanted = sorted(lengths, reverse=True)
        chosen: list[Prefix] = []
        for n in wanted:
            near = min((p for p in ranked if p not in chosen), key=lambda p: (abs(len(p.tokens) - n), p.residual))
            chosen.append(near)
        return chosen
    return ranked[:batch_size]
