"""Shamir's secret sharing of 32 bytes (Shamir 1979): any ``threshold`` shares give the secret, fewer say nothing about it.

Python's whole numbers are not computed in constant time; a process on the same machine is not among the adversaries.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from rasura.core.errors import InputError

PRIME = (1 << 256) + 297
"""The smallest prime above every number of 32 bytes."""

SHARE = 33
"""Bytes of a share."""


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """A share of 32 ``secret`` bytes for each holder: the values at ``holder + 1`` of a random polynomial of degree
    ``threshold - 1`` whose value at 0 is the secret. Raises ``InputError`` if the holders could not open it."""
    if len(secret) != 32 or len(set(holders)) != len(holders) or any(h < 0 for h in holders):
        raise InputError(f"a secret of {len(secret)} bytes for {len(holders)} holders; expected 32, each holder once")
    if not 1 <= threshold <= len(holders):
        raise InputError(f"{threshold} of {len(holders)} shares should open the secret; expected 1 to {len(holders)}")
    factors = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    found = {}
    for holder in holders:
        value, x = 0, holder + 1
        for factor in factors:
            value = (value + factor) * x % PRIME
        found[holder] = ((value + int.from_bytes(secret, "big")) % PRIME).to_bytes(SHARE, "big")
    return found


def joined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, of the first ``threshold`` of the holders' ``shares``. Raises ``InputError`` for fewer, for bytes that are
    not a number below the prime, and where the result has more than 32 bytes (a share was wrong).

    A wrong share may also give a wrong secret: compare the result with something that is known of it.
    """
    if threshold < 1 or len(shares) < threshold:
        raise InputError(f"{len(shares)} shares; at least {threshold} are needed to open a secret")
    points = [(holder + 1, int.from_bytes(shares[holder], "big")) for holder in sorted(shares)[:threshold]]
    if any(len(s) != SHARE for s in shares.values()) or any(not 0 <= y < PRIME for _, y in points):
        raise InputError("a share is not a number below the prime")
    total = 0
    for x, y in points:
        above, below = 1, 1
        for other, _ in points:
            if other != x:
                above, below = above * other % PRIME, below * (other - x) % PRIME
        total = (total + y * above * pow(below, -1, PRIME)) % PRIME
    if total >> 256:
        raise InputError("the shares do not belong together")
    return total.to_bytes(32, "big")
