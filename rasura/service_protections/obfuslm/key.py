"""The key of an obfuscated model, kept by its owner, and its file format.

Layout: safetensors, the permutation and the tokenizer as tensors, the rest as JSON in its header; no pickle, no code. With a
passphrase those bytes are sealed by AES-256-GCM under a key that scrypt derives, behind a magic, a salt and a nonce.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rasura.core.ciphers import WrongKey, decrypted, encrypted, passphrase_key
from rasura.core.files import read_private, write_whole
from rasura.core.interfaces import InputError

log = logging.getLogger(__name__)

PAIR = "obfuslm_pair"
"""The entry of the served model's ``config.json`` that says which key it goes with: sixteen random hex digits."""

MAGIC = b"RASURA-OBFUSLM\x00\x01"
"""Begins a file with a passphrase; ends in the schema's version."""

SCHEMA = 2
SALT, NONCE = 16, 12
LIMIT = 1 << 28
"""Bytes of a key file, at most: 256 MiB."""


@dataclass(frozen=True, repr=False)
class Key:
    """``tokens`` ``(vocabulary,)`` int64: the obfuscated id of each token. ``tokenizer``: the original one, as JSON, with
    ``options``. ``pair``: which obfuscated model it is for. ``base``: digest of the original word embedding."""

    tokens: Tensor
    tokenizer: str
    options: Mapping[str, Any]
    pair: str
    base: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Key(for the obfuscated model {self.pair}, {len(self.tokens)} tokens)"

    def save(self, path: str | Path, passphrase: str | None = None) -> None:
        """Write the key, completely or not at all. Only its owner can read it, from its first byte on. Raises ``InputError``
        if a file of this name exists: keys are not overwritten."""
        data = self._bytes()
        if passphrase is not None:
            data = _sealed(data, passphrase)
        write_whole(path, data, replace=False)

    def _bytes(self) -> bytes:
        from safetensors.torch import save

        about = {
            "schema": SCHEMA, "options": dict(self.options), "pair": self.pair, "base": self.base,
            "settings": dict(self.settings),
        }  # fmt: skip
        about["digest"] = _digest(about, self.tokens, self.tokenizer.encode())
        text = torch.from_numpy(np.frombuffer(self.tokenizer.encode(), dtype=np.uint8).copy())
        data: bytes = save({"tokens": self.tokens, "tokenizer": text}, metadata={"rasura": json.dumps(about)})
        return data

    @classmethod
    def load(cls, path: str | Path, passphrase: str | None = None) -> Key:
        """Read a file of ``save``. Raises ``InputError`` for any other file, for a file that others can read, for a damaged
        file, and for a wrong passphrase. A log line warns of a key that leaves words open which were added to the
        tokenizer, as keys of earlier versions do."""
        file = Path(path)
        data = read_private(file, "key", LIMIT)
        if data.startswith(MAGIC):
            if passphrase is None:
                raise InputError(f"the key {file} has a passphrase; pass it")
            data = _opened(data, passphrase, file)
        key = cls._read(data, file)
        if open_words := key.open_words():
            log.warning(
                "%s leaves %d words that were added to the tokenizer under their public ids; obfuscate the model again "
                "with rasura protect obfuslm", file, open_words,
            )  # fmt: skip
        return key

    def open_words(self) -> int:
        """How many words were added to the tokenizer, if the key leaves all of them under their public ids; otherwise 0: by
        chance a permutation leaves few where they were."""
        added = [t["id"] for t in json.loads(self.tokenizer).get("added_tokens", ()) if not t["special"]]
        return len(added) if all(i < len(self.tokens) and int(self.tokens[i]) == i for i in added) else 0

    @classmethod
    def _read(cls, data: bytes, file: Path) -> Key:
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            found = load(data)
            size = int.from_bytes(data[:8], "little")
            head = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["rasura"])
            tokens, text = found["tokens"], found["tokenizer"].numpy().tobytes()
            told = head.pop("digest")
            whole = head["schema"] == SCHEMA and tokens.dtype == torch.int64 and told == _digest(head, tokens, text)
            whole = whole and torch.equal(tokens.sort().values, torch.arange(len(tokens)))
            whole = whole and all(isinstance(head[name], dict) for name in ("options", "settings"))
            if not whole or not all(isinstance(head[name], str) for name in ("pair", "base")):
                raise ValueError
            return cls(tokens, text.decode(), head["options"], head["pair"], head["base"], head["settings"])
        except (SafetensorError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError):
            raise InputError(
                f"{file} does not hold a complete key of an obfuscated model; restore it from a copy, or make "
                "one with rasura protect obfuslm"
            ) from None


def _digest(about: Mapping[str, Any], tokens: Tensor, tokenizer: bytes) -> str:
    """Of all that a damaged file would change unseen: the permutation, the tokenizer and its options."""
    head = json.dumps(dict(about), sort_keys=True).encode()
    return hashlib.sha256(head + tokens.numpy().tobytes() + tokenizer).hexdigest()


def _sealed(data: bytes, passphrase: str) -> bytes:
    if not passphrase:
        raise InputError("the passphrase is empty; pass a passphrase, or leave it out")
    salt, nonce = os.urandom(SALT), os.urandom(NONCE)
    return MAGIC + salt + nonce + encrypted(passphrase_key(passphrase, salt), nonce, data, MAGIC)


def _opened(data: bytes, passphrase: str, file: Path) -> bytes:
    rest = data[len(MAGIC) :]
    key = passphrase_key(passphrase, rest[:SALT])
    try:
        return decrypted(key, rest[SALT : SALT + NONCE], rest[SALT + NONCE :], MAGIC)
    except WrongKey:
        raise InputError(f"the passphrase of the key {file} is wrong, or the file was changed") from None
