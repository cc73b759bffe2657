"""The assignments of a training program: what each variable holds, and what may not be assigned."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.calls import Calls
from rasura.accounting.configurations.expressions import Where
from rasura.accounting.configurations.kinds import Kind, joined, parts
from rasura.accounting.configurations.scopes import Variable, root


@dataclass
class Assignments(Calls):
    """The kinds of variables. ``inputs``: those of the plain model and its modules."""

    inputs: frozenset[Variable] = frozenset()

    def assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, where: Where) -> None:
        if node.value is None:
            return
        kind = self.kind(node.value, where)
        if isinstance(node, ast.AugAssign):
            before = self.kind(node.target, where)
            found = parts(before) | parts(kind)
            if parts(before) & k.SHARED:
                self.doubt(node, f"{ast.unparse(node)[:80]} changes the {min(parts(before) & k.SHARED)} in its place")
            if strange := found - k.DATA - {k.PUBLIC}:
                self.doubt(node, f"{ast.unparse(node)[:80]} changes the {min(strange)}")
            kind = k.FIGURE if found & k.DATA else k.PUBLIC
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            self.bind(target, kind, where)
            self.shares(target, node.value)
            self.shares(target, targets[0])

    def shares(self, target: ast.expr, value: ast.expr) -> None:
        """Note what the variables of a target hold a part of."""
        for one in ast.walk(target):
            if isinstance(one, ast.Name):
                self.share(self.scopes.variable(one.id, one), value)

    def bind(self, target: ast.expr, kind: Kind, where: Where) -> None:
        """Bind a target of an assignment."""
        if isinstance(target, ast.Tuple | ast.List):
            self._unpacked(target, kind, where)
        elif isinstance(target, ast.Name):
            if where.private and parts(kind) <= k.DATA | {k.PUBLIC}:
                kind = joined((kind, k.FIGURE))
            elif where.private:
                self.doubt(target, f"private values decide what {target.id} is")
            variable = self.scopes.variable(target.id, target)
            if kind in (k.INNER, k.ACCOUNTANT):
                self.doubt(target, f"the {kind} is kept as {target.id}")
            self.put(variable, k.PLAIN if kind == k.PUBLIC and variable in self.inputs else kind)
        elif isinstance(target, ast.Attribute | ast.Subscript):
            self._stored(target, kind, where)
        elif isinstance(target, ast.Starred):
            self.bind(target.value, k.figure(parts(kind), held=True) if parts(kind) & k.DATA else kind, where)

    def _unpacked(self, target: ast.Tuple | ast.List, kind: Kind, where: Where) -> None:
        starred = any(isinstance(one, ast.Starred) for one in target.elts)
        if isinstance(kind, tuple) and len(kind) == len(target.elts) and not starred:
            for one, each in zip(target.elts, kind):
                self.bind(one, each, where)
            return
        each = k.COLUMN if kind == k.BATCH else k.figure(parts(kind), held=True) if parts(kind) & k.DATA else kind
        if isinstance(each, tuple) or each not in (k.COLUMN, k.FIGURE, k.VIEW, k.PUBLIC, k.PARAMETERS, k.PLAIN, k.WEIGHTS):
            self.doubt(target, f"{ast.unparse(target)} takes parts of what is not understood")
            each = k.PUBLIC
        for one in target.elts:
            self.bind(one, each, where)

    def _stored(self, target: ast.Attribute | ast.Subscript, kind: Kind, where: Where) -> None:
        """An assignment to an attribute or an item."""
        base, shown, first = self.kind(target.value, where), ast.unparse(target)[:80], root(target)
        found = parts(kind)
        if isinstance(target, ast.Subscript) and parts(self.kind(target.slice, where)) & k.DATA:
            found = found | {k.FIGURE}
        found |= {k.FIGURE} if where.private else set()
        if base == k.GROUPS and ast.unparse(target.slice if isinstance(target, ast.Subscript) else target) == "'lr'":
            if found != {k.PUBLIC} or where.private:
                self.doubt(target, f"{shown} depends on private values")
        elif base in (k.PLAIN, k.PARAMETERS) and isinstance(target, ast.Attribute):
            fine = ("requires_grad",) if base == k.PARAMETERS else None
            if (fine and target.attr not in fine) or target.attr in ("data", "grad") or not found <= {k.PUBLIC, k.PLAIN}:
                self.doubt(target, f"{shown} is assigned")
        elif parts(base) != {k.PUBLIC} and not parts(base) <= {k.FIGURE, k.PUBLIC}:
            self.doubt(target, f"{shown} is assigned")
        elif found <= k.DATA | {k.PUBLIC}:
            if found & k.DATA and isinstance(first, ast.Name) and self.scopes.library(first) is not None:
                self.doubt(target, f"private values are kept in {shown}, from which they may be read again")
            elif found & k.DATA and isinstance(first, ast.Name):
                self.taint(first, found)
            if isinstance(target, ast.Attribute) and target.attr in ("data", "grad", "weight", "bias"):
                self.doubt(target, f"{shown} is assigned")
        elif found - k.DATA - {k.PUBLIC, k.WEIGHTS} or isinstance(target, ast.Attribute):
            self.doubt(target, f"the {min(found - k.DATA - {k.PUBLIC})} is kept in {shown}")
