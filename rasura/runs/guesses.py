"""The form of a guess at private texts or images. One that lacks it is refused where the attack is attempted, so that it
ends that attempt and not the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch

from rasura.core.batches import Batch, ImageBatch
from rasura.core.errors import InputError
from rasura.core.values import Confidence, Reconstruction


def well_formed(guess: Any, batch: Batch | ImageBatch) -> Reconstruction:
    """``guess`` at ``batch``, with plain ids and labels.

    A guess names at most as many texts as the batch holds: with more, some would be right by chance. Raises ``InputError``
    for anything else.
    """
    if not isinstance(guess, Reconstruction):
        raise InputError(f"the attack returned {type(guess).__name__}; expected a Reconstruction")
    size = len(batch)
    tokens = tuple(_whole("tokens", text) for text in _each("tokens", guess.tokens))
    labels = None if guess.labels is None else _whole("labels", guess.labels)
    for name, many in (("texts", len(tokens)), ("labels", len(labels or ()))):
        if many > size:
            raise InputError(f"the guess names {many} {name} for a batch of {size}; expected at most as many")
    if guess.confidence not in get_args(Confidence):
        raise InputError(f"the confidence is {guess.confidence!r}; expected {', '.join(get_args(Confidence))}")
    if not isinstance(guess.details, Mapping):
        raise InputError(f"details is {type(guess.details).__name__}; expected figures by their names")
    for name, value in guess.details.items():
        if not isinstance(name, str):
            raise InputError(f"details: {name!r} is {type(name).__name__}; expected a name")
        if not isinstance(value, float | int | str | bool | None) or (isinstance(value, float) and math.isinf(value)):
            raise InputError(f"details: {name} is {type(value).__name__}; expected a finite number, a text or None")
    _check_images(guess.images, batch, bool(tokens))
    return replace(guess, tokens=tokens, labels=labels)


def _check_images(images: Any, batch: Batch | ImageBatch, tokens: bool) -> None:
    if isinstance(batch, Batch):
        if images is not None:
            raise InputError("the guess holds images of a batch of texts; expected tokens")
        return
    if tokens:
        raise InputError("the guess holds tokens of a batch of images; expected images")
    if images is None:
        return
    shape = tuple(batch.pixel_values.shape[1:])
    if not isinstance(images, torch.Tensor) or tuple(images.shape[1:]) != shape or len(images) > len(batch):
        raise InputError(f"images are not a tensor of at most {len(batch)} images of the shape {shape}")
    if not images.is_floating_point() or not bool(images.isfinite().all()):
        raise InputError("images hold something that is not a finite number")


def _each(name: str, values: Any) -> Iterable[Any]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise InputError(f"{name} is {type(values).__name__}; expected a sequence")
    return values


def _whole(name: str, values: Any) -> tuple[int, ...]:
    each = _each(name, values)
    try:
        return tuple(int(value.__index__()) for value in each)
    except (AttributeError, TypeError, ValueError):
        raise InputError(f"{name} holds something that is not a whole number") from None
