"""Plain values from a TOML file as the fields of a plan. Names and types are checked before the values are used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rasura.core.errors import InputError
from rasura.core.options import known

MAX_WHOLE = 1 << 63
"""Whole numbers are below this limit, as in TOML."""

MAX_FILE = 1 << 22
"""Maximum bytes of a plan or a study."""


def toml(path: Path, what: str) -> dict[str, Any]:
    """The values of a TOML file. Raises ``InputError`` if the file is missing, too large, nested too deeply or not valid
    TOML."""
    import tomllib

    if not path.is_file():
        raise InputError(f"{path} does not exist; expected {what}")
    if path.stat().st_size > MAX_FILE:
        raise InputError(f"{path} has more than {MAX_FILE >> 20} MiB; expected {what}")
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = {UnicodeDecodeError: "not UTF-8", RecursionError: "nested too deeply"}.get(type(error), "not readable")
        raise InputError(f"{path} is not valid TOML: {why}; expected {what}") from None


def typed(cls: type, found: Any, source: str, names: Iterable[str] | None = None) -> dict[str, Any]:
    """``found`` as arguments of the data class ``cls``: lists become tuples, and a single value stands for a list of one.
    ``names``: the fields that may be given; None for all. Raises ``InputError`` for other names, and for values of the wrong
    type, including NaN, infinity and numbers beyond 64 bits.
    """
    if not isinstance(found, Mapping):
        raise InputError(f"{source}: found {_called(found)}, expected a table")
    hints = get_type_hints(cls)
    choices = tuple(f.name for f in fields(cls)) if names is None else tuple(names)
    out = {}
    for key, value in found.items():
        known(f"key in {source}", key, choices)
        out[key] = _typed(hints[key], value, f"{source}: {key}")
    return out


def text(value: Any, place: str) -> str:
    """``value``. Raises ``InputError`` if it is not a text."""
    return str(_typed(str, value, place))


def texts(value: Any, place: str) -> tuple[str, ...]:
    """``value`` as texts. Raises ``InputError`` if one of them is not a text."""
    return tuple(_typed(tuple[str, ...], value, place))


def whole(value: Any, place: str) -> int:
    """``value``. Raises ``InputError`` if it is not a whole number."""
    return int(_typed(int, value, place))


def _typed(wanted: Any, value: Any, place: str) -> Any:
    origin = get_origin(wanted)
    if origin in (Union, UnionType):
        (wanted,) = (part for part in get_args(wanted) if part is not NoneType)
        return _typed(wanted, value, place)
    if origin is tuple:
        kind = get_args(wanted)[0]
        parts = value if isinstance(value, list | tuple) else (value,)
        return tuple(_typed(kind, part, place) for part in parts)
    if origin is Literal:
        return known(place, _typed(str, value, place), get_args(wanted))
    fits = isinstance(value, wanted) and not (wanted is not bool and isinstance(value, bool))
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        fits = True
    if not fits:
        expected = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
        raise InputError(f"{place} is {_called(value)}; expected {expected.get(wanted, wanted.__name__)}")
    if wanted in (int, float) and not (math.isfinite(value) if isinstance(value, float) else abs(value) < MAX_WHOLE):
        raise InputError(f"{place} is a number beyond 64 bits, NaN or infinity; expected a finite number")
    return float(value) if wanted is float else value


def _called(value: Any) -> str:
    """``value`` for a message: its type, and the value if it is short."""
    kinds: dict[type, str] = {str: "the text", bool: "the truth value", list: "a list", dict: "a table"}
    kinds |= {int: "the number", float: "the number"}
    kind = kinds.get(type(value), f"a {type(value).__name__}")
    if isinstance(value, int) and abs(value) >= MAX_WHOLE:
        return "a number beyond 64 bits"
    return f"{kind} {value!r}" if isinstance(value, str | bool | int | float) and len(str(value)) <= 60 else kind
