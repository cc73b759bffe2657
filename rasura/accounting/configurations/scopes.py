"""The variables of a Python program, each by its scope: where they are bound and read, and what runs for sure."""

from __future__ import annotations

import ast
from typing import NamedTuple

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = ast.Module | Function | ast.ClassDef
ENDS = ("exit", "_exit", "quit", "abort")
BRANCHES: dict[type[ast.AST], str] = {
    ast.If: "if", ast.IfExp: "if", ast.For: "for", ast.AsyncFor: "for", ast.While: "while", ast.Try: "try",
    ast.TryStar: "try", ast.With: "with", ast.AsyncWith: "with", ast.Match: "match", ast.BoolOp: "and or or",
    ast.ListComp: "for", ast.SetComp: "for", ast.DictComp: "for", ast.GeneratorExp: "for", ast.Assert: "assert",
    ast.Compare: "a comparison", ast.Await: "await", ast.Lambda: "lambda", ast.ClassDef: "class",
}  # fmt: skip
"""What may keep the code inside it from running exactly once, with its name."""


class Variable(NamedTuple):
    """A name in the scope that binds it; the module where none does."""

    scope: ast.AST
    name: str


class Scopes:
    """The scopes of a program.

    ``parents``: the node around each node. ``bindings``: all nodes that bind a variable. ``loads``: all that read one.
    ``stars``: whether anything is imported by a star. A comprehension counts as part of the function around it.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        self.stars = False
        self.bindings: dict[Variable, list[ast.AST]] = {}
        self.loads: dict[Variable, list[ast.Name]] = {}
        self._local: dict[ast.AST, set[str]] = {}
        nodes = list(ast.walk(tree))
        for node in nodes:
            self._local.setdefault(self.scope(node), set()).update(changed(node))
            self.stars |= "*" in changed(node)
        for node in nodes:  # a name that is declared global or nonlocal belongs to a scope further out
            if isinstance(node, ast.Global | ast.Nonlocal):
                self._local.setdefault(self.scope(node), set()).difference_update(node.names)
        for node in nodes:
            for name in changed(node):
                self.bindings.setdefault(self.variable(name, node), []).append(node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.loads.setdefault(self.variable(node.id, node), []).append(node)

    def scope(self, node: ast.AST) -> ast.AST:
        """The function, class or module whose code a node is."""
        child, around = node, self.parents.get(node)
        while around is not None:
            if isinstance(around, ast.Module | ast.ClassDef) and child in around.body:
                return around
            if isinstance(around, ast.Lambda) and child is around.body:
                return around
            if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef) and child in around.body:
                return around
            if isinstance(child, ast.arg) and isinstance(around, ast.arguments):
                return self.parents[around]
            child, around = around, self.parents.get(around)
        return self.tree

    def variable(self, name: str, node: ast.AST) -> Variable:
        """The variable that ``name`` means at ``node``."""
        first = scope = self.scope(node)
        while scope is not self.tree:
            if name in self._local.get(scope, ()) and (scope is first or not isinstance(scope, ast.ClassDef)):
                return Variable(scope, name)
            scope = self.scope(scope)
        return Variable(self.tree, name)

    def read(self, node: ast.AST) -> Variable | None:
        """The variable of a bare name; None for any other expression."""
        return self.variable(node.id, node) if isinstance(node, ast.Name) else None

    def bound(self, variable: Variable) -> list[ast.AST]:
        """What binds a variable; nothing for one that the program does not have."""
        return self.bindings.get(variable, [])

    def assigned(self, variable: Variable, beside: frozenset[ast.AST] = frozenset()) -> ast.expr | None:
        """The value of a variable that is bound by one plain assignment, apart from the bindings in ``beside``."""
        found = [one for one in self.bound(variable) if one not in beside]
        around = self.parents.get(found[0]) if len(found) == 1 else None
        if isinstance(around, ast.Assign) and len(around.targets) == 1 and around.targets[0] is found[0]:
            return around.value
        return None

    def library(self, node: ast.AST) -> str | None:
        """The package that a dotted name was imported from; empty if the program does not bind it, None if otherwise."""
        variable = self.read(root(node))
        if variable is None:
            return None
        if not (found := self.bound(variable)):
            return ""
        if len({_package(one, variable.name) for one in found}) > 1:
            return None
        return _package(found[0], variable.name)

    def original(self, node: ast.AST) -> str:
        """The last part of a dotted name, as it was before an import gave it another."""
        found = last_name(node)
        for one in self.bound(self.variable(found, node)) if isinstance(node, ast.Name) else ():
            for name in one.names if isinstance(one, ast.ImportFrom) else ():
                if (name.asname or name.name) == found:
                    return name.name
        return found

    def statement(self, node: ast.AST) -> ast.AST:
        """The statement that a node is in."""
        while not isinstance(node, ast.stmt) and node in self.parents:
            node = self.parents[node]
        return node

    def unsure(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset(), *, framework: bool = False) -> str:
        """Why it is not known that ``node`` runs exactly once; empty if it is.

        ``framework``: a function that the program never calls is taken for one that a framework runs once.
        """
        child, around = node, self.parents.get(node)
        while around is not None:
            if type(around) in BRANCHES and not _main(around, child) and not _first(around, child):
                return f"it stands under {BRANCHES[type(around)]}"
            if isinstance(around, ast.FunctionDef | ast.AsyncFunctionDef):
                if child not in around.body:
                    return f"it stands in the head of {around.name}"
                if why := _left_before(around.body, node, f"{around.name} may end before it"):
                    return why
                return self._unsure_function(around, seen, framework)
            if isinstance(around, ast.Module) and (why := _left_before(around.body, node, "the program may end before it")):
                return why
            child, around = around, self.parents.get(around)
        return ""

    def _unsure_function(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, seen: frozenset[ast.AST], framework: bool
    ) -> str:
        unknown = f"it is not known how often {function.name} runs"
        variable = self.variable(function.name, function)
        calls, seen = self.loads.get(variable, []), seen | {function}
        yields = any(isinstance(one, ast.Yield | ast.YieldFrom) for one in ast.walk(function))
        if len(seen) > 20 or yields or self.bound(variable) != [function]:
            return unknown
        run = len(function.decorator_list) == 1 and entry(function.decorator_list[0])
        if not calls and (run or framework) and isinstance(self.parents[function], ast.Module):
            return ""
        if len(calls) != 1 or function.decorator_list or isinstance(function, ast.AsyncFunctionDef):
            return unknown
        call = self.parents[calls[0]]
        if not isinstance(call, ast.Call) or call.func is not calls[0] or self.scope(call) in seen:
            return unknown
        return self.unsure(call, seen, framework=framework) or self.unsure(function, seen, framework=framework)


def _package(node: ast.AST, name: str) -> str | None:
    """The package that an import binds ``name`` to; None for another binding."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] if not node.level else "."
    if isinstance(node, ast.Import):
        return next(one.name.split(".")[0] for one in node.names if (one.asname or one.name.split(".")[0]) == name)
    return None


