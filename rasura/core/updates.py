"""What a client computes from a batch: one gradient, or the change after several steps of local training.

Used by the step that sends, and by attacks that recompute what a guess would have sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.checked import rules
from rasura.core.local import FEDSGD, RATES, Local, Order, Round, announced, run
from rasura.core.options import options
from rasura.core.specs import UpdateSpec
from rasura.core.values import Gradients, Grant, Observation


def announced_update(seen: Observation) -> Local:
    """How the update was computed, according to the mechanism; one gradient if it does not say."""
    return announced(seen.mechanism) if Grant.MECHANISM in seen else FEDSGD


def changed(
    model: nn.Module,
    inputs: Mapping[str, Any],
    names: Sequence[str],
    local: Local = FEDSGD,
    order: Order = torch.randperm,
) -> tuple[Gradients, float]:
    """What a client would send for ``inputs``: one tensor for each of the parameters ``names`` that has one, and the loss.
    For local training, the tensor is (weights before - weights after) / learning rate, which after one step of SGD is the
    gradient; the loss is that of the first mini-batch. ``order`` draws the order of texts. ``model`` and its ``.grad`` are
    unchanged; tensors are on the CPU.
    """
    start: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if n in set(names)}
    if local.kind == "fedsgd":
        with trained(start.values()), torch.enable_grad():
            loss = model(**inputs).loss
            found = torch.autograd.grad(loss, list(start.values()), allow_unused=True)
        return {n: g.detach().cpu() for n, g in zip(start, found) if g is not None}, float(loss.detach())
    own: dict[str, Tensor] = {n: p.detach().clone().requires_grad_(True) for n, p in start.items()}
    used: set[str] = set()
    size = len(next(iter(inputs.values())))

    def gradient(rows: Tensor) -> tuple[Gradients, float]:
        some = mini_batch(inputs, rows) if len(rows) < size else dict(inputs)
        with torch.enable_grad():
            loss = torch.func.functional_call(model, own, (), some).loss
            found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
        there = {n: g for n, g in zip(own, found) if g is not None}
        used.update(there)
        return there, float(loss.detach())

    losses = run(own, size, local.round, gradient, order)
    return {n: ((start[n] - p).detach() / local.learning_rate).cpu() for n, p in own.items() if n in used}, losses[0]


@contextmanager
def trained(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Inside the block, ``parameters`` have gradients."""
    before = [(p, p.requires_grad) for p in parameters]
    try:
        for p, _ in before:
            p.requires_grad_(True)
        yield
    finally:
        for p, flag in before:
            p.requires_grad_(flag)


def mini_batch(inputs: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
    """The texts at the indices ``rows`` of a step's ``inputs``, without padding on either side that none of them needs."""
    some = {name: value[rows.to(value.device)] for name, value in inputs.items()}
    mask = some.get("attention_mask")
    if mask is None or mask.dim() != 2 or not mask.any():
        return some
    used = mask.any(0).nonzero()
    kept = slice(int(used.min()), int(used.max()) + 1)
    return {name: value[:, kept] if by_token(name, value, mask.shape) else value for name, value in some.items()}


def by_token(name: str, value: Tensor, shape: Sequence[int] | None) -> bool:
    """Whether an input has an entry for each token of texts of ``shape`` ``(texts, length)``. Labels in floating point are
    of classes, of which there may be as many as tokens."""
    return value.shape == shape and not (name == "labels" and value.is_floating_point())


def classified(model: nn.Module, embedded: Tensor, mask: Tensor, **rest: Any) -> Tensor:
    """Logits ``(texts, classes)`` of a classifier for word embeddings ``(texts, length, hidden)``, padded on the right.

    A decoder with a classification head reads the last token, which it finds by the ids; given embeddings, it would read the
    padding.
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


def _local(text: str = "") -> Local:
    usual = {name: one.default for name, one in rules(Round).items()}
    given = options("local", text, usual)
    if given.get("optimizer") == "sgd":
        given.setdefault("decay", 0.0)  # as PyTorch's SGD
    return Local("local", plan=Round(**given))


SPEC = UpdateSpec(
    name="fedsgd",
    about="one gradient",
    source="McMahan et al. 2017, sec. 2 (FedSGD)",
    make=lambda: FEDSGD,
    example="fedsgd",
)

FEDAVG_SGD = UpdateSpec(
    name="fedavg-sgd",
    about="weight change after STEPS of SGD, divided by the learning rate RATE: fedavg-sgd:4 or fedavg-sgd:4:0.01",
    source="McMahan et al. 2017, Algorithm 1 (FedAvg)",
    make=partial(_fedavg, "fedavg-sgd"),
    figures=2,
    example="fedavg-sgd:4:0.01",
)

FEDAVG_MOMENTUM = UpdateSpec(
    name="fedavg-momentum",
    about="weight change after STEPS of SGD with momentum 0.9, divided by the learning rate RATE",
    source="McMahan et al. 2017, Algorithm 1, with momentum (Sutskever et al. 2013, sec. 2) as local optimizer",
    make=partial(_fedavg, "fedavg-momentum"),
    figures=2,
    example="fedavg-momentum:4:0.01",
)

FEDAVG_ADAMW = UpdateSpec(
    name="fedavg-adamw",
    about="weight change after STEPS of AdamW, divided by the learning rate RATE",
    source="McMahan et al. 2017, Algorithm 1, with AdamW (Loshchilov and Hutter 2019, Algorithm 2) as local optimizer",
    make=partial(_fedavg, "fedavg-adamw"),
    figures=2,
    example="fedavg-adamw:4:5e-5",
)

LOCAL = UpdateSpec(
    name="local",
    about="weight change after one client's local training, divided by lr; options: epochs, batch, optimizer, lr, lora "
    "and others",
    source="McMahan et al. 2017, Algorithm 1, with the settings of usual trainers",
    make=_local,
    figures=1,
    example="local:epochs=1/batch=8/optimizer=adamw/lr=1e-4/lora=16",
)

LORA = UpdateSpec(
    name="lora",
    about="gradient of new LoRA adapters of rank RANK: lora:8",
    source="Hu et al. 2022 (LoRA), sec. 4.1",
    make=lambda rank: Local(lora=int(rank)),
    figures=1,
    needed=1,
    example="lora:8",
)
