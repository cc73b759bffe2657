"""The functions of a training program, followed where they are called."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field

import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.assignments import Assignments
from rasura.accounting.configurations.expressions import Where
from rasura.accounting.configurations.kinds import Kind, joined, parts
from rasura.accounting.configurations.scopes import Variable

Leaves = set[str]
"""How a block may end before its last statement: by return, break, continue or raise, ``private`` if by private values."""


@dataclass
class Entering(Assignments):
    """The kinds of what functions of this file return. ``entered``: those that are called; ``returned``: what each returns
    that is followed now."""

    entered: set[ast.AST] = field(default_factory=set)
    returned: list[list[Kind]] = field(default_factory=list)

    def block(self, body: Sequence[ast.stmt], where: Where) -> Leaves:
        """Follow statements."""
        raise NotImplementedError

    def enter(self, function: ast.FunctionDef, call: ast.Call, where: Where) -> Kind:
        """Follow a function of this file, with what it is called on."""
        given = {part for one in call.args for part in parts(self.kind(_plain(one), where))}
        if len(where.calls) > 12 or function in where.calls:
            self.doubt(call, f"{function.name} calls itself, or too many others")
            return k.PUBLIC
        bound = self._parameters(function, call, where)
        starred = any(isinstance(one, ast.Starred) for one in call.args) or any(one.arg is None for one in call.keywords)
        given |= {part for one in call.keywords for part in parts(self.kind(one.value, where))}
        if starred and given - {k.PUBLIC}:
            self.doubt(call, f"which parameter of {function.name} gets what is not understood")
        return self.run(function, bound, where._replace(calls=(*where.calls, call, function)))

    def _parameters(self, function: ast.FunctionDef, call: ast.Call, where: Where) -> dict[str, Kind]:
        named = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        bound: dict[str, Kind] = {}
        for name, value in zip(named, call.args):
            bound[name] = self.kind(_plain(value), where)
            self.share(Variable(function, name), _plain(value))
        for one in call.keywords:
            if one.arg is not None:
                self.share(Variable(function, one.arg), one.value)
        beyond = [self.kind(_plain(one), where) for one in call.args[len(named) :]]
        bound |= {one.arg: self.kind(one.value, where) for one in call.keywords if one.arg is not None}
        every = {*named, *(one.arg for one in function.args.kwonlyargs)}
        beyond += [kind for name, kind in bound.items() if name not in every]
        if any(parts(kind) - {k.PUBLIC} for kind in beyond):
            self.doubt(call, f"which parameter of {function.name} gets what is not understood")
        return {name: kind for name, kind in bound.items() if name in every}

    def run(self, function: ast.FunctionDef, bound: dict[str, Kind], where: Where) -> Kind:
        """Follow the body of a function; the kind of what it returns."""
        self.entered.add(function)
        for variable in [one for one in self.env if one.scope is function]:
            del self.env[variable]
        for name, kind in bound.items():
            self.put(Variable(function, name), kind)
        if function.decorator_list:
            blind = {"no_grad", "inference_mode"} & {self.scopes.original(_called(one)) for one in function.decorator_list}
            where = where._replace(blind=where.blind or bool(blind))
        self.returned.append([])
        mode = self.evaluating
        leaves = self.block(function.body, where._replace(within=False))
        found = self.returned.pop()
        if where.blind:
            self.evaluating = mode
        ends = bool(function.body) and isinstance(function.body[-1], ast.Return)
        if "private" in leaves and "raise" in leaves:
            self.doubt(function, f"{function.name} may end with an error that depends on private values")
        return joined([*found, *([] if ends else [k.PUBLIC])])


def _plain(node: ast.expr) -> ast.expr:
    return node.value if isinstance(node, ast.Starred) else node


def _called(node: ast.expr) -> ast.expr:
    return node.func if isinstance(node, ast.Call) else node
