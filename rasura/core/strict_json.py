"""JSON that every parser reads: NaN and infinity, which JSON does not have, are null."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def finite(value: Any) -> Any:
    """``value`` with None in place of every number that is not finite."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value


def strict_json(value: Any, *, sort: bool = False, indent: int | None = None) -> str:
    """``value`` as JSON. ``sort``: the keys in order."""
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, sort_keys=sort, indent=indent)
