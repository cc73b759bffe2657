"""What a program does with a mechanism, its arguments and its results. Only what is understood is accepted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import rasura.accounting.configurations.flower as flower
import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.scopes import Scopes, Variable, position
from rasura.accounting.configurations.seeding import NUMPY, TORCH, seeds
from rasura.accounting.configurations.strategies import not_averaging
from rasura.accounting.configurations.trainings import argument, targets

OPACUS = ("make_private", "make_private_with_epsilon")
RESULTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(OPACUS, ((k.MODEL, "module"), (k.OPTIMIZER, "optimizer"), (k.LOADER, "data_loader"))),
    "protect_training": ((k.MODEL, "model"), (k.OPTIMIZER, "optimizer"), (k.LOADER, "loader"), (k.LEDGER, "")),
}
"""What a mechanism returns, by its kind, and the argument that it takes the place of."""

LIBRARIES: Mapping[str, str] = {
    **dict.fromkeys(("protect_training", "PrivateTrainer"), __name__.partition(".")[0]),
    **dict.fromkeys(("DPKerasConfig", "gaussian_privatizer", "clipped_grad", "CyclicPoissonSampling"), "jax_privacy"),
    **dict.fromkeys(("LocalDpMod", *flower.WRAPPERS), "flwr"),
    **dict.fromkeys(OPACUS, "opacus"),
}
"""The mechanisms whose use is followed, with the package of each."""

POSITION = {k.MODEL: 0, k.OPTIMIZER: 1, k.LOADER: 2}
"""Positions of the arguments of ``protect_training``; Opacus takes none by position."""

ATTRIBUTES = ("start", "summary", "sensitivity", "l2_norm_bound", "init", "update", "batch_iterator")
"""What may be read of a mechanism of Flower or jax-privacy: it changes neither noise nor clip nor sampling."""

_CALLBACKS = ("PrinterCallback", "ProgressCallback", "NotebookProgressCallback", "TensorBoardCallback", "WandbCallback")
_UNUSED = (ast.Expr, ast.Return, ast.NamedExpr, ast.AnnAssign, ast.Yield, ast.Await, ast.Starred)
_READERS = ("len", "print", "isinstance", "type", "id", "repr", "str")

_NO_MODULE = ("device", "parse_args", "len", "int", "max", "min", "round")
"""Calls that make no module, though the call that makes a model may take what they return."""


@dataclass
class Handled:
    """One call of a mechanism in a program: ``held``: the variables that hold what it returns; ``doubts`` by node."""

    scopes: Scopes
    node: ast.Call
    name: str
    held: dict[str, Variable] = field(default_factory=dict)
    doubts: list[tuple[ast.AST, str]] = field(default_factory=list)

    @property
    def followed(self) -> bool:
        """Whether the training is in the program, so that its statements are followed."""
        return self.name in RESULTS or self.name == "PrivateTrainer"

    @property
    def kinds(self) -> k.Kind:
        """The kinds of what the mechanism returns."""
        return tuple(kind for kind, _ in RESULTS[self.name]) if self.name in RESULTS else k.TRAINER

    def doubt(self, node: ast.AST, why: str) -> None:
        """Record something that is not understood."""
        self.doubts.append((node, why))

    def read(self) -> None:
        """Read how the mechanism is called, and what else is done with its arguments and results."""
        expected = LIBRARIES[self.name]
        if self.name not in OPACUS and self.scopes.library(self.node.func) not in ("", expected):
            self.doubt(self.node, f"{self.name} is not imported from {expected}")
        if why := self.scopes.unsure(self.node):
            self.doubt(self.node, f"{self.name} may not run, or more than once: {why}")
        self._kept()
        if self.name in OPACUS and isinstance(self.node.func, ast.Attribute):
            self._engine(self.node.func.value)
        if expected == "flwr":
            self.doubts += seeds(self.scopes, NUMPY)
        if self.name in flower.WRAPPERS:
            self.doubts += not_averaging(self.scopes, self.node)
        if self.name == "PrivateTrainer":
            self._arguments(argument(self.node, "args", 1))
            self._callbacks(argument(self.node, "callbacks", 99))
        for variable, role in self._inputs():
            for one in self.scopes.loads.get(variable, []):
                self._input_read(one, variable, role)
        if not self.followed:
            for variable in self.held.values():
                self._object(variable)

    def inputs(self) -> frozenset[Variable]:
        """The variables of the plain model and of the modules that it is made of."""
        found = {variable for variable, role in self._inputs(trainer=True) if role == k.MODEL}
        for variable in list(found):
            for bound in self.scopes.bound(variable):
                around = self.scopes.parents.get(bound)
                made = around.value if isinstance(around, ast.Assign) else None
                if isinstance(made, ast.Call) and self.scopes.library(made.func) == "torch":
                    names = [self.scopes.read(one) for one in ast.walk(made) if isinstance(one, ast.Name)]
                    found |= {one for one in names if one is not None and self._may_be_a_module(one)}
        return frozenset(found)

    def _may_be_a_module(self, variable: Variable) -> bool:
        made = self.scopes.assigned(variable)
        return isinstance(made, ast.Call) and self.scopes.original(made.func) not in _NO_MODULE

    def _kept(self) -> None:
        """The variables that hold what is returned, by kind."""
        around, found = self.scopes.parents.get(self.node), targets(self.scopes, self.node)
        kinds = [kind for kind, _ in RESULTS.get(self.name, ())] or ["object"]
        names = [one for one in found if isinstance(one, ast.Name) and one.id != "_"]
        kept = {kind: self.scopes.variable(one.id, one) for kind, one in zip(kinds, names)}
        if found and len(names) == len(found) == len(kinds) == len(set(kept.values())):
            self.held = kept
            if any(one.scope is not self.scopes.scope(self.node) for one in kept.values()):
                self.doubt(self.node, f"what {self.name} returns is kept outside of its function")
        elif kinds != ["object"] or isinstance(around, _UNUSED) or found:
            self.doubt(self.node, f"what {self.name} returns is not used, or not kept in variables of its own")
        else:  # in a list or another call
            holder = self.scopes.statement(self.node)
            for one in holder.targets if isinstance(holder, ast.Assign) else ():
                if isinstance(one, ast.Name):
                    self.held["object"] = self.scopes.variable(one.id, one)

    def _engine(self, node: ast.expr) -> None:
        """Opacus' engine, which must be one, made in this program."""
        variable = self.scopes.read(node)
        made = node if variable is None else self.scopes.assigned(variable)
        origin = self.scopes.library(made.func) if isinstance(made, ast.Call) else None
        if (
            not isinstance(made, ast.Call)
            or self.scopes.original(made.func) != "PrivacyEngine"
            or origin not in ("", "opacus")
        ):
            self.doubt(node, f"{self.name} is called on {ast.unparse(node)}, which is not a PrivacyEngine made in this file")
        elif not any(one.arg == "secure_mode" and ast.unparse(one.value) == "True" for one in made.keywords):
            self.doubts += seeds(self.scopes, TORCH)

    def _arguments(self, node: ast.expr | None) -> None:
        """The ``TrainingArguments``, which must stay as they were made."""
        variable = None if node is None else self.scopes.read(node)
        for one in self.scopes.loads.get(variable, []) if variable is not None else ():
            around = self.scopes.parents[one]
            reads = isinstance(around, ast.Attribute) and not self._stores(around) and isinstance(around.ctx, ast.Load)
            called = isinstance(self.scopes.parents[around], ast.Call) and getattr(around, "attr", "").startswith("set_")
            if not self._within(one) and (not reads or called):
                self.doubt(one, f"{one.id} may be changed after it was made")

    def _callbacks(self, node: ast.expr | None) -> None:
        """The callbacks of a Trainer, which must be known: others may write weights, or end the training by its loss."""
        for one in node.elts if isinstance(node, ast.List | ast.Tuple) else [] if node is None else [node]:
            made = one.func if isinstance(one, ast.Call) else one
            if self.scopes.original(made) not in _CALLBACKS or self.scopes.library(made) != "transformers":
                self.doubt(one, f"the callback {ast.unparse(one)[:60]} is not known here")

    def _inputs(self, *, trainer: bool = False) -> Iterator[tuple[Variable, str]]:
        """The variables of what is made private, by kind. What is made in the call itself has none."""
        for role, name in RESULTS.get(self.name, ((k.MODEL, "model"),) if trainer else ()):
            place = POSITION.get(role, 0) if self.name not in OPACUS else 99
            given = argument(self.node, name, place) if name else None
            if given is None or isinstance(given, ast.Call | ast.Constant):
                continue
            variable = self.scopes.read(given)
            if variable is None:
                self.doubt(given, f"{ast.unparse(given)} is made private, but may also be reached without")
            else:
                yield variable, role

    def _input_read(self, one: ast.Name, variable: Variable, role: str) -> None:
        """Doubt a reading of what is not yet private: after the call, or where it may be used or kept before.

        What is done with the plain model before is judged where the statements are followed.
        """
        if self._within(one):
            return
        around = self.scopes.parents[one]
        call = self.scopes.parents[around] if isinstance(around, ast.keyword) else around
        if not self._before(one):
            if self.held.get(role) != variable:
                self.doubt(one, f"{one.id} is used without the protection")
        elif isinstance(around, ast.Attribute):
            fine = {k.OPTIMIZER: ("param_groups",), k.LOADER: ("dataset", "batch_size")}.get(role)
            if fine is not None and (around.attr not in fine or self._stores(around)):
                self.doubt(one, f"{ast.unparse(around)} is used before {self.name}")
        elif isinstance(call, ast.Call):
            if role != k.MODEL and not self._reads(call) and not re.fullmatch(k.SCHEDULES, self.scopes.original(call.func)):
                self.doubt(one, f"{one.id} is used before {self.name}")
        elif not (role == k.MODEL and isinstance(around, ast.Expr)):
            self.doubt(one, f"{one.id} is used before {self.name}, or kept under another name")

    def _object(self, variable: Variable) -> None:
        """Doubt each use of a mechanism of Flower or jax-privacy that is not understood."""
        own = targets(self.scopes, self.node) or self.scopes.bound(variable)
        if again := [one for one in self.scopes.bound(variable) if one not in own and not self._before(one)]:
            self.doubt(again[0], f"{variable.name} is bound again")
        for one in self.scopes.loads.get(variable, []):
            around = self.scopes.parents[one]
            call = self.scopes.parents[around] if isinstance(around, ast.keyword) else around
            if (
                self._before(one)
                or self._within(one)
                or isinstance(around, ast.Expr | ast.FormattedValue | ast.Compare | ast.Return)
            ):
                continue
            if isinstance(around, ast.Attribute):
                if around.attr not in ATTRIBUTES or self._stores(around) or not isinstance(around.ctx, ast.Load):
                    self.doubt(around, f"{ast.unparse(around)} may change {self.name}, or go past it")
            elif isinstance(call, ast.Call):
                if call.func is not one and not self._reads(call) and self.scopes.library(call.func) != "flwr":
                    self.doubt(one, f"{one.id} is passed to {ast.unparse(call.func)}, which is not known here")
            elif not (isinstance(around, ast.List) and isinstance(self.scopes.parents[around], ast.keyword)):
                self.doubt(one, f"{one.id} is kept under another name, or used in a way that is not understood")

    def _stores(self, node: ast.AST) -> bool:
        """Whether something below an attribute is assigned, apart from a learning rate."""
        while isinstance(around := self.scopes.parents[node], ast.Attribute | ast.Subscript) and around.value is node:
            node = around
        learning_rate = isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "'lr'"
        return isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load) and not learning_rate

    def _reads(self, call: ast.Call) -> bool:
        """Whether a call only reads what it is given, such as ``len``."""
        return self.scopes.original(call.func) in _READERS and self.scopes.library(call.func) == ""

    def _within(self, node: ast.AST) -> bool:
        return any(one is node for one in ast.walk(self.node))

    def _before(self, node: ast.AST) -> bool:
        """Whether a node is in the same function as the call, and before it."""
        return self.scopes.scope(node) is self.scopes.scope(self.node) and position(node) < position(self.node)
