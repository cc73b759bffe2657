"""Files of ``torch.save``: an archive of raw numbers and a pickle that describes them, read as data."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.runs.update_files.entries import MAX_TENSORS, Entry, Source, check_names, checked_shape
from rasura.runs.update_files.pickled import MAX_BYTES, Held, Made, Name, Table, followed, words

STORAGES: Mapping[str, torch.dtype] = {
    "torch.DoubleStorage": torch.float64, "torch.FloatStorage": torch.float32, "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16, "torch.LongStorage": torch.int64, "torch.IntStorage": torch.int32,
    "torch.ShortStorage": torch.int16, "torch.CharStorage": torch.int8, "torch.ByteStorage": torch.uint8,
    "torch.BoolStorage": torch.bool,
}  # fmt: skip
"""The storage types that ``torch.save`` writes."""

LATER: Mapping[str, torch.dtype] = {
    "torch.float8_e4m3fn": torch.float8_e4m3fn, "torch.float8_e5m2": torch.float8_e5m2,
}  # fmt: skip
"""Types without a storage type of their own; they are named beside the tensor."""

INSIDE = (
    "gradients", "grads", "gradient", "grad", "update", "delta",
    "model", "state_dict", "model_state_dict", "module", "params", "weights", "data", "cur_model",
)  # fmt: skip
"""The entries in which training loops store gradients, which come before weights beside them; and those in which frameworks
store the weights: NVFlare ``model``, its messages ``data``, FederatedScope and trainers ``model``, Lightning ``state_dict``,
FLModel ``params``."""

REMEDY = "save tensors by parameter name, with torch.save or rasura.capture"


@dataclass(frozen=True)
class _Archive:
    """An archive of ``torch.save``. Each call of ``open`` opens its bytes again."""

    where: str
    open: Callable[[], AbstractContextManager[IO[bytes]]]

    def described(self) -> object:
        """The saved value, with tensors as notes of how to make them."""
        with self.open() as readable, zipfile.ZipFile(readable) as archive:
            infos = archive.infolist()
            if len(infos) > 2 * MAX_TENSORS or any(i.compress_type or i.flag_bits & 1 for i in infos):
                raise InputError(f"{self.where} is not an archive in the form that torch.save writes; {REMEDY}")
            top = [i for i in infos if i.filename.count("/") == 1 and i.filename.endswith("/data.pkl")]
            if len(top) != 1 or len({i.filename for i in infos}) < len(infos):
                raise InputError(f"{self.where} is a zip archive without one data.pkl or .npy files; {REMEDY}")
            order = next((i for i in infos if i.filename.endswith("/byteorder")), None)
            if order is not None and archive.read(order)[:8] != b"little":
                raise InputError(f"{self.where} was written on a big-endian machine, which is not supported; {REMEDY}")
            if top[0].file_size > MAX_BYTES:
                raise InputError(f"{self.where}: its description has {top[0].file_size} bytes; {REMEDY}")
            return followed(archive.read(top[0]))

    def numbers(self, key: str, start: int, count: int, dtype: torch.dtype) -> Tensor:
        """``count`` numbers of the storage ``key``, from ``start``."""
        size = dtype.itemsize
        with self.open() as readable, zipfile.ZipFile(readable) as archive:
            infos = [i for i in archive.infolist() if i.filename.split("/", 1)[1:] == [f"data/{key}"]]
            if len(infos) != 1 or (start + count) * size > infos[0].file_size:
                raise InputError(f"{self.where}: the numbers of a tensor are missing ({key[:20]})")
            with archive.open(infos[0]) as stored:
                stored.seek(start * size)
                data = stored.read(count * size)
        if len(data) != count * size:
            raise InputError(f"{self.where}: the numbers of a tensor are missing ({key[:20]})")
        return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def opened(file: Path) -> Source:
    """The tensors of a ``torch.save`` file. Raises ``InputError`` for anything else; nothing is executed."""
    archive = _Archive(str(file), lambda: file.open("rb"))
    inner, around = _weights(archive.described(), str(file))
    entries = []
    for key, value in inner:
        entry = _entry(archive, key, value)
        if entry is None and (isinstance(value, Made) or key is None):
            raise InputError(f"{file}: {(key or 'a part of the list')[:100]} is not a tensor; {REMEDY}")
        entries += [entry] if entry is not None else []
    check_names(entries, file)
    return Source(file, "torch.save, read as data", entries, states=_states(archive, around))


def single(where: str, open_part: Callable[[], AbstractContextManager[IO[bytes]]]) -> Entry:
    """The single tensor in an archive, which is how a distributed checkpoint stores its pieces."""
    archive = _Archive(where, open_part)
    found = _entry(archive, None, archive.described())
    if found is None:
        raise InputError(f"{where} holds something other than a tensor")
    return found


def _weights(value: object, where: str) -> tuple[Sequence[tuple[str | None, object]], dict[str, object]]:
    """The names and tensors in what was saved, and the dict around them; no names in a list."""
    if isinstance(value, list | tuple):
        return [(None, item) for item in value], {}
    found = words(value)
    for key in INSIDE:
        inner = found.get(key)
        if isinstance(inner, Table | Made) and not _is_tensor(inner) and words(inner):
            return list(words(inner).items()), found
    if not found:
        raise InputError(f"{where} holds something other than tensors by parameter name; {REMEDY}")
    return [(k, v) for k, v in found.items() if k not in ("quant_state", "meta")], found


def _states(archive: _Archive, around: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """NVFlare's ``quant_state``, beside the weights or in the ``meta`` of a message: by name."""
    told = words(around.get("quant_state") or words(around.get("meta")).get("quant_state"))
    out: dict[str, dict[str, object]] = {}
    for name, state in told.items():
        parts = words(state)
        if parts:
            out[name] = {k: _entry(archive, k, v) if isinstance(v, Made) and _is_tensor(v) else v for k, v in parts.items()}
    return out


