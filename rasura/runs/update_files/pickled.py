"""Pickles as data. ``pickletools`` lists their instructions, and these are followed on plain values only.

A pickle is a program: it names functions, and loading it calls them. Here no name is looked up and nothing is called. A name
is a word, and a call is a note of the function and the values. So the numbers of an untrusted file can be read, whatever
else it would have done.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rasura.core.interfaces import InputError

MAX_BYTES = 32 << 20
"""Maximum bytes of a pickle: the description of a tensor has a few hundred bytes."""


@dataclass(frozen=True)
class Name:
    """A name that the pickle would look up: ``torch.FloatStorage``."""

    text: str


@dataclass(eq=False)
class Made:
    """The object that a call would make. ``state``: the state that would be set on it; ``pairs``: its items, for a dict."""

    call: object
    arguments: object
    state: object = None
    pairs: list[tuple[object, object]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the function that would be called."""
        return self.call.text if isinstance(self.call, Name) else "a value"


@dataclass(eq=False)
class Table:
    """A dict as pairs. Keys are not hashed, since hashing an untrusted key can take forever."""

    pairs: list[tuple[object, object]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Held:
    """Data that is stored outside the pickle, at ``key``."""

    key: object


def words(value: object) -> dict[str, object]:
    """The items of a dict whose keys are words; others are left out. Raises ``InputError`` if a key occurs twice."""
    found: dict[str, object] = {}
    for key, item in value.pairs if isinstance(value, Table | Made) else ():
        if isinstance(key, str):
            if key in found:
                raise InputError(f"{key[:100]!r} occurs twice")
            found[key] = item
    return found


def followed(data: bytes) -> object:
    """The value that a pickle describes. Raises ``InputError`` for instructions that descriptions of tensors do not need."""
    if len(data) > MAX_BYTES:
        raise InputError(f"a pickle of {len(data)} bytes; expected at most {MAX_BYTES}")
    machine = _Machine()
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "STOP":
            return machine.last()
        if name in _VALUES:
            machine.stack.append(argument)
        elif name in _CONSTANTS:
            machine.stack.append(_CONSTANTS[name]())
        elif name in _STEPS:
            _STEPS[name](machine, argument)
        elif name not in ("PROTO", "FRAME"):
            raise InputError(f"a pickle with the instruction {name}, which is not needed to describe tensors")
    raise InputError("a pickle without an end")


class _Mark:
    pass


_MARK = _Mark()

_VALUES = frozenset(
    {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}
    | {"SHORT_BINBYTES", "BINBYTES"}
)
_CONSTANTS: dict[str, Callable[[], object]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_TUPLE": tuple, "EMPTY_LIST": list,
    "EMPTY_DICT": Table, "MARK": lambda: _MARK,
}  # fmt: skip


class _Machine:
    def __init__(self) -> None:
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def last(self) -> object:
        if not self.stack or self.stack[-1] is _MARK:
            raise InputError("a pickle that uses a value which it does not hold")
        return self.stack.pop()

    def marked(self) -> list[object]:
        """Everything above the last mark."""
        out: list[object] = []
        while self.stack:
            value = self.stack.pop()
            if value is _MARK:
                return out[::-1]
            out.append(value)
        raise InputError("a pickle that uses a value which it does not hold")

    def top(self) -> object:
        self.stack.append(self.last())
        return self.stack[-1]


def _put(machine: _Machine, argument: Any) -> None:
    machine.memo[len(machine.memo) if argument is None else argument] = machine.top()


def _get(machine: _Machine, argument: Any) -> None:
    if argument not in machine.memo:
        raise InputError("a pickle that uses a value which it does not hold")
    machine.stack.append(machine.memo[argument])


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    def step(machine: _Machine, _: Any) -> None:
        machine.stack.append(tuple([machine.last() for _ in range(count)][::-1]))

    return step


def _global(machine: _Machine, argument: Any) -> None:
    machine.stack.append(Name(".".join(str(argument).split(" ", 1))))


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.last(), machine.last()
    if not isinstance(name, str) or not isinstance(module, str):
        raise InputError("a pickle with a name that is not a word")
    machine.stack.append(Name(f"{module}.{name}"))


def _call(machine: _Machine, _: Any) -> None:
    arguments, call = machine.last(), machine.last()
    machine.stack.append(Made(call, arguments))


def _build(machine: _Machine, _: Any) -> None:
    state, target = machine.last(), machine.top()
    if not isinstance(target, Made):
        raise InputError("a pickle that changes an object which it did not make")
    target.state = state


def _items(machine: _Machine, values: Sequence[object]) -> None:
    target = machine.top()
    if not isinstance(target, Table | Made) or len(values) % 2:
        raise InputError("a pickle that sets items on a value that is not a dict")
    target.pairs.extend(zip(values[::2], values[1::2]))


def _appended(machine: _Machine, values: Sequence[object]) -> None:
    target = machine.top()
    if not isinstance(target, list):
        raise InputError("a pickle that appends to a value that is not a list")
    target.extend(values)


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.last(), machine.last()
    _items(machine, (key, value))


_STEPS: dict[str, Callable[[_Machine, Any], None]] = {
    "BINPUT": _put, "LONG_BINPUT": _put, "MEMOIZE": _put, "BINGET": _get, "LONG_BINGET": _get, "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2), "TUPLE3": _tuple(3), "GLOBAL": _global, "STACK_GLOBAL": _stack_global, "REDUCE": _call,
    "NEWOBJ": _call, "BUILD": _build, "SETITEM": _set_item,
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.marked())),
    "SETITEMS": lambda machine, _: _items(machine, machine.marked()),
    "APPEND": lambda machine, _: _appended(machine, [machine.last()]),
    "APPENDS": lambda machine, _: _appended(machine, machine.marked()),
    "BINPERSID": lambda machine, _: machine.stack.append(Held(machine.last())),
}  # fmt: skip
