"""How a model is fine-tuned: the settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rasura.core.interfaces import InputError


@dataclass(frozen=True)
class Recipe:
    """How a model is fine-tuned: AdamW at ``learning_rate``, ``batch_size`` texts a step, up to ``epochs``, ending when
    ``patience`` epochs brought nothing. ``precision`` bf16: the forward and backward pass in bfloat16 by autocast. ``keep``:
    the model of the best epoch, or of the last one. ``schedule`` linear: the learning rate rises over the first ``warmup``
    (a share of all steps) and then falls to 0 at the end of the last epoch.

    ``optimizer`` sgd is plain stochastic gradient descent, for defenses whose analysis assumes it. ``noise`` of a protection
    with a formal guarantee, and its choice of texts: ``secure`` draws them from the operating system, so that a run cannot
    be repeated; ``seeded`` is for experiments and guarantees nothing.
    """

    epochs: int = 20
    batch_size: int = 32
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    patience: int = 5
    optimizer: Literal["adamw", "sgd"] = "adamw"
    precision: Literal["float32", "bf16"] = "float32"
    seed: int = 0
    noise: Literal["secure", "seeded"] = "secure"
    keep: Literal["best", "last"] = "best"
    schedule: Literal["constant", "linear"] = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1 or self.patience < 1 or not 0 < self.learning_rate < float("inf"):
            raise InputError(
                f"training: {self.epochs} epochs, batches of {self.batch_size}, patience {self.patience}, learning rate "
                f"{self.learning_rate}; expected at least 1 of the first three and a learning rate above 0"
            )
        if not 0 <= self.warmup < 1:
            raise InputError(f"warmup is {self.warmup}; expected a share of the steps, at least 0 and below 1")
        if self.schedule not in ("constant", "linear"):
            raise InputError(f"schedule is {self.schedule!r}; expected constant or linear")
        if self.schedule == "constant" and self.warmup:
            raise InputError("warmup is for the linear schedule; a constant learning rate has none")

    def rate(self, done: float) -> float:
        """The learning rate when a share ``done`` of all steps was taken."""
        if self.schedule == "constant":
            return self.learning_rate
        return self.learning_rate * (done / self.warmup if done < self.warmup else (1 - done) / (1 - self.warmup))
