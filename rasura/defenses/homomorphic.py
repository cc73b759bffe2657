"""Sealing numbers so that a server can add what it cannot read: packed BFV, and CKKS for comparison (TenSEAL).

BFV adds whole numbers exactly. A value is quantised to 16 bits of an agreed scale, and every slot of a ciphertext holds two
of them in lanes with room for the sum of all clients: a sealed value takes 7.5 bytes (up to 4 clients) or 8 (up to 64). CKKS
is what other frameworks use by default; its decoded results are never to be published as float64, since they tell of the key
(Li and Micciancio 2021).

Beside the values every ciphertext holds a 1 of its client, in a slot of its own: a sum says itself of how many clients it
is, and whoever opens it takes no other number.

Clients share the secret key; the server's context is public. One client who works with the server therefore opens
everything: secure aggregation or threshold keys are the answer where that matters.

Without torch, so that the processes which encrypt in parallel start fast.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from rasura.core.errors import InputError, MissingExtra
from rasura.core.files import read_limited, write_whole

Scheme = Literal["bfv", "ckks"]

BITS = 16
"""Bits of a quantised value."""

HALF = (1 << (BITS - 1)) - 1
"""Steps on either side of zero."""

LANES = 2
"""Values in a slot of a BFV ciphertext."""

LIMIT = 1 << 20
"""Bytes that a ciphertext or a context may have at most; what is longer is refused unread."""


@dataclass(frozen=True)
class Parameters:
    """Of a scheme: polynomial ``degree``, bits of the ``moduli``, the plain modulus (BFV) or the scale's bits (CKKS)."""

    scheme: Scheme
    degree: int
    moduli: tuple[int, ...]
    plain: int
    most: int
    """Clients whose sum fits."""

    @property
    def lane(self) -> int:
        """Bits of a lane: a value, and the carry of all clients."""
        return BITS + (self.most - 1).bit_length()

    @property
    def values(self) -> int:
        """Values of a ciphertext, which has one slot more for the count of clients."""
        return (self.degree - 1) * LANES if self.scheme == "bfv" else self.degree // 2 - 1

    def noise_budget(self, clients: int) -> float | None:
        """Bits that are left of BFV's noise budget in a sum of ``clients``; below zero the sum may be wrong. None for CKKS.

        Computed, since TenSEAL does not tell it. SEAL encrypts under both moduli and divides by the last one: what is left
        is the rounding of N coefficients times a ternary key, of variance ``(1 + 2 N / 3) / 12``. A coefficient is right
        while it stays below ``q / (2 t)``; ten standard deviations are counted, beyond which no coefficient of an update is
        expected. Held against sums that were doubled until they broke (``tests/test_homomorphic.py``).
        """
        if self.scheme != "bfv":
            return None
        spread = math.sqrt(clients * (1 + 2 * self.degree / 3) / 12)
        return self.moduli[0] - 1 - math.log2(self.plain) - math.log2(10 * spread)


# The plain moduli are the largest primes of 38 and 45 bits that are 1 modulo twice the degree, which packing needs.
CHOICES: dict[Scheme, tuple[Parameters, ...]] = {
    "bfv": (
        Parameters("bfv", 4096, (55, 54), 274877816833, 4),
        Parameters("bfv", 8192, (60, 60), 35184371613697, 64),
    ),
    "ckks": (Parameters("ckks", 8192, (60, 40, 40), 40, 64),),
}
"""By scheme, the smallest first. All keep 128 bits of security by the Homomorphic Encryption Standard (2018)."""


def parameters_for(clients: int, scheme: Scheme = "bfv") -> Parameters:
    """The smallest parameters under which ``clients`` sums stay exact. Raises ``InputError`` with the number that fits."""
    if scheme not in CHOICES:
        raise InputError(f"unknown scheme {scheme!r}; known: {', '.join(CHOICES)}")
    if clients < 1:
        raise InputError(f"sealing for {clients} clients; expected at least 1")
    for some in CHOICES[scheme]:
        if clients <= some.most:
            return some
    raise InputError(f"the noise budget of {scheme} fits {CHOICES[scheme][-1].most} clients, found {clients}")


def _tenseal() -> Any:
    try:
        import tenseal
    except ImportError:
        raise MissingExtra("sealing needs TenSEAL: pip install 'rasura[encryption]'") from None
    return tenseal


