"""Adding masks to vectors modulo a power of two, a piece at a time, so that a mask is never held as a whole."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rasura.core.ciphers import KeyStream


def add_masks(vector: NDArray[np.uint32], keys: Iterable[tuple[bytes, int]]) -> None:
    """Add to ``vector`` ``(n,)``, in place and modulo 2 ** 32, the key stream of each key, times its sign."""
    streams = [(KeyStream(key), sign) for key, sign in keys]
    for start in range(0, len(vector), KeyStream.AT_ONCE):
        part = vector[start : start + KeyStream.AT_ONCE]
        for stream, sign in streams:
            if sign > 0:
                part += stream.words(len(part))
            else:
                part -= stream.words(len(part))
