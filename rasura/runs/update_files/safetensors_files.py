"""Files of safetensors: the header is checked before anything is read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.runs.update_files.entries import Entry, Source, check_names, checked_shape, first_line, refusing

MAX_HEADER = 100_000_000
"""Maximum bytes of a safetensors header: the limit of the format."""

TYPES: Mapping[str, str] = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
}  # fmt: skip
"""PyTorch's names of the format's types."""


def opened(file: Path) -> Source:
    """The tensors of a safetensors file. Raises ``InputError`` for anything else."""
    from safetensors import SafetensorError, safe_open

    remedy = "is not a safetensors file; write it with rasura.capture"
    with refusing(file, remedy):
        _check_header(file)
        try:
            held: Any = safe_open(str(file), framework="pt")
            entries = []
            for name in held.keys():  # noqa: SIM118  # not a dict
                part = held.get_slice(name)
                shape = checked_shape(list(part.get_shape()), f"{file}: {name}")
                kind = str(part.get_dtype())
                entries.append(Entry(name, shape, TYPES.get(kind, kind), _reading(held, file, name)))
        except SafetensorError as error:
            raise InputError(f"{file} {remedy} ({first_line(error)})") from None
    check_names(entries, file)
    return Source(file, "safetensors", entries, ordered=False)


def _reading(held: Any, file: Path, name: str) -> Callable[[], Tensor]:
    def read() -> Tensor:
        from safetensors import SafetensorError

        try:
            found: Tensor = held.get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"{file}: {name} cannot be read ({first_line(error)})") from None
        return found

    return read


def _check_header(file: Path) -> None:
    """Raises ``InputError`` if ``file`` cannot be safetensors, or if a tensor occurs twice in it."""
    twice: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> Mapping[str, Any]:
        twice.extend(name for name, count in Counter(name for name, _ in found).items() if count > 1)
        return dict(found)

    size = file.stat().st_size
    with file.open("rb") as readable:
        length = int.from_bytes(readable.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise InputError(f"{file} is not a safetensors file (its header is invalid); write it with rasura.capture")
        json.loads(readable.read(length), object_pairs_hook=pairs)
    if twice:
        raise InputError(f"{file}: {twice[0]} occurs twice; expected one tensor per parameter name")
