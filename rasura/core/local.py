"""A client's work between two messages as one value: what an audit audits, ``rasura train`` trains and a client runs.

``run`` is the loop: it draws the mini-batches, accumulates, clips, follows the schedule and steps the optimizer. Whoever
calls it says how a mini-batch's gradient is taken.
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
from rasura.core.protection import Protection
from rasura.core.values import Gradients, Mechanism, Stage

WEIGHT_DECAY = 0.01
"""AdamW's default."""

MOMENTUM = 0.9
"""The usual momentum of SGD."""

TARGETS = ("attention", "all")
"""Layers that adapters can be put on: queries and values, as in the LoRA paper; or every linear layer of the blocks."""


class Adapter(NamedTuple):
    """LoRA adapters: their ``rank``, 0 for none; the layers, one of ``TARGETS``; the dropout of what they read."""

    rank: int = 0
    targets: str = "attention"
    dropout: float = 0.0


@dataclass(frozen=True)
class FedAvgMomentum(FedAvgSgd, named="fedavg-momentum", at=Stage.AGGREGATE):
    """Several steps of SGD with momentum, which starts anew with every message."""


@dataclass(frozen=True)
class Round(Protection, named="local", at=Stage.AGGREGATE):
    """One round of local training, as users write it behind ``local:``.

    ``epochs`` over the client's texts in random order, ``batch`` texts a mini-batch (0: all). ``examples``: texts of a
    round, 0 for all that the client has. ``optimizer`` sgd or adamw at ``lr``, with ``momentum`` (sgd), ``decay`` of the
    weights and ``beta1``, ``beta2`` (adamw); its state begins anew with every round. ``accumulate``: mini-batches a step,
    whose gradients are averaged. ``clip``: the largest Euclidean norm of a step's gradient, 0 for none. ``schedule``:
    constant, linear or cosine, which fall to 0 at the end of the round, after a rise over ``warmup``, a fraction of its
    steps. ``lora``: rank of adapters that are trained instead of the weights, 0 for none; ``targets``, one of ``TARGETS``;
    ``dropout`` of what they read. ``precision``: of the forward and backward pass; bf16 by autocast.
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
            raise InputError("local: momentum is for optimizer=sgd; adamw has beta1")
        if self.warmup and self.schedule == "constant":
            raise InputError("local: warmup is for the linear and cosine schedules; a constant learning rate has none")
        if (self.dropout or self.targets != TARGETS[0]) and not self.lora:
            raise InputError("local: targets and dropout are the adapters'; pass lora=RANK, too")

    @property
    def dropout_rate(self) -> float:
        return self.dropout

    def rate(self, done: float) -> float:
        """The learning rate when a fraction ``done`` of the round's steps was taken."""
        if self.schedule == "constant":
            return self.lr
        if done < self.warmup:
            return self.lr * done / self.warmup
        left = (1 - done) / (1 - self.warmup)
        return self.lr * (left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left)))

    def mini_batches(self, size: int) -> int:
        """Mini-batches of an epoch over ``size`` texts."""
        return math.ceil(size / (self.batch or size))

    def steps(self, size: int) -> int:
        """Steps that a round over ``size`` texts takes."""
        return self.epochs * math.ceil(self.mini_batches(size) / self.accumulate)

    def kept(self, size: int) -> float:
        """What the weights' own decay leaves of a weight that no gradient moves, over a round of ``size`` texts."""
        count = self.steps(size)
        return math.prod(1 - self.rate(k / count) * self.decay for k in range(count))

    def optimizing(self, own: Iterable[Tensor], *, fused: bool = False) -> torch.optim.Optimizer:
        """The optimizer of the parameters ``own``. ``fused``: the same step in one pass over the weights, eight times faster
        on a laptop (MiniLM: 0.02 s for 0.16 s), and rounded otherwise."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(own, lr=self.lr, momentum=self.momentum, weight_decay=self.decay, fused=fused)
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(own, lr=self.lr, betas=betas, weight_decay=self.decay, fused=fused)


SHORT: Mapping[str, tuple[float, Mapping[str, str | float]]] = {
    "fedavg-sgd": (0.01, {"optimizer": "sgd", "decay": 0.0}),
    "fedavg-momentum": (0.01, {"optimizer": "sgd", "decay": 0.0, "momentum": MOMENTUM}),
    "fedavg-adamw": (5e-5, {"optimizer": "adamw", "decay": WEIGHT_DECAY}),
}
"""Kinds whose every step takes the whole batch: their usual learning rate, and what else they are as a ``Round``."""

KINDS = ("fedsgd", *SHORT, "local")
"""What a client can send: one gradient, or what a training changed."""

RATES: Mapping[str, float] = {"fedsgd": 1.0, **{kind: rate for kind, (rate, _) in SHORT.items()}, "local": 1e-4}
"""The usual learning rate of each kind, where none is given."""


@dataclass(frozen=True)
class Local:
    """One client's work between two messages.

    ``kind``: ``fedsgd``, the gradient; ``fedavg-*``: ``steps`` of training on the whole batch at ``learning_rate``; or
    ``local``, a whole ``plan``, which gives the other fields. What training changed is sent. ``lora``: rank of the adapters
    that are trained instead of the weights, 0 for none. Raises ``InputError`` for what cannot be.
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
            raise InputError("update local takes a plan, and no other kind does")
        if self.plan is not None:
            for name, value in (("steps", self.plan.epochs), ("learning_rate", self.plan.lr), ("lora", self.plan.lora)):
                object.__setattr__(self, name, value)
        if self.steps < 1 or self.lora < 0 or not 0 < self.learning_rate < float("inf"):
            raise InputError(
                f"update {self.kind}: {self.steps} steps, rank {self.lora}, learning rate {self.learning_rate}; "
                "expected at least 1 step, a rank of at least 0, and a learning rate above 0"
            )
        if self.kind == "fedsgd" and self.steps > 1:
            raise InputError(f"update fedsgd sends one gradient, found {self.steps} steps; use fedavg-sgd or fedavg-adamw")

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
        """Whether each entry is scaled by its own history, so that little but signs is left of its size."""
        return self.kind != "fedsgd" and self.round.optimizer == "adamw"

    def repeatable(self, size: int) -> bool:
        """Whether whoever knows the ``size`` texts can take the same steps: no hidden order, no dropout."""
        return self.kind == "fedsgd" or (self.round.mini_batches(size) == 1 and not self.round.dropout)

    @property
    def mechanism(self) -> Protection:
        """What everybody knows of it."""
        if self.plan is not None:
            return self.plan
        decay = self.round.decay if self.kind != "fedsgd" else 0.0
        known = {"steps": self.steps, "learning_rate": self.learning_rate, "weight_decay": decay, "lora": self.lora}
        return mechanism(self.kind, known)


FEDSGD = Local()
"""One gradient."""


def announced(mechanisms: Iterable[Mechanism]) -> Local:
    """How an update came about, as one of ``mechanisms`` tells it; one gradient where none does."""
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
"""A random order of so many texts."""

Gradient = Callable[[Tensor], tuple[Gradients, float]]
"""Places of the texts of a mini-batch ``(texts,)`` to its gradient, by parameter, and its mean loss."""


def run(
    own: Mapping[str, Tensor], size: int, course: Round, gradient: Gradient, order: Order = torch.randperm
) -> list[float]:
    """Train the parameters ``own`` in place on ``size`` texts as ``course`` says; the loss of every mini-batch.

    ``order`` draws each epoch's order, where a mini-batch is not all texts. A parameter that no gradient names stays as it
    is.
    """
    optimizer, taken, count = course.optimizing(own.values()), 0, course.steps(size)
    losses: list[float] = []
    device = next(iter(own.values())).device
    for _ in range(course.epochs):
        for group in _grouped(_dealt(size, course, order), course.accumulate):
            total: dict[str, Tensor] = {}
            for rows in group:
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=course.precision == "bf16"):
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
