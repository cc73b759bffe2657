"""The precision of a forward and backward pass, and what it costs on this processor."""

from __future__ import annotations

import logging
import time
from functools import cache
from statistics import median

import torch

log = logging.getLogger(__name__)

SLOW = 4.0
"""How many times as long as in float32 a product takes in bfloat16, from where on a log line says so."""


def passes_in(precision: str, device: str) -> torch.autocast:
    """The context of passes in ``precision``: ``float32``, or ``bf16`` by autocast on ``device`` (``cpu``, ``cuda``).

    A log line says, once, if this processor lacks fast products in bfloat16.
    """
    if precision == "bf16" and device == "cpu":
        _say_if_slow()
    return torch.autocast(device, dtype=torch.bfloat16, enabled=precision == "bf16")


def times_as_long(size: int = 128) -> float:
    """How many times as long as in float32 a product of two ``(size, size)`` matrices takes in bfloat16 here."""
    one, other = (
        median(_seconds(torch.ones(size, size, dtype=d)) for _ in range(5)) for d in (torch.bfloat16, torch.float32)
    )
    return one / max(other, 1e-9)


@torch.no_grad()
def _seconds(matrix: torch.Tensor) -> float:
    start = time.perf_counter()
    torch.mm(matrix, matrix)
    return time.perf_counter() - start


def line_of(times: float) -> str | None:
    """What is to be said where products take so many ``times`` as long; None where that is not slow."""
    if times < SLOW:
        return None
    return (
        f"this processor multiplies about {times:.0f} times as slowly in bfloat16 as in float32; without bf16, this "
        "takes a fraction of the time"
    )


@cache
def _say_if_slow() -> None:
    if (line := line_of(times_as_long())) is not None:
        log.warning(line)
