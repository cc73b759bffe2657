"""Numbers as whole steps whose sum never wraps around, packed into as few bits as the number of clients allows.

A value is rounded to ``bits`` bits of a scale that the clients agree on for each block of values, so one client's rounding
error is at most half a step, ``scale / (2 ** (bits - 1) - 1) / 2``, and a sum is off by at most that for each client (and by
what float64 rounds). Sums of ``clients`` steps need ``ceil(log2(clients))`` more bits: the modulus is
two to the power of both together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rasura.core.errors import InputError

CHECKS = 9
"""Extra values behind the client's own: a 1, whose sum counts the clients, and eight zeros, whose sum must be zero."""

MOST_VALUES = 1 << 32


@dataclass(frozen=True)
class Encoding:
    """``values`` numbers of ``bits`` bits each, for sums of up to ``clients``."""

    values: int
    bits: int
    clients: int

    def __post_init__(self) -> None:
        if not 1 <= self.values <= MOST_VALUES or self.bits < 2 or self.clients < 1:
            raise InputError(f"{self.values} values of {self.bits} bits; expected 1 to {MOST_VALUES} of at least 2 bits")
        if self.modulus_bits > 32:
            carry = self.modulus_bits - self.bits
            raise InputError(f"{self.bits} bits and {carry} for the sum of {self.clients} clients; at most 32 together")

    @property
    def modulus_bits(self) -> int:
        """Bits of a sum."""
        return self.bits + (self.clients - 1).bit_length()

    @property
    def half(self) -> int:
        """Steps on either side of zero."""
        return int((1 << (self.bits - 1)) - 1)

    @property
    def packed_bytes(self) -> int:
        """Bytes of a packed vector, with its checks."""
        return packed_bytes(self.values + CHECKS, self.modulus_bits)


@dataclass(frozen=True)
class Blocks:
    """``lengths`` of consecutive blocks, and the ``exponents`` of their scales, which are powers of two: 2 ** exponent is
    the largest absolute value that is not beyond it."""

    lengths: tuple[int, ...]
    exponents: tuple[int, ...]

    def __post_init__(self) -> None:
        right = len(self.lengths) == len(self.exponents) and all(n >= 0 for n in self.lengths)
        if not right or not all(-120 <= e <= 60 for e in self.exponents):
            raise InputError("blocks need a length and an exponent from -120 to 60 each")

    @property
    def values(self) -> int:
        """All values together."""
        return sum(self.lengths)

    @property
    def scales(self) -> NDArray[np.float64]:
        """The largest absolute value of each entry ``(values,)`` that is not beyond its scale."""
        found: NDArray[np.float64] = np.repeat([2.0**e for e in self.exponents], self.lengths)
        return found


def encoded(
    values: NDArray[np.float32] | NDArray[np.float64], blocks: Blocks, encoding: Encoding, *, clip: bool = False
) -> tuple[NDArray[np.int32], int]:
    """``values`` ``(n,)`` in whole steps, and how many of them lay beyond their block's scale.

    Raises ``InputError`` for values that are not finite numbers, and for values beyond the scale unless ``clip``, which cuts
    them to the scale: they are never wrapped.
    """
    if values.shape != (blocks.values,) or blocks.values != encoding.values:
        raise InputError(f"{values.shape} values for blocks of {blocks.values}; expected {encoding.values}")
    steps, beyond, start = np.empty(encoding.values, np.int32), 0, 0
    for length, exponent in zip(blocks.lengths, blocks.exponents):
        part = values[start : start + length].astype(np.float64)
        if not np.isfinite(part).all():
            raise InputError("some values are not finite numbers; nothing is sent")
        part *= encoding.half * 2.0**-exponent
        np.rint(part, out=part)
        beyond += int(np.count_nonzero(np.abs(part) > encoding.half))
        steps[start : start + length] = np.clip(part, -encoding.half, encoding.half, out=part)
        start += length
    if beyond and not clip:
        raise InputError(f"{beyond} values are larger than the agreed scale of their block; nothing is sent")
    return steps, beyond


def decoded(sums: NDArray[np.int64], blocks: Blocks, encoding: Encoding) -> NDArray[np.float64]:
    """The ``sums`` ``(n,)`` of steps in the units of the values."""
    if sums.shape != (blocks.values,):
        raise InputError(f"{sums.shape} sums for blocks of {blocks.values} values")
    factors = [2.0**e / encoding.half for e in blocks.exponents]
    found: NDArray[np.float64] = sums * np.repeat(factors, blocks.lengths)
    return found


def packed_bytes(count: int, bits: int) -> int:
    """Bytes of ``count`` numbers of ``bits`` bits."""
    whole, rest = divmod(bits, 8)
    return count * whole + rest * -(-count // 8)


def packed(numbers: NDArray[np.uint32], bits: int) -> bytes:
    """The low ``bits`` of each number ``(n,)``: whole bytes first, byte by byte, then the bits that are left, bit by bit."""
    whole, rest = divmod(bits, 8)
    parts = [(numbers >> np.uint32(8 * k)).astype(np.uint8).tobytes() for k in range(whole)]
    for k in range(8 * whole, 8 * whole + rest):
        parts.append(np.packbits((numbers >> np.uint32(k)) & np.uint32(1) != 0).tobytes())
    return b"".join(parts)


def unpacked(data: bytes, count: int, bits: int) -> NDArray[np.uint32]:
    """What ``packed`` was given. Raises ``InputError`` for another number of bytes, before anything is allocated."""
    if len(data) != packed_bytes(count, bits):
        raise InputError(f"a vector of {len(data)} bytes; expected {packed_bytes(count, bits)}")
    found = np.zeros(count, np.uint32)
    whole, rest = divmod(bits, 8)
    for k in range(whole):
        found |= np.frombuffer(data, np.uint8, count, k * count).astype(np.uint32) << np.uint32(8 * k)
    each = -(-count // 8)
    for k in range(rest):
        plane = np.frombuffer(data, np.uint8, each, whole * count + k * each)
        found |= np.unpackbits(plane, count=count).astype(np.uint32) << np.uint32(8 * whole + k)
    return found
