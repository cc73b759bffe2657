"""What a researcher's own method is: a digest of its code and its parameters, since its name alone does not say it."""

from __future__ import annotations

import functools
import hashlib
import os
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

PLAIN = (type(None), bool, int, float, complex, str, bytes, PurePath, Enum, torch.dtype, torch.device, np.generic)
"""Types whose ``repr`` says all about a value."""

PYTHON_CLASS = 1 << 9
"""The flag of classes whose objects have no state but their attributes (CPython, Py_TPFLAGS_HEAPTYPE)."""


def identity_of(method: Any) -> str:
    """Sixteen hex digits that identify the code of ``method``, what it was made with, and the functions of its own package
    that it uses. Libraries count by name.

    A value that cannot be compared, such as an open file, gives other digits each time: a run is then never resumed with it.
    """
    found = hashlib.sha256()
    for piece in _pieces(method, {}):
        found.update(piece.encode("utf-8", "surrogatepass") + b"\n")
    return found.hexdigest()[:16]


def _pieces(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Lines that say what ``value`` is. ``seen``: values that were told before, by their id."""
    if isinstance(value, PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if id(value) in seen:
        yield f"again {list(seen).index(id(value))}"
        return
    seen[id(value)] = value
    if isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for key in sorted(value, key=repr):
            yield from _pieces(key, seen)
            yield from _pieces(value[key], seen)
    elif isinstance(value, set | frozenset):
        yield from (f"member {one}" for one in sorted(identity_of(one) for one in value))
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} {len(value)}"
        for one in value:
            yield from _pieces(one, seen)
    elif isinstance(value, torch.Tensor | np.ndarray):
        held = value.detach().cpu().contiguous().numpy() if isinstance(value, torch.Tensor) else np.ascontiguousarray(value)
        yield f"array {held.shape} {held.dtype} {hashlib.sha256(held.tobytes()).hexdigest()}"
    elif isinstance(value, types.ModuleType | types.MemberDescriptorType | types.GetSetDescriptorType):
        yield f"{type(value).__name__} {value.__name__}"
    else:
        yield from _code(value, seen) if callable(value) else _object(value, seen)


def _code(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    """Functions, classes and what is called like them."""
    if isinstance(value, functools.partial):
        yield "partial"
        yield from _pieces((value.func, value.args, value.keywords), seen)
    elif isinstance(value, types.MethodType):
        yield from _pieces((value.__func__, value.__self__), seen)
    elif isinstance(value, types.FunctionType):
        yield f"function {value.__qualname__}"
        yield from _pieces((value.__defaults__, value.__kwdefaults__), seen)
        if _of_library(value):
            return
        yield from _instructions(value.__code__, seen)
        for cell in value.__closure__ or ():
            yield from _pieces(cell.cell_contents, seen)
        for name in _names(value.__code__):
            if name in value.__globals__:
                yield from _pieces(value.__globals__[name], seen)
    elif isinstance(value, type):
        yield f"class {value.__module__}.{value.__qualname__}"
        if not _of_library(value):
            own = {k: v for k, v in vars(value).items() if isinstance(v, types.FunctionType) or not k.startswith("__")}
            yield from _pieces({k: v for k, v in own.items() if k != "_abc_impl"}, seen)
            yield from _pieces(value.__bases__, seen)
    elif isinstance(value, types.BuiltinFunctionType):
        yield f"builtin {value.__module__}.{value.__qualname__}"
    else:
        yield from _object(value, seen)


def _object(value: Any, seen: dict[int, Any]) -> Iterator[str]:
    yield from _pieces(type(value), seen)
    if isinstance(value, property):
        yield from _pieces((value.fget, value.fset), seen)
    elif isinstance(value, classmethod | staticmethod):
        yield from _pieces(value.__func__, seen)
    elif isinstance(value, torch.nn.Module):
        yield from _pieces(dict(value.state_dict()), seen)
    elif type(value).__flags__ & PYTHON_CLASS and (hasattr(value, "__dict__") or hasattr(type(value), "__slots__")):
        slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
        yield from _pieces(
            {**{n: getattr(value, n) for n in slots if hasattr(value, n)}, **getattr(value, "__dict__", {})}, seen
        )
    else:
        yield f"unknown {os.urandom(8).hex()}"


def _instructions(code: types.CodeType, seen: dict[int, Any]) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names} {code.co_varnames}"
    for constant in code.co_consts:
        yield from _instructions(constant, seen) if isinstance(constant, types.CodeType) else _pieces(constant, {})


def _names(code: types.CodeType) -> list[str]:
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in _names(c)]
    return sorted({*code.co_names, *inner})


def _of_library(value: Any) -> bool:
    """Whether ``value`` belongs to Python, Rasura or an installed package, whose versions a run stores."""
    package = str(value.__module__).partition(".")[0]
    return package in _installed()


@functools.cache
def _installed() -> frozenset[str]:
    import sys
    from importlib.metadata import packages_distributions

    return frozenset({*sys.stdlib_module_names, *packages_distributions(), "rasura"} - {"__main__"})
