"""The kinds of expressions in a training program. Whatever reaches the mechanism in a way that is not understood is a doubt.

A pure expression of private values is a figure. That is no doubt by itself: a figure may be told, but nothing may be trained
on it, and no condition on it may decide what is trained.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from typing import NamedTuple

import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.kinds import Kind, joined, parts
from rasura.accounting.configurations.scopes import Scopes, Variable, root

Made = tuple[ast.AST, tuple[ast.AST, ...]]
"""A node, and the calls that lead to it."""


_ALIKE = ({k.WEIGHTS}, {k.SCHEDULE}, {k.PARAMETERS}, {k.PLAIN})
"""What may stand in a list, if nothing else does: it is then as one of them."""


@dataclass
class Batch:
    """What was done with one batch of the private loader: each node, with the calls that lead to it. ``pending``: there is
    a gradient that no step has used."""

    forwards: dict[Made, None] = field(default_factory=dict)
    backwards: dict[Made, None] = field(default_factory=dict)
    steps: dict[Made, None] = field(default_factory=dict)
    pending: bool = False


class Where(NamedTuple):
    """The place of a statement. ``barred``: why nothing may be trained here; ``private``: a condition on private values
    decides whether it runs; ``blind``: no gradient is taken; ``batch``: that of the loop over the private loader;
    ``times``: how often it runs, None if that is not known; ``calls``: the calls that lead to it; ``within``: the function
    may end here, under a condition."""

    barred: str = ""
    private: bool = False
    blind: bool = False
    batch: Batch | None = None
    times: int | None = 1
    calls: tuple[ast.AST, ...] = ()
    within: bool = False

    def bar(self, why: str) -> Where:
        """The same place where nothing may be trained."""
        return self._replace(barred=self.barred or why)

    def by(self, kind: Kind) -> Where:
        """The same place, where a value of this kind decides whether it is reached."""
        return self._replace(private=self.private or bool(parts(kind) & k.DATA))


@dataclass
class Expressions:
    """The kinds of expressions. ``env``: the kinds of variables now; ``evaluating``: the model is in eval mode;
    ``ever``: all kinds that a variable had; ``deferred``: what makes learning rates at another time;
    ``same``: the variables that may hold a part of the same object;
    ``own_loss``: why the loss that the model computes is not known to be one for each example, empty if it is."""

    scopes: Scopes
    env: dict[Variable, Kind] = field(default_factory=dict)
    doubts: dict[tuple[ast.AST, str], None] = field(default_factory=dict)
    mechanisms: dict[ast.AST, Kind] = field(default_factory=dict)
    evaluating: bool = False
    ever: dict[Variable, list[Kind]] = field(default_factory=dict)
    deferred: list[ast.expr] = field(default_factory=list)
    same: dict[Variable, set[Variable]] = field(default_factory=dict)
    own_loss: str = ""

    def put(self, variable: Variable, kind: Kind) -> None:
        """Give a variable a kind."""
        self.env[variable] = kind
        self.ever.setdefault(variable, []).append(kind)

    def taint(self, name: ast.Name, kinds: set[str]) -> None:
        """A value that something private was put into is private from now on, under all of its names."""
        variable = self.scopes.variable(name.id, name)
        if (library := self.scopes.library(name)) is not None:
            if library not in k.TRACKERS:
                self.doubt(name, f"private values are put into {name.id}, from which they may be read again")
            return
        for one in self.same.get(variable, {variable}):
            found = parts(self.env.get(one, k.PUBLIC)) | kinds
            if found <= k.DATA | {k.PUBLIC}:
                self.put(one, k.figure(found, held=True))
            else:
                self.doubt(name, f"private values are put into the {min(found - k.DATA - {k.PUBLIC})}")

    def share(self, variable: Variable, node: ast.expr) -> None:
        """Note that a variable may hold what an expression holds, or a part of it."""
        names = [one for one in _held(node) if self.scopes.library(one) is None]
        found = {variable, *(self.scopes.variable(one.id, one) for one in names)}
        every = {other for one in found for other in self.same.get(one, {one})}
        self.same |= dict.fromkeys(every, every)

    @property
    def told(self) -> Kind:
        """The kind of what files and trackers hold now."""
        return self.env.get(Variable(self.scopes.tree, ""), k.PUBLIC)

    def tell(self, kinds: set[str]) -> None:
        """Note that values of these kinds were written where the program can read them again."""
        if kinds & k.DATA:
            self.put(Variable(self.scopes.tree, ""), k.FIGURE)

    def doubt(self, node: ast.AST, why: str) -> None:
        """Record something that is not understood."""
        self.doubts[node, why] = None

    def call(self, node: ast.Call, where: Where) -> Kind:
        """The kind of what a call returns."""
        raise NotImplementedError

    def bind(self, target: ast.expr, kind: Kind, where: Where) -> None:
        """Bind a target of an assignment."""
        raise NotImplementedError

    def kind(self, node: ast.expr, where: Where) -> Kind:
        """The kind of an expression."""
        if isinstance(node, ast.Constant):
            return k.PUBLIC
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Tuple) and not any(isinstance(one, ast.Starred) for one in node.elts):
            return tuple(self.kind(one, where) for one in node.elts)
        if isinstance(node, ast.Call):
            return self.call(node, where)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, where)
        if isinstance(node, ast.NamedExpr):
            kind = self.kind(node.value, where)
            self.bind(node.target, kind, where)
            return kind
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node, where)
        if isinstance(node, ast.Subscript):
            return self._item(node, where)
        if isinstance(node, ast.Lambda):
            return self.kind(node.body, where.bar("it stands in a lambda"))
        if isinstance(node, ast.IfExp):
            return self._either(node, where)
        return self._pure(node, where)

    def _name(self, node: ast.Name) -> Kind:
        found = self.env.get(self.scopes.variable(node.id, node), k.PUBLIC)
        if k.MIXED in parts(found):
            self.doubt(node, f"{node.id} may be one thing or another here")
            return k.PUBLIC
        return found

    def _either(self, node: ast.IfExp, where: Where) -> Kind:
        test = self.kind(node.test, where)
        inner, private = where.bar("it stands under if").by(test), bool(parts(test) & k.DATA)
        found = joined((self.kind(node.body, inner), self.kind(node.orelse, inner)))
        if private and parts(found) <= {k.PUBLIC}:
            return k.FIGURE
        if k.MIXED in parts(found) or (private and not parts(found) <= k.DATA | {k.PUBLIC}):
            self.doubt(node, f"{ast.unparse(node)[:80]} may be one thing or another")
            return k.PUBLIC
        return joined((found, k.FIGURE)) if private else found

    def _pure(self, node: ast.expr, where: Where) -> Kind:
        """An operation on values: a figure if any of them is private."""
        shown = isinstance(node, ast.JoinedStr | ast.Compare)
        inner = where.bar("it stands under and or or") if isinstance(node, ast.BoolOp) else where
        kinds: list[Kind] = []
        for one in (one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)):
            kinds.append(self.kind(one, inner))
            if isinstance(node, ast.BoolOp) or (isinstance(node, ast.Compare) and len(kinds) > 1):
                inner = inner.by(tuple(kinds))  # the first values decide whether the others are computed
        found = {one for kind in kinds for one in parts(kind)}
        held = isinstance(node, ast.List | ast.Dict | ast.Set | ast.Starred | ast.BoolOp | ast.Await | ast.Yield)
        if isinstance(node, ast.FormattedValue):
            return k.figure(found)
        if isinstance(node, ast.List | ast.Dict | ast.Set) and found - {k.PUBLIC} in _ALIKE:
            return (found - {k.PUBLIC}).pop()
        if isinstance(node, ast.Dict) and found <= {k.WEIGHTS, k.PUBLIC, *k.DATA}:
            return k.WEIGHTS if k.WEIGHTS in found else k.figure(found, held=True)
        if not shown and (strange := found - k.DATA - {k.PUBLIC}):
            self.doubt(node, f"{ast.unparse(node)[:80]} holds the {min(strange)}, or computes with it")
        return k.figure(found, held=held)

    def _item(self, node: ast.Subscript, where: Where) -> Kind:
        base, key = self.kind(node.value, where), self.kind(node.slice, where)
        constant = isinstance(node.slice, ast.Constant)
        if isinstance(base, tuple):
            index = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return (
                base[index] if type(index) is int and -len(base) <= index < len(base) else k.figure(parts(base), held=True)
            )
        if base == k.BATCH and constant:
            return k.COLUMN
        if base == k.OUTPUT and isinstance(node.slice, ast.Constant) and node.slice.value in ("logits", "loss"):
            return k.OWN if node.slice.value == "loss" else k.OUTPUT
        if base in (k.PLAIN, k.PARAMETERS):
            return base
        if base in (k.GROUPS, k.WEIGHTS):
            if base == k.GROUPS and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                return k.WEIGHTS if node.slice.value == "params" else k.PUBLIC
            return base
        if base not in (k.PUBLIC, *k.DATA):
            self.doubt(node, f"{ast.unparse(node)[:80]} takes a part of the {base}")
        return k.figure(parts(base) | parts(key), held=True)

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp, where: Where) -> Kind:
        inner, private, over = where.bar("it stands in a comprehension"), False, set[str]()
        for one in node.generators:
            kind = self.kind(one.iter, where)
            over |= parts(kind)
            inner = inner if kind in (k.BATCH, k.ITEMS) else inner.by(kind)
            self.bind(one.target, self.element(one.iter, kind), inner)
            for test in (self.kind(each, inner) for each in one.ifs):
                private |= bool(parts(test) & k.DATA)
                inner = inner.by(test)
        elements = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        found = {part for one in elements for part in parts(self.kind(one, inner))}
        if isinstance(node, ast.GeneratorExp) and found & k.DATA:  # ``any`` ends by what it has seen
            self.kind(node.elt, inner.by(tuple(found)))
        if found - {k.PUBLIC} == {k.COLUMN} and len(node.generators) == 1 and over <= {k.BATCH, k.ITEMS} and not private:
            return k.BATCH
        if found - {k.PUBLIC} in _ALIKE:
            return (found - {k.PUBLIC}).pop()
        if strange := found - k.DATA - {k.PUBLIC}:
            self.doubt(node, f"{ast.unparse(node)[:80]} holds the {min(strange)}")
        return k.figure(found | (over & k.DATA) | ({k.FIGURE} if private else set()), held=True)

    def element(self, node: ast.expr, kind: Kind) -> Kind:
        """The kind of an element of what is iterated over, apart from the private loader."""
        if isinstance(kind, tuple):
            return joined(kind) if kind else k.PUBLIC
        if kind in (k.BATCH, k.ITEMS):
            return k.COLUMN if kind == k.BATCH else (k.PUBLIC, k.COLUMN)
        if kind in (k.PUBLIC, k.WEIGHTS, k.GROUPS, k.PARAMETERS, k.PLAIN):
            return kind
        if kind not in k.DATA:
            self.doubt(node, f"{ast.unparse(node)[:80]} is iterated over in a way that is not understood")
        return k.figure(parts(kind), held=True)

    def _attribute(self, node: ast.Attribute, where: Where) -> Kind:
        """What is read of a value. A method that is not called keeps what it belongs to."""
        kind = self.kind(node.value, where)
        if isinstance(kind, str) and (found := k.ATTRIBUTES.get(kind, {}).get(node.attr)) is not None:
            return found
        if parts(kind) == {k.PUBLIC}:
            return self.reached(node)
        if parts(kind) <= k.DATA | {k.PUBLIC} and node.attr not in ("data", "grad", "grad_fn"):
            return k.figure(parts(kind), held=True)
        if kind == k.PLAIN and not re.fullmatch(k.CHANGES, node.attr):
            return k.PARAMETERS if node.attr in k.REACHES else k.PLAIN  # a layer, or a setting of one
        self.doubt(node, f"{ast.unparse(node)[:80]} may change the mechanism, or go past it")
        return k.FIGURE

    def reached(self, node: ast.Attribute) -> Kind:
        """The kind of an attribute of something public, which may write, train or hook, or reach weights."""
        first = root(node)
        if re.fullmatch(k.CHANGES, node.attr) and node.attr != "requires_grad_" and ".init." not in ast.unparse(node):
            self.doubt(node, f"{ast.unparse(node)[:80]} may train, or change a value in its place")
        if node.attr in k.REACHES and not (isinstance(first, ast.Name) and first.id == "self"):
            return k.PARAMETERS
        return self.told if self.scopes.library(node) in k.TRACKERS else k.PUBLIC


def _held(node: ast.expr) -> list[ast.Name]:
    """The names whose objects an expression may hold: its beginning, the elements of a list, the arguments of a call."""
    if isinstance(node, ast.Name):
        return [node]
    if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.NamedExpr):
        return _held(node.value)
    if isinstance(node, ast.Call):
        inner = [*node.args, *(one.value for one in node.keywords)] if isinstance(node.func, ast.Name) else [node.func]
        return [name for one in inner for name in _held(one)]
    if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict | ast.IfExp | ast.BoolOp):
        return [name for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr) for name in _held(one)]
    return []
