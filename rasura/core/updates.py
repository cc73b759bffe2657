"""What a client makes of a batch before it sends: one gradient, or what several steps of local training changed.

Used by the step that sends, and by attacks that recompute what a guess would have sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.interfaces import InputError
from rasura.core.mechanisms import FedAvgSgd, mechanism
from rasura.core.protection import Protection
from rasura.core.specs import UpdateSpec
from rasura.core.values import Gradients, Grant, Observation, Stage

WEIGHT_DECAY = 0.01
"""AdamW's default."""

MOMENTUM = 0.9
"""The usual momentum of SGD."""


@dataclass(frozen=True)
class FedAvgMomentum(FedAvgSgd, named="fedavg-momentum", at=Stage.AGGREGATE):
    """Several steps of SGD with momentum, which starts anew with every message."""


@dataclass(frozen=True)
class Training:
    """A kind of local training: its usual learning ``rate``, the ``optimizer`` of parameters and a rate, what it decays."""

    rate: float
    optimizer: Callable[[Iterable[Tensor], float], torch.optim.Optimizer]
    weight_decay: float = 0.0


TRAININGS: Mapping[str, Training] = {
    "fedavg-sgd": Training(0.01, lambda own, rate: torch.optim.SGD(own, lr=rate)),
    "fedavg-momentum": Training(0.01, lambda own, rate: torch.optim.SGD(own, lr=rate, momentum=MOMENTUM)),
    "fedavg-adamw": Training(
        5e-5, lambda own, rate: torch.optim.AdamW(own, lr=rate, weight_decay=WEIGHT_DECAY), WEIGHT_DECAY
    ),
}
"""Every kind of update that is more than one gradient."""

RATES: Mapping[str, float] = {"fedsgd": 1.0, **{kind: one.rate for kind, one in TRAININGS.items()}}
"""The usual learning rate of each kind, where none is given."""


@dataclass(frozen=True)
class Local:
    """One client's work between two messages.

    ``kind``: ``fedsgd``, the gradient; or one of ``TRAININGS``: ``steps`` of training on the whole batch at
    ``learning_rate``; sent is what they changed. ``lora``: rank of the adapters that are trained instead of the weights, 0
    for none. Raises ``InputError`` for what cannot be.
    """

    kind: str = "fedsgd"
    steps: int = 1
    learning_rate: float = 1.0
    lora: int = 0

    def __post_init__(self) -> None:
        if self.kind not in RATES:
            raise InputError(f"unknown update {self.kind!r}; known: {', '.join(RATES)}")
        if self.steps < 1 or self.lora < 0 or not 0 < self.learning_rate < float("inf"):
            raise InputError(
                f"update {self.kind}: {self.steps} steps, rank {self.lora}, learning rate {self.learning_rate}; "
                "expected at least 1 step, a rank of at least 0, and a learning rate above 0"
            )
        if self.kind == "fedsgd" and self.steps > 1:
            raise InputError(f"update fedsgd sends one gradient, found {self.steps} steps; use fedavg-sgd or fedavg-adamw")

    @property
    def mechanism(self) -> Protection:
        """What everybody knows of it."""
        decay = TRAININGS[self.kind].weight_decay if self.kind in TRAININGS else 0.0
        known = {"steps": self.steps, "learning_rate": self.learning_rate, "weight_decay": decay, "lora": self.lora}
        return mechanism(self.kind, known)


FEDSGD = Local()
"""One gradient."""


def announced_update(seen: Observation) -> Local:
    """How the update came about, as the mechanism tells it; one gradient where it tells nothing."""
    for m in seen.mechanism if Grant.MECHANISM in seen else ():
        if m.name in RATES:
            p = m.parameters
            return Local(m.name, int(p["steps"] or 1), float(p["learning_rate"] or 1.0))
    return FEDSGD


