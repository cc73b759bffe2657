"""What a researcher's own method is: a digest of its code and its parameters, since its name alone does not say it."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import operator
import pickle
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from rasura.runs.sources import imports, library, modules, package_of, spec_of, unknown

PLAIN = (
    type(None), bool, int, float, complex, str, bytes, PurePath, Enum, np.generic,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
"""Types whose ``repr`` says all about a value."""

MADE_AT_RUN_TIME = 1 << 9
"""The flag of classes that Python code can have made (CPython, Py_TPFLAGS_HEAPTYPE)."""

CONTAINERS = (dict, list, tuple, set, frozenset, types.MappingProxyType)
"""Types whose objects have no state but what they contain."""

PASSING = ("_name_or_path", "name_or_path", "_original_object_hash")
"""Attributes of a library's models that differ between machines or processes: their folder, and a hash with a random key."""


@dataclass(frozen=True, slots=True)
class Part:
    """A value that is a part of another one."""

    value: Any


Pieces = Iterator[str | Part]


def identity_of(method: Any) -> str:
    """Sixteen hex digits that identify the code of ``method``, what it was made with, and the modules that it uses.

    Libraries count by name and version (``rasura.runs.sources``). These do not count: files that a method reads, modules
    that it imports under a computed name, and values written into a module that it imports inside a function.

    A value that cannot be compared, such as an open file, gives other digits each time: a run is then never resumed with it.
    """
    return _digest(method, {})


def _digest(value: Any, seen: dict[int, tuple[int, Any]]) -> str:
    """``seen``: the values that were told before and their numbers, by their ids."""
    found = hashlib.sha256()
    waiting: list[Pieces] = [iter([Part(value)])]
    while waiting:  # without recursion, for chains of any length
        piece = next(waiting[-1], None)
        if piece is None:
            waiting.pop()
        elif isinstance(piece, Part):
            waiting.append(_pieces(piece.value, seen))
        else:
            found.update(piece.encode("utf-8", "surrogatepass") + b"\n")
    return found.hexdigest()[:16]


def _pieces(value: Any, seen: dict[int, tuple[int, Any]]) -> Pieces:
    """Lines that say what ``value`` is, and its parts."""
    if isinstance(value, PLAIN):
        yield f"{type(value).__name__} {value!r}"
        if _library(type(value)):
            return
    if id(value) in seen:
        yield f"again {seen[id(value)][0]}"
        return
    if type(value) not in (tuple, frozenset):  # equal ones may be one object or several
        seen[id(value)] = len(seen), value
    if isinstance(value, Mapping):
        yield f"mapping {len(value)}"
        for key in sorted(value, key=repr) if all(isinstance(key, PLAIN) for key in value) else value:
            yield from (Part(key), Part(value[key]))
    elif isinstance(value, set | frozenset):
        yield from (f"member {one}" for one in sorted(_digest(one, dict(seen)) for one in value))
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} {len(value)}"
        yield from map(Part, value)
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield from _array(value)
    elif isinstance(value, types.ModuleType):
        yield from _module(value)
    elif isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        yield f"{type(value).__name__} {value.__name__}"
    else:
        yield from _code(value) if callable(value) else _object(value)
        return
    if isinstance(value, Mapping | set | frozenset | tuple | list) and type(value) not in CONTAINERS:
        yield from _object(value)


def _array(value: torch.Tensor | np.ndarray[Any, Any]) -> Pieces:
    yield f"array {tuple(value.shape)} {value.dtype}"
    if isinstance(value, torch.Tensor):
        try:
            held = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        except (RuntimeError, NotImplementedError, TypeError):  # such as a sparse tensor, or one without storage
            yield unknown()
            return
        yield from (hashlib.sha256(held).hexdigest(), Part(type(value)), Part(vars(value)))
    elif value.dtype.hasobject:
        yield from (Part(type(value)), Part(value.tolist()))
    else:
        yield hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
        if type(value) is not np.ndarray:
            yield from _object(value)


def _module(value: types.ModuleType) -> Iterator[str]:
    spec = spec_of(value)
    known = _library(value)
    if known:
        yield f"module {value.__name__} of {known}"
    else:
        yield from modules([spec]) if spec else [unknown()]


