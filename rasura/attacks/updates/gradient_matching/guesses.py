"""What the engine holds: candidates of a run as embeddings, and the best token ids found so far."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Texts:
    """Candidates of one run.

    ``e`` ``(candidates, batch, width, hidden)`` embeddings; ``lengths`` ``(candidates, batch)``; ``y`` ``(candidates, batch,
    classes)`` label logits. ``lengths`` is on the CPU, as ids are; the others are where the model is.
    """

    e: Tensor
    lengths: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.e)

    def at(self, which: Tensor | slice) -> Texts:
        """Some of the candidates."""
        return Texts(self.e[which], self.lengths[which], self.y[which])


class Beam:
    """Ids ``(batch, width)`` with their distances; none is judged twice."""

    def __init__(self, judge: Callable[[Tensor], Tensor]) -> None:
        self.judge = judge
        self.scores: dict[tuple[int, ...], float] = {}
        self.ids: dict[tuple[int, ...], Tensor] = {}

    def add(self, ids: Sequence[Tensor]) -> None:
        """Judge what is new of ``ids``."""
        fresh = {key: x for x in ids if (key := tuple(x.flatten().tolist())) not in self.scores}
        if fresh:
            self.scores.update(zip(fresh, self.judge(torch.stack(list(fresh.values()))).tolist()))
            self.ids |= fresh

    def top(self, count: int) -> Tensor:
        """The ``count`` of least distance, ``(count, batch, width)``, best first."""
        return torch.stack([self.ids[key] for key in heapq.nsmallest(count, self.scores, key=self.scores.__getitem__)])

    @property
    def least(self) -> float:
        return min(self.scores.values())
