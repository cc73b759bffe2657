"""How many passes over its loader a program makes, where its loops show it."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from rasura.accounting.configurations.facts import Value
from rasura.accounting.configurations.handled import Handled
from rasura.accounting.configurations.scopes import Scopes, last_name, root

Read = Callable[[ast.expr], Value]


def passes(one: Handled, read: Read) -> int | None:
    """The passes in which each batch is stepped on once, summed over all steps of the optimizer; None if not shown.

    A step counts as often as the loops around it run, apart from the one loop over the private loader. ``read`` gives the
    value of an expression.
    """
    found = 0
    for node in ast.walk(one.scopes.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            variable = one.scopes.read(node.func.value)
            if variable is None or one.roles.get(variable) != "optimizer":
                continue
            times = _times(one, node, read, frozenset())
            if times is None or times[1] != 1:
                return None
            found += times[0]
    return found or None


def _times(one: Handled, node: ast.AST, read: Read, seen: frozenset[ast.AST]) -> tuple[int, int] | None:
    """How often the loops over ranges around a node run it, and how many loops over the loader are around it."""
    times, loaders = 1, 0
    child, around = node, one.scopes.parents.get(node)
    while around is not None:
        if isinstance(around, ast.For) and child in around.body:
            counted = _range(one.scopes, around.iter, read)
            if counted is None and not _over_loader(one, around.iter):
                return None
            times, loaders = times * (counted or 1), loaders + (counted is None)
        elif isinstance(around, ast.While | ast.AsyncFor | ast.comprehension | ast.Lambda | ast.AsyncFunctionDef):
            return None
        elif isinstance(around, ast.FunctionDef):
            return _called(one, around, (times, loaders), read, seen)
        child, around = around, one.scopes.parents.get(around)
    return times, loaders


def _called(
    one: Handled, function: ast.FunctionDef, inside: tuple[int, int], read: Read, seen: frozenset[ast.AST]
) -> tuple[int, int] | None:
    calls = one.scopes.loads.get(one.scopes.variable(function.name, function), [])
    if function in seen or not calls or len(seen) > 8:
        return None
    each = [_times(one, call, read, seen | {function}) for call in calls]
    known = [each_one for each_one in each if each_one is not None]
    if len(known) != len(each) or len({loaders for _, loaders in known}) > 1:
        return None
    return inside[0] * sum(times for times, _ in known), inside[1] + known[0][1]


def _unwrapped(scopes: Scopes, node: ast.expr) -> ast.expr:
    """What ``enumerate`` or ``tqdm`` is called on."""
    while isinstance(node, ast.Call) and scopes.original(node.func) in ("enumerate", "tqdm") and node.args:
        node = node.args[0]
    return node


def _over_loader(one: Handled, node: ast.expr) -> bool:
    variable = one.scopes.read(_unwrapped(one.scopes, node))
    return variable is not None and one.roles.get(variable) == "loader"


def _ranges(scopes: Scopes, node: ast.expr) -> bool:
    """Whether an expression is ``range`` or ``trange``, of whatever length."""
    node = _unwrapped(scopes, node)
    named = isinstance(node, ast.Call) and last_name(node.func) in ("range", "trange")
    return named and scopes.library(node) in ("", "tqdm")


def _range(scopes: Scopes, node: ast.expr, read: Read) -> int | None:
    """The length of ``range(N)`` or ``range(A, B)`` with numbers that are written in the program."""
    node = _unwrapped(scopes, node)
    if not isinstance(node, ast.Call) or not _ranges(scopes, node):
        return None
    ends = [read(one) for one in node.args]
    if node.keywords or not 1 <= len(ends) <= 2 or not all(type(one) is int for one in ends):
        return None
    whole = [one for one in ends if isinstance(one, int)]
    return max(0, whole[-1] - (whole[0] if len(whole) == 2 else 0))


def _loops(one: Handled, node: ast.AST, seen: set[ast.AST]) -> list[ast.For]:
    """The loops around a node, and around all calls of the function that it is in."""
    found = []
    child, around = node, one.scopes.parents.get(node)
    while around is not None:
        if isinstance(around, ast.For) and child in around.body:
            found.append(around)
        if isinstance(around, ast.FunctionDef) and around not in seen:
            seen.add(around)
            for call in one.scopes.loads.get(one.scopes.variable(around.name, around), []):
                found += _loops(one, call, seen)
        child, around = around, one.scopes.parents.get(around)
    return found


def steps_elsewhere(one: Handled) -> Iterator[tuple[ast.AST, str]]:
    """Every ``step()`` that is not one of the mechanism's optimizer, or of a schedule of learning rates."""
    for node in ast.walk(one.scopes.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "step":
            continue
        variable = one.scopes.read(root(node.func))
        role = None if variable is None else one.roles.get(variable)
        if role == "optimizer":
            for loop in _loops(one, node, set()):
                if not _ranges(one.scopes, loop.iter) and not _over_loader(one, loop.iter):
                    yield loop, f"the loop over {ast.unparse(loop.iter)} steps on other batches than those of its loader"
        elif role != "schedule":
            yield node, f"{ast.unparse(node.func)} is not a step of what {one.name} returned"
