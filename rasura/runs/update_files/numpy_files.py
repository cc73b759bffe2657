"""NumPy arrays: ``.npz`` archives, ``.npy`` files, and several ``.npy`` buffers in a row. Arrays of objects are refused."""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.runs.update_files.entries import MAX_TENSORS, Entry, Source, check_names, checked_shape

PLACE = re.compile(r"(?:arr_|array_|)(\d{1,7})")
"""The names of list items: numpy's ``arr_0``, or ``0``."""

TYPES = frozenset({"float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"})


def archived(file: Path) -> Source:
    """The arrays of an ``.npz`` archive, without names if numpy numbered them (``np.savez(file, *arrays)``)."""

    def member(name: str) -> Callable[[], AbstractContextManager[IO[bytes]]]:
        return lambda: _Member(file, name)

    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
    if len(infos) > MAX_TENSORS or any(i.flag_bits & 1 for i in infos):
        raise InputError(f"{file} is not an archive in the form that numpy writes")
    other = [i.filename for i in infos if not i.filename.endswith(".npy")]
    if other:
        raise InputError(f"{file}: {other[0][:100]!r} is not an array; expected an archive of numpy.savez")
    parts = [_described(i.filename.removesuffix(".npy"), member(i.filename), f"{file}: {i.filename[:100]}") for i in infos]
    check_names(parts, file)
    return Source(file, "an archive of numpy", _ordered(parts))


def buffers(file: Path) -> Source:
    """One or more consecutive ``.npy`` buffers, as frameworks send a list of arrays without names."""
    size, at = file.stat().st_size, 0
    entries: list[Entry] = []
    while at < size and len(entries) <= MAX_TENSORS:
        entry, at = _buffer(file, at)
        entries.append(entry)
    check_names(entries, file)
    return Source(file, "buffers of numpy", entries)


def folder(place: Path, files: list[Path]) -> Source:
    """A folder of ``.npy`` files, each with one array: names or numbers."""
    parts = [_described(f.stem, lambda f=f: f.open("rb"), str(f)) for f in files]  # type: ignore[misc]  # f is bound
    check_names(parts, place)
    return Source(place, "a folder of numpy arrays", _ordered(parts))


def _ordered(parts: list[Entry]) -> list[Entry]:
    """Numbered arrays in their order, without names; named arrays unchanged."""
    places = [PLACE.fullmatch(entry.name or "") for entry in parts]
    if not all(places):
        return parts
    numbers = [int(found.group(1)) for found in places if found]
    if sorted(numbers) != list(range(len(parts))):
        raise InputError(f"the arrays are numbered {sorted(numbers)[:5]}...; expected 0 to {len(parts) - 1}")
    return [Entry(None, e.shape, e.dtype, e.read) for _, e in sorted(zip(numbers, parts), key=lambda pair: pair[0])]


class _Member:
    """A member of a zip archive, opened together with it."""

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, name

    def __enter__(self) -> IO[bytes]:
        self._archive = zipfile.ZipFile(self.file)
        return self._archive.open(self.name)

    def __exit__(self, *_: object) -> None:
        self._archive.close()


def _head(readable: IO[bytes], where: str) -> tuple[tuple[int, ...], bool, np.dtype[np.generic]]:
    """The shape, the order (Fortran or not) and the type of the array that begins here."""
    version = npy.read_magic(readable)
    if version not in ((1, 0), (2, 0)):
        raise InputError(f"{where} has version {version} of numpy's format, which is not for plain numbers")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of headers that Python 2 wrote
        shape, fortran, dtype = read(readable, max_header_size=10_000)
    if dtype.kind == "O":
        raise InputError(f"{where} holds pickled Python objects, which are not opened; expected plain numbers")
    if dtype.name not in TYPES:
        raise InputError(f"{where} is {str(dtype)[:60]}; expected float64, float32 or float16 (convert others to float32)")
    return checked_shape(shape, where), fortran, dtype


def _array(readable: IO[bytes], told: tuple[tuple[int, ...], bool, np.dtype[np.generic]], where: str) -> Tensor:
    shape, fortran, dtype = told
    wanted = math.prod(shape) * dtype.itemsize
    data = readable.read(wanted)
    if len(data) != wanted:
        raise InputError(f"{where} ends before the last of its numbers")
    flat = np.frombuffer(data, dtype=dtype)
    whole = flat.reshape(shape, order="F" if fortran else "C").astype(dtype.newbyteorder("="), order="C")
    return torch.from_numpy(whole)


def _described(name: str, open_part: Callable[[], AbstractContextManager[IO[bytes]]], where: str) -> Entry:
    with open_part() as readable:
        told = _head(readable, where)

    def read() -> Tensor:
        with open_part() as again:
            return _array(again, _head(again, where), where)

    return Entry(name, told[0], told[2].name, read)


def _buffer(file: Path, at: int) -> tuple[Entry, int]:
    """The array that begins at the byte ``at`` of a file, and where it ends."""
    where = f"{file} (byte {at})"
    with file.open("rb") as readable:
        readable.seek(at)
        told = _head(readable, where)
        start = readable.tell()

    def read() -> Tensor:
        with file.open("rb") as again:
            again.seek(start)
            return _array(again, told, where)

    return Entry(None, told[0], told[2].name, read), start + math.prod(told[0]) * told[2].itemsize
