"""Dequantisation: blockwise 8-bit, fp4 and nf4, as made by bitsandbytes and sent by NVFlare.

Every number is an index into a table of values, multiplied by the largest absolute value of its block: Dettmers et al. 2022
(8-bit optimizers, sec. 2.1) for 8 bits, and Dettmers et al. 2023 (QLoRA, sec. 3) for nf4. Two numbers of 4 bits share a
byte, the first in its upper half. The table and the scales of the blocks are in the file, so nothing here depends on how
they were chosen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.runs.update_files.entries import Entry, Source, checked_shape

PACKED = ".quant_state.bitsandbytes__"
"""Separates a name from the kind: bitsandbytes' description of a tensor in safetensors, JSON as bytes."""

BLOCK_8 = 4096
"""The default number of entries in a block of 8-bit numbers, as in bitsandbytes."""

MAX_PACKED = 10_000
"""Maximum bytes of such a description."""

TABLES = ("quant_map", "code")


def restored(source: Source) -> Source:
    """The same tensors, dequantised. Raises ``InputError`` for a state that does not fit."""
    states = {name: dict(state) for name, state in source.states.items()}
    by_name = {entry.name: entry for entry in source.entries if entry.name is not None}
    used: set[str] = set()
    for name in by_name:
        if f"{name}.absmax" not in by_name or name in states:
            continue
        packed = [other for other in by_name if other.startswith(f"{name}{PACKED}")]
        state: dict[str, object] = {"absmax": by_name[f"{name}.absmax"]}
        for table in TABLES:
            state |= {table: by_name[f"{name}.{table}"]} if f"{name}.{table}" in by_name else {}
        state |= _packed(by_name[packed[0]], source.file) if packed else {}
        states[name] = state
        used |= {f"{name}.{part}" for part in ("absmax", *TABLES)} | set(packed)
    if not states:
        return source
    unknown = sorted(set(states) - set(by_name))
    if unknown:
        raise InputError(f"{source.file}: {unknown[0][:100]} has a quantisation state but no tensor")
    entries = [
        _restored(entry, states[entry.name], source.file) if entry.name in states else entry
        for entry in source.entries
        if entry.name not in used
    ]
    return source.holding(entries)


def _packed(entry: Entry, file: Path) -> dict[str, object]:
    """The description of a tensor by bitsandbytes: ``quant_type``, ``blocksize``, ``shape``, ``dtype``."""
    if entry.dtype != "uint8" or math.prod(entry.shape) > MAX_PACKED:
        raise InputError(f"{file}: {entry.name} is not a description of a quantised tensor")
    found: Any = json.loads(bytes(entry.read().flatten().tolist()))
    if not isinstance(found, dict):
        raise InputError(f"{file}: {entry.name} is not a description of a quantised tensor")
    return {str(k): v for k, v in found.items()}


def _restored(entry: Entry, state: Mapping[str, object], file: Path) -> Entry:
    where = f"{file}: {entry.name}"
    sizes = state.get("absmax")
    table = next((state[name] for name in TABLES if name in state), None)
    if not isinstance(sizes, Entry) or not isinstance(table, Entry):
        raise InputError(f"{where} lacks absmax or its table of values (code or quant_map)")
    if any(key.startswith("nested") for key in state):
        raise InputError(f"{where} is quantised twice (nested absmax), which is not supported; send it quantised once")
    kind = str(state.get("quant_type", "blockwise8"))
    four = kind in ("fp4", "nf4")
    if entry.dtype not in ("uint8", "int8") or not (four or kind == "blockwise8"):
        raise InputError(f"{where} is {entry.dtype}, quantised as {kind[:20]}; expected bytes of blockwise8, fp4 or nf4")
    block = state.get("blocksize", 64 if four else BLOCK_8)
    if type(block) is not int or not 0 < block <= 1 << 20:
        raise InputError(f"{where}: the block size is {str(block)[:20]}; expected 1 to {1 << 20}")
    shape = checked_shape(_listed(state.get("shape", () if four else entry.shape), where), where)
    count, held = math.prod(shape), math.prod(entry.shape)
    if held != (-(-count // 2) if four else count):
        raise InputError(
            f"{where}: {held} bytes for {count} numbers of {4 if four else 8} bits; expected as "
            "many bytes as the shape needs"
        )
    if math.prod(sizes.shape) != -(-count // block) or math.prod(table.shape) != (16 if four else 256):
        raise InputError(
            f"{where}: absmax has {math.prod(sizes.shape)} values, which does not fit {count} numbers in blocks of {block}"
        )

    def read() -> Tensor:
        codes = entry.read().flatten().view(torch.uint8)
        if four:
            codes = torch.stack([codes >> 4, codes & 15], 1).flatten()[:count]
        values = table.read().flatten().float()[codes.int()]
        scales = sizes.read().flatten().float().repeat_interleave(block)[:count]
        return (values * scales).reshape(shape)

    return Entry(entry.name, shape, "float32", read)


def _listed(value: object, where: str) -> tuple[object, ...]:
    """A shape as a pickle or JSON holds it."""
    found = getattr(value, "arguments", None)
    inner = found[0] if isinstance(found, tuple) and found else value
    if isinstance(inner, Entry) and inner.dtype == "int64" and math.prod(inner.shape) < 17:
        return tuple(inner.read().flatten().tolist())
    if not isinstance(inner, tuple | list):
        raise InputError(f"{where} does not state its shape before quantisation")
    return tuple(inner)
