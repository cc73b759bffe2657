"""Files of identities: a long-term Ed25519 key for each client, and the list of all clients' public keys.

With them clients check whose the keys of a round are, so that a server cannot put its own in their place. The list must
come to each client on another way than through that server.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from rasura.core.ciphers import KEY, SigningKey
from rasura.core.files import read_limited, read_private, write_new, write_whole
from rasura.core.interfaces import InputError

LIMIT = 1 << 22

UNKNOWN = (
    "the keys of the clients are not authenticated, and it is not checked that all are told the same list of survivors. "
    "A server that breaks the protocol could put its own keys in their place, or open an update by two lists. "
    "Name a list of identities to rule that out (docs/secure-aggregation.md)"
)
"""What is said in every run without a list of identities."""


def make_identity(path: str | Path) -> str:
    """Write a new secret key to ``path``, which only its owner can read; its public key as text. Raises ``InputError`` for a
    file that exists."""
    secret = secrets.token_bytes(KEY)
    write_whole(path, _secret(secret), replace=False)
    return SigningKey(secret).public.hex()


def make_identities(folder: Path, clients: int) -> tuple[Path, ...]:
    """Write ``identity-0.secret`` and so on into ``folder``, and last the list of their public keys: all or none. Their
    paths. Raises ``InputError`` if one of them exists."""
    made = [secrets.token_bytes(KEY) for _ in range(clients)]
    listed = [f"{SigningKey(secret).public.hex()} client {k}\n" for k, secret in enumerate(made)]
    own = {f"identity-{k}.secret": _secret(secret) for k, secret in enumerate(made)}
    return write_new(folder, own, {"identities.public": "".join(listed)})


def _secret(key: bytes) -> str:
    return f"{key.hex()}\n"


def load_identity(path: str | Path) -> SigningKey:
    """The key in ``path``. Raises ``InputError`` for a file that others can read, and for one that holds no key."""
    return SigningKey(_key(read_private(path, "identity", LIMIT).decode(errors="replace").strip(), path))


def read_identities(path: str | Path) -> tuple[bytes, ...]:
    """The public keys in ``path``, in ascending order: on each line a key, and any name behind a space. Raises
    ``InputError`` for an empty list, a line without a key, and a key that is named twice."""
    data, _ = read_limited(path, "list of identities", LIMIT)
    lines = [line.split()[0] for line in data.decode(errors="replace").splitlines() if line.strip()]
    found = sorted(_key(line, path) for line in lines)
    if not found or len(set(found)) != len(found):
        raise InputError(
            f"{path} names {len(found)} identities, {len(found) - len(set(found))} of them twice; expected one each"
        )
    return tuple(found)


def _key(text: str, path: str | Path) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != KEY:
        raise InputError(f"{path} holds a line that is not a key of {KEY} bytes in hexadecimal digits")
    return found
