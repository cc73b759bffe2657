"""Randomness: one seed makes named, independent generators; secrets come from the operating system."""

from __future__ import annotations

import hashlib
import os
import secrets

import numpy as np
import torch
from torch import Tensor


def derive(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream called ``names``; the same on every machine and in every process."""
    label = "\x1f".join([str(seed), *map(str, names)]).encode()
    return int.from_bytes(hashlib.sha256(label).digest()[:8], "big") >> 1


def generator(seed: int, *names: str | int) -> torch.Generator:
    """A CPU generator for the stream called ``names``. For experiments only: whoever knows the seed can replay it."""
    return torch.Generator().manual_seed(derive(seed, *names))


def secret_generator() -> torch.Generator:
    """A CPU generator seeded by the operating system. For permutations and noise of a real deployment use
    ``secrets`` directly where the quality of every draw matters: torch's generator is not cryptographic."""
    return torch.Generator().manual_seed(secrets.randbits(63))


def child(rng: torch.Generator) -> int:
    """A fresh seed drawn from ``rng``, to start an independent stream."""
    return int(torch.randint(0, 2**62, (1,), generator=rng, dtype=torch.int64))


def uniform(count: int, rng: torch.Generator | None) -> Tensor:
    """``count`` draws from the open interval (0, 1), float64: from ``rng``, or from the operating system if it is None."""
    if rng is not None:
        bits = torch.randint(0, 1 << 53, (count,), generator=rng)
    else:
        bits = torch.from_numpy((np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(11)).astype(np.int64))
    return (bits.double() + 0.5) * 2.0**-53


def laplace(count: int, rng: torch.Generator | None) -> Tensor:
    """``count`` draws from the Laplace distribution of scale 1, float64; randomness as in ``uniform``."""
    centred = uniform(count, rng) - 0.5
    return -centred.sign() * torch.log1p(-2 * centred.abs())


def permutation(count: int, rng: torch.Generator | None) -> Tensor:
    """A random order of ``0 .. count - 1``, int64; randomness as in ``uniform``."""
    if rng is not None:
        return torch.randperm(count, generator=rng)
    order = list(range(count))
    secrets.SystemRandom().shuffle(order)
    return torch.tensor(order, dtype=torch.int64)
