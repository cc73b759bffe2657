"""The limits of the service: who may use it, how much, and how often. No torch, no web framework."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rasura.core.errors import InputError
from rasura.core.files import read_private

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names of models and tenants. They never become a path, and could not leave a folder if they did."""

ID = re.compile(r"[0-9a-f]{16}")
"""What the server itself calls the folders of its models, jobs and uploads; any other folder is somebody else's."""

SHORTEST_TOKEN = 16
MIB = 1 << 20


class Refused(InputError):
    """A refused request: the HTTP ``status`` and one line with the reason, without any part of the body."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status, self.detail = status, detail


@dataclass(frozen=True)
class Limits:
    """Bytes of a model, of a data set, of a tenant's models together, and of any other body; requests a second and at once
    (``burst``) of a tenant; jobs of a tenant that are not finished; texts of a data set; inputs of one request; new tokens
    of one generation; requests that wait for the models, in all and of one tenant; models kept in memory; downloads of a
    tenant at the same time; bytes of memory that one computation takes beside the weights, and that a training job takes in
    all (``rasura.server.memory``)."""

    model_bytes: int = 2048 * MIB
    data_bytes: int = 256 * MIB
    tenant_bytes: int = 20480 * MIB
    body_bytes: int = MIB
    rate: float = 50.0
    burst: int = 100
    jobs: int = 10
    texts: int = 2_000_000
    inputs: int = 256
    new_tokens: int = 1024
    waiting: int = 1024
    tenant_waiting: int = 64
    loaded: int = 4
    downloads: int = 4
    memory: int = 1024 * MIB
    training_memory: int = 8192 * MIB

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"the limit {name} is {value}; expected a number above 0")


class Tenants:
    """The tokens of the tenants. ``name`` compares with every token in constant time, so it does not reveal how close a
    guess was."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        self._digests = {name: _digest(token.encode()) for name, token in tokens.items()}

    def __len__(self) -> int:
        return len(self._digests)

    @classmethod
    def read(cls, path: str | Path) -> Tenants:
        """From a file of lines ``name:token``, empty lines and ``#`` aside. Raises ``InputError`` for one that others can
        read, that holds none, or that holds a short or repeated token."""
        found: dict[str, str] = {}
        for number, line in enumerate(private_text(path, "token file").splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, _, token = (part.strip() for part in line.partition(":"))
            if not NAME.fullmatch(name) or len(token) < SHORTEST_TOKEN or not token.isascii():
                raise InputError(
                    f"{path}, line {number}: expected name:token, at least {SHORTEST_TOKEN} characters of token"
                )
            if name in found or token in found.values():
                raise InputError(f"{path}, line {number}: this name or token occurs twice; use each once")
            found[name] = token
        if not found:
            raise InputError(f"{path} holds no token; expected lines name:token")
        return cls(found)

    def name(self, authorization: bytes) -> str | None:
        """The tenant of the header ``Authorization: Bearer TOKEN``, or None."""
        scheme, _, token = authorization.partition(b" ")
        digest, found = _digest(token), None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found if scheme.lower() == b"bearer" else None


def private_text(path: str | Path, what: str) -> str:
    """A small text file that only its owner can read. Raises ``InputError`` otherwise."""
    try:
        return read_private(path, what, MIB).decode()
    except UnicodeDecodeError:
        raise InputError(f"the {what} {path} cannot be read (not text)") from None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


class Rates:
    """A bucket of ``burst`` requests for each tenant, refilled at ``rate`` per second."""

    def __init__(self, rate: float, burst: int) -> None:
        self.rate, self.burst = rate, float(burst)
        self._left: dict[str, tuple[float, float]] = {}

    def wait(self, tenant: str, now: float | None = None) -> float:
        """Take one request from the bucket. Returns 0, or the seconds until one is available."""
        at = time.monotonic() if now is None else now
        left, since = self._left.get(tenant, (self.burst, at))
        left = min(self.burst, left + (at - since) * self.rate)
        self._left[tenant] = (left - 1 if left >= 1 else left, at)
        return 0.0 if left >= 1 else (1 - left) / self.rate
