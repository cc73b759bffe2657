"""Keys for homomorphic sealing: a scheme's parameters, key pairs, and their files.

Clients share the secret key; the server's context is public. A single client who colludes with the server can therefore
decrypt everything. Where that matters, use secure aggregation or threshold keys.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from rasura.core.errors import InputError, MissingExtra
from rasura.core.files import read_limited, write_new, write_whole

Scheme = Literal["bfv", "ckks"]


BITS = 16
"""Bits of a quantised value."""

LANES = 2
"""Values in a slot of a BFV ciphertext."""

LIMIT = 1 << 20
"""Maximum bytes of a ciphertext or a context; longer ones are refused unread."""


@dataclass(frozen=True)
class Parameters:
    """Parameters of a scheme: polynomial ``degree``, bits of the ``moduli``, the plain modulus (BFV) or the scale's bits
    (CKKS)."""

    scheme: Scheme
    degree: int
    moduli: tuple[int, ...]
    plain: int
    max_clients: int
    """The maximum number of clients in a sum."""

    @property
    def lane(self) -> int:
        """Bits of a lane: a value, and the carry of all clients."""
        return BITS + (self.max_clients - 1).bit_length()

    @property
    def values(self) -> int:
        """Number of values in a ciphertext, which has one more slot for the count of clients."""
        return (self.degree - 1) * LANES if self.scheme == "bfv" else self.degree // 2 - 1

    def noise_budget(self, clients: int) -> float | None:
        """Remaining bits of BFV's noise budget in a sum of ``clients``; below zero the sum may be wrong. None for CKKS.

        It is computed here, since TenSEAL does not report it. SEAL encrypts under both moduli and divides by the last one,
        which leaves the rounding of N coefficients times a ternary key, of variance ``(1 + 2 N / 3) / 12``. A coefficient is
        right while it stays below ``q / (2 t)``; ten standard deviations are counted, beyond which no coefficient of an
        update is expected. Verified with sums that were doubled until they failed (``tests/test_homomorphic.py``).
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
    """The smallest parameters with which sums of ``clients`` clients stay exact. Raises ``InputError`` with the number that
    fits."""
    if scheme not in CHOICES:
        raise InputError(f"unknown scheme {scheme!r}; known: {', '.join(CHOICES)}")
    if clients < 1:
        raise InputError(f"sealing for {clients} clients; expected at least 1")
    for some in CHOICES[scheme]:
        if clients <= some.max_clients:
            return some
    raise InputError(
        f"the noise budget of {scheme} fits at most {CHOICES[scheme][-1].max_clients} clients, but {clients} were requested"
    )


def load_tenseal() -> Any:
    """The module ``tenseal``. Raises ``MissingExtra`` without it."""
    try:
        import tenseal
    except ImportError:
        raise MissingExtra("sealing needs TenSEAL: pip install 'rasura[encryption]'") from None
    return tenseal


@dataclass(frozen=True)
class Context:
    """A scheme's parameters with keys. ``secret``: whether it can decrypt; a server's must not. ``key``: the id of the key
    pair, sixteen hex digits. ``data``: TenSEAL's serialisation; never logged."""

    parameters: Parameters
    secret: bool
    key: str
    data: bytes

    def __repr__(self) -> str:
        return f"Context({self.parameters.scheme}, {'secret' if self.secret else 'public'}, key {self.key})"

    def public(self) -> Context:
        """The part that a server may hold."""
        context = opened_context(self.data)
        context.make_context_public()
        return Context(self.parameters, False, self.key, _bytes(context, secret=False))

    def save(self, path: str | Path) -> None:
        """Write the context, completely or not at all. Only the owner can read a file with a secret key, from its first byte
        on. Raises ``InputError`` if a file of this name exists: keys are not overwritten."""
        write_whole(path, self._file(), private=self.secret, replace=False)

    def save_both(self, folder: str | Path) -> tuple[Path, Path]:
        """Write ``clients.secret``, and ``server.public`` for the server, into ``folder``: both or none. Their paths. Raises
        ``InputError`` if one of them exists."""
        secret, public = write_new(Path(folder), {"clients.secret": self._file()}, {"server.public": self.public()._file()})
        return secret, public

    def _file(self) -> bytes:
        about = f"{self.parameters.scheme} {self.parameters.max_clients} {self.key}".encode()
        return b"%s\n%s %s\n" % (MAGIC, about, _digest(about + self.data).encode()) + self.data

    @classmethod
    def load(cls, path: str | Path) -> Context:
        """Read a file of ``save``. Raises ``InputError`` for another file, a damaged one, and a secret one that others can
        read."""
        found, others = read_limited(path, "file of keys", LIMIT)
        load_tenseal()  # Without it nothing is wrong with the file.
        try:
            magic, about, data = found.split(b"\n", 2)
            told, digest = about.rsplit(b" ", 1)
            # TenSEAL gets only what was written: its parser trusts what it is given.
            if magic != MAGIC or digest.decode() != _digest(told + data):
                raise ValueError
            scheme, clients, key = told.decode().split()
            chosen = parameters_for(int(clients), scheme)  # type: ignore[arg-type]  # checked there
            secret = bool(opened_context(data).is_private())
        except (ValueError, RuntimeError):
            raise InputError(
                f"{path} does not hold keys of Rasura, or they are damaged; make new ones with rasura keys"
            ) from None
        if secret and others:
            raise InputError(f"{path} holds a secret key that other users can read; run: chmod 600 {path}")
        return cls(chosen, secret, key, data)


MAGIC = b"rasura keys 2"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def make_keys(clients: int, scheme: Scheme = "bfv") -> Context:
    """A new key pair, made by TenSEAL from the operating system's randomness, for sums of up to ``clients``."""
    chosen, ts = parameters_for(clients, scheme), load_tenseal()
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


def opened_context(data: bytes) -> Any:
    """TenSEAL's context of the serialised ``data``, which is trusted: pass what ``make_keys`` or ``Context.load`` gave."""
    return load_tenseal().context_from(data, 1)


_opened: WeakKeyDictionary[Context, Any] = WeakKeyDictionary()


def opened(context: Context) -> Any:
    """TenSEAL's context of ``context``, to be left unchanged. It is opened once, since that takes as long as a few
    ciphertexts, and kept as long as ``context`` itself."""
    if context not in _opened:
        _opened[context] = opened_context(context.data)
    return _opened[context]


def server_context(context: Context) -> Context:
    """``context``, for a server. Raises ``InputError`` if it holds a secret key."""
    if context.secret or opened(context).is_private():
        raise InputError(
            "the server's context holds a secret key, so the server could decrypt every update; pass the public one"
        )
    return context
