"""Data sets that a program writes itself: whether their classes give each row once, and each by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rasura.accounting.configurations.scopes import Scopes, last_name, root

_SAME = ("int", "tolist", "item")
"""Calls that give the number of a row as it is."""

_TOLD = ("str", "print", "is_tensor", "isinstance", "type", "format", "__getitem__")
"""Calls that may take the number of a row: those that name it, and the same method of another data set."""

_TABLES = ("dict", "defaultdict", "Counter")
"""Calls that make a dictionary, beside its display."""


def classes_of(scopes: Scopes, node: ast.expr) -> Iterator[ast.ClassDef]:
    """The class of this file that is called, with those of this file that it inherits from."""
    for one in _classes(scopes, node.func) if isinstance(node, ast.Call) else ():
        yield one
        yield from _inherited(scopes, one, {one})


def picks(node: ast.ClassDef) -> bool:
    """Whether a class may give a row more than once, or make one of several: it does anything with the number of a row but
    take the row of that number."""
    own = methods(node)
    return any(not _whole(node, own[name], 1, frozenset()) for name in ("__getitem__", "__getitems__") if name in own)


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    """The methods of a class by their names."""
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def sources(node: ast.ClassDef) -> tuple[list[ast.expr], bool]:
    """What the rows of a class are taken from: all that is assigned to the attributes it reads by number. And whether one of
    these grows by many rows at once."""
    read = {_attribute(one.value) for one in ast.walk(node) if isinstance(one, ast.Subscript)} - {""}
    made: list[ast.expr] = []
    for one in ast.walk(node):
        if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            made += [one.value for target in targets if _attribute(target) in read]
        if isinstance(one, ast.AugAssign) and _attribute(one.target) in read:
            return made, True
        grows = isinstance(one, ast.Attribute) and one.attr in ("extend", "insert")
        if grows and _attribute(one.value) in read:  # type: ignore[attr-defined]  # an attribute
            return made, True
    return made, False


def _classes(scopes: Scopes, name: ast.expr) -> list[ast.ClassDef]:
    variable = scopes.read(name)
    return [one for one in scopes.bound(variable) if isinstance(one, ast.ClassDef)] if variable is not None else []


def _inherited(scopes: Scopes, node: ast.ClassDef, seen: set[ast.ClassDef]) -> Iterator[ast.ClassDef]:
    for one in (each for base in node.bases for each in _classes(scopes, base)):
        if one not in seen:
            seen.add(one)
            yield one
            yield from _inherited(scopes, one, seen)


def _attribute(node: ast.AST) -> str:
    """The name of an attribute of ``self`` that an expression begins with; empty if it begins otherwise."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return node.attr
        node = node.func if isinstance(node, ast.Call) else node.value
    return ""


def _whole(owner: ast.ClassDef, function: ast.FunctionDef, place: int, seen: frozenset[str]) -> bool:
    """Whether a method only takes the row whose number is its argument at ``place``."""
    named = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    if place >= len(named) or function.name in seen:
        return False
    index, seen = named[place], seen | {function.name}
    parents = {child: one for one in ast.walk(function) for child in ast.iter_child_nodes(one)}
    rows = [one for one in ast.walk(function) if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Load)]
    return all(
        _used_whole(owner, one, parents, seen) for one in ast.walk(function) if isinstance(one, ast.Name) and one.id == index
    ) and all(_row(owner, one, index) for one in rows)


def _used_whole(owner: ast.ClassDef, node: ast.Name, parents: dict[ast.AST, ast.AST], seen: frozenset[str]) -> bool:
    """Whether the number of a row, here, takes that row, is told, or is passed on as it is."""
    if isinstance(node.ctx, ast.Store):
        made = parents[node]
        return isinstance(made, ast.Assign) and len(made.targets) == 1 and _number(made.value, node.id)
    child: ast.AST = node
    around = parents[child]
    while _same(around, child) or (isinstance(around, ast.Attribute) and around.attr in _SAME):
        child, around = around, parents[around]
    if isinstance(around, ast.Subscript):
        return around.slice is child
    if isinstance(around, ast.Tuple):
        outer = parents[around]
        return isinstance(outer, ast.Return) or (isinstance(outer, ast.Subscript) and around.elts[0] is child)
    if isinstance(around, ast.Assign):
        return any(isinstance(one, ast.Name) and one.id == node.id for one in around.targets)
    if isinstance(around, ast.Compare):
        test = parents[around]
        return isinstance(test, ast.If) and not test.orelse and all(isinstance(one, ast.Raise) for one in test.body)
    if isinstance(around, ast.Call) and child in around.args:
        if last_name(around.func) in _TOLD:
            return True
        own = isinstance(around.func, ast.Attribute) and ast.unparse(around.func.value) == "self"
        called = methods(owner).get(last_name(around.func)) if own else None
        return called is not None and _whole(owner, called, 1 + around.args.index(child), seen)  # type: ignore[arg-type]
    return isinstance(around, ast.FormattedValue | ast.Dict | ast.Return)


def _same(node: ast.AST, child: ast.AST) -> bool:
    """Whether a call gives the number ``child`` as it is."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in _SAME:
        return False
    return node.args == [child] or (node.func is child and not node.args)


def _number(node: ast.expr, index: str) -> bool:
    """Whether an expression is the number of the row: ``i``, ``int(i)``, ``i.tolist()``."""
    while isinstance(node, ast.Call) and last_name(node.func) in _SAME:
        node = node.func.value if isinstance(node.func, ast.Attribute) else node.args[0] if node.args else node.func
    return isinstance(node, ast.Name) and node.id == index


def _row(owner: ast.ClassDef, node: ast.Subscript, index: str) -> bool:
    """Whether a part of an attribute is the row, something of the row, or of a table that is not of rows."""
    first = root(node)
    if not isinstance(first, ast.Name) or first.id != "self":
        return isinstance(first, ast.Name)
    if any(isinstance(one, ast.Name) and one.id == index for one in ast.walk(node.value)):
        return True  # a part of the row
    place = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
    if isinstance(place, ast.Constant) or _number(place, index):
        return True
    if isinstance(place, ast.Attribute) and not any(isinstance(one, ast.Subscript) for one in ast.walk(place)):
        return True  # a column
    return _table(owner, _attribute(node))


def _table(owner: ast.ClassDef, name: str) -> bool:
    """Whether an attribute is a dictionary that the class makes."""
    made = [
        one.value
        for one in ast.walk(owner)
        if isinstance(one, ast.Assign) and any(_attribute(target) == name for target in one.targets)
    ]
    return bool(made) and all(
        isinstance(one, ast.Dict | ast.DictComp) or (isinstance(one, ast.Call) and last_name(one.func) in _TABLES)
        for one in made
    )
