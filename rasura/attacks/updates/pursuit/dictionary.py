"""The dictionary of the pursuit: the input of block 0's attention that each candidate would give at each place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rasura.attacks.updates.span.folding import Form, form
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.scan import squares


class Dictionary(Protocol):
    """Inputs of the candidates by place."""

    def inputs(self, place: int) -> Tensor:
        """The input of each candidate at ``place``, ``(candidates, hidden)``."""

    def sizes(self, place: int) -> Tensor:
        """Their squared norms, ``(candidates,)``."""

    def along(self, directions: Tensor, place: int) -> Tensor:
        """Their inner products with ``directions`` ``(hidden, k)``: ``(candidates, k)``."""


def dictionary(inputs: Inputs, ids: Tensor, places: Sequence[int], memory_mb: int) -> Dictionary:
    """Of the candidates ``ids`` ``(candidates,)`` at ``places``, with half of ``memory_mb`` for what is kept."""
    found = form(inputs.model)
    return Run(inputs, ids, memory_mb) if found is None else Folded(found, ids, places)


class Run:
    """By running the model on every candidate."""

    def __init__(self, inputs: Inputs, ids: Tensor, memory_mb: int) -> None:
        self._inputs, self._ids = inputs, ids
        self._cached: dict[int, Tensor] = {}
        self._most = (memory_mb << 19) // (4 * len(ids) * inputs.parts.hidden)

    def inputs(self, place: int) -> Tensor:
        own = self._cached.get(place)
        if own is None:
            own = self._inputs.first(self._ids, place)
            if len(self._cached) < self._most:
                self._cached[place] = own
        return own

    def sizes(self, place: int) -> Tensor:
        return self.inputs(place).square().sum(1)

    def along(self, directions: Tensor, place: int) -> Tensor:
        return self.inputs(place) @ directions


class Folded:
    """By how the model makes its inputs, ``(y_v + z_p) / s_vp + shift`` for word v at place p (``folding``): products of the
    words serve all places."""

    def __init__(self, how: Form, ids: Tensor, places: Sequence[int]) -> None:
        norm = how.norm
        self._shift, self._row = norm.shift, {place: n for n, place in enumerate(places)}
        words, offsets = norm.middle(how.table[ids]), norm.middle(how.offsets(max(places) + 1, 0)[list(places)])
        self._factors = norm.inverse(squares(words, offsets))
        self._words, self._offsets = norm.stretched(words), norm.stretched(offsets)
        self._sizes = squares(self._words, self._offsets, self._factors, self._shift)
        self._of = torch.empty(0), torch.empty(0)

    def inputs(self, place: int) -> Tensor:
        n = self._row[place]
        return (self._words + self._offsets[n]) * self._factors[n, :, None] + self._shift

    def sizes(self, place: int) -> Tensor:
        return self._sizes[self._row[place]]

    def along(self, directions: Tensor, place: int) -> Tensor:
        if self._of[0] is not directions:
            self._of = directions, self._words @ directions
        n = self._row[place]
        return (self._of[1] + self._offsets[n] @ directions) * self._factors[n, :, None] + self._shift @ directions