def _is_tensor(value: object) -> bool:
    return isinstance(value, Made) and value.name.startswith("torch._utils._rebuild_")


def _entry(archive: _Archive, name: str | None, value: object) -> Entry | None:
    """A tensor from the note of how it is made; None for everything else."""
    where = f"{archive.where}: {(name or 'a tensor')[:100]}"
    for _ in range(2):  # a parameter wraps a tensor
        if isinstance(value, Made) and value.name.startswith("torch._utils._rebuild_parameter"):
            value = value.arguments[0] if isinstance(value.arguments, tuple) and value.arguments else None
    if not isinstance(value, Made) or value.name not in (
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
    ):
        return None
    told = value.arguments
    if not isinstance(told, tuple) or len(told) < 6 or not isinstance(told[0], Held):
        raise InputError(f"{where} is described in a way that torch.save does not use; {REMEDY}")
    held, start, size, stride = told[0].key, told[1], told[2], told[3]
    if not isinstance(held, tuple) or len(held) != 5 or held[0] != "storage" or not isinstance(held[1], Name):
        raise InputError(f"{where} is described in a way that torch.save does not use; {REMEDY}")
    dtype = STORAGES.get(held[1].text)
    if value.name.endswith("v3") and held[1].text == "torch.storage.UntypedStorage" and len(told) > 6:
        dtype = LATER.get(told[6].text) if isinstance(told[6], Name) else None
    key = held[2]
    if dtype is None or not isinstance(key, str) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        raise InputError(f"{where} has an unsupported type; {REMEDY}")
    shape, steps = checked_shape(size, where), checked_shape(stride, f"{where}: stride")
    (first,) = checked_shape((start,), f"{where}: offset")
    if len(steps) != len(shape):
        raise InputError(f"{where} has {len(shape)} sizes and {len(steps)} strides")
    known = dtype
    span = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, steps))

    def read() -> Tensor:
        numbers = archive.numbers(key, first, span, known)
        return numbers.as_strided(shape, steps).clone() if span else torch.empty(shape, dtype=known)

    return Entry(name, shape, str(dtype).removeprefix("torch."), read)


def plain(found: object) -> tuple[int, ...] | None:
    """Whole numbers in a tuple, a list or a ``torch.Size`` of a pickle; None for everything else."""
    if isinstance(found, Made) and found.name == "torch.Size" and isinstance(found.arguments, tuple):
        found = found.arguments[0] if found.arguments else ()
    if not isinstance(found, tuple | list) or not all(type(n) is int for n in found):
        return None
    return tuple(n for n in found if isinstance(n, int))