def entry(decorator: ast.expr) -> bool:
    """Whether a decorator makes a function the one that a Flower server app runs: ``@app.main()``."""
    return isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute) and decorator.func.attr == "main"


def _main(around: ast.AST, child: ast.AST) -> bool:
    """Whether ``child`` stands under ``if __name__ == "__main__"``."""
    if not isinstance(around, ast.If) or child not in around.body:
        return False
    return ast.unparse(around.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _first(around: ast.AST, child: ast.AST) -> bool:
    """Whether ``child`` is what a loop, branch or block evaluates once at its start."""
    if isinstance(around, ast.For):
        return child is around.iter
    if isinstance(around, ast.With):
        return bool(around.items) and child is around.items[0]
    return isinstance(around, ast.If) and child is around.test


def _left_before(body: list[ast.stmt], node: ast.AST, why: str) -> str:
    """``why`` if a statement before ``node`` may end the function or the program."""
    for statement in body:
        for one in _inside(statement):
            ends = isinstance(one, ast.Return | ast.Raise) or (isinstance(one, ast.Call) and last_name(one.func) in ENDS)
            if ends and position(one) < position(node):
                return why
    return ""


def _inside(node: ast.AST) -> list[ast.AST]:
    """A node and all nodes in it, apart from the bodies of functions and errors that are all that follows from a test."""
    refuses = isinstance(node, ast.If) and not node.orelse and len(node.body) == 1 and isinstance(node.body[0], ast.Raise)
    if refuses or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return [node]
    return [node, *(inner for child in ast.iter_child_nodes(node) for inner in _inside(child))]


def position(node: ast.AST) -> tuple[int, int]:
    """Line and column where a node begins."""
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def root(node: ast.AST) -> ast.AST:
    """What an expression of attributes, items and calls begins with: ``a`` of ``a.b[0].c()``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def last_name(node: ast.AST) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def changed(node: ast.AST) -> list[str]:
    """Names that a node of a program binds or deletes; a star for an import of everything."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
        return [node.id]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [(one.asname or one.name).split(".")[0] for one in node.names]
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
        return [node.name] if node.name else []
    return [node.arg] if isinstance(node, ast.arg) else []