def _code(value: Any) -> Pieces:
    """Functions, classes and what is called like them."""
    if isinstance(value, functools.partial):
        yield "partial"
        yield Part((value.func, value.args, value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (Part(value.__func__), Part(value.__self__))
    elif isinstance(value, types.FunctionType):
        yield from _function(value)
    elif isinstance(value, type):
        known = _library(value)
        yield f"class {value.__module__}.{value.__qualname__} of {known}"
        if not known:
            own = {k: v for k, v in vars(value).items() if not k.startswith("__") or callable(v) or hasattr(v, "__get__")}
            yield Part({k: v for k, v in own.items() if k != "_abc_impl"})
            yield Part((type(value), *value.__bases__))
    elif isinstance(value, types.BuiltinFunctionType):
        yield f"builtin {value.__module__}.{value.__qualname__}"
        yield Part(value.__self__)
    else:
        yield from _object(value)


def _function(value: types.FunctionType) -> Pieces:
    known = _library(value)
    yield f"function {value.__qualname__} of {known and f'{known} {value.__module__}'}"
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    held = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    yield Part((value.__defaults__, value.__kwdefaults__, held, vars(value)))
    if known and not value.__qualname__.endswith("<lambda>"):  # no name says which lambda it is
        return
    yield from _instructions(value.__code__)
    if not known:
        names = _names(value.__code__)
        yield from _used(value.__globals__, names)
        yield from modules(imports(value.__code__, package_of(value.__globals__)))


def _used(place: Mapping[str, Any], names: Iterable[str]) -> Pieces:
    """The globals of ``place`` under ``names``, and what a researcher's own modules among them hold under these names."""
    waiting, told = [place], set[int]()
    while waiting:
        held = waiting.pop()
        for value in [held[name] for name in names if name in held]:
            yield Part(value)
            if isinstance(value, types.ModuleType) and not _library(value) and id(value) not in told:
                told.add(id(value))
                waiting.append(vars(value))
                yield from modules(f"{value.__name__}.{name}" for name in names if name not in vars(value))


def _object(value: Any) -> Pieces:
    """An object: its class, its attributes, and what it would be pickled as."""
    yield Part(type(value))
    if isinstance(value, property):
        yield Part((value.fget, value.fset, value.fdel))
    elif isinstance(value, classmethod | staticmethod):
        yield Part(value.__func__)
    elif isinstance(value, functools.cached_property):
        yield Part(value.func)
    elif isinstance(value, torch.nn.Module):  # hooks are held under numbers that the process draws
        held = {n: list(v.values()) if "_hooks" in n and isinstance(v, Mapping) else v for n, v in vars(value).items()}
        yield Part(_lasting(held, type(value)))
    else:
        if not _library(type(value)) or hasattr(value, "__wrapped__"):
            slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            yield Part({n: getattr(value, n) for n in slots if hasattr(value, n)} | getattr(value, "__dict__", {}))
        if not isinstance(value, set | frozenset | Mapping) or isinstance(value, dict):  # what these contain was told
            yield from _pickled(value)


def _pickled(value: Any) -> Pieces:
    """What ``value`` would be pickled as: also the state of an object made in C, which no attribute shows."""
    try:
        reduce: Any = copyreg.dispatch_table.get(type(value))
        made = reduce(value) if reduce else value.__reduce_ex__(2)
    except Exception:
        yield unknown()
        return
    if not isinstance(made, str):
        state = made[2] if len(made) > 2 else None
        yield Part((*made[:2], _lasting(state, type(value)) if isinstance(state, dict) else state))
        yield from (Part(list(more or ())) for more in made[3:5])
        return
    yield f"name {made}"
    made_in = sys.modules.get(pickle.whichmodule(value, made))  # type: ignore[attr-defined]  # typeshed lacks it
    if not hasattr(value, "__wrapped__") and getattr(made_in, made, None) is not value:
        yield unknown()


def _lasting(held: dict[str, Any], kind: type) -> dict[str, Any]:
    return {name: value for name, value in held.items() if name not in PASSING} if _library(kind) else held


def _instructions(code: types.CodeType) -> Pieces:
    yield f"{code.co_code.hex()} {code.co_exceptiontable.hex()} {code.co_flags} {code.co_names} {code.co_varnames}"
    yield f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}"
    for constant in code.co_consts:
        yield from _instructions(constant) if isinstance(constant, types.CodeType) else [Part(constant)]


def _names(code: types.CodeType) -> list[str]:
    inner = [n for c in code.co_consts if isinstance(c, types.CodeType) for n in _names(c)]
    return sorted({*code.co_names, *inner})


def _library(value: Any) -> str | None:
    """The library of a function, class or module; none for a researcher's own."""
    if isinstance(value, types.FunctionType):
        return library(str(value.__globals__.get("__name__")), value.__globals__.get("__file__"))
    if isinstance(value, types.ModuleType):
        return library(value.__name__, getattr(value, "__file__", None))
    name = str(value.__module__)
    made_in = sys.modules.get(name)
    if made_in is None or (value.__flags__ & MADE_AT_RUN_TIME and not _stands_in(made_in, value)):
        return None  # a library's function may have made it of a researcher's, as `types.new_class` does
    return library(name, getattr(made_in, "__file__", None))


def _stands_in(module: types.ModuleType, kind: type) -> bool:
    try:
        return operator.attrgetter(kind.__qualname__)(module) is kind
    except AttributeError:
        return False
