"""How an input is damaged: bits, cuts, lengths, pieces of other inputs; and values of other types where there is JSON."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Sequence
from copy import deepcopy
from random import Random
from typing import Any

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 0.5, -0.0, 1e308, float("nan"), float("inf"), 10**30, -(10**30), 1 << 31, 1 << 62,
    1 << 63, "", "a", "none", "0", "1e999", "\ud800", "two\nlines", "x" * 3000, "../../etc/passwd", "\x00", "ü", [], [[]],
    {}, {"": {}}, [0], [1, 2], ["a"], [None], {"a": 1},
)  # fmt: skip
"""What stands where something else was expected."""

DIGITS = re.compile(rb"\d+")


def damaged(rng: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """``data`` after one to four changes."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        _CHANGES[rng.randrange(len(_CHANGES))](rng, out, others)
    return bytes(out)


def _place(rng: Random, out: bytearray) -> int:
    # Most of what a reader decides on stands at the start or the end.
    size = len(out)
    near = rng.random()
    if near < 0.4:
        return rng.randrange(min(size, 128) + 1)
    return size - rng.randrange(min(size, 128) + 1) if near < 0.5 else rng.randrange(size + 1)


def _flip(rng: Random, out: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, out)
    if at < len(out):
        out[at] ^= 1 << rng.randrange(8)


def _set(rng: Random, out: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, out)
    out[at : at + 1] = bytes([rng.randrange(256)])


def _cut(rng: Random, out: bytearray, _: Sequence[bytes]) -> None:
    del out[_place(rng, out) :]


def _remove(rng: Random, out: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, out)
    del out[at : at + rng.randint(1, 64)]


def _insert(rng: Random, out: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, out)
    piece = (
        rng.randbytes(rng.randint(1, 32))
        if rng.random() < 0.5
        else bytes([rng.choice(b'[{"\n,;\t\x00\xff')]) * rng.randint(1, 200)
    )
    out[at:at] = piece


def _repeat(rng: Random, out: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, out)
    out[at:at] = out[at : at + rng.randint(1, 256)]


def _length(rng: Random, out: bytearray, _: Sequence[bytes]) -> None:
    at = _place(rng, out)
    number = rng.choice(NUMBERS)
    form = rng.choice(("<I", ">I", "<Q", ">Q", "<H", ">H"))
    piece = struct.pack(form, number % (1 << (8 * struct.calcsize(form))))
    out[at : at + len(piece)] = piece


def _digits(rng: Random, out: bytearray, _: Sequence[bytes]) -> None:
    found = list(DIGITS.finditer(out[:20_000]))
    if found:
        one = rng.choice(found)
        number = rng.choice((*NUMBERS, -1, 10**30, 10**400, int(one.group()[:18]) + rng.choice((-1, 1))))
        out[one.start() : one.end()] = str(number).encode()


def _splice(rng: Random, out: bytearray, others: Sequence[bytes]) -> None:
    if others:
        other = rng.choice(others)
        start = rng.randrange(len(other) + 1)
        at = _place(rng, out)
        out[at : at + rng.choice((0, 16, 1 << 30))] = other[start : start + rng.choice((16, 256, 1 << 16))]


_CHANGES = (_flip, _flip, _set, _cut, _remove, _insert, _repeat, _length, _digits, _splice)


def retyped(rng: Random, value: Any) -> Any:
    """A copy of a JSON value in which one to three places hold something else, or are missing, doubled or renamed."""
    out = json.loads(json.dumps(value))
    for _ in range(rng.choice((1, 1, 2, 3))):
        out = _changed(rng, out)
    return out


def _value(rng: Random) -> Any:
    # A copy: values that are put into each other must not change those of later inputs.
    return deepcopy(rng.choice(VALUES))


def _changed(rng: Random, root: Any) -> Any:
    place: Any = None
    key: Any = None
    here = root
    # A walk to a random depth; the root itself is replaced now and then.
    while isinstance(here, dict | list) and here and (place is None or rng.random() < 0.8):
        place = here
        key = rng.choice(list(here)) if isinstance(here, dict) else rng.randrange(len(here))
        here = here[key]
    if place is None or rng.random() < 0.02:
        return _value(rng)
    what = rng.random()
    if what < 0.6:
        place[key] = _value(rng)
    elif what < 0.7:
        del place[key]
    elif what < 0.8 and isinstance(place, dict):
        place[rng.choice(("", "x", "\ud800", str(key) + "x", "k" * 300))] = place.pop(key)
    elif what < 0.9 and isinstance(here, int | float) and not isinstance(here, bool):
        place[key] = rng.choice((here + 1, here - 1, -here, here * 1000, float(here), str(here)))
    elif isinstance(place, list):
        place.insert(key, here)
    else:
        place[key] = [here]
    return root


def as_json(value: Any) -> bytes:
    """JSON as Python writes it, with NaN and lone surrogates."""
    return json.dumps(value).encode("utf-8", "surrogatepass")
