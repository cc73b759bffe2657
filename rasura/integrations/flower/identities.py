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

SECRET = "secret"
"""The word in front of a secret key, which no list of public keys may hold."""

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
    return f"{SECRET} {key.hex()}\n"


def load_identity(path: str | Path) -> SigningKey:
    """The key in ``path``. Raises ``InputError`` for a file that others can read, and for one that holds no key. Files from
    before secret keys had a word in front are read too."""
    text = read_private(path, "identity", LIMIT).decode(errors="replace").strip()
    return SigningKey(_key(text.removeprefix(SECRET).strip(), path))


def read_identities(path: str | Path) -> tuple[bytes, ...]:
    """The public keys in ``path``, in ascending order: on each line a key, and any name behind a space. Raises
    ``InputError`` for an empty list, a line without a key, a key that is named twice, and a secret key. A key alone, without
    a name, is taken for a secret one: files of secret keys once looked so."""
    data, _ = read_limited(path, "list of identities", LIMIT)
    lines = [line.split() for line in data.decode(errors="replace").splitlines() if line.strip()]
    if len(lines) == 1 == len(lines[0]) or any(line[0].startswith(SECRET) for line in lines):
        raise InputError(
            f"{path} looks like a client's secret key, which must not be given to anyone; expected the list of public "
            "keys, each with a name"
        )
    found = sorted(_key(line[0], path) for line in lines)
    if secret := {SigningKey(key).public for key in found} & set(found):
        raise InputError(f"{path} holds the secret keys of {len(secret)} of its identities; expected public keys alone")
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
