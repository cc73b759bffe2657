"""The calls of a training program: which train, and which methods only read."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.effects import READING
from rasura.accounting.configurations.expressions import Batch, Where
from rasura.accounting.configurations.functions import Functions, over_classes
from rasura.accounting.configurations.kinds import Kind, parts
from rasura.accounting.configurations.scopes import root

_RESHAPES = ("view", "reshape")


@dataclass
class Calls(Functions):
    """The kinds of calls. ``trainings``: the calls that run a Trainer."""

    trainings: dict[tuple[ast.AST, tuple[ast.AST, ...]], None] = field(default_factory=dict)

    def call(self, node: ast.Call, where: Where) -> Kind:
        """The kind of what a call returns."""
        if node in self.mechanisms:
            if again := self.arguments(node, where) & {k.MODEL, k.OPTIMIZER, k.LOADER, k.WEIGHTS, *k.DATA}:
                self.doubt(node, f"the {min(again)} is made private again, or settings depend on it")
            return self.mechanisms[node]
        if (function := self.function(node.func)) is not None:
            return self.enter(function, node, where)
        if isinstance(node.func, ast.Attribute):
            base = self.kind(node.func.value, where)
            if isinstance(base, str) and base in k.METHODS and node.func.attr != "forward":
                return self._method(node, base, node.func.attr, where)
            if parts(base) & k.DATA:
                return self._of_data(node, base, node.func.attr, where)
            if parts(base) != {k.PUBLIC}:
                self.doubt(node, f"{ast.unparse(node.func)[:80]} of the {min(parts(base))} is not understood")
                return k.PUBLIC
            if (reached := self.reached(node.func)) != k.PUBLIC:
                self.arguments(node, where)
                return reached
            return self.named(node, where)
        called = self.kind(node.func, where)
        if called in (k.MODEL, k.PLAIN):
            return self._forward(node, where)
        if called in (k.CRITERION, k.CRITERION_ALIKE):
            return self.loss(node, where, alike=called == k.CRITERION_ALIKE)
        if called != k.PUBLIC:
            self.doubt(node, f"{ast.unparse(node.func)[:80]} is called, which is not understood")
            return k.PUBLIC
        return self.named(node, where)

    # --- what trains

    def trains(self, node: ast.AST, what: str, where: Where) -> Batch | None:
        """The batch that something may be trained on here; a doubt if there is none."""
        if where.barred:
            self.doubt(node, f"{what} is not understood here: {where.barred}")
            return None
        if where.batch is None:
            self.doubt(node, f"{what} stands outside of a loop over the loader that the mechanism returned")
        return where.batch

    def _trained_on(self, node: ast.Call, what: str, where: Where) -> Batch | None:
        """The same for a call that takes no arguments."""
        if node.args or node.keywords:
            self.doubt(node, f"{ast.unparse(node)[:80]} has arguments that are not understood")
        return self.trains(node, what, where)

    def trained(self, node: ast.Call, where: Where) -> None:
        """The training of a Trainer, which must run once, from its beginning."""
        again = bool(self.trainings) and (node, where.calls) not in self.trainings
        self.trainings[node, where.calls] = None
        if where.barred or where.times != 1 or again:
            self.doubt(node, f"{ast.unparse(node)[:60]} may not run, or more than once: {where.barred or 'it is repeated'}")
        if node.args or node.keywords:
            self.doubt(node, f"{ast.unparse(node)[:60]} may go on from an earlier training, which is not counted here")

    def _forward(self, node: ast.Call, where: Where) -> Kind:
        """The model on a batch of its loader, or on other values where no gradient is taken."""
        given = [*node.args, *(one.value for one in node.keywords)]
        kinds = [self.kind(one.value if isinstance(one, ast.Starred) else one, where) for one in given]
        found = {part for kind in kinds for part in parts(kind)}
        if strange := found - k.DATA - {k.PUBLIC}:
            self.doubt(node, f"the model is called on the {min(strange)}")
        if where.blind or (not found & k.DATA and self.evaluating):
            return k.FIGURE
        whole = [not isinstance(one, ast.Starred) for one in given]  # a tensor with a star is its examples, one by one
        batch = [kind == k.BATCH or (kind == k.COLUMN and each) for kind, each in zip(kinds, whole)]
        fixed = [isinstance(one, ast.Constant) for one in given]
        if not any(batch) or not all(own or constant for own, constant in zip(batch, fixed)):
            other = next((one for one, own, constant in zip(given, batch, fixed) if not own and not constant), node)
            self.doubt(
                node, f"the model is called on {ast.unparse(other)[:60]}, which is not the batch as its loader gave it"
            )
            return k.FIGURE
        if where.batch is None or where.barred:
            if not self.evaluating:
                self.trains(node, "the model", where)
            return k.FIGURE
        where.batch.forwards[node, where.calls] = None
        return k.OUTPUT

    # --- methods

    def _method(self, node: ast.Call, kind: str, name: str, where: Where) -> Kind:
        """A method of something that has a kind of its own."""
        given = self.arguments(node, where)
        if (found := k.METHODS[kind].get(name)) is None and kind not in k.DATA:
            self.doubt(node, f"{ast.unparse(node.func)[:80]} may change the mechanism, or go past it")
            return k.FIGURE
        if kind in k.DATA:
            return self._of_data(node, kind, name, where)
        told = {k.LOADER, k.LEDGER, k.TRAINER}
        if given - {k.PUBLIC} and kind not in told and not (kind == k.ENGINE and not given & k.DATA):
            self.doubt(node, f"{ast.unparse(node)[:80]} depends on private values")
        step = kind == k.OPTIMIZER and name == "step"
        if step and (batch := self._trained_on(node, "the step of the optimizer", where)) is not None:
            batch.steps[node, where.calls] = None
            batch.pending = False
        if kind == k.TRAINER and name == "train":
            self.trained(node, where)
            self.tell({k.FIGURE})  # its losses, beside the checkpoints
        if kind in told:
            self.tell(given)
        if where.private and name not in READING:
            self.doubt(node, f"{ast.unparse(node)[:80]} depends on private values")
        if name == "zero_grad" and where.batch is not None and where.batch.pending:
            self.doubt(node, f"{ast.unparse(node)[:80]} drops the gradient before the step")
        if kind == k.MODEL and name in ("train", "eval"):
            self.evaluating = name == "eval" or any(ast.unparse(one) == "False" for one in node.args)
        return found or k.PUBLIC

    def _of_data(self, node: ast.Call, kind: Kind, name: str, where: Where) -> Kind:
        """A method of a private value: a part of the batch as it was, or a figure."""
        given = self.arguments(node, where)
        if strange := given - k.DATA - {k.PUBLIC}:
            self.doubt(node, f"{ast.unparse(node)[:80]} takes the {min(strange)}")
        if any(one.arg == "out" for one in node.keywords):
            self.doubt(node, f"{ast.unparse(node)[:80]} writes to a value that it is given")
        if kind in (k.LOSS, k.OWN) and name == "backward":
            if kind == k.OWN and self.own_loss:
                self.doubt(node, self.own_loss)
            if (batch := self._trained_on(node, "the gradient", where)) is not None:
                batch.backwards[node, where.calls] = None
                batch.pending = True
            return k.PUBLIC
        if name == "backward":
            says = "the gradient is not that of a known loss, of the model's output on a batch of its loader"
            self.doubt(node, f"{ast.unparse(node)[:60]}: {says}")
            return k.PUBLIC
        kept = kind in (k.FIGURE, k.VIEW) and name in k.TOLD
        if name not in k.READS and name not in k.METHODS.get(str(kind), {}) and not kept:
            self.doubt(node, f"{ast.unparse(node)[:80]} may change private values, or hook into their gradients")
            return k.FIGURE
        first = root(node.func)
        if name in k.KEEPS and isinstance(first, ast.Name):
            self.taint(first, given)
        if given <= {k.PUBLIC} and (found := k.METHODS.get(str(kind), {}).get(name)) is not None:
            return found
        if kind == k.OUTPUT and over_classes(node):
            return k.OUTPUT
        if isinstance(node.func, ast.Attribute) and kind == k.COLUMN and _keeps_rows(node, node.func.value):
            return k.COLUMN
        return k.figure(parts(kind) | given, held=name not in k.COPIES)


def _keeps_rows(node: ast.Call, value: ast.expr) -> bool:
    """Whether a new shape of a part of the batch keeps one row for each example."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    given = [ast.unparse(one) for one in (*node.args, *(each.value for each in node.keywords))]
    if name in ("flatten", "squeeze", "unsqueeze"):
        return len(given) == 1 and given[0] in ("1", "-1", "2")
    rows = ast.unparse(value)
    return name in _RESHAPES and bool(given) and given[0] in (f"{rows}.size(0)", f"{rows}.shape[0]", f"len({rows})")
