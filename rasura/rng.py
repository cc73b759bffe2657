"""Randomness: one seed makes named, independent generators; secrets and real noise come from the operating system."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_AT_ONCE = 1 << 20
"""Numbers that are drawn from the operating system at once."""


class SecretGenerator(torch.Generator):
    """A generator whose ``uniform`` and ``normal`` below come from the operating system, draw by draw; nothing repeats them.

    Where torch itself draws from it (masks of dropout, permutations), it is a generator that the operating system seeded.
    """


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream called ``names``; the same on every machine and in every process."""
    label = "\x1f".join([str(seed), *map(str, names)]).encode()
    return int.from_bytes(hashlib.sha256(label).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for the stream called ``names``. For experiments only: whoever knows the seed can replay it."""
    return torch.Generator().manual_seed(derive(seed, *names))


def secret_generator() -> SecretGenerator:
    """A CPU generator seeded by the operating system. For permutations and noise of a real deployment use ``uniform`` and
    ``normal`` with it, or ``secrets``: what torch draws from it is not cryptographic."""
    made = SecretGenerator()
    made.manual_seed(secrets.randbits(63))
    return made


def child(rng: torch.Generator) -> int:
    """A fresh seed drawn from ``rng``, to start an independent stream."""
    return int(torch.randint(0, 2**62, (1,), generator=rng, dtype=torch.int64))


def uniform(shape: Sequence[int], rng: torch.Generator) -> Tensor:
    """Numbers between 0 and 1, both left out, float64; from the operating system where ``rng`` is a ``SecretGenerator``."""
    if isinstance(rng, SecretGenerator):
        return torch.from_numpy(_secret(math.prod(shape))).reshape(tuple(shape))
    # 52 bits and half a step fit a float64: never 0, never 1.
    return (torch.randint(0, 1 << 52, tuple(shape), generator=rng).double() + 0.5) * 2.0**-52


def laplace(count: int, rng: torch.Generator) -> Tensor:
    """``count`` draws from the Laplace distribution of scale 1, float64; randomness as in ``uniform``."""
    centred = uniform((count,), rng) - 0.5
    return -centred.sign() * torch.log1p(-2 * centred.abs())


def permutation(count: int, rng: torch.Generator) -> Tensor:
    """A random order of ``0 .. count - 1``, int64; from the operating system where ``rng`` is a ``SecretGenerator``."""
    if not isinstance(rng, SecretGenerator):
        return torch.randperm(count, generator=rng)
    order = list(range(count))
    secrets.SystemRandom().shuffle(order)
    return torch.tensor(order, dtype=torch.int64)


def normal(shape: Sequence[int], rng: torch.Generator, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers; from the operating system, by Box and Muller, where ``rng`` is a ``SecretGenerator``.

    They are drawn on the CPU, so that a seed gives the same noise on every device. What the rounding of a floating-point
    sum tells (Mironov 2012) is not addressed.
    """
    if not isinstance(rng, SecretGenerator):
        return torch.randn(tuple(shape), generator=rng, dtype=dtype)
    out = torch.empty(math.prod(shape), dtype=dtype)
    for start in range(0, len(out), _AT_ONCE):
        part = out[start : start + _AT_ONCE]
        half = (len(part) + 1) // 2
        radius, angle = np.sqrt(-2 * np.log(_secret(half))), 2 * math.pi * _secret(half)
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        part.copy_(torch.from_numpy(both[: len(part)]))
    return out.reshape(tuple(shape))


def _secret(count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    bits = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(12)
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def gamma(shape: Tensor, rng: torch.Generator) -> Tensor:
    """A draw of the gamma distribution at scale 1 for each entry of ``shape``, float64 (Marsaglia, Tsang 2000)."""
    # Below 1 their method starts from shape + 1.
    small = shape < 1
    boost = torch.where(small, uniform(shape.shape, rng) ** (1 / shape), 1.0) if bool(small.any()) else 1.0
    d = shape + small.double() - 1 / 3
    out = torch.empty_like(shape)
    missing = torch.arange(len(shape))
    while len(missing):
        x, scale = normal((len(missing),), rng), d[missing]
        v = (1 + x / (9 * scale).sqrt()) ** 3
        limit = x * x / 2 + scale * (1 - v + v.clamp_min(1e-300).log())
        good = (v > 0) & (uniform((len(missing),), rng).log() < limit)
        out[missing[good]] = (scale * v)[good]
        missing = missing[~good]
    return out * boost
