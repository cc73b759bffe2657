"""The global generators of PyTorch, NumPy and Python, restarted for a while: data sets draw from them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rasura.core.rng import Randomness, integers, seeded

WORDS = 624
"""Words of 32 bits in the state of a Mersenne Twister, which all three use on the CPU."""


def new_seed(rng: Randomness) -> bytes:
    """A seed of 256 bits for ``restarted``."""
    return bytes(integers(256, (32,), rng).tolist())


@contextmanager
def restarted(seed: bytes) -> Iterator[None]:
    """Inside the block, the global generators of PyTorch, NumPy and Python start from ``seed``, and nothing else decides on
    what they draw. Afterwards they are as they were. Those on the CPU get whole states: PyTorch keeps 32 bits of a seed,
    which can be tried out. Generators that other code made are not touched."""
    drawn = hashlib.shake_256(seed).digest(3 * 4 * WORDS + 8)
    own, numpys, pythons = np.frombuffer(drawn[:-8], np.uint32).reshape(3, WORDS)
    before = np.random.get_state(), random.getstate()  # noqa: NPY002  # other code draws from it
    with seeded(int.from_bytes(drawn[-8:], "big") >> 1):
        torch.set_rng_state(_state(own))
        np.random.set_state(("MT19937", numpys, WORDS, 0, 0.0))  # noqa: NPY002
        random.setstate((3, (*pythons.tolist(), WORDS), None))
        try:
            yield
        finally:
            np.random.set_state(before[0])  # noqa: NPY002
            random.setstate(before[1])


def _state(words: NDArray[np.uint32]) -> Tensor:
    """The state of PyTorch's CPU generator with these ``words``."""
    state = torch.Generator().manual_seed(0).get_state()
    held = state.view(torch.int64)
    # The first words that the seed 0 gives: PyTorch does not document where they stand.
    if held[3:6].tolist() != [0, 1, 1812433255]:
        raise RuntimeError(
            f"PyTorch {torch.__version__} keeps the state of its generator in another way; use an earlier one"
        )
    held[3 : 3 + WORDS] = torch.from_numpy(words.astype(np.int64))
    return state
