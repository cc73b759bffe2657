"""A message as bytes, and back: what a client puts on the wire, and what a server checks before it allocates anything.

Layout: eight bytes of magic with the schema's version; the header's length (four bytes, big-endian) and the header, JSON;
the tensors in the header's order, of each first the mask, one bit an entry, where some entries are hidden, then the visible
entries, little-endian; then the ciphertexts. Every length follows from the header: there is one that fits, and the
message must have it.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.values import Message

MAGIC = b"RASURA\x00\x02"
"""Ends in the schema's version."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}
START = len(MAGIC) + 4
"""Where the header begins."""

DIMENSIONS = 16
"""Dimensions of a tensor, at most."""

LONGEST_NAME = 256

AUDITED = "sent_bytes"
"""In a header, it marks what an audit shows in place of a secure sum, and states the bytes that one client would send."""


class WireError(InputError):
    """Bytes that are not a message, or that do not agree with their own header."""


@dataclass(frozen=True)
class Limits:
    """What a receiver takes: ``total`` bytes of a message, ``header`` bytes, ``entries`` of all tensors together,
    ``tensors`` and ``ciphertexts``, and ``ciphertext`` bytes of one.

    Opened tensors take at most 72 times the bytes of the message: entries of a tensor that is hidden as a whole take none.
    """

    total: int = 1 << 31
    header: int = 1 << 22
    entries: int = 1 << 31
    tensors: int = 1 << 16
    ciphertexts: int = 1 << 20
    ciphertext: int = 1 << 20


USUAL = Limits()


