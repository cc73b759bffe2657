"""The state of a training that is kept from epoch to epoch, and what may join its steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rasura.accounting import Draw
from rasura.core.interfaces import Defense, InputError
from rasura.victims.recipe import Recipe

Progress = Callable[[int, int, Mapping[str, float]], None]
"""Is told the batches done, those of all epochs, and the figures of the last epoch."""


class Canaries(Protocol):
    """Gradients that join the aggregation of each step, and measure what it hides (``rasura.GradientCanaries``)."""

    def joined(
        self, defense: Defense, draw: Draw, trained: Mapping[str, Sequence[int]]
    ) -> tuple[Defense, Callable[[], None]]:
        """The defense of one step with the canaries, and what to call when its release was counted."""

    def state_dict(self) -> dict[str, Any]:
        """All that is known of them, as plain values."""

    def load_state_dict(self, state: Any) -> None:
        """Go on from such values."""


@dataclass
class History:
    """The state of a training run: training losses and the figures on the held-out texts, by epoch."""

    epoch: int = 0
    best: float | None = None
    best_epoch: int = 0
    epochs: list[dict[str, float]] | None = None

    def finished(self, recipe: Recipe) -> bool:
        """Whether all epochs are done or the patience is used up."""
        return self.epoch >= recipe.epochs or self.epoch - self.best_epoch >= recipe.patience


def checked(figures: Mapping[str, float], epoch: int, learning_rate: float) -> Mapping[str, float]:
    """The ``figures`` of an epoch on the held-out texts. Raises ``InputError`` unless they are numbers: no such model is
    kept."""
    # A perplexity is beyond floating point where a loss is large.
    if all(math.isfinite(value) for name, value in figures.items() if name != "perplexity"):
        return figures
    raise diverged("the figures on the held-out texts are not numbers", epoch, learning_rate)


def diverged(what: str, epoch: int, learning_rate: float) -> InputError:
    """The error of a training that ends in ``epoch``, since ``what``."""
    return InputError(f"{what} in epoch {epoch}; lower the learning rate ({learning_rate})")


def unstored(state: object) -> str:
    """Raises ``InputError`` for a ``state`` that is no plain value, which ``json`` hands over."""
    kind = type(state).__name__
    raise InputError(
        f"the aggregation keeps a {kind} from step to step; expected numbers, which a resumed training can read"
    )
