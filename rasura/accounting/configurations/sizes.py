"""The size of a batch in the ``forward`` of a model: one example more changes it, and with it what is computed for others.

It may be the first entry of a shape. In arithmetic, in a comparison or as another argument it reaches every example.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rasura.accounting.configurations.scopes import Scopes, last_name, root

SIZE, SHAPE = "size of a batch", "shape"
"""What an expression may hold: the size of the batch itself, or a tuple that begins with it."""

_SHAPED = ("view", "reshape", "expand", "repeat", "zeros", "ones")
"""Calls whose first argument is the first entry of a shape, or a whole shape."""

_WITHIN = (1, 2, 3, -1)
"""Places in a shape that belong to one example."""


def of_self(node: ast.AST, function: ast.FunctionDef) -> bool:
    """Whether an expression begins with the module itself."""
    first, names = root(node), [one.arg for one in function.args.args]
    return isinstance(first, ast.Name) and first.id in names[:1]


def held(node: ast.AST, function: ast.FunctionDef) -> bool:
    """Whether an expression is a part of the module itself, such as a layer, and no call."""
    return of_self(node, function) and not any(isinstance(one, ast.Call) for one in ast.walk(node))


class Sizes:
    """The names of a method that hold the size of a batch, or a shape that begins with it."""

    def __init__(self, scopes: Scopes, function: ast.FunctionDef) -> None:
        self.scopes, self.function, self.names = scopes, function, dict[str, set[str]]()
        self._nodes = [inner for statement in function.body for inner in ast.walk(statement)]
        for _ in range(20):
            before, self._found = self.names, dict[str, set[str]]()
            for node in [*self._nodes, *ast.walk(function.args)]:
                if isinstance(node, ast.Assign):
                    for target in node.targets:
                        self._bind(target, self.kind(node.value))
                elif isinstance(node, ast.NamedExpr | ast.AnnAssign) and node.value is not None:
                    self._bind(node.target, self.kind(node.value))
                elif isinstance(node, ast.For | ast.comprehension):
                    self._bind(node.target, "")
                elif isinstance(node, ast.arg):
                    self._found.setdefault(node.arg, set()).add("")
            self.names = self._found
            if self.names == before:
                break

    def _bind(self, target: ast.expr, kind: str) -> None:
        """Note what an assignment gives its names: the first of several gets the size of the batch."""
        if isinstance(target, ast.Name):
            self._found.setdefault(target.id, set()).add(kind)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, kind and SHAPE)
        elif isinstance(target, ast.Tuple | ast.List) and target.elts:
            for one in target.elts[1:]:
                self._bind(one, "")
            self._bind(target.elts[0], kind and SIZE)

    def kind(self, node: ast.expr) -> str:
        """What an expression holds of the size of a batch; empty if nothing."""
        if isinstance(node, ast.Name):
            found = self.names.get(node.id, {""})
            return SIZE if len(found) > 1 else next(iter(found))  # what may be a shape, or something else, is neither
        if isinstance(node, ast.Attribute):
            return SHAPE if node.attr == "shape" and not held(node, self.function) else ""
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.Subscript):
            return self._entry(node.slice) if self.kind(node.value) == SHAPE else ""
        if isinstance(node, ast.Starred | ast.NamedExpr):
            return self.kind(node.value)
        if isinstance(node, ast.Tuple | ast.List) and node.elts:
            first = self.kind(node.elts[0])
            return SHAPE if first and not any(map(self.kind, node.elts[1:])) else ""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and self.kind(node.left) == SHAPE:
            return SHAPE if not self.kind(node.right) else ""
        return ""

    def _called(self, node: ast.Call) -> str:
        if self.scopes.original(node.func) == "len" and isinstance(node.func, ast.Name) and len(node.args) == 1:
            given = node.args[0]
            plain = self.kind(given) == SHAPE or held(given, self.function)
            return "" if plain or isinstance(given, ast.List | ast.Tuple) else SIZE
        if last_name(node.func) != "size" or held(node.func, self.function):
            return ""
        place = [*node.args, *(one.value for one in node.keywords)]
        return self._entry(place[0]) if place else SHAPE

    def _entry(self, place: ast.expr) -> str:
        """What the entries of a shape at some place hold."""
        if isinstance(place, ast.Slice):
            return "" if place.step is None and place.lower is not None and _number(place.lower) in _WITHIN else SHAPE
        return "" if _number(place) in _WITHIN else SIZE

    def strange(self) -> Iterator[tuple[ast.AST, str]]:
        """Each place where the size of a batch may change what is computed for its examples."""
        told = {inner for one in self._nodes if isinstance(one, ast.Raise) for inner in ast.walk(one)}
        told |= {inner for one in self._nodes if isinstance(one, ast.Assert) and one.msg for inner in ast.walk(one.msg)}
        for node in self._nodes:
            if isinstance(node, ast.AugAssign) and self.kind(node.target):
                yield node, f"{ast.unparse(node)[:60]} computes with the size of the batch"
            if not isinstance(node, ast.expr) or node in told or isinstance(getattr(node, "ctx", None), ast.Store):
                continue
            if (kind := self.kind(node)) and not self._fine(node, kind):
                yield node, f"{ast.unparse(node)[:60]} is the size of the batch, and not the first entry of a shape here"

    def _fine(self, node: ast.expr, kind: str) -> bool:
        around = self.scopes.parents[node]
        if isinstance(around, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            return True
        if isinstance(around, ast.Subscript):
            return kind == SHAPE and node is around.value
        if isinstance(around, ast.BinOp | ast.Tuple | ast.List | ast.Starred):
            return bool(self.kind(around)) or self._state(node)
        if isinstance(around, ast.Call):
            return self._of_shape(node, kind, around) or self._state(node)
        return isinstance(around, ast.Expr)

    def _of_shape(self, node: ast.expr, kind: str, around: ast.Call) -> bool:
        """Whether an argument begins a shape that has more entries."""
        name = self.scopes.original(around.func)
        if name == "len":
            return kind == SHAPE
        own = isinstance(around.func, ast.Attribute) and isinstance(around.func.value, ast.Name)
        own = own and of_self(around.func, self.function)  # ``self.view(...)`` is a method of the model
        more = len(around.args) > 1 or kind == SHAPE
        return name in _SHAPED and not own and bool(around.args) and node is around.args[0] and more

    def _state(self, node: ast.expr) -> bool:
        """Whether ``zeros(layers, batch, width)`` is made, and given to a layer behind its input: the state of an LSTM."""
        around = made = self.scopes.parents[node]
        if isinstance(around, ast.Tuple):
            made = self.scopes.parents[around]
        entries = around.elts if isinstance(around, ast.Tuple) else around.args if isinstance(around, ast.Call) else []
        zeros = isinstance(made, ast.Call) and self.scopes.original(made.func) == "zeros"
        if not zeros or len(entries) != 3 or entries[1] is not node or self.kind(entries[0]) or self.kind(entries[2]):
            return False
        while last_name(self.scopes.parents[made]) == "to" and not isinstance(self.scopes.parents[made], ast.Name):
            made = self.scopes.parents[self.scopes.parents[made]]
        outer = self.scopes.parents[made]
        if isinstance(outer, ast.Assign) and len(outer.targets) == 1 and isinstance(outer.targets[0], ast.Name):
            variable = self.scopes.variable(outer.targets[0].id, outer.targets[0])
            return all(map(self._behind, self.scopes.loads.get(variable, [])))
        return self._behind(made)

    def _behind(self, node: ast.AST) -> bool:
        """Whether a value is an argument of a layer, and not the first. A method of this file is no layer."""
        while isinstance(self.scopes.parents[node], ast.Tuple):
            node = self.scopes.parents[node]
        around = self.scopes.parents[node]
        own = {one.name for one in ast.walk(self.scopes.tree) if isinstance(one, ast.FunctionDef)}
        layer = isinstance(around, ast.Call) and held(around.func, self.function) and last_name(around.func) not in own
        return layer and isinstance(around, ast.Call) and node in around.args[1:]


def _number(node: ast.expr) -> object:
    """A whole number that is written, with its sign; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        return -node.operand.value if type(node.operand.value) is int else None
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None
