"""What methods are lent, and whether they left it as it was.

An update and the weights of a model are too large to copy for every attack, so all attacks of a step share them. One that
writes into them would change what the next attack reads. So everything is compared after each of them.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.values import Message

CHUNK = 512
"""Words of eight bytes that are summed together."""

CHANGED = "it changed what it was given"
"""Why an attack crashed that wrote into what it shares with others."""


def mark(tensor: Tensor) -> bytes:
    """A digest of the shape, the type and every bit of ``tensor``: of the sums of its bits, 4 KiB at a time, which takes a
    tenth of the time of a hash. It is against mistakes; a forger could keep the sums."""
    held = tensor.detach()
    found = hashlib.blake2b(f"{tuple(held.shape)} {held.dtype}".encode(), digest_size=16)
    flat = held.contiguous().reshape(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    whole = words.view(torch.int64)
    many = whole.numel() // CHUNK * CHUNK
    for part in (whole[:many].view(-1, CHUNK).sum(1), whole[many:], flat[words.numel() :]):
        found.update(part.cpu().numpy().tobytes())
    return found.digest()


def tensors_of(*models: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of ``models``, by a name that says of which model it is. Memory that several of them share
    is named once."""
    seen: set[Any] = set()
    out: dict[str, Tensor] = {}
    for number, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if place not in seen:
                seen.add(place)
                out[f"{number} {name}"] = tensor
    return out


def entries_of(message: Message) -> dict[str, Tensor]:
    """The tensors of ``message``, by a name that says whether it is an entry or a mask."""
    entries = {f"gradients {n}": t for n, t in message.gradients.items()}
    return entries | {f"visible {n}": t for n, t in message.visible.items()}


class Lent:
    """What is lent, as it was. ``tensors`` names what is there whenever it is asked; ``plain``: the rest of it, as values
    that can be compared."""

    def __init__(self, tensors: Callable[[], Mapping[str, Tensor]], plain: Callable[[], Any] = lambda: None) -> None:
        self._tensors, self._plain = tensors, plain
        self._marks, self._rest = self._now(), copy.deepcopy(plain())

    def _now(self) -> dict[str, bytes]:
        return {name: mark(tensor) for name, tensor in self._tensors().items()}

    @property
    def changed(self) -> bool:
        """Whether any of it is not as it was."""
        return self._now() != self._marks or self._plain() != self._rest


def lent_message(message: Message) -> Lent:
    """``message`` as it was."""
    return Lent(lambda: entries_of(message), lambda: (message.kind, dict(message.header), dict(message.sealed)))


class Assembled:
    """The modules of a model as they are put together: their attributes, hooks and modes, and which tensors they hold.

    ``put_back`` undoes whatever was done to them since. The numbers in the tensors are not kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [*model.modules(), *_configs(model)]
        self._were = [_shallow(vars(owner)) for owner in self._owners]
        self._parameters = [(p, p.data, p.requires_grad, p.grad) for p in model.parameters()]

    def put_back(self) -> None:
        """Every module, parameter and configuration as it was."""
        for owner, were in zip(self._owners, self._were, strict=True):
            held = vars(owner)
            held.clear()
            held.update(_shallow(were))
        for parameter, data, required, gradient in self._parameters:
            if parameter.data_ptr() != data.data_ptr() or parameter.shape != data.shape:
                parameter.data = data
            parameter.requires_grad_(required)
            parameter.grad = gradient


def _configs(model: nn.Module) -> list[Any]:
    found = {id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")}
    return list(found.values())


def _shallow(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.copy(v) if isinstance(v, dict | list | set) else v for name, v in values.items()}


KEPT = 4 << 30
"""Bytes of weights up to which a clean copy of them is kept."""


class Clean:
    """The numbers of a model as they were: of its buffers, and with ``weights`` of its parameters, up to ``KEPT`` bytes.
    ``whole``: nothing is left out."""

    def __init__(self, model: nn.Module, weights: bool) -> None:
        parameters: list[Tensor] = list(model.parameters())
        buffers: list[Tensor] = list(model.buffers())
        self.whole = weights and sum(p.numel() * p.element_size() for p in parameters) <= KEPT
        self._kept = [(t, t.detach().clone()) for t in (buffers + parameters if self.whole else buffers)]

    def put_back(self) -> None:
        """Every number as it was, as far as it was kept."""
        with torch.no_grad():
            for tensor, was in self._kept:
                tensor.data.copy_(was)