@dataclass(frozen=True)
class Context:
    """A scheme's parameters with keys. ``secret``: whether it can open; a server's must not. ``key``: which key pair it is
    of, sixteen hex digits. ``data``: TenSEAL's serialisation; never logged."""

    parameters: Parameters
    secret: bool
    key: str
    data: bytes

    def __repr__(self) -> str:
        return f"Context({self.parameters.scheme}, {'secret' if self.secret else 'public'}, key {self.key})"

    def public(self) -> Context:
        """The part that a server may hold."""
        context = _opened(self.data)
        context.make_context_public()
        return Context(self.parameters, False, self.key, _bytes(context, secret=False))

    def save(self, path: str | Path) -> None:
        """Write the context, whole or not at all; one that holds a secret key is readable by its owner alone from its first
        byte on. Raises ``InputError`` where a file of this name exists: keys are not overwritten."""
        about = f"{self.parameters.scheme} {self.parameters.most} {self.key}".encode()
        head = b"%s\n%s %s\n" % (MAGIC, about, _digest(about + self.data).encode())
        write_whole(path, head + self.data, private=self.secret, replace=False)

    @classmethod
    def load(cls, path: str | Path) -> Context:
        """Read a file of ``save``. Raises ``InputError`` for another file, a damaged one, and a secret one that others can
        read."""
        found, others = read_limited(path, "file of keys", LIMIT)
        _tenseal()  # Without it nothing is wrong with the file.
        try:
            magic, about, data = found.split(b"\n", 2)
            told, digest = about.rsplit(b" ", 1)
            # TenSEAL gets only what was written: its parser trusts what it is given.
            if magic != MAGIC or digest.decode() != _digest(told + data):
                raise ValueError
            scheme, most, key = told.decode().split()
            chosen = parameters_for(int(most), scheme)  # type: ignore[arg-type]  # checked there
            secret = bool(_opened(data).is_private())
        except (ValueError, RuntimeError):
            raise InputError(f"{path} holds no keys of Rasura, or damaged ones; make some with rasura keys") from None
        if secret and others:
            raise InputError(f"{path} holds a secret key that others can read; chmod 600 it")
        return cls(chosen, secret, key, data)


MAGIC = b"rasura keys 2"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_keys(clients: int, scheme: Scheme = "bfv") -> Context:
    """A fresh key pair, by TenSEAL from the operating system's randomness, for sums of up to ``clients``."""
    chosen, ts = parameters_for(clients, scheme), _tenseal()
    kind, plain = ts.SCHEME_TYPE.CKKS, {}
    if scheme == "bfv":
        kind, plain = ts.SCHEME_TYPE.BFV, {"plain_modulus": chosen.plain}
    context = ts.context(kind, chosen.degree, coeff_mod_bit_sizes=list(chosen.moduli), n_threads=1, **plain)
    if scheme == "ckks":
        context.global_scale = 2.0**chosen.plain
    data = _bytes(context, secret=True)
    key = _digest(data)[:16]
    return Context(chosen, True, key, data)


def _bytes(context: Any, secret: bool) -> bytes:
    found: bytes = context.serialize(
        save_public_key=True, save_secret_key=secret, save_galois_keys=False, save_relin_keys=False
    )
    return found


def _opened(data: bytes) -> Any:
    return _tenseal().context_from(data, 1)


def server_context(context: Context) -> Context:
    """``context``, for a server. Raises ``InputError`` where it holds a secret key."""
    if context.secret or _opened(context.data).is_private():
        raise InputError(
            "the server's context holds a secret key, so the server could open every update; give it the public one"
        )
    return context


@dataclass(frozen=True)
class Sealed:
    """Ciphertexts of one sequence of values, and of how many ``clients`` they are said to be the sum."""

    ciphertexts: tuple[bytes, ...]
    clients: int = 1


@dataclass(frozen=True)
class Quantised:
    """Values in steps: ``steps`` int64, and how many values lay beyond the agreed scale and were cut to it."""

    steps: NDArray[np.int64]
    beyond: int


def quantise(values: NDArray[np.float64], scale: NDArray[np.float64]) -> Quantised:
    """``values`` ``(n,)`` in steps of ``scale / HALF``, ``scale`` ``(n,)`` being the largest size that was agreed for each.

    Raises ``InputError`` for values that are no numbers, and for scales that are not above 0.
    """
    if not np.isfinite(values).all():
        raise InputError(f"{int((~np.isfinite(values)).sum())} values are no finite numbers; nothing is sealed")
    if not (scale > 0).all():
        raise InputError("a scale is not above 0; expected the largest size that a value may have")
    steps = np.rint(values / scale * HALF)
    beyond = int((np.abs(steps) > HALF).sum())
    return Quantised(np.clip(steps, -HALF, HALF).astype(np.int64), beyond)


def seal(
    values: NDArray[np.float64], scale: NDArray[np.float64], context: Context, processes: int = 1
) -> tuple[Sealed, int]:
    """One client's ``values`` ``(n,)``, sealed, and how many of them lay beyond ``scale`` ``(n,)`` and were cut to it.

    ``processes``: how many encrypt in parallel; TenSEAL itself uses one core.
    """
    found = quantise(values, scale)
    width = context.parameters.values
    parts = [found.steps[start : start + width] for start in range(0, len(found.steps), width)]
    if processes < 2 or len(parts) < 2 * processes:
        return Sealed(tuple(_encrypted(parts, context))), found.beyond
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        done = pool.map(_encrypted, _shares(parts, processes), [context] * processes)
        return Sealed(tuple(c for share in done for c in share)), found.beyond


