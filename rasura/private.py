"""A protected training loop in one line: the model gives private gradients, the loader draws texts as accounting assumes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from rasura.accounting import Guarantee, Run, assumes_poisson, formal, guarantee
from rasura.interfaces import Defense, InputError
from rasura.recipes import parse_defense
from rasura.rng import Randomness, generator, secret_generator
from rasura.values import Stage
from rasura.victims.batching import drawn
from rasura.victims.step import defended, message_for


class Private(NamedTuple):
    """A protected loop: the model (the same object), the optimizer, the loader to train with, and what is guaranteed."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    loader: Any
    guarantee: Guarantee


class PoissonBatches:
    """Row numbers of batches that each row joins by chance; as many batches an epoch as ``size`` rows a batch would make."""

    def __init__(self, count: int, size: int, rng: Randomness) -> None:
        self.count, self.size, self.rng = count, size, rng

    def __len__(self) -> int:
        return -(-self.count // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        yield from drawn(self.count, self.size, self.rng)


def poisson_loader(loader: Any, rng: Randomness) -> Any:
    """``loader`` with Poisson sampling at its batch size. An empty batch has the first row's tensors without any row."""
    data, size = loader.dataset, loader.batch_size
    if size is None or isinstance(data, IterableDataset) or not hasattr(data, "__len__"):
        raise InputError("the loader has no batch size, or a data set without a length; Poisson sampling needs both: pass a "
                         "DataLoader over a list or map-style data set")  # fmt: skip
    collate: Callable[[list[Any]], Any] = loader.collate_fn

    def collated(rows: list[Any]) -> Any:
        return collate(rows) if rows else _emptied(collate([data[0]]))

    return DataLoader(
        data, batch_sampler=PoissonBatches(len(data), size, rng), collate_fn=collated, num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
    )  # fmt: skip


def _emptied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return type(batch)({k: _emptied(v) for k, v in batch.items()})  # type: ignore[call-arg]  # a dict or its like
    if isinstance(batch, (list, tuple)):
        return type(batch)(_emptied(v) for v in batch)
    raise InputError(f"a batch of {type(batch).__name__} cannot be made empty; let the collate function return tensors")


class _Release(torch.autograd.Function):
    """A loss whose backward pass hands out gradients that were made before."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> Any:
        return None, None, *(None if g is None else grad[0] * g for g in ctx.gradients)


class _Forward:
    """The forward of a protected model: in training, a loss whose gradients are private; else the model's own."""

    def __init__(self, model: nn.Module, defense: Defense, rng: Randomness, expected: int | None) -> None:
        self.model, self.defense, self.rng, self.expected = model, defense, rng, expected
        self.original = model.forward
        self.inside = False

    def __call__(self, *positional: Any, **inputs: Any) -> Any:
        if self.inside or not self.model.training or not torch.is_grad_enabled():
            return self.original(*positional, **inputs)
        if positional:
            raise InputError("call the protected model with keywords: model(**batch)")
        # The Trainer's count of tokens belongs to losses over the whole batch.
        inputs = {k: v for k, v in inputs.items() if v is not None and k not in ("num_items_in_batch", "return_dict")}
        labels = inputs.get("labels")
        if labels is None:
            raise InputError("the protected model takes its loss itself: pass labels with the batch while it trains")
        other = [k for k, v in inputs.items() if not isinstance(v, Tensor) or v.shape[:1] != labels.shape[:1]]
        if other:
            raise InputError(f"{', '.join(other)}: expected tensors with a row for each of the {len(labels)} texts")
        self.inside = True
        try:
            message, loss, _ = message_for(
                self.model, inputs, len(labels), self.defense, self.rng, expected=self.expected
            )  # fmt: skip
        finally:
            self.inside = False
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        found = [None if (g := message.gradients.get(n)) is None else g.to(p.device, p.dtype) for n, p in named.items()]
        from transformers.utils import ModelOutput

        value = torch.tensor(loss, device=next(iter(named.values())).device)
        return ModelOutput(loss=_Release.apply(value, found, *named.values()))  # type: ignore[no-untyped-call]  # of torch


def protect_training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    loader: Any,
    defense: str | Defense,
    *,
    epochs: int = 1,
    delta: float | None = None,
    poisson: bool = True,
    seed: int | None = None,
) -> Private:
    """Protect a training loop: ``model, optimizer, loader, told = protect(model, optimizer, loader, "dp-sgd:1.0")``.

    From then on ``model(**batch).loss.backward()`` in training mode, labels in the batch, leaves protected gradients in
    ``.grad``; every optimizer and schedule works behind it. The returned loader draws texts as the guarantee assumes
    (Poisson sampling for DP-SGD); train with it, for ``epochs`` passes and one optimizer step a batch.
    ``poisson=False`` keeps the
    given loader, and the guarantee says what that costs. Noise comes from the operating system unless ``seed`` is given,
    which is for experiments. Not covered: the loss that is returned, and whatever else is told of the texts.

    Raises ``InputError`` for a defense of the data, and for an optimizer of parameters that the model does not have.
    """
    parts = parse_defense(defense) if isinstance(defense, str) else defense
    if any(p.stage is Stage.DATA for p in parts):
        raise InputError("a protection of the data acts before training; make the texts with rasura protect ghost first")
    if hasattr(vars(model).get("forward"), "__rasura__"):
        raise InputError("the model is protected already; load it anew to protect it otherwise")
    own = {id(p) for p in model.parameters()}
    if optimizer is not None and any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise InputError(
            "the optimizer trains parameters that the model does not have; their gradients would be unprotected"
        )
    rng = secret_generator() if seed is None else generator(seed, "protect")
    mechanisms = [p.mechanism for p in parts]
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
    by_chance = assumes_poisson(mechanisms) and poisson
    with defended(model, parts):
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
    if formal(mechanisms) is None:
        told = guarantee(mechanisms, Run(1, 1, epochs))
    else:
        if not hasattr(loader.dataset, "__len__"):
            raise InputError("the loader's data set has no length, which the guarantee depends on")
        run = Run(len(loader.dataset), size, epochs, delta, "poisson" if by_chance else "shuffled")
        told = guarantee(mechanisms, run, sizes=sizes, secure=seed is None)
        if not by_chance and isinstance(loader.sampler, RandomSampler) and loader.sampler.replacement:
            raise InputError("the loader draws texts with replacement, which no guarantee covers; pass replacement=False")
    if by_chance:
        loader = poisson_loader(loader, rng)
    forward = _Forward(model, parts, rng, min(size, len(loader.dataset)) if by_chance else None)

    # Whoever looks at the signature (the Trainer drops columns by it) finds the model's own.
    @functools.wraps(forward.original)
    def protected(*positional: Any, **inputs: Any) -> Any:
        return forward(*positional, **inputs)

    protected.__rasura__ = forward  # type: ignore[attr-defined]  # a mark
    model.forward = protected
    return Private(model, optimizer, loader, told)
