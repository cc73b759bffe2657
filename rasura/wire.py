"""A message as bytes, and back: what a client puts on the wire, and what a server checks before it allocates anything.

Layout: eight bytes of magic with the schema's version; the header's length (four bytes, big-endian) and the header, JSON;
the clear entries as safetensors, of a tensor with hidden entries the visible ones alone and a mask of one bit an entry; then
the ciphertexts, each behind its length (four bytes).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rasura.interfaces import InputError
from rasura.values import Message

MAGIC = b"RASURA\x00\x01"
"""Ends in the schema's version."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Limits:
    """What a receiver takes: ``total`` bytes of a message, ``header`` bytes, ``entries`` of all tensors together,
    ``tensors`` and ``ciphertexts``, and ``ciphertext`` bytes of one."""

    total: int = 1 << 31
    header: int = 1 << 24
    entries: int = 1 << 31
    tensors: int = 1 << 16
    ciphertexts: int = 1 << 20
    ciphertext: int = 1 << 20


USUAL = Limits()


def mask_digest(visible: Mapping[str, Tensor]) -> str:
    """Sixteen hex digits that name which entries are visible; clients that agreed on a mask have the same."""
    out = hashlib.sha256()
    for name in sorted(visible):
        out.update(
            f"{name}\0{tuple(visible[name].shape)}\0".encode() + np.packbits(visible[name].numpy().reshape(-1)).tobytes()
        )
    return out.hexdigest()[:16]


def to_bytes(message: Message) -> bytes:
    """``message`` as bytes. Raises ``InputError`` for a tensor of a kind that is not sent."""
    from safetensors.torch import save

    tensors: dict[str, Any] = {}
    clear: dict[str, Tensor] = {}
    for name, gradient in message.gradients.items():
        kind = str(gradient.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise InputError(f"{name} is {kind}; expected one of {', '.join(DTYPES)}")
        mask = message.visible.get(name)
        entries = gradient.reshape(-1)
        hidden = "none"
        if mask is not None and not bool(mask.all()):
            flat = mask.reshape(-1)
            hidden = "some" if bool(flat.any()) else "all"
            entries = entries[flat]
            if hidden == "some":
                clear[f"mask/{name}"] = torch.from_numpy(np.packbits(flat.numpy()))
        if hidden != "all":
            clear[f"entries/{name}"] = entries.contiguous()
        tensors[name] = {"shape": list(gradient.shape), "dtype": kind, "hidden": hidden}
    blob: bytes = save(clear)
    header = {
        "kind": message.kind, "header": dict(message.header), "tensors": tensors, "clear": len(blob),
        "sealed": [[name, len(data)] for name, data in message.sealed.items()],
    }  # fmt: skip
    head = json.dumps(header, sort_keys=True, allow_nan=False).encode()
    sealed = b"".join(struct.pack(">I", len(data)) + data for data in message.sealed.values())
    return MAGIC + struct.pack(">I", len(head)) + head + blob + sealed


def from_bytes(data: bytes, limits: Limits = USUAL) -> Message:
    """The message that ``data`` holds. Raises ``InputError`` that says what is wrong, before anything of the announced size
    is allocated; no pickle, no code."""
    header, start = _header(data, limits)
    tensors, sealed = header["tensors"], header["sealed"]
    _within("tensors", len(tensors), limits.tensors)
    _within("entries", sum(prod(t["shape"]) for t in tensors.values()), limits.entries)
    _within("ciphertexts", len(sealed), limits.ciphertexts)
    for _, size in sealed:
        _within("bytes of a ciphertext", size, limits.ciphertext)
    if start + header["clear"] + sum(4 + size for _, size in sealed) != len(data):
        raise InputError(f"the message has {len(data)} bytes, its header announces another length: it was cut or added to")
    gradients, visible = _clear(data[start : start + header["clear"]], tensors)
    place, found = start + header["clear"], {}
    for name, size in sealed:
        if struct.unpack(">I", data[place : place + 4])[0] != size:
            raise InputError(f"ciphertext {name} has another length than its header says")
        found[name] = data[place + 4 : place + 4 + size]
        place += 4 + size
    return Message(gradients, visible, found, header["kind"], header["header"])


def _within(what: str, found: int, most: int) -> None:
    if not 0 <= found <= most:
        raise InputError(f"the message has {found} {what}; at most {most} are taken")


def _header(data: bytes, limits: Limits) -> tuple[dict[str, Any], int]:
    _within("bytes", len(data), limits.total)
    if len(data) < len(MAGIC) + 4 or data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise InputError("these bytes are no message of Rasura")
    if data[len(MAGIC) - 1] != MAGIC[-1]:
        raise InputError(f"the message has schema {data[len(MAGIC) - 1]}; this version reads {MAGIC[-1]}")
    (size,) = struct.unpack(">I", data[len(MAGIC) : len(MAGIC) + 4])
    start = len(MAGIC) + 4 + size
    _within("bytes of header", size, min(limits.header, len(data)))
    try:
        header = json.loads(data[len(MAGIC) + 4 : start])
        whole = isinstance(header["kind"], str) and isinstance(header["clear"], int) and header["clear"] >= 0
        whole &= isinstance(header["header"], dict)
        whole &= all(isinstance(v, str | int | float | bool | None) for v in header["header"].values())
        whole &= all(isinstance(n, str) and type(s) is int and s >= 0 for n, s in header["sealed"])
        whole &= len({n for n, _ in header["sealed"]}) == len(header["sealed"])
        for told in header["tensors"].values():
            whole &= told["dtype"] in DTYPES and told["hidden"] in ("none", "some", "all")
            whole &= all(type(n) is int and n >= 0 for n in told["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise InputError("the message's header is malformed")
    return header, start


def _clear(blob: bytes, tensors: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found = load(blob)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"the message's clear entries cannot be read ({str(error).splitlines()[0]})") from None
    wanted = {f"entries/{n}" for n, t in tensors.items() if t["hidden"] != "all"}
    wanted |= {f"mask/{n}" for n, t in tensors.items() if t["hidden"] == "some"}
    if set(found) != wanted:
        raise InputError("the message's clear entries are not those of its header")
    gradients, visible = {}, {}
    for name, told in tensors.items():
        shape, count = tuple(told["shape"]), prod(told["shape"])
        mask = torch.full((count,), told["hidden"] == "none")
        if told["hidden"] == "some":
            bits = found[f"mask/{name}"]
            if bits.dtype != torch.uint8 or bits.numel() != -(-count // 8):
                raise InputError(f"the mask of {name} does not have {count} bits")
            mask = torch.from_numpy(np.unpackbits(bits.numpy(), count=count).astype(bool))
        entries = found.get(f"entries/{name}", torch.empty(0, dtype=DTYPES[told["dtype"]]))
        if entries.dtype != DTYPES[told["dtype"]] or entries.shape != (int(mask.sum()),):
            raise InputError(f"{name} has {tuple(entries.shape)} {entries.dtype} entries, its header says otherwise")
        if not bool(torch.isfinite(entries).all()):
            raise InputError(f"{name} holds entries that are no finite numbers")
        if told["hidden"] == "none":
            gradients[name] = entries.reshape(shape)
        else:
            gradients[name] = torch.zeros(count, dtype=entries.dtype).masked_scatter(mask, entries).reshape(shape)
            visible[name] = mask.reshape(shape)
    return gradients, visible
