"""How a model is fine-tuned: the settings of a training run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from rasura.core.interfaces import InputError
from rasura.core.local import Round


@dataclass(frozen=True)
class Recipe:
    """How a model is fine-tuned: AdamW at ``learning_rate``, ``batch_size`` texts a step, for at most ``epochs``. Training
    stops after ``patience`` epochs without improvement. ``precision`` bf16: the forward and backward pass run in bfloat16 by
    autocast. ``keep``: the model of the best epoch, or of the last one. ``schedule`` linear or cosine: the learning rate
    rises over the first ``warmup`` (a fraction of all steps) and then falls to 0 at the end of the last epoch.

    ``optimizer`` sgd is plain stochastic gradient descent, for defenses whose analysis assumes it. ``noise`` is about the
    noise, and the choice of texts, of a protection with a formal guarantee: ``secure`` draws them from the operating system,
    so the run cannot be repeated; ``seeded`` is for experiments and gives no guarantee. The other settings are those of
    ``core.local.Round``. ``physical_batch_size``: texts in memory at once under a protection that aggregates texts one by
    one, such as ``dp-sgd``; None for the whole batch. It changes nothing that is released.
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
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: float = 0.0
    momentum: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    accumulate: int = 1
    clip: float = 0.0
    physical_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.physical_batch_size is not None and self.physical_batch_size < 1:
            raise InputError(f"physical_batch_size is {self.physical_batch_size}; expected at least 1")
        if self.epochs < 1 or self.batch_size < 1 or self.patience < 1 or not 0 < self.learning_rate < float("inf"):
            raise InputError(
                f"training: {self.epochs} epochs, batches of {self.batch_size}, patience {self.patience}, learning rate "
                f"{self.learning_rate}; expected at least 1 of the first three and a learning rate above 0"
            )
        if not 0 <= self.warmup < 1:
            raise InputError(f"warmup is {self.warmup}; expected a fraction of the steps, at least 0 and below 1")
        if self.schedule not in ("constant", "linear", "cosine"):
            raise InputError(f"schedule is {self.schedule!r}; expected constant, linear or cosine")
        if self.schedule == "constant" and self.warmup:
            raise InputError("warmup needs the schedule linear or cosine; a constant learning rate has no warm-up")
        _ = self.course

    @classmethod
    def following(cls, course: Round, **others: Any) -> Recipe:
        """The training that a client's ``course`` describes; ``others`` are fields that a round does not have."""
        told: Any = {"optimizer": course.optimizer, "precision": course.precision, "schedule": course.schedule}
        return cls(
            epochs=course.epochs, batch_size=course.batch, learning_rate=course.lr, weight_decay=course.decay,
            warmup=course.warmup, momentum=course.momentum, betas=(course.beta1, course.beta2),
            accumulate=course.accumulate, clip=course.clip, **told, **others,
        )  # fmt: skip

    @property
    def compared(self) -> int:
        """How many epochs the held-out texts may choose among: they say which one is kept, and when training stops."""
        return 1 if self.keep == "last" and self.patience >= self.epochs else self.epochs

    @property
    def course(self) -> Round:
        """The same as a client's round over all texts."""
        return Round(
            epochs=self.epochs, batch=self.batch_size, optimizer=self.optimizer, lr=self.learning_rate,
            momentum=self.momentum, decay=self.weight_decay, beta1=self.betas[0], beta2=self.betas[1],
            accumulate=self.accumulate, clip=self.clip, schedule=self.schedule, warmup=self.warmup,
            precision=self.precision,
        )  # fmt: skip
