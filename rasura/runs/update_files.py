"""Update files of strangers: safetensors with one tensor per parameter name, checked before anything is made of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rasura.core.interfaces import InputError
from rasura.core.options import known
from rasura.victims.loading import Victim
from rasura.victims.models import parameter_shapes

FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
"""Types that hold gradients."""

MOST = 1e14
"""Entries are at most this in size, so that the squared norm of 10^10 of them is finite in float32."""

MAX_HEADER = 100_000_000
"""Bytes of a safetensors header, at most: the format's own limit."""

OTHERS = {b"PK\x03\x04": "a zip archive (npz or torch.save)", b"\x93NUMPY": "a NumPy array", b"\x80": "a pickle"}


def load_hidden(path: str | Path, victim: Victim) -> dict[str, torch.Tensor]:
    """Which entries are visible, by parameter, from a file of bool tensors that are true where an entry is hidden.

    Raises ``InputError`` for a missing or damaged file, unknown names, wrong shapes, and tensors that are not bool.
    """
    remedy = "expected bool tensors by parameter name, true where an entry is hidden"
    found = _tensors(Path(path), victim, ("BOOL",), "bool, true where an entry is hidden", remedy)
    return {n: ~t for n, t in found.items()}


def load_update(path: str | Path, victim: Victim) -> dict[str, torch.Tensor]:
    """The tensors of an update file in float32, checked against the model.

    Raises ``InputError`` for a missing or damaged file, unknown names, wrong shapes, whole numbers, NaN, infinity, and
    entries above ``MOST``. Pickles and archives are never opened.
    """
    file = Path(path)
    found = _tensors(file, victim, FLOATS, "gradients: float64, 32, 16, bfloat16 or float8", "write it with rasura.capture")
    out = {}
    for name, tensor in found.items():
        # float8 knows no comparison, and float64 overflows float32: both are looked at in a type that holds them.
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        if not bool(torch.isfinite(wide).all()):
            raise InputError(f"{file}: {name} holds NaN or infinity; expected finite gradients")
        if wide.numel() and float(wide.abs().max()) > MOST:
            raise InputError(
                f"{file}: {name} holds entries above {MOST:g} in size; expected gradients, scaled to be smaller"
            )
        out[name] = wide.float()
    return out


def _tensors(file: Path, victim: Victim, dtypes: tuple[str, ...], expected: str, remedy: str) -> dict[str, torch.Tensor]:
    """One tensor per parameter name of the victim's model, in its shape; names, types and shapes are checked first."""
    from safetensors import SafetensorError, safe_open

    _whole(file, remedy)
    shapes = parameter_shapes(victim.model)
    try:
        with safe_open(str(file), framework="pt") as opened:
            names = list(opened.keys())
            for name in names:
                known(f"parameter in {file.name}", name, shapes)
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                if shape != shapes[name]:
                    raise InputError(
                        f"{file}: {name} has shape {shape}, the model's is {shapes[name]}; pass the model it came from"
                    )
                if dtype not in dtypes:
                    raise InputError(f"{file}: {name} is {dtype}; expected {expected}")
            found: dict[str, torch.Tensor] = {name: opened.get_tensor(name) for name in names}
    except InputError:
        raise
    except (SafetensorError, OSError, RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{file} is no safetensors file ({_first(error)}); {remedy}") from None
    if not found:
        raise InputError(f"{file} holds no tensor; expected one per parameter name")
    return found


def _whole(file: Path, remedy: str) -> None:
    """Raises ``InputError`` where ``file`` cannot be safetensors, and where a tensor stands in it twice."""
    wanted = "expected a safetensors file with one tensor per parameter name"
    if file.is_dir():
        raise InputError(f"{file} is a folder; {wanted}")
    if not file.is_file():
        raise InputError(f"{file} does not exist; {wanted}")
    twice: list[str] = []

    def pairs(found: list[tuple[str, Any]]) -> Mapping[str, Any]:
        twice.extend(name for name, count in Counter(name for name, _ in found).items() if count > 1)
        return dict(found)

    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            head = opened.read(8)
            for mark, kind in OTHERS.items():
                # A pickle begins with one byte, which may be the length of a safetensors header as well.
                if head.startswith(mark) and (len(mark) > 1 or head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")):
                    raise InputError(f"{file} is {kind}, which is not opened; {remedy}")
            length = int.from_bytes(head, "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise InputError(f"{file} is no safetensors file (its header does not fit); {remedy}")
            json.loads(opened.read(length), object_pairs_hook=pairs)
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is no safetensors file ({_first(error)}); {remedy}") from None
    if twice:
        raise InputError(f"{file}: {twice[0]} stands in it twice; expected one tensor per parameter name")


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
