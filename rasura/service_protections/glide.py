"""SentinelLMs (Mishra et al. 2024): the word embedding is moved by glide reflections, which preserve all distances."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.rng import Randomness, normal, uniform

Directions = Literal["ones", "random"]


def glide(table: Tensor, times: int, directions: Directions, rng: Randomness) -> Tensor:
    """``table`` ``(tokens, hidden)`` reflected across a hyperplane and shifted, ``times`` over; of the same kind.

    ``random``: normals of the hyperplanes in any direction, shifts within the plane of a length drawn between 0 and a row's
    mean norm. ``ones``: as in the authors' published code (llm_converter.py), where normal and shift are both the vector
    of ones times a number between 0 and 1. Such a reflection only moves each row's mean, and two of them undo each other: an
    even number adds one constant to all entries, which a layer norm behind the embedding takes off again.
    """
    if times < 1:
        raise InputError(f"sentinellms: {times} reflections; expected at least 1")
    rows = table.detach().double()
    width = rows.shape[1]
    norm = float(rows.norm(dim=1).mean())
    for _ in range(times):
        if directions == "ones":
            line = torch.ones(width, dtype=torch.float64)
            shift = line * uniform((1,), rng)
        else:
            line = normal((width,), rng)
            shift = normal((width,), rng)
            shift = shift - (shift @ line) / (line @ line) * line
            shift = shift / shift.norm() * norm * uniform((1,), rng)
        rows = rows - 2 * (rows @ line / (line @ line))[:, None] * line + shift
    return rows.to(table.dtype)
