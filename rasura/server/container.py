"""The transfer format of models and data sets: one body with a header and a few files, whose sizes are known before anything
is stored.

Layout: 8 bytes, little-endian, the length of the header; the header, JSON with ``files`` (name -> bytes) and what else the
request says; the files, one after another in the header's order. No archive, no compression, no pickle.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rasura.server.limits import MIB, NAME, Refused

CONTENT_TYPE = "application/vnd.rasura"
HEADER = 64 << 10
"""Maximum bytes of a header."""

CHUNK = 1 << 20

CONFIG, WEIGHTS, DATA = "config.json", "model.safetensors", "data.safetensors"
TENSOR_HEADER = 16 * MIB
"""Maximum bytes of a safetensors header."""


def header_bytes(about: Mapping[str, Any], files: Mapping[str, int]) -> bytes:
    """The length and the header of a body that holds ``files`` (name -> bytes)."""
    head = json.dumps({**about, "files": dict(files)}).encode()
    return len(head).to_bytes(8, "little") + head


class Outgoing:
    """A body of ``about`` and the files ``names`` of ``folder``, ``length`` bytes together, in chunks.

    The files are open from the start, so a transfer completes even if the model is deleted meanwhile. Raises ``Refused``
    (404) if they no longer exist.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], names: Sequence[str]) -> None:
        with ExitStack() as opened:
            try:
                self._files = [opened.enter_context((folder / name).open("rb")) for name in names]
            except FileNotFoundError:
                raise Refused(404, "there is no such model") from None
            sizes = {name: os.fstat(file.fileno()).st_size for name, file in zip(names, self._files)}
            self._open = opened.pop_all()
        self._head = header_bytes(about, sizes)
        self.length = len(self._head) + sum(sizes.values())

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with self._open:
            yield self._head
            for file in self._files:
                while chunk := await asyncio.to_thread(file.read, CHUNK):
                    yield chunk


class Incoming:
    """A body of ``length`` bytes from a ``stream``, read in order."""

    def __init__(self, stream: AsyncIterator[bytes], length: int) -> None:
        self._stream, self._length, self._buffer = stream, length, b""

    async def header(self, required: frozenset[str], limits: Mapping[str, int]) -> dict[str, Any]:
        """The header. Raises ``Refused`` if it is malformed, if it names other files than ``required``, or if sizes exceed
        ``limits`` (name -> bytes) or do not add up to the size of the body."""
        size = int.from_bytes(await self._exactly(8), "little")
        if not 2 <= size <= HEADER:
            raise Refused(415, f"the body is not a Rasura container: expected a header of at most {HEADER} bytes")
        try:
            head = json.loads(await self._exactly(size))
            files = head["files"]
            sizes = [n for n in files.values() if type(n) is int and n > 0]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise Refused(415, "the body is not a Rasura container: its header is not a JSON object with files") from None
        if set(files) != required or len(sizes) != len(files):
            raise Refused(422, f"the body's files must be {' and '.join(sorted(required))}, and none may be empty")
        for name in files:
            if files[name] > limits[name]:
                raise Refused(413, f"{name} is larger than {limits[name]} bytes, the limit of this server")
        if 8 + size + sum(sizes) != self._length:
            raise Refused(422, "the sizes in the header do not add up to the size of the body")
        found: dict[str, Any] = head
        return found

    async def save(self, files: Mapping[str, int], folder: Path) -> None:
        """Write the ``files`` into ``folder``; what calls itself safetensors is looked at before it is kept."""
        for name, size in files.items():
            if name.endswith(".safetensors"):
                self._buffer = await self._exactly(min(9, size)) + self._buffer
                check_start(self._buffer[:9], size, name)
            with (folder / name).open("wb") as out:
                left = size
                while left:
                    if not self._buffer:
                        self._buffer = await self._next()
                    part, self._buffer = self._buffer[:left], self._buffer[left:]
                    out.write(part)
                    left -= len(part)

    async def _next(self) -> bytes:
        async for chunk in self._stream:
            if chunk:
                return chunk
        raise Refused(422, "the body ended early")

    async def _exactly(self, count: int) -> bytes:
        parts = [self._buffer]
        have = len(self._buffer)
        while have < count:
            parts.append(await self._next())
            have += len(parts[-1])
        whole = b"".join(parts)
        self._buffer = whole[count:]
        return whole[:count]


def check_start(start: bytes, size: int, name: str) -> None:
    """Raises ``Refused`` if the first 9 bytes of a file of ``size`` bytes cannot be the start of a safetensors file."""
    head = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{" or not 2 <= head <= min(TENSOR_HEADER, size - 8):
        raise Refused(415, f"{name} is not a safetensors file; pickles and archives are not accepted")


def tensor_shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor of a safetensors file; the library checks that its offsets fit its size.

    Raises ``Refused`` for any other file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="np") as file:
            names = file.keys()
            slices = {name: file.get_slice(name) for name in names}
            return {name: (str(s.get_dtype()), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError):
        raise Refused(415, f"{path.name} is not a safetensors file") from None


def checked_name(name: Any, what: str) -> str:
    """``name`` if it is a valid name. Otherwise raises ``Refused``."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Refused(
            422, f"{what} must be 1 to 64 letters, digits, dots, dashes or underscores, and begin with a letter or digit"
        )
    return name