def _shares(parts: Sequence[NDArray[np.int64]], count: int) -> list[list[NDArray[np.int64]]]:
    size = -(-len(parts) // count)
    return [list(parts[k : k + size]) for k in range(0, count * size, size)]


def _encrypted(parts: Sequence[NDArray[np.int64]], context: Context) -> list[bytes]:
    ts, opened, p = _tenseal(), _opened(context.data), context.parameters
    out = []
    for part in parts:
        if p.scheme == "bfv":
            lanes = np.zeros((LANES, p.degree - 1), dtype=np.int64)
            # An offset makes every value positive: the carry of a sum stays in its lane.
            lanes.flat[: len(part)] = part + HALF
            packed: NDArray[np.int64] = sum(lanes[k] << (p.lane * k) for k in range(LANES))  # type: ignore[assignment]
            out.append(ts.bfv_vector(opened, [1, *packed.tolist()]).serialize())
        else:
            out.append(ts.ckks_vector(opened, [1.0, *part.astype(float).tolist()]).serialize())
    return out


def _vector(data: bytes, opened: Any, p: Parameters, number: int) -> Any:
    if not 0 < len(data) <= LIMIT:
        raise InputError(f"ciphertext {number} has {len(data)} bytes; expected 1 to {LIMIT}")
    try:
        found = (_tenseal().bfv_vector_from if p.scheme == "bfv" else _tenseal().ckks_vector_from)(opened, data)
    except (ValueError, RuntimeError) as error:
        raise InputError(f"ciphertext {number} cannot be read ({error})") from None
    # TenSEAL adds a vector of one value to every value of another, and reads some bytes that are none as no values.
    least, most = (p.degree, p.degree) if p.scheme == "bfv" else (2, p.degree // 2)
    if not least <= found.size() <= most:
        raise InputError(f"ciphertext {number} holds {found.size()} slots; expected {least} to {most}")
    return found


def added(sealed: Sequence[Sealed], context: Context) -> Sealed:
    """The sum of ``sealed`` values, each of one client or of several, by a server's public ``context``.

    Raises ``InputError`` for a context with a secret key, more clients in all than fit, different counts of ciphertexts, and
    ciphertexts that are malformed or of other parameters.
    """
    opened, p = _opened(server_context(context).data), context.parameters
    clients = sum(_fits(s.clients, p) for s in sealed)
    if not 1 <= clients <= p.most:
        raise InputError(f"{clients} clients' values are to be added; these keys fit 1 to {p.most}")
    counts = sorted({len(s.ciphertexts) for s in sealed})
    if len(counts) != 1:
        raise InputError(f"clients sealed different counts of ciphertexts: {counts}")
    out = []
    for number, column in enumerate(zip(*(s.ciphertexts for s in sealed))):
        total = _vector(column[0], opened, p, number)
        for data in column[1:]:
            other = _vector(data, opened, p, number)
            try:
                total.add_(other)
            except (ValueError, RuntimeError) as error:
                raise InputError(f"ciphertext {number} does not fit the others ({error})") from None
        out.append(total.serialize())
    return Sealed(tuple(out), clients)


def _fits(clients: int, p: Parameters) -> int:
    if not 1 <= clients <= p.most:
        raise InputError(f"a sum of {clients} clients; these keys fit 1 to {p.most}")
    return clients


def opened_sum(sealed: Sealed, scale: NDArray[np.float64], context: Context) -> NDArray[np.float64]:
    """The sum ``(n,)`` of the values of ``sealed.clients`` clients, for who has the secret key.

    Off by at most ``clients * scale / HALF / 2``, the quantisation step; BFV adds nothing to that. Raises ``InputError``
    where a ciphertext holds the values of another number of clients than was said, of more than the keys fit, or values that
    no clients can have (it was made under another key, or changed).
    """
    if not context.secret:
        raise InputError("this context is public, it cannot open anything; pass the clients' own")
    p, opened = context.parameters, _opened(context.data)
    clients = _fits(sealed.clients, p)
    rows = []
    for number, data in enumerate(sealed.ciphertexts):
        plain = np.asarray(_vector(data, opened, p, number).decrypt(opened.secret_key()))
        slots = plain.astype(np.int64) % p.plain if p.scheme == "bfv" else np.rint(plain)
        if not slots[0] == clients:
            raise InputError(f"ciphertext {number} is the sum of {slots[0]:.0f} clients, not of {clients} as was said")
        if p.scheme == "bfv":
            lanes = np.concatenate([slots[1:] & ((1 << p.lane) - 1), slots[1:] >> p.lane])
            if int(lanes.max()) > 2 * HALF * clients:
                raise InputError(f"ciphertext {number} holds values that {clients} clients cannot have; it was changed")
            rows.append(lanes - clients * HALF)
        else:
            rows.append(slots[1:])
    found = np.concatenate(rows)[: len(scale)] if rows else np.empty(0)
    if len(found) != len(scale):
        raise InputError(f"{len(found)} values were sealed, {len(scale)} are expected")
    return found.astype(np.float64) * scale / HALF
