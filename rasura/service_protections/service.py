"""A model service under any protection, as one value: what is served, what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rasura.core.rng import Randomness, drawing, secret_generator
from rasura.core.values import Mechanism, Vocabulary
from rasura.service_protections.replacement import Replacement, replaced
from rasura.service_protections.split import Split


@dataclass(frozen=True)
class Service:
    """``served`` is what the server has or, where states are sent, both halves; ``tokens`` ``(vocabulary,)`` each token's id
    there; ``replacement`` what is drawn in place of a token; ``uploaded`` what ``served`` was before it was trained."""

    public: nn.Module
    served: nn.Module
    vocabulary: Vocabulary
    mechanism: Mechanism
    tokens: Tensor = field(repr=False)
    replacement: Replacement | None = None
    uploaded: nn.Module | None = None

    @property
    def draws(self) -> bool:
        """Whether tokens are sent in place of others, drawn again each time."""
        return self.replacement is not None

    def sent(self, texts: Sequence[Sequence[int]], rng: Randomness | None = None) -> tuple[tuple[int, ...], ...]:
        """The ids that the client sends (or, where states are sent, computes them of) for ``texts`` in its own ids."""
        if self.replacement is not None:
            return replaced(self.replacement, texts, self.vocabulary.marks, rng or secret_generator())
        return tuple(tuple(self.tokens[list(text)].tolist()) for text in texts)

    def states(self, texts: Sequence[Sequence[int]], rng: Randomness) -> tuple[Tensor, ...] | None:
        """The states that the client sends in place of ids, as ``states_sent``; None where ids are sent."""
        return states_sent(self.served, texts, rng) if isinstance(self.served, Split) else None


def states_sent(split: Split, texts: Sequence[Sequence[int]], rng: Randomness) -> tuple[Tensor, ...]:
    """What the client of ``split`` sends for each of ``texts`` by itself: ``(length, hidden)``."""
    with drawing(rng):
        rows = [torch.tensor([list(text)]) for text in texts]
        return tuple(split.sent(ids, torch.ones_like(ids))[0].float() for ids in rows)
