"""Randomness: one seed makes named, independent generators; secrets come from the operating system."""

from __future__ import annotations

import hashlib
import secrets

import torch


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
