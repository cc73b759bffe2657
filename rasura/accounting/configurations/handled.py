"""What a program does with a mechanism and with what it returns. Only what is understood is accepted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import rasura.accounting.configurations.flower as flower
from rasura.accounting.configurations.bypasses import TORCH_SEEDS, seeds
from rasura.accounting.configurations.scopes import Scopes, Variable, position
from rasura.accounting.configurations.trainings import argument, targets

OPACUS = ("make_private", "make_private_with_epsilon")
RESULTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    **dict.fromkeys(OPACUS, (("model", "module"), ("optimizer", "optimizer"), ("loader", "data_loader"))),
    "protect_training": (("model", "model"), ("optimizer", "optimizer"), ("loader", "loader"), ("ledger", "")),
}
"""What a mechanism returns, by its role, and the argument that it takes the place of."""

LIBRARIES: Mapping[str, str] = {
    **dict.fromkeys(("protect_training", "PrivateTrainer"), __name__.partition(".")[0]),
    **dict.fromkeys(("DPKerasConfig", "gaussian_privatizer", "clipped_grad", "CyclicPoissonSampling"), "jax_privacy"),
    **dict.fromkeys(("LocalDpMod", *flower.WRAPPERS), "flwr"),
    **dict.fromkeys(OPACUS, "opacus"),
}
"""The mechanisms whose use is followed, with the package of each."""

POSITION = {"model": 0, "optimizer": 1, "loader": 2}
"""Positions of the arguments of ``protect_training``; Opacus takes none by position."""

ATTRIBUTES: Mapping[str, tuple[str, ...]] = {
    "model": (
        "train", "eval", "parameters", "named_parameters", "state_dict", "save_pretrained", "to", "cuda", "cpu", "config",
        "device", "generate", "zero_grad", "module_state", "_module",
    ),
    "optimizer": ("step", "zero_grad", "state_dict", "param_groups"),
    "loader": ("dataset", "batch_size"),
    "schedule": ("step", "get_last_lr", "state_dict"),
    "engine": ("get_epsilon", "accountant"),
    "ledger": (
        "planned", "spent", "epsilon", "save", "state_dict", "load_state_dict", "load", "guarantee",
    ),
    "object": (
        "train", "evaluate", "predict", "save_model", "save_state", "save_metrics", "log_metrics", "guarantee", "ledger",
        "start", "summary", "sensitivity", "l2_norm_bound", "init", "update", "batch_iterator",
    ),
}  # fmt: skip
"""What may be read of what a mechanism returns: it changes neither noise nor clip nor sampling, and trains nothing else."""

_UNUSED = (ast.Expr, ast.Return, ast.NamedExpr, ast.AnnAssign, ast.Yield, ast.Await, ast.Starred)
_READERS = ("len", "print", "enumerate", "iter", "next", "isinstance", "type", "id", "repr", "str", "tqdm", "zip")
_SCHEDULES = re.compile(r"\w+LR|CosineAnnealingWarmRestarts|ReduceLROnPlateau|get_scheduler|get_(\w+_)?schedule\w*")


@dataclass
class Handled:
    """One call of a mechanism in a program: ``roles`` of the variables that hold what it returns; ``doubts`` by node;
    ``own``: the nodes that bind those variables."""

    scopes: Scopes
    node: ast.Call
    name: str
    roles: dict[Variable, str] = field(default_factory=dict)
    doubts: list[tuple[ast.AST, str]] = field(default_factory=list)
    own: set[ast.AST] = field(default_factory=set)

    def doubt(self, node: ast.AST, why: str) -> None:
        """Record something that is not understood."""
        self.doubts.append((node, why))

    def followed(self) -> None:
        """Follow what the mechanism returns through the program."""
        expected = LIBRARIES[self.name]
        if self.name not in OPACUS and self.scopes.library(self.node.func) not in ("", expected):
            self.doubt(self.node, f"{self.name} is not imported from {expected}")
        if why := self.scopes.unsure(self.node):
            self.doubt(self.node, f"{self.name} may not run, or more than once: {why}")
        kept = self._kept()
        if LIBRARIES[self.name] == "flwr":
            self.doubts += seeds(self.scopes, ("seed", "set_seed", "seed_everything"))
        if self.name == "PrivateTrainer":
            self._arguments(argument(self.node, "args", 1))
        self.own.update(targets(self.scopes, self.node))
        for variable in self.scopes.bindings:
            made = self.scopes.assigned(variable)
            if isinstance(made, ast.Call) and self.schedule(made):
                self.roles[variable] = "schedule"
        for variable, role in self._inputs():
            for one in self.scopes.loads.get(variable, []):
                self._input_read(one, variable, role, kept)
        waiting, seen = list(self.roles), set[Variable]()
        while waiting:
            variable = waiting.pop()
            seen.add(variable)
            for bound in self.scopes.bound(variable):
                if bound not in self.own and not self._before(bound) and self.roles[variable] != "schedule":
                    self.doubt(bound, f"{variable.name} is bound again")
            for one in self.scopes.loads.get(variable, []):
                if self._early(one, set()) and self.roles[variable] in ("model", "optimizer", "loader"):
                    self.doubt(one, f"{one.id} may be used before {self.name}, in a function that is called before")
                if not self._before(one) and not self._within(one):
                    waiting += set(self._used(one, variable, self.roles[variable])) - seen

    def _kept(self) -> dict[str, Variable]:
        """The variables that hold what is returned, by role."""
        around, found = self.scopes.parents.get(self.node), targets(self.scopes, self.node)
        roles = [role for role, _ in RESULTS.get(self.name, ())] or ["object"]
        names = [one for one in found if isinstance(one, ast.Name) and one.id != "_"]
        kept = {role: self.scopes.variable(one.id, one) for role, one in zip(roles, names)}
        if found and len(names) == len(found) == len(roles) == len(set(kept.values())):
            self.roles |= {variable: role for role, variable in kept.items()}
            if any(one.scope is not self.scopes.scope(self.node) for one in kept.values()):
                self.doubt(self.node, f"what {self.name} returns is kept outside of its function")
        elif roles != ["object"] or isinstance(around, _UNUSED) or found:
            self.doubt(self.node, f"what {self.name} returns is not used, or not kept in variables of its own")
        else:  # in a list or another call
            holder = self.scopes.statement(self.node)
            for one in holder.targets if isinstance(holder, ast.Assign) else ():
                if isinstance(one, ast.Name):
                    self.roles[self.scopes.variable(one.id, one)] = "object"
        if self.name in OPACUS and isinstance(self.node.func, ast.Attribute):
            self._engine(self.node.func.value)
        return kept

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
            self.doubts += seeds(self.scopes, TORCH_SEEDS)
        if variable is not None and isinstance(made, ast.Call):
            self.roles[variable] = "engine"
            self.own.update(self.scopes.bound(variable))

    def _arguments(self, node: ast.expr | None) -> None:
        """The ``TrainingArguments``, which must stay as they were made."""
        variable = None if node is None else self.scopes.read(node)
        for one in self.scopes.loads.get(variable, []) if variable is not None else ():
            around = self.scopes.parents[one]
            reads = isinstance(around, ast.Attribute) and not self._stores(around) and isinstance(around.ctx, ast.Load)
            called = isinstance(self.scopes.parents[around], ast.Call) and getattr(around, "attr", "").startswith("set_")
            if not self._within(one) and (not reads or called):
                self.doubt(one, f"{one.id} may be changed after it was made")

    def _inputs(self) -> Iterator[tuple[Variable, str]]:
        """The variables of what is made private, by role. What is made in the call itself has none."""
        for role, name in RESULTS.get(self.name, (("strategy", "strategy"),)):
            place = 0 if role == "strategy" else POSITION.get(role, 99) if self.name == "protect_training" else 99
            given = argument(self.node, name, place) if name else None
            if given is None or isinstance(given, ast.Call | ast.Constant):
                continue
            variable = self.scopes.read(given)
            if variable is None:
                self.doubt(given, f"{ast.unparse(given)} is made private, but may also be reached without")
            else:
                yield variable, role

    def _input_read(self, one: ast.Name, variable: Variable, role: str, kept: Mapping[str, Variable]) -> None:
        """Doubt a reading of what is not yet private: after the call, or where it may train before."""
        if self._within(one):
            return
        around = self.scopes.parents[one]
        if not self._before(one):
            if kept.get(role) != variable:
                self.doubt(one, f"{one.id} is used without the protection")
        elif isinstance(around, ast.Attribute):
            fine = {"optimizer": ("param_groups",), "loader": ("dataset", "batch_size")}.get(role)
            if fine is not None and (around.attr not in fine or self._stores(around)):
                self.doubt(one, f"{ast.unparse(around)} is used before {self.name}")
        elif isinstance(around, ast.Call | ast.keyword):
            call = self.scopes.parents[around] if isinstance(around, ast.keyword) else around
            reads = isinstance(call, ast.Call) and (self._reads(call) or self.schedule(call))
            if role != "model" and not reads:
                self.doubt(one, f"{one.id} is used before {self.name}")
        else:
            self.doubt(one, f"{one.id} is used before {self.name}, or kept under another name")

    def _used(self, one: ast.Name, variable: Variable, role: str) -> list[Variable]:
        """Doubt a use that is not understood; the further variables that hold the same."""
        around = self.scopes.parents[one]
        if isinstance(around, ast.Attribute):
            beyond = self.scopes.parents[around]
            last = beyond.attr if isinstance(beyond, ast.Attribute) else ""
            narrow = {"_module": ("state_dict", "save_pretrained"), "accountant": ("get_epsilon",), "param_groups": ("",)}
            fine = around.attr in ATTRIBUTES[role] and last in narrow.get(around.attr, (last,))
            if not fine or not isinstance(around.ctx, ast.Load) or self._stores(around):
                self.doubt(around, f"{ast.unparse(around)} may change {self.name}, or go past it")
            return []
        if isinstance(around, ast.Call) and around.func is one and role in ("model", "object"):
            return []
        if isinstance(around, ast.Call | ast.keyword):
            return self._passed(one, around, role)
        loops = isinstance(around, ast.For | ast.comprehension) and around.iter is one and role == "loader"
        told = isinstance(around, ast.Expr | ast.FormattedValue | ast.Compare)
        listed = role == "object" and isinstance(around, ast.List) and isinstance(self.scopes.parents[around], ast.keyword)
        if not (loops or told or listed or (isinstance(around, ast.Return) and role in ("model", "object"))):
            self.doubt(one, f"{one.id} is kept under another name, or used in a way that is not understood")
        return []

    def _stores(self, node: ast.AST) -> bool:
        """Whether something below an attribute is assigned, apart from a learning rate."""
        while isinstance(around := self.scopes.parents[node], ast.Attribute | ast.Subscript) and around.value is node:
            node = around
        learning_rate = isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "'lr'"
        return isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load) and not learning_rate

    def _passed(self, one: ast.Name, around: ast.AST, role: str) -> list[Variable]:
        """The further variables where something is passed to a function of this file."""
        call = self.scopes.parents[around] if isinstance(around, ast.keyword) else around
        if not isinstance(call, ast.Call):
            self.doubt(one, f"{one.id} is used in a way that is not understood")
            return []
        if self._reads(call) or role == "ledger" or (role == "optimizer" and self.schedule(call)):
            return []
        if self.scopes.original(call.func) == "BatchMemoryManager" and self.scopes.library(call.func) == "opacus":
            item = self.scopes.parents[call]
            names = item.optional_vars if isinstance(item, ast.withitem) else None
            return [self._role(names, "loader")] if isinstance(names, ast.Name) else []
        function = self.function(call)
        if role == "object" and self.scopes.library(call.func) == "flwr":
            return []
        if function is None:
            if role != "model":
                self.doubt(one, f"{one.id} is passed to {ast.unparse(call.func)}, which is not known here")
            return []
        named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        index = next((number for number, value in enumerate(call.args) if value is one), len(named))
        taken = [a for a in named if isinstance(around, ast.keyword) and a.arg == around.arg] or named[index : index + 1]
        starred = any(isinstance(value, ast.Starred) for value in call.args)
        if not taken or starred:
            self.doubt(one, f"which parameter of {function.name} gets {one.id} is not understood")
            return []
        known = self.roles.get(self.scopes.variable(taken[0].arg, taken[0]))
        if known not in (None, role) or not self._always(function, taken[0], role):
            self.doubt(one, f"{taken[0].arg} of {function.name} is not always what {self.name} returned")
        return [self._role(taken[0], role)] if known is None else []

    def _role(self, node: ast.Name | ast.arg, role: str) -> Variable:
        variable = self.scopes.variable(node.id if isinstance(node, ast.Name) else node.arg, node)
        self.roles[variable] = role
        self.own.add(node)
        if [one for one in self.scopes.bound(variable) if one is not node]:
            self.doubt(node, f"{variable.name} is bound again")
        return variable

    def _always(self, function: ast.FunctionDef | ast.AsyncFunctionDef, taken: ast.arg, role: str) -> bool:
        """Whether every call of a function gives a parameter what has the role."""
        named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        for one in self.scopes.loads.get(self.scopes.variable(function.name, function), []):
            call = self.scopes.parents[one]
            if not isinstance(call, ast.Call) or call.func is not one:
                return False
            given = argument(call, taken.arg, named.index(taken))
            variable = None if given is None else self.scopes.read(given)
            if variable is None or self.roles.get(variable) != role or self._before(call):
                return role == "model"  # other models may be passed: those of an evaluation
        return True

    def function(self, call: ast.Call) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The function of this file that is called, if there is one of that name."""
        variable = self.scopes.read(call.func)
        found = self.scopes.bound(variable) if variable is not None else []
        one = found[0] if len(found) == 1 else None
        return one if isinstance(one, ast.FunctionDef) and not one.decorator_list else None

    def schedule(self, call: ast.Call) -> bool:
        """Whether a call makes a schedule of learning rates."""
        fits = _SCHEDULES.fullmatch(self.scopes.original(call.func))
        return bool(fits) and self.scopes.library(call.func) in ("", "torch", "transformers")

    def _reads(self, call: ast.Call) -> bool:
        """Whether a call only reads what it is given, such as ``len``."""
        return self.scopes.original(call.func) in _READERS and self.scopes.library(call.func) in ("", "tqdm")

    def _early(self, node: ast.AST, seen: set[ast.AST]) -> bool:
        """Whether a node is in another function that is named before the call of the mechanism."""
        function = self.scopes.scope(node)
        if isinstance(function, ast.Lambda):
            return position(function) < position(self.node)
        if function in seen or function is self.scopes.scope(self.node) or not isinstance(function, ast.FunctionDef):
            return False
        named = self.scopes.loads.get(self.scopes.variable(function.name, function), [])
        seen.add(function)
        return any(self._before(one) or self._early(one, seen) for one in named)

    def _within(self, node: ast.AST) -> bool:
        return any(one is node for one in ast.walk(self.node))

    def _before(self, node: ast.AST) -> bool:
        """Whether a node is in the same function as the call, and before it."""
        return self.scopes.scope(node) is self.scopes.scope(self.node) and position(node) < position(self.node)
