"""Files of identities: a long-term Ed25519 key for each client, and the list of all clients' public keys.

With them clients check whose the keys of a round are, so that a server cannot put its own in their place. The list must
come to each client on another way than through that server.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from rasura.core.ciphers import KEY, SigningKey
from rasura.core.files import read_limited, read_private, write_whole
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
    write_whole(path, secret.hex() + "\n", replace=False)
    return SigningKey(secret).public.hex()


def make_identities(folder: Path, clients: int) -> Path:
    """``identity-0.secret`` and so on in ``folder``, and the list of their public keys, whose path is returned."""
    public = [f"{make_identity(folder / f'identity-{k}.secret')} client {k}" for k in range(clients)]
    write_identities(folder / "identities.public", public)
    return folder / "identities.public"


def load_identity(path: str | Path) -> SigningKey:
    """The key in ``path``. Raises ``InputError`` for a file that others can read, and for one that holds no key."""
    return SigningKey(_key(read_private(path, "identity", LIMIT).decode(errors="replace").strip(), path))


def write_identities(path: str | Path, public: list[str]) -> None:
    """Write a list of public keys, one on each line."""
    write_whole(path, "".join(f"{line}\n" for line in public), private=False, replace=False)


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
