"""A client's local training between two messages, as one value. Audits, ``rasura train`` and clients all use it.

``run`` is the loop: it draws the mini-batches, accumulates, clips, follows the schedule and steps the optimizer. The caller
defines how the gradient of a mini-batch is computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rasura.core.checked import number, whole, word
from rasura.core.errors import InputError
from rasura.core.mechanisms import FedAvgSgd, mechanism
from rasura.core.precision import passes_in
from rasura.core.protection import Protection
from rasura.core.values import Gradients, Mechanism, Stage

WEIGHT_DECAY = 0.01
"""The default of AdamW."""

MOMENTUM = 0.9
"""The usual momentum of SGD."""

TARGETS = ("attention", "all")
"""Layers that can have adapters: queries and values, as in the LoRA paper, or every linear layer of the blocks."""


class Adapter(NamedTuple):
    """LoRA adapters: their ``rank`` (0 for none), their layers (one of ``TARGETS``), and the dropout on their inputs."""

    rank: int = 0
    targets: str = "attention"
    dropout: float = 0.0


@dataclass(frozen=True)
class FedAvgMomentum(FedAvgSgd, named="fedavg-momentum", at=Stage.AGGREGATE):
    """Several steps of SGD with momentum, which is reset with every message."""


@dataclass(frozen=True)
class Round(Protection, named="local", at=Stage.AGGREGATE):
    """One round of local training, as users write it after ``local:``.

    ``epochs`` over the client's texts in random order, ``batch`` texts per mini-batch (0: all). ``examples``: texts per
    round, 0 for all texts of the client. ``optimizer`` sgd or adamw at ``lr``, with ``momentum`` (sgd), ``decay`` of the
    weights and ``beta1``, ``beta2`` (adamw); the optimizer's state is reset with every round. ``accumulate``: mini-batches
    per step, whose gradients are averaged. ``clip``: the maximum Euclidean norm of a step's gradient, 0 for none.
    ``schedule``: constant, linear or cosine; the last two fall to 0 at the end of the round, after a rise over ``warmup``, a
    fraction of its steps. ``lora``: rank of adapters that are trained instead of the weights, 0 for none; ``targets``: their
    layers, one of ``TARGETS``; ``dropout``: the dropout on their inputs. ``precision``: of the forward and backward pass;
    bf16 by autocast.
    """

    epochs: int = whole(1, minimum=1)
    examples: int = whole(0, minimum=0)
    batch: int = whole(8, minimum=0)
    optimizer: str = word("adamw", words=("adamw", "sgd"))
    lr: float = number(1e-4, minimum=0, open="low")
    momentum: float = number(0.0, minimum=0, maximum=1, open="high")
    decay: float = number(WEIGHT_DECAY, minimum=0)
    beta1: float = number(0.9, minimum=0, maximum=1, open="high")
    beta2: float = number(0.999, minimum=0, maximum=1, open="high")
    accumulate: int = whole(1, minimum=1)
    clip: float = number(0.0, minimum=0)
    schedule: str = word("constant", words=("constant", "linear", "cosine"))
    warmup: float = number(0.0, minimum=0, maximum=1, open="high")
    lora: int = whole(0, minimum=0)
    targets: str = word("attention", words=TARGETS)
    dropout: float = number(0.0, minimum=0, maximum=1, open="high")
    precision: str = word("float32", words=("float32", "bf16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and self.optimizer != "sgd":
            raise InputError("local: momentum needs optimizer=sgd; for adamw, set beta1")
        if self.warmup and self.schedule == "constant":
            raise InputError("local: warmup needs the schedule linear or cosine; a constant learning rate has no warm-up")
        if (self.dropout or self.targets != TARGETS[0]) and not self.lora:
            raise InputError("local: targets and dropout apply to adapters; also pass lora=RANK")

    @property
    def dropout_rate(self) -> float:
        return self.dropout

    def rate(self, done: float) -> float:
        """The learning rate after a fraction ``done`` of the round's steps."""
        if self.schedule == "constant":
            return self.lr
        if done < self.warmup:
            return self.lr * done / self.warmup
        left = (1 - done) / (1 - self.warmup)
        return self.lr * (left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))

    def mini_batches(self, size: int) -> int:
        """Number of mini-batches in an epoch over ``size`` texts."""
        return math.ceil(size / (self.batch or size))

    def steps(self, size: int) -> int:
        """Number of steps in a round over ``size`` texts."""
        return self.epochs * math.ceil(self.mini_batches(size) / self.accumulate)

    def kept(self, size: int) -> float:
        """The factor by which weight decay alone shrinks a weight without a gradient, over a round of ``size`` texts."""
        count = self.steps(size)
        return math.prod(1 - self.rate(k / count) * self.decay for k in range(count))

    def optimizing(self, own: Iterable[Tensor], *, fused: bool = False) -> torch.optim.Optimizer:
        """The optimizer of the parameters ``own``. ``fused``: the same step in one pass over the weights, eight times faster
        on a laptop (MiniLM: 0.02 s instead of 0.16 s), with different rounding."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(own, lr=self.lr, momentum=self.momentum, weight_decay=self.decay, fused=fused)
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(own, lr=self.lr, betas=betas, weight_decay=self.decay, fused=fused)


SHORT: Mapping[str, tuple[float, Mapping[str, str | float]]] = {
    "fedavg-sgd": (0.01, {"optimizer": "sgd", "decay": 0.0}),
    "fedavg-momentum": (0.01, {"optimizer": "sgd", "decay": 0.0, "momentum": MOMENTUM}),
    "fedavg-adamw": (5e-5, {"optimizer": "adamw", "decay": WEIGHT_DECAY}),
}
"""The kinds of update whose steps all take the whole batch: their default learning rate, and their other fields as a
``Round``."""

KINDS = ("fedsgd", *SHORT, "local")
"""The kinds of update: one gradient, or the change made by local training."""

RATES: Mapping[str, float] = {"fedsgd": 1.0, **{kind: rate for kind, (rate, _) in SHORT.items()}, "local": 1e-4}
"""The default learning rate of each kind."""


@dataclass(frozen=True)
class Local:
    """One client's local training between two messages.

    ``kind``: ``fedsgd``, the gradient; ``fedavg-*``: ``steps`` of training on the whole batch at ``learning_rate``; or
    ``local``, a whole ``plan``, which sets the other fields. The client sends what training changed. ``lora``: rank of the
    adapters that are trained instead of the weights, 0 for none. Raises ``InputError`` for invalid combinations.
    """

    kind: str = "fedsgd"
    steps: int = 1
    learning_rate: float = 1.0
    lora: int = 0
    plan: Round | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"unknown update {self.kind!r}; known: {', '.join(KINDS)}")
        if (self.kind == "local") != (self.plan is not None):
            raise InputError("update kind local needs a plan, and no other kind takes one")
        if self.plan is not None:
            for name, value in (("steps", self.plan.epochs), ("learning_rate", self.plan.lr), ("lora", self.plan.lora)):
                object.__setattr__(self, name, value)
        if self.steps < 1 or self.lora < 0 or not 0 < self.learning_rate < float("inf"):
            raise InputError(
                f"update {self.kind}: {self.steps} steps, rank {self.lora}, learning rate {self.learning_rate}; "
                "expected at least 1 step, a rank of at least 0, and a learning rate above 0"
            )
        if self.kind == "fedsgd" and self.steps > 1:
            raise InputError(
                f"update fedsgd sends one gradient, but {self.steps} steps were given; use fedavg-sgd or fedavg-adamw"
            )

    @property
    def round(self) -> Round:
        """The training as a whole plan; ``fedsgd`` is one step of plain SGD."""
        if self.plan is not None:
            return self.plan
        _, rest = SHORT.get(self.kind, SHORT["fedavg-sgd"])
        return Round(epochs=self.steps, batch=0, lr=self.learning_rate, lora=self.lora, **rest)  # type: ignore[arg-type]

    @property
    def adapter(self) -> Adapter:
        """The adapters that are trained."""
        return Adapter(self.lora) if self.plan is None else Adapter(self.plan.lora, self.plan.targets, self.plan.dropout)

    @property
    def adaptive(self) -> bool:
        """Whether each entry is scaled by its own history, so that it carries little more than its sign."""
        return self.kind != "fedsgd" and self.round.optimizer == "adamw"

    def decayed(self, size: int) -> float:
        """The share of each weight that its own decay adds to what is sent of ``size`` texts."""
        return (1 - self.round.kept(size)) / self.learning_rate

    def repeatable(self, size: int) -> bool:
        """Whether anyone who knows the ``size`` texts can repeat the steps: no hidden order, no dropout."""
        return self.kind == "fedsgd" or (self.round.mini_batches(size) == 1 and not self.round.dropout)

    @property
    def mechanism(self) -> Protection:
        """Its public description."""
        if self.plan is not None:
            return self.plan
        decay = self.round.decay if self.kind != "fedsgd" else 0.0
        known = {"steps": self.steps, "learning_rate": self.learning_rate, "weight_decay": decay, "lora": self.lora}
        return mechanism(self.kind, known)


FEDSGD = Local()
"""One gradient."""


def announced(mechanisms: Iterable[Mechanism]) -> Local:
    """How an update was computed, according to ``mechanisms``; one gradient if none of them says so."""
    for m in mechanisms:
        if m.name == "local":
            made = mechanism(m.name, m.parameters)
            assert isinstance(made, Round)
            return Local("local", plan=made)
        if m.name in KINDS:
            p = m.parameters
            return Local(m.name, int(p["steps"] or 1), float(p["learning_rate"] or 1.0), int(p.get("lora") or 0))
    return FEDSGD


Order = Callable[[int], Tensor]
"""A function that returns a random order of a given number of texts."""

Gradient = Callable[[Tensor], tuple[Gradients, float]]
"""A function from the indices of a mini-batch's texts ``(texts,)`` to its gradient by parameter and its mean loss."""


