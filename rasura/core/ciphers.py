"""Key agreement, authenticated encryption and key streams, by the library ``cryptography``, which only this module imports.

X25519 (RFC 7748), Ed25519 (RFC 8032), HKDF-SHA256 (RFC 5869), AES-256-GCM, scrypt (RFC 7914) and ChaCha20 (RFC 8439).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rasura.core.errors import InputError, MissingExtra

KEY = 32
"""Bytes of every key here, secret or public."""

SIGNATURE = 64
"""Bytes of a signature."""

TAG = 16
"""Bytes that authenticated encryption adds."""


class WrongKey(InputError):
    """Bytes that were encrypted under another key or for another purpose, or that were changed."""


def _primitives() -> Any:
    try:
        from cryptography.hazmat import primitives
    except ImportError:
        raise MissingExtra(
            "this needs the library cryptography; run: pip install 'rasura[federated]' for secure aggregation, or "
            "'rasura[service]' for a passphrase"
        ) from None
    return primitives


class PrivateKey:
    """An X25519 key of 32 ``secret`` bytes; ``public`` is the one to send."""

    def __init__(self, secret: bytes) -> None:
        _primitives()
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._key = X25519PrivateKey.from_private_bytes(secret)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def agreed(self, public: bytes) -> bytes:
        """The 32 bytes that the owners of the two keys have in common, not yet uniform: pass them to ``derived``. Raises
        ``InputError`` for a public key of low order: then these bytes would be no secret."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        try:
            return self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError:
            raise InputError("a public key is not a valid key of X25519; nothing is encrypted with it") from None


class SigningKey:
    """An Ed25519 key of 32 ``secret`` bytes; ``public`` is the one that others know its owner by."""

    def __init__(self, secret: bytes) -> None:
        _primitives()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def signed(self, data: bytes) -> bytes:
        """The signature of ``data``, ``SIGNATURE`` bytes."""
        return self._key.sign(data)


def verified(public: bytes, signature: bytes, data: bytes) -> bool:
    """Whether the owner of ``public`` signed ``data``."""
    _primitives()
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def derived(key: bytes, *purpose: bytes) -> bytes:
    """A key for one purpose, by HKDF. Different purposes give independent keys; parts of ``purpose`` are not ambiguous."""
    _primitives()
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = b"".join(len(part).to_bytes(4, "big") + part for part in purpose)
    return HKDF(SHA256(), KEY, None, info).derive(key)


def passphrase_key(passphrase: str, salt: bytes) -> bytes:
    """The key that a passphrase gives. scrypt with 32 MiB, a tenth of a second a guess; fixed, so that a file cannot ask for
    more."""
    _primitives()
    from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

    return Scrypt(salt=salt, length=KEY, n=1 << 15, r=8, p=1).derive(passphrase.encode())


def encrypted(key: bytes, nonce: bytes, data: bytes, about: bytes) -> bytes:
    """``data`` under AES-256-GCM, ``TAG`` bytes longer. A key and a nonce (12 bytes) must meet once only. ``about`` is not
    sent, but must be the same where it is decrypted."""
    _primitives()
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key).encrypt(nonce, data, about)


def decrypted(key: bytes, nonce: bytes, data: bytes, about: bytes) -> bytes:
    """What ``encrypted`` was given. Raises ``WrongKey`` if anything differs."""
    _primitives()
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(nonce, data, about)
    except (InvalidTag, ValueError):
        raise WrongKey("it was encrypted under another key or for another purpose, or it was changed") from None


class KeyStream:
    """Pseudorandom numbers of a ``key`` by ChaCha20, the same on every machine. A key must be used for one stream only."""

    AT_ONCE = 1 << 18
    """Words in one call, at most."""

    def __init__(self, key: bytes) -> None:
        _primitives()
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

        self._encryptor = Cipher(ChaCha20(key, bytes(16)), None).encryptor()

    def words(self, count: int) -> NDArray[np.uint32]:
        """The next ``count`` numbers of 32 bits, at most ``AT_ONCE``."""
        drawn = self._encryptor.update(_ZEROS[: 4 * count])
        return np.frombuffer(drawn, "<u4")


_ZEROS = memoryview(bytes(4 * KeyStream.AT_ONCE))
