"""One part of a protection at work. What it returns is looked at: the next part, every attack and every metric take its
form for granted, and what has another form could pass for an update that hides its texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rasura.core.batches import Batch, ImageBatch
from rasura.core.errors import Malformed
from rasura.core.interfaces import Transform
from rasura.core.rng import Randomness
from rasura.core.values import Message, Stage

Shapes = Mapping[str, Sequence[int]]


def applied(
    part: Transform[Any, Any, Any], given: Any, state: Any, rng: Randomness, shapes: Shapes | None = None
) -> tuple[Any, Any]:
    """What ``part`` makes of ``given``, and its next state. ``shapes``: those of the model's parameters, by name, which
    only AGGREGATE needs.

    Raises ``Malformed``, which names the part, where it returns anything but: a batch of as many examples (DATA), the model
    that it was given (MODEL), entries by name in these shapes (AGGREGATE), or a message of the entries that it was given,
    with zeros where a mask says that an entry is hidden (WIRE).
    """
    found = part.apply(given, state, rng)
    if not isinstance(found, tuple) or len(found) != 2:
        raise _malformed(part, f"returned {_kind(found)}; expected two values: the result, and the next state")
    result = found[0]
    if part.stage is Stage.DATA:
        fault = _of_batch(result, given)
    elif part.stage is Stage.MODEL:
        fault = (
            None if result is given else f"returned {_kind(result)}; expected the model that it was given, changed in place"
        )
    elif part.stage is Stage.AGGREGATE:
        fault = _of_entries(result, shapes or {})
    else:
        fault = _of_message(result, given)
    if fault is not None:
        raise _malformed(part, fault)
    return found


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """The shapes of ``tensors``, by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _malformed(part: Transform[Any, Any, Any], fault: str) -> Malformed:
    return Malformed(f"the protection {part.mechanism.name} {fault}")


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _of_batch(result: Any, given: Batch | ImageBatch) -> str | None:
    if not isinstance(result, type(given)):
        return f"returned {_kind(result)}; expected a {type(given).__name__}"
    if len(result) != len(given):
        return f"returned {len(result)} examples of {len(given)}; expected as many as it was given"
    return None


def _of_message(result: Any, given: Message) -> str | None:
    if not isinstance(result, Message):
        return f"returned {_kind(result)}; expected a Message"
    if result.kind != given.kind:
        return f"changed the kind of the update from {given.kind!r} to {result.kind!r}"
    fault = _of_entries(result.gradients, shapes_of(given.gradients))
    return fault or _of_masks(result)


def _of_entries(result: Any, shapes: Shapes) -> str | None:
    if not isinstance(result, Mapping):
        return f"returned {_kind(result)}; expected tensors by the names of parameters"
    if not result:
        return "returned no entries; one that sends nothing raises NotSent"
    for name, entries in result.items():
        if name not in shapes:
            return f"returned {name!r}, which is not among the entries that it was given"
        if not isinstance(entries, Tensor) or entries.layout != torch.strided or not entries.is_floating_point():
            return f"returned something else for {name} than a dense tensor of floating-point numbers"
        if entries.requires_grad:
            return f"returned a tensor for {name} that still has its computation; detach it"
        if tuple(entries.shape) != tuple(shapes[name]):
            return f"returned the shape {tuple(entries.shape)} for {name}; expected {tuple(shapes[name])}"
    return None


def _of_masks(result: Message) -> str | None:
    if not isinstance(result.visible, Mapping):
        return f"returned {_kind(result.visible)} as visible; expected masks by the names of parameters"
    for name, mask in result.visible.items():
        entries = result.gradients.get(name)
        if entries is None or not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != entries.shape:
            return f"returned a mask for {name} that is not of bool in the shape of its entries"
        if bool(entries.masked_fill(mask, 0).any()):
            return f"sends entries of {name} that its mask calls hidden; set them to zero"
    return None
