"""What a caller passes from Python: an object of the right kind, and texts as a list of texts."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from rasura.core.errors import InputError

T = TypeVar("T")


def of_kind(found: Any, kind: type[T], name: str, instead: str) -> T:
    """``found``, if it is a ``kind``. Raises ``InputError`` otherwise, with the argument's ``name`` and what to pass
    ``instead``."""
    if not isinstance(found, kind):
        raise InputError(f"{name} is {type(found).__name__}; expected {kind.__name__}: {instead}")
    return found


def given_texts(data: Any, name: str = "data", least: int = 1) -> tuple[str, ...]:
    """The texts of a list. Raises ``InputError`` for a table, whose items are the names of its columns, for fewer texts than
    ``least``, and for anything else among them."""
    kind = type(data).__name__
    if isinstance(data, Mapping) or any(hasattr(data, columns) for columns in ("columns", "column_names")):
        raise InputError(f"{name} is a table ({kind}); pass its column of texts as a list: {name}=list(table['text'])")
    if isinstance(data, str | bytes) or not isinstance(data, Collection):
        raise InputError(f"{name} is {kind}; expected a list of texts")
    if len(data) < least:
        raise InputError(f"no texts were given; expected at least one in {name}, as a list of texts or a file")
    for place, one in enumerate(data):
        if not isinstance(one, str):
            raise InputError(f"{name}[{place}] is {type(one).__name__}; expected a text, as in every place of {name}")
    return tuple(data)
