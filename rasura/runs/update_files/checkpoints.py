"""Folders of ``torch.distributed.checkpoint``, as Accelerate and FSDP write them: pieces of tensors in several files.

The folder's ``.metadata`` is a pickle. It is read as data, and the pieces are put together by what it says.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.runs.update_files.entries import Entry, Source, check_names, checked_shape
from rasura.runs.update_files.pickled import MAX_BYTES, Made, Name, followed, words
from rasura.runs.update_files.torch_files import plain, single

METADATA = ".metadata"
REMEDY = "merge it with accelerate merge-weights or torch.distributed.checkpoint.format_utils"


@dataclass(frozen=True)
class _Piece:
    """The location of a piece of a tensor: its corner and sizes in the tensor, its file, and the bytes there."""

    corner: tuple[int, ...]
    file: Path
    start: int
    length: int


def opened(folder: Path) -> Source:
    """The tensors of a distributed checkpoint. Raises ``InputError`` for anything else; nothing is executed."""
    file = folder / METADATA
    if file.stat().st_size > MAX_BYTES:
        raise InputError(f"{file} has {file.stat().st_size} bytes; expected at most {MAX_BYTES}")
    whole = followed(file.read_bytes())
    if not isinstance(whole, Made) or not whole.name.endswith(".Metadata"):
        raise InputError(f"{file} does not describe a distributed checkpoint; {REMEDY}")
    told = words(whole.state)
    pieces = _pieces(folder, told.get("storage_data"))
    entries = []
    for name, about in words(told.get("state_dict_metadata")).items():
        if not isinstance(about, Made) or not about.name.endswith(".TensorStorageMetadata"):
            continue  # numbers and words beside the weights, such as a step: never read
        entries.append(_entry(f"{folder}: {name[:100]}", name, words(about.state), pieces.get(name, [])))
    weights = [e for e in entries if not (e.name or "").startswith(("optimizer.", "optim."))]
    check_names(weights, folder)
    return Source(folder, "a distributed checkpoint, its metadata read as data", weights, ordered=False)


def _pieces(folder: Path, stored: object) -> dict[str, list[_Piece]]:
    """The locations of the pieces of each tensor, by name."""
    out: dict[str, list[_Piece]] = {}
    for key, value in getattr(stored, "pairs", ()):
        index, info = (words(v.state) if isinstance(v, Made) else {} for v in (key, value))
        name, path, corner = index.get("fqn"), info.get("relative_path"), plain(index.get("offset") or ())
        start, length = info.get("offset"), info.get("length")
        if not isinstance(name, str) or not isinstance(path, str) or corner is None:
            raise InputError(f"{folder}/{METADATA} describes a piece without its location; {REMEDY}")
        if info.get("transform_descriptors"):
            raise InputError(f"{folder} is a compressed checkpoint, which is not supported; {REMEDY}")
        if Path(path).name != path or path in ("", ".", ".."):
            raise InputError(f"{folder}/{METADATA} names {path[:100]!r}; expected a file in the same folder")
        (first, size) = checked_shape((start, length), f"{folder}/{METADATA}: a place")
        out.setdefault(name, []).append(_Piece(corner, folder / path, first, size))
    return out


def _entry(where: str, name: str, about: Mapping[str, object], pieces: list[_Piece]) -> Entry:
    size = plain(about.get("size"))
    if size is None:
        raise InputError(f"{where} has no shape; {REMEDY}")
    shape = checked_shape(size, where)
    properties = about.get("properties")
    state = properties.state if isinstance(properties, Made) else None
    kind = state[0].text if isinstance(state, tuple) and state and isinstance(state[0], Name) else "unknown"
    dtype = kind.removeprefix("torch.")

    def read() -> Tensor:
        return _merged(where, shape, pieces)

    return Entry(name, shape, dtype, read)


def _merged(where: str, shape: tuple[int, ...], pieces: list[_Piece]) -> Tensor:
    """The whole tensor. Raises ``InputError`` if pieces are missing, overlap or lie outside of it."""
    out: Tensor | None = None
    done = torch.zeros(shape, dtype=torch.bool)
    for piece in pieces:
        found = single(where, _part(where, piece))
        corner = piece.corner or (0,) * len(shape)
        ends = [c + n for c, n in zip(corner, found.shape)]
        if len(corner) != len(shape) or len(found.shape) != len(shape) or any(e > n for e, n in zip(ends, shape)):
            raise InputError(f"{where}: a piece lies outside of the tensor; {REMEDY}")
        values, place = found.read(), tuple(slice(c, e) for c, e in zip(corner, ends))
        if out is None:
            out = torch.empty(shape, dtype=values.dtype)
        if out.dtype != values.dtype or bool(done[place].any()):
            raise InputError(f"{where}: its pieces overlap or differ in type; {REMEDY}")
        out[place] = values
        done[place] = True
    if out is None or not bool(done.all()):
        raise InputError(f"{where}: some of its pieces are missing; the folder needs the files of every process")
    return out


def _part(where: str, piece: _Piece) -> Callable[[], AbstractContextManager[IO[bytes]]]:
    def open_part() -> AbstractContextManager[IO[bytes]]:
        if not piece.file.is_file():
            raise InputError(f"{where}: {piece.file} does not exist; the folder needs the files of every process")
        with piece.file.open("rb") as readable:
            if piece.start + piece.length > piece.file.stat().st_size:
                raise InputError(f"{where}: {piece.file} is too short")
            readable.seek(piece.start)
            return io.BytesIO(readable.read(piece.length))

    return open_part
