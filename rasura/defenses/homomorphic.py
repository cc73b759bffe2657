"""Sealing numbers so that a server can add them without reading them: packed BFV, and CKKS for comparison (TenSEAL).

BFV adds whole numbers exactly. A value is quantised to 16 bits of an agreed scale, and every slot of a ciphertext holds two
of them in lanes with room for the sum of all clients: a sealed value takes 7.5 bytes (up to 4 clients) or 8 (up to 64). CKKS
is the default of other frameworks; its decoded results must never be published as float64, since they leak the key (Li and
Micciancio 2021).

Besides the values, every ciphertext holds a 1 in a separate slot. So a sum states the number of its clients, and the
receiver accepts no other number.

Keys are in ``homomorphic_keys``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rasura.core.errors import InputError
from rasura.defenses.homomorphic_keys import (
    BITS,
    LANES,
    LIMIT,
    Context,
    Parameters,
    load_tenseal,
    opened,
    server_context,
)

HALF = (1 << (BITS - 1)) - 1
"""Steps on either side of zero."""


@dataclass(frozen=True)
class Sealed:
    """Ciphertexts of one sequence of values, and the claimed number of ``clients`` in the sum."""

    ciphertexts: tuple[bytes, ...]
    clients: int = 1


@dataclass(frozen=True)
class Quantised:
    """Quantised values: ``steps`` int64, and the number of values that exceeded the agreed scale and were clipped to it."""

    steps: NDArray[np.int64]
    beyond: int


def quantise(values: NDArray[np.float64], scale: NDArray[np.float64]) -> Quantised:
    """``values`` ``(n,)`` in steps of ``scale / HALF``, where ``scale`` ``(n,)`` is the agreed maximum absolute value of
    each. Raises ``InputError`` for values that are not finite numbers, and for scales that are not finite and above
    0.
    """
    if not np.isfinite(values).all():
        raise InputError(f"{int((~np.isfinite(values)).sum())} values are not finite numbers; nothing is sealed")
    steps = values / _usable(scale)
    steps *= HALF
    np.rint(steps, out=steps)
    beyond = int(np.count_nonzero(np.abs(steps) > HALF))
    return Quantised(steps.clip(-HALF, HALF, out=steps).astype(np.int64), beyond)


def _usable(scale: NDArray[np.float64]) -> NDArray[np.float64]:
    if not (np.isfinite(scale) & (scale > 0)).all():
        raise InputError("a scale is not finite and above 0; expected the maximum absolute value of each entry")
    return scale


def seal(values: NDArray[np.float64], scale: NDArray[np.float64], context: Context) -> tuple[Sealed, int]:
    """One client's ``values`` ``(n,)``, sealed, and how many of them exceeded ``scale`` ``(n,)`` and were clipped to it."""
    found = quantise(values, scale)
    width = context.parameters.values
    parts = [found.steps[start : start + width] for start in range(0, len(found.steps), width)]
    return Sealed(tuple(_encrypted(parts, context))), found.beyond


def _encrypted(parts: Sequence[NDArray[np.int64]], context: Context) -> list[bytes]:
    ts, within, p = load_tenseal(), opened(context), context.parameters
    out = []
    for part in parts:
        if p.scheme == "bfv":
            lanes = np.zeros((LANES, p.degree - 1), dtype=np.int64)
            # An offset makes every value positive: the carry of a sum stays in its lane.
            lanes.flat[: len(part)] = part + HALF
            packed: NDArray[np.int64] = sum(lanes[k] << (p.lane * k) for k in range(LANES))  # type: ignore[assignment]
            out.append(ts.bfv_vector(within, [1, *packed.tolist()]).serialize())
        else:
            out.append(ts.ckks_vector(within, [1.0, *part.astype(float).tolist()]).serialize())
    return out