def changed(
    model: nn.Module, inputs: Mapping[str, Any], names: Sequence[str], local: Local = FEDSGD
) -> tuple[Gradients, float]:
    """What ``model`` would send for ``inputs``: one tensor for each of the parameters ``names`` that has one, and the loss.

    For FedAvg: (weights before - weights after) / learning rate, which after one step of SGD is the gradient. ``model`` and
    its ``.grad`` are left as they are; tensors are on the CPU.
    """
    start: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if n in set(names)}
    if local.kind == "fedsgd":
        before = [p.requires_grad for p in start.values()]
        try:
            for p in start.values():
                p.requires_grad_(True)
            with torch.enable_grad():
                loss = model(**inputs).loss
                found = torch.autograd.grad(loss, list(start.values()), allow_unused=True)
        finally:
            for p, flag in zip(start.values(), before):
                p.requires_grad_(flag)
        return {n: g.detach().cpu() for n, g in zip(start, found) if g is not None}, float(loss.detach())
    own: dict[str, Tensor] = {n: p.detach().clone().requires_grad_(True) for n, p in start.items()}
    optimizer = TRAININGS[local.kind].optimizer(own.values(), local.learning_rate)
    losses = []
    used: set[str] = set()
    for _ in range(local.steps):
        with torch.enable_grad():
            loss = torch.func.functional_call(model, own, (), dict(inputs)).loss
            found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        for (n, p), g in zip(own.items(), found):
            p.grad = g
            used |= {n} if g is not None else set()
        optimizer.step()
        losses.append(float(loss.detach()))
    return {n: ((start[n] - p).detach() / local.learning_rate).cpu() for n, p in own.items() if n in used}, losses[0]


def classified(model: nn.Module, embedded: Tensor, mask: Tensor, **rest: Any) -> Tensor:
    """Logits ``(texts, classes)`` of a classifier for word embeddings ``(texts, length, hidden)``, padded on the right.

    A decoder's classifier reads the last token, which it looks for in the ids; given embeddings it would read the padding.
    """
    whole: Any = getattr(model, "get_base_model", lambda: model)()  # without the shell of LoRA
    inputs = {"inputs_embeds": embedded, "attention_mask": mask, **rest}
    if not isinstance(getattr(whole, "score", None), nn.Module):
        logits: Tensor = model(**inputs).logits
        return logits
    states = whole.base_model(**inputs).last_hidden_state
    last: Tensor = whole.score(states[torch.arange(len(mask), device=mask.device), mask.sum(1) - 1])
    return last


def _fedavg(kind: str, steps: str = "1", rate: str = "") -> Local:
    return Local(kind, int(steps), float(rate) if rate else RATES[kind])


SPEC = UpdateSpec(
    name="fedsgd",
    about="one gradient",
    source="McMahan et al. 2017, sec. 2 (FedSGD)",
    make=lambda: FEDSGD,
    example="fedsgd",
)

FEDAVG_SGD = UpdateSpec(
    name="fedavg-sgd",
    about="what STEPS of SGD at RATE changed, over the rate: fedavg-sgd:4 or fedavg-sgd:4:0.01",
    source="McMahan et al. 2017, Algorithm 1 (FedAvg)",
    make=partial(_fedavg, "fedavg-sgd"),
    figures=2,
    example="fedavg-sgd:4:0.01",
)

FEDAVG_MOMENTUM = UpdateSpec(
    name="fedavg-momentum",
    about="what STEPS of SGD with momentum .9 at RATE changed, over the rate",
    source="McMahan et al. 2017, Algorithm 1, with momentum (Sutskever et al. 2013, sec. 2) as local optimizer",
    make=partial(_fedavg, "fedavg-momentum"),
    figures=2,
    example="fedavg-momentum:4:0.01",
)

FEDAVG_ADAMW = UpdateSpec(
    name="fedavg-adamw",
    about="what STEPS of AdamW at RATE changed, over the rate",
    source="McMahan et al. 2017, Algorithm 1, with AdamW (Loshchilov and Hutter 2019, Algorithm 2) as local optimizer",
    make=partial(_fedavg, "fedavg-adamw"),
    figures=2,
    example="fedavg-adamw:4:5e-5",
)

LORA = UpdateSpec(
    name="lora",
    about="the gradient of fresh adapters of rank RANK: lora:8",
    source="Hu et al. 2022 (LoRA), sec. 4.1",
    make=lambda rank: Local(lora=int(rank)),
    figures=1,
    needed=1,
    example="lora:8",
)