def run(
    own: Mapping[str, Tensor], size: int, course: Round, gradient: Gradient, order: Order = torch.randperm
) -> list[float]:
    """Train the parameters ``own`` in place on ``size`` texts by ``course``. Returns the loss of every mini-batch. ``order``
    draws the order of each epoch, unless a mini-batch holds all texts. A parameter without a gradient is unchanged.
    """
    optimizer, taken, count = course.optimizing(own.values()), 0, course.steps(size)
    losses: list[float] = []
    device = next(iter(own.values())).device
    for _ in range(course.epochs):
        for group in _grouped(_dealt(size, course, order), course.accumulate):
            total: dict[str, Tensor] = {}
            for rows in group:
                with passes_in(course.precision, device.type):
                    found, loss = gradient(rows)
                losses.append(loss)
                for name, entries in found.items():
                    part = entries.to(own[name].device, own[name].dtype) / len(group)
                    total[name] = total[name] + part if name in total else part
            for name, parameter in own.items():
                parameter.grad = total.get(name)
            if course.clip:
                torch.nn.utils.clip_grad_norm_(own.values(), course.clip)
            for settings in optimizer.param_groups:
                settings["lr"] = course.rate(taken / count)
            optimizer.step()
            taken += 1
    for parameter in own.values():
        parameter.grad = None
    return losses


def _dealt(size: int, course: Round, order: Order) -> list[Tensor]:
    if course.mini_batches(size) == 1:
        return [torch.arange(size)]
    return list(torch.split(order(size), course.batch))


def _grouped(rows: list[Tensor], count: int) -> Iterator[list[Tensor]]:
    for start in range(0, len(rows), count):
        yield rows[start : start + count]
