"""The common form of all update files: tensors that are described but not yet read."""

from __future__ import annotations

import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from rasura.core.interfaces import InputError

FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""Types of gradients and weights, by their PyTorch names."""

MAX_TENSORS = 200_000
"""Maximum number of tensors in a file: a model with 1,000 blocks of 100 tensors has half as many."""

MAX_DIMENSIONS = 16
"""Maximum dimensions of a tensor: no layer has more than five."""

DAMAGE = (
    OSError, RuntimeError, TypeError, ValueError, LookupError, OverflowError, EOFError, MemoryError, RecursionError,
    SyntaxError, tokenize.TokenError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""The errors that libraries raise for malformed files."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. ``name``: None in a list without names; ``dtype``: PyTorch's name of the type, or the file's
    where PyTorch has none; ``read``: reads it, in its own type."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Source:
    """An opened file or folder. ``kind``: its recognised format; ``ordered``: whether the entries are in the writer's order;
    ``states``: the quantisation state of a tensor by its name: numbers, words, and tensors."""

    file: Path
    kind: str
    entries: Sequence[Entry]
    ordered: bool = True
    states: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def holding(self, entries: Sequence[Entry]) -> Source:
        """The same with other entries."""
        return replace(self, entries=entries, states={})

    @property
    def named(self) -> bool:
        """Whether the entries have names."""
        return all(entry.name is not None for entry in self.entries)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    return (str(error).splitlines() or [type(error).__name__])[0][:120] or type(error).__name__


@contextmanager
def refusing(place: Path, what: str = "is damaged or not an update file") -> Iterator[None]:
    """Any error from reading ``place`` inside the block becomes an ``InputError`` of one printable line.

    Names come from the file, so a message may contain anything.
    """
    try:
        yield
    except InputError as error:
        text = str(error)
        if text.isprintable():
            raise
        raise InputError("".join(c if c.isprintable() else "?" for c in text)) from None
    except DAMAGE as error:
        why = "".join(c if c.isprintable() else "?" for c in first_line(error))
        raise InputError(f"{place} {what} ({why})") from None


def checked_shape(found: Sequence[object], where: str) -> tuple[int, ...]:
    """``found`` as a shape. Raises ``InputError`` if it is not one."""
    if len(found) > MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 48 for n in found):
        raise InputError(f"{where} has the shape {str(tuple(found))[:60]}; expected sizes of 0 to 2^48")
    return tuple(n for n in found if isinstance(n, int))


def check_names(entries: Sequence[Entry], file: Path) -> None:
    """Raises ``InputError`` if a file holds no tensor, too many, or one twice."""
    if not entries:
        raise InputError(
            f"{file} holds no tensor under the name of a parameter; expected one for each (the state of an optimizer, whose "
            "tensors are numbered, is not read)"
        )
    if len(entries) > MAX_TENSORS:
        raise InputError(f"{file} holds {len(entries)} tensors; expected at most {MAX_TENSORS}")
    seen: set[str] = set()
    for entry in entries:
        if entry.name is not None and entry.name in seen:
            raise InputError(f"{file}: {entry.name} occurs twice; expected one tensor per parameter name")
        seen |= {entry.name} if entry.name is not None else set()