@dataclass(frozen=True)
class _Told:
    """What the header says of one tensor, checked: its ``count`` entries, and how many of them are ``shown``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    shown: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def mask_bytes(self) -> int:
        return -(-self.count // 8) if 0 < self.shown < self.count else 0

    @property
    def entry_bytes(self) -> int:
        return self.shown * self.dtype.itemsize


@dataclass(frozen=True)
class _Header:
    kind: str
    header: Mapping[str, Any]
    tensors: Mapping[str, _Told]
    sealed: tuple[tuple[str, int], ...]


def mask_digest(visible: Mapping[str, Tensor]) -> str:
    """Sixteen hex digits that name which entries are visible; clients that agreed on a mask have the same."""
    out = hashlib.sha256()
    for name in sorted(visible):
        out.update(f"{name}\0{tuple(visible[name].shape)}\0".encode() + np.packbits(visible[name].numpy()).tobytes())
    return out.hexdigest()[:16]


def to_bytes(message: Message) -> bytes:
    """``message`` as bytes. Raises ``InputError`` for a tensor of a kind that is not sent, for names or header values that a
    receiver would refuse, and for what an audit shows in place of a secure sum."""
    if AUDITED in message.header:
        raise InputError(
            "this message is what an audit shows in place of a secure sum, in the clear; no client sends it. Sum updates by "
            "the Flower app (rasura new federated), or by rasura.defenses.secure_aggregation.client.Client"
        )
    tensors: dict[str, Any] = {}
    parts: list[bytes] = []
    for name, gradient in message.gradients.items():
        kind = str(gradient.dtype).removeprefix("torch.")
        if kind not in DTYPES:
            raise InputError(f"{name} is {kind}; expected one of {', '.join(DTYPES)}")
        entries = gradient.detach().cpu().reshape(-1)
        mask = message.visible.get(name)
        if mask is not None:
            flat = mask.reshape(-1)
            entries = entries[flat]
            if 0 < len(entries) < len(flat):
                parts.append(np.packbits(flat.numpy()).tobytes())
        parts.append(entries.contiguous().view(torch.uint8).numpy().tobytes())
        tensors[name] = {"shape": list(gradient.shape), "dtype": kind, "shown": len(entries)}
    header = {
        "kind": message.kind, "header": dict(message.header), "tensors": tensors,
        "sealed": [[name, len(data)] for name, data in message.sealed.items()],
    }  # fmt: skip
    _checked(header)
    head = json.dumps(header).encode()
    return b"".join([MAGIC, struct.pack(">I", len(head)), head, *parts, *message.sealed.values()])


def from_bytes(data: bytes, limits: Limits = USUAL) -> Message:
    """The message that ``data`` holds. Raises ``WireError`` that says what is wrong in one line, before anything of the
    announced size is allocated; no pickle, no code."""
    _within("bytes", len(data), limits.total)
    if len(data) < START or data[: len(MAGIC) - 1] != MAGIC[:-1]:
        raise WireError("these bytes are not a message of Rasura")
    if data[len(MAGIC) - 1] != MAGIC[-1]:
        raise WireError(f"the message has schema {data[len(MAGIC) - 1]}; this version reads {MAGIC[-1]}")
    (size,) = struct.unpack(">I", data[len(MAGIC) : START])
    _within("bytes of header", size, min(limits.header, len(data) - START))
    found = _parsed(data[START : START + size])
    _within("tensors", len(found.tensors), limits.tensors)
    _within("entries", sum(t.count for t in found.tensors.values()), limits.entries)
    _within("ciphertexts", len(found.sealed), limits.ciphertexts)
    for _, length in found.sealed:
        _within("bytes of a ciphertext", length, limits.ciphertext)
    place = START + size
    told = place + sum(t.mask_bytes + t.entry_bytes for t in found.tensors.values()) + sum(n for _, n in found.sealed)
    if told != len(data):
        raise WireError(f"the message has {len(data)} bytes, its header announces {told}: it was cut or added to")
    gradients, visible, sealed = {}, {}, {}
    for name, tensor in found.tensors.items():
        bits, place = data[place : place + tensor.mask_bytes], place + tensor.mask_bytes
        entries, place = data[place : place + tensor.entry_bytes], place + tensor.entry_bytes
        gradients[name], mask = _opened(name, tensor, bits, entries)
        if mask is not None:
            visible[name] = mask
    for name, length in found.sealed:
        sealed[name], place = data[place : place + length], place + length
    return Message(gradients, visible, sealed, found.kind, found.header)


def _opened(name: str, told: _Told, bits: bytes, entries: bytes) -> tuple[Tensor, Tensor | None]:
    """The tensor, and which of its entries are visible; None for all."""
    if told.shown == 0 and told.count > 0:
        # One zero, repeated without memory: nothing of this size was sent.
        return torch.zeros((), dtype=told.dtype).expand(told.shape), torch.zeros((), dtype=torch.bool).expand(told.shape)
    shown = torch.frombuffer(bytearray(entries), dtype=told.dtype) if entries else torch.empty(0, dtype=told.dtype)
    if not bool(torch.isfinite(shown).all()):
        raise WireError(f"{name} holds entries that are not finite numbers")
    if not bits:
        return shown.reshape(told.shape), None
    mask = torch.from_numpy(np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=told.count).astype(bool))
    if int(mask.sum()) != told.shown or np.packbits(mask.numpy()).tobytes() != bits:
        raise WireError(f"the mask of {name} shows another number of entries than the {told.shown} that were sent")
    gradient = torch.zeros(told.count, dtype=told.dtype)
    gradient[mask] = shown
    return gradient.reshape(told.shape), mask.reshape(told.shape)


def _within(what: str, found: int, max_count: int) -> None:
    if found > max_count:
        raise WireError(f"the message has {found} {what}; at most {max_count} are accepted")


def _parsed(text: bytes) -> _Header:
    try:
        found = json.loads(text.decode(), parse_constant=_refused)
    except (ValueError, RecursionError):
        raise WireError("the message's header is malformed: it is not JSON") from None
    return _checked(found)


def _refused(constant: str) -> NoReturn:
    raise ValueError(constant)


def _checked(header: Any) -> _Header:
    """The header of a message. Raises ``WireError`` that names the part which is wrong."""

    def expect(right: bool, what: str) -> None:
        if not right:
            raise WireError(f"the message's header is malformed: {what}")

    expect(isinstance(header, dict) and set(header) == {"kind", "header", "tensors", "sealed"}, "its parts")
    kind, told, tensors, sealed = header["kind"], header["header"], header["tensors"], header["sealed"]
    expect(_name(kind), "its kind")
    expect(isinstance(told, dict) and all(_name(k) and _plain(v) for k, v in told.items()), "what it tells")
    expect(isinstance(tensors, dict), "its tensors")
    found: dict[str, _Told] = {}
    for name, one in tensors.items():
        expect(_name(name), "the name of a tensor")
        expect(isinstance(one, dict) and set(one) == {"shape", "dtype", "shown"}, f"the parts of {name}")
        shape, dtype, shown = one["shape"], one["dtype"], one["shown"]
        expect(isinstance(dtype, str) and dtype in DTYPES, f"the kind of {name}")
        expect(isinstance(shape, list) and len(shape) <= DIMENSIONS, f"the shape of {name}")
        expect(all(_count(n) for n in shape) and math.prod(max(n, 1) for n in shape) < 1 << 62, f"the shape of {name}")
        expect(_count(shown) and shown <= math.prod(shape), f"the entries of {name}")
        found[name] = _Told(tuple(shape), DTYPES[dtype], shown)
    pairs = isinstance(sealed, list) and all(isinstance(s, list) and len(s) == 2 for s in sealed)
    expect(pairs and all(_name(n) and _count(size) for n, size in sealed), "its ciphertexts")
    expect(len({n for n, _ in sealed}) == len(sealed), "two of its ciphertexts have one name")
    return _Header(kind, told, found, tuple((n, size) for n, size in sealed))


def _name(value: object) -> bool:
    return isinstance(value, str) and len(value) <= LONGEST_NAME and value.isprintable()


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _plain(value: object) -> bool:
    """A value that a header may hold; what a receiver prints of it stays one line."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, int):
        return abs(value) < 1 << 62
    return value is None or (isinstance(value, str) and value.isprintable())
