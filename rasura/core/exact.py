"""Norms and sums of gradients as a guarantee needs them: nothing is rounded to half precision, nothing underflows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def exact(device: str) -> Iterator[None]:
    """Inside the block, products of float32 tensors are in float32, whatever autocast on ``device`` and the process say
    (TF32, bfloat16)."""
    with full_products(), torch.autocast(device, enabled=False):
        yield


@contextmanager
def full_products() -> Iterator[None]:
    """Inside the block, the process allows no TF32 and no bfloat16 in place of float32; autocast stays as it is."""
    backends: Any = torch.backends
    full: Any = "ieee"
    if hasattr(backends.cudnn, "conv"):
        name = "fp32_precision"
        places = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    else:  # torch before 2.9
        name, places, full = "allow_tf32", [backends.cuda.matmul, backends.cudnn], False
    before = [getattr(place, name) for place in places]
    try:
        for place in places:
            setattr(place, name, full)
        yield
    finally:
        for place, value in zip(places, before):
            setattr(place, name, value)


def half(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of floating-point numbers shorter than float32."""
    return tensor.is_floating_point() and tensor.element_size() < 4


def widened(tensor: Tensor) -> Tensor:
    """``tensor``, in float32 where it is shorter: half precision cannot hold a sum, a norm or a direction."""
    return tensor.float() if half(tensor) else tensor


CACHED = 2**16
"""Entries of a tensor in main memory that are widened at once, so that their float64 copy never leaves the cache."""


def squared(tensor: Tensor) -> Tensor:
    """The sum of the squares of all entries, ``()`` float64, taken in float64: those of float32 numbers do not underflow."""
    total = torch.zeros((), dtype=torch.float64, device=tensor.device)
    entries = tensor.reshape(-1)
    for part in torch.split(entries, CACHED) if entries.device.type == "cpu" else (entries,):
        wide = part.double()
        total += torch.dot(wide, wide)
    return total


def norm(tensors: Iterable[Tensor]) -> Tensor:
    """The Euclidean norm of all entries of ``tensors`` together, ``()`` float64. Squares of float64 numbers below 1e-154
    count as zero."""
    return sum((squared(tensor) for tensor in tensors), torch.zeros((), dtype=torch.float64)).sqrt()