def _vector(data: bytes, within: Any, p: Parameters, number: int) -> Any:
    if not 0 < len(data) <= LIMIT:
        raise InputError(f"ciphertext {number} has {len(data)} bytes; expected 1 to {LIMIT}")
    try:
        found = (load_tenseal().bfv_vector_from if p.scheme == "bfv" else load_tenseal().ckks_vector_from)(within, data)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"ciphertext {number} cannot be read ({error})") from None
    # TenSEAL adds a vector of one value to every value of another, and reads some bytes that are none as no values.
    smallest, largest = (p.degree, p.degree) if p.scheme == "bfv" else (2, p.degree // 2)
    if not smallest <= found.size() <= largest:
        raise InputError(f"ciphertext {number} holds {found.size()} slots; expected {smallest} to {largest}")
    return found


def added(sealed: Sequence[Sealed], context: Context) -> Sealed:
    """The sum of ``sealed`` values, each of one client or of several, by a server's public ``context``.

    Raises ``InputError`` for a context with a secret key, more clients than the keys fit, different numbers of ciphertexts,
    and ciphertexts that are malformed or have other parameters.
    """
    within, p = opened(server_context(context)), context.parameters
    clients = sum(_fits(s.clients, p) for s in sealed)
    if not 1 <= clients <= p.max_clients:
        raise InputError(f"the values of {clients} clients are to be added, but these keys fit 1 to {p.max_clients}")
    counts = sorted({len(s.ciphertexts) for s in sealed})
    if len(counts) != 1:
        raise InputError(f"clients sealed different numbers of ciphertexts: {counts}; expected the same number from each")
    out = []
    for number, column in enumerate(zip(*(s.ciphertexts for s in sealed))):
        total = _vector(column[0], within, p, number)
        for data in column[1:]:
            other = _vector(data, within, p, number)
            try:
                total.add_(other)
            except (ValueError, RuntimeError) as error:
                raise InputError(f"ciphertext {number} does not fit the others ({error})") from None
        out.append(total.serialize())
    return Sealed(tuple(out), clients)


def _fits(clients: int, p: Parameters) -> int:
    if not 1 <= clients <= p.max_clients:
        raise InputError(f"a sum of {clients} clients, but these keys fit 1 to {p.max_clients}")
    return clients


def opened_sum(sealed: Sealed, scale: NDArray[np.float64], context: Context) -> NDArray[np.float64]:
    """The sum ``(n,)`` of the values of ``sealed.clients`` clients. Needs the secret key.

    Off by at most ``clients * scale / HALF / 2``, the quantisation step; BFV adds nothing to that. Raises ``InputError`` if
    a ciphertext holds the values of another number of clients than claimed, of more than the keys fit, or impossible values
    (it was made under another key, or changed).
    """
    if not context.secret:
        raise InputError("this context is public and cannot decrypt anything; pass the clients' secret one")
    p, within = context.parameters, opened(context)
    clients = _fits(sealed.clients, p)
    rows = []
    for number, data in enumerate(sealed.ciphertexts):
        plain = np.asarray(_vector(data, within, p, number).decrypt(within.secret_key()))
        slots = plain.astype(np.int64) % p.plain if p.scheme == "bfv" else np.rint(plain)
        if not slots[0] == clients:
            raise InputError(f"ciphertext {number} is the sum of {slots[0]:.0f} clients, not of {clients} as claimed")
        if p.scheme == "bfv":
            lanes = np.concatenate([slots[1:] & ((1 << p.lane) - 1), slots[1:] >> p.lane])
            steps = lanes - clients * HALF
        else:
            steps = slots[1:]
        if not np.abs(steps).max() <= HALF * clients:  # NaN is not
            raise InputError(f"ciphertext {number} holds values that are impossible for {clients} clients; it was changed")
        rows.append(steps)
    found = np.concatenate(rows)[: len(scale)] if rows else np.empty(0)
    if len(found) != len(scale):
        raise InputError(f"{len(found)} values were sealed; expected {len(scale)}")
    total = found.astype(np.float64)
    total *= _usable(scale)
    total /= HALF
    return total
