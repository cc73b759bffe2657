"""The functions that a training program calls: which only read what they are given, and which make something known."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.effects import harmless, reads_back, writes_down
from rasura.accounting.configurations.expressions import Expressions, Where
from rasura.accounting.configurations.kinds import Kind, parts
from rasura.accounting.configurations.scopes import root

_BROADCASTS = (
    "with outputs of (B, 1) and labels of (B,) this is a mean over all pairs of the batch, and nothing shows that the "
    "shapes agree; write labels.view_as(outputs)"
)

_OPTIMIZERS = re.compile(r"SGD|Adam\w*|RMSprop|Adagrad|Adadelta|NAdam|RAdam|Adamax|ASGD|Rprop|Adafactor|LBFGS")


@dataclass
class Functions(Expressions):
    """The kinds of what functions return, by their names."""

    def enter(self, function: ast.FunctionDef, call: ast.Call, where: Where) -> Kind:
        """The kind of what a function of this file returns."""
        raise NotImplementedError

    def function(self, node: ast.expr) -> ast.FunctionDef | None:
        """The function of this file that is called, if there is one of that name."""
        variable = self.scopes.read(node)
        found = self.scopes.bound(variable) if variable is not None else []
        one = found[0] if len(found) == 1 else None
        if not isinstance(one, ast.FunctionDef):
            return None
        decorators = [each.func if isinstance(each, ast.Call) else each for each in one.decorator_list]
        plain = all(self.scopes.original(each) in ("no_grad", "inference_mode") for each in decorators)
        yields = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(one))
        return one if plain and not yields else None

    def arguments(self, node: ast.Call, where: Where) -> set[str]:
        """The kinds of all arguments of a call."""
        given = [*node.args, *(one.value for one in node.keywords)]
        return {part for one in given for part in parts(self.kind(one, where))}

    def loss(self, node: ast.Call, where: Where, *, alike: bool = False) -> Kind:
        """A loss of the output on the labels of its batch; of anything else it is a figure. ``alike``: it is one for each
        example only where both have the same shape, which the program must show."""
        shaped = _shaped_alike(node.args)
        kinds = [self.kind(one, where) for one in shaped or node.args]
        named = [self.kind(one.value, where) for one in node.keywords]
        found = {part for kind in (*kinds, *named) for part in parts(kind)}
        if strange := found - k.DATA - {k.PUBLIC}:
            self.doubt(node, f"a loss is taken of the {min(strange)}")
        if kinds == [k.OUTPUT, k.COLUMN] and _fixed(node.keywords):
            if not alike or shaped:
                return k.LOSS
            self.doubt(node, f"{ast.unparse(node)[:60]}: {_BROADCASTS}")
        return k.FIGURE if found & k.DATA else k.PUBLIC

    def named(self, node: ast.Call, where: Where) -> Kind:
        """A function that this file does not have."""
        name, library = self.scopes.original(node.func), self.scopes.library(node.func)
        if where.private:
            self._by_private(node, name)
        if library in ("", "torch") and name in (*k.FUNCTIONAL, *k.ALIKE):
            return self.loss(node, where, alike=name in k.ALIKE)
        if library in ("", "torch") and name in (*k.LOSSES, *k.LOSSES_ALIKE):
            made = k.CRITERION if name in k.LOSSES else k.CRITERION_ALIKE
            return made if not node.args and _fixed(node.keywords) else k.PUBLIC
        if name == "PrivacyEngine" and library in ("", "opacus"):
            return k.ENGINE
        if name in ("tqdm", "trange", "enumerate") and library in ("", "tqdm") and node.args:
            return self._wrapped(node, name, where)
        if name == "BatchMemoryManager" and library == "opacus":
            return self._memory(node, where)
        given = self.arguments(node, where)
        if re.fullmatch(k.SCHEDULES, name) and library in ("", "torch", "transformers"):
            return self._schedule(node, given)
        if library in ("", "torch", "transformers") and _OPTIMIZERS.fullmatch(name):
            if k.WEIGHTS in given:
                self.doubt(node, f"{ast.unparse(node.func)} gets the weights of the model, which it may train")
            return k.PLAIN_OPTIMIZER
        if given & {k.PLAIN, k.PARAMETERS} and not given & k.DATA:
            return self._of_plain(node, name, library, given)
        if not given - {k.PUBLIC}:
            known = library in k.BESIDE or name in (*k.TOLD, *k.BUILTINS, *k.COMPUTED, "empty_cache", "synchronize")
            if where.batch is not None and not known:
                self.doubt(node, f"{ast.unparse(node.func)[:80]} in the loop over the loader is not known here")
            return self.told if reads_back(self.scopes, node) else k.PUBLIC
        return self._of_private(node, name, library, given, where)

    def _by_private(self, node: ast.Call, name: str) -> None:
        """A function that private values call, or not: it must change nothing but a list, which is then private."""
        first = root(node.func)
        if not harmless(self.scopes, node):
            self.doubt(node, f"{ast.unparse(node)[:80]} depends on private values")
        elif name in (*k.KEEPS, "clear", "reset") and isinstance(node.func, ast.Attribute) and isinstance(first, ast.Name):
            self.taint(first, {k.FIGURE})

    def _of_private(self, node: ast.Call, name: str, library: str | None, given: set[str], where: Where) -> Kind:
        """A function that takes something private, which it must only read."""
        shown = ast.unparse(node.func)[:80]
        if writes_down(self.scopes, node):
            self.tell(given)
        data = given <= k.DATA | {k.PUBLIC}
        if library == "" and name in k.NAMING:
            return k.FIGURE if given & k.DATA else k.PUBLIC
        if library == "" and name in k.BUILTINS and (data or given <= {k.WEIGHTS, k.PUBLIC}):
            return (
                k.WEIGHTS
                if k.WEIGHTS in given
                else k.figure(given, held=name not in ("float", "int", "len", "print", "round"))
            )
        if (
            library in k.MATHEMATICS
            and name in k.COMPUTED
            and data
            and not any(one.arg in ("out", "copy") for one in node.keywords)
        ):
            return self._softmax(node, name, where)
        if library == "torch" and name in ("clip_grad_norm_", "clip_grad_value_") and given <= {k.WEIGHTS, k.PUBLIC}:
            return k.FIGURE
        if name in k.SAVES and given <= {k.WEIGHTS, k.PUBLIC, k.LOSS, k.OWN, k.FIGURE, k.VIEW, k.MODEL, k.INNER}:
            if name == "deepcopy" and given - {k.WEIGHTS, k.PUBLIC}:
                self.doubt(node, f"{shown} copies the {min(given - {k.PUBLIC})}")
            if where.private:
                self.doubt(node, f"what {shown} keeps depends on private values")
            return k.WEIGHTS if k.WEIGHTS in given else k.PUBLIC
        tells = isinstance(node.func, ast.Attribute) and (library in (None, "") or library in k.TRACKERS)
        if name in k.TOLD and tells and given <= {k.FIGURE, k.VIEW, k.LOSS, k.OWN, k.PUBLIC}:
            first = root(node.func)
            if isinstance(first, ast.Name) and name in k.KEEPS:
                self.taint(first, given)
            return k.FIGURE
        if name in k.READS and isinstance(node.func, ast.Attribute) and library is None and data:
            return k.FIGURE
        if given <= {k.LEDGER, k.PUBLIC}:
            return k.PUBLIC
        if name in k.PARSES and library in ("json", "csv", "yaml", "ast") and given <= {k.FIGURE, k.PUBLIC}:
            return k.FIGURE
        self.doubt(node, f"the {min(given - {k.PUBLIC})} is passed to {shown}, which is not known here")
        return k.FIGURE

    def _of_plain(self, node: ast.Call, name: str, library: str | None, given: set[str]) -> Kind:
        """A function that takes the plain model or its weights, before they are private."""
        made = name[:1].isupper() and not name.endswith("Parallel")
        if library == "torch" and (made or ".init." in ast.unparse(node.func) or name.endswith("_")):
            return k.PLAIN
        if library in ("", "opacus", "peft") and name in k.FITTING:
            return k.PLAIN if name in ("fix", "get_peft_model") else k.PUBLIC
        if library == "" and name in (*k.BUILTINS, "filter", "next", "iter"):
            return k.PARAMETERS if k.PARAMETERS in given else k.PLAIN
        self.doubt(
            node, f"the {min(given - {k.PUBLIC})} is passed to {ast.unparse(node.func)[:80]}, which is not known here"
        )
        return k.PLAIN

    def _wrapped(self, node: ast.Call, name: str, where: Where) -> Kind:
        """What ``tqdm`` or ``enumerate`` is called on."""
        kind = self.kind(node.args[0], where)
        beside = [*node.args[1:], *(one.value for one in node.keywords)]
        strange = {part for one in beside for part in parts(self.kind(one, where))} - {k.PUBLIC}
        if kind in (k.LOADER, k.NUMBERED) and strange:
            self.doubt(node, f"{ast.unparse(node)[:80]} depends on private values")
        if name == "enumerate" and kind == k.LOADER:
            return k.NUMBERED
        if kind in (k.LOADER, k.NUMBERED) and name == "tqdm":
            return kind
        if found := parts(kind) - k.DATA - {k.PUBLIC}:
            self.doubt(node, f"{ast.unparse(node)[:80]} holds the {min(found)}")
        return k.FIGURE if parts(kind) & k.DATA else k.PUBLIC

    def _memory(self, node: ast.Call, where: Where) -> Kind:
        """Opacus' manager, which divides each batch for the memory and steps once for all of its parts."""
        given = {one.arg: self.kind(one.value, where) for one in node.keywords}
        if node.args or given.get("data_loader") != k.LOADER or given.get("optimizer") != k.OPTIMIZER:
            self.doubt(node, "BatchMemoryManager does not get the loader and the optimizer that were returned")
            return k.PUBLIC
        return k.LOADER

    def _schedule(self, node: ast.Call, given: set[str]) -> Kind:
        """A schedule of learning rates, which must not follow private values."""
        for one in [*node.args, *(each.value for each in node.keywords)]:
            if isinstance(one, ast.Lambda):
                self.deferred.append(one)
            elif self.function(one) is not None:
                self.deferred.append(ast.copy_location(ast.Call(one, [], []), node))
                self.scopes.parents[self.deferred[-1]] = self.scopes.parents[node]
        if strange := given - {k.PUBLIC, k.OPTIMIZER, k.SCHEDULE, k.PLAIN_OPTIMIZER}:
            self.doubt(node, f"a schedule of learning rates depends on the {min(strange)}")
        return k.SCHEDULE

    def _softmax(self, node: ast.Call, name: str, where: Where) -> Kind:
        """``softmax`` and ``log_softmax`` of the output, over classes."""
        first = self.kind(node.args[0], where) if node.args else k.PUBLIC
        classes = name in ("softmax", "log_softmax") and over_classes(node, function=True)
        return k.OUTPUT if first == k.OUTPUT and classes else k.FIGURE


def _shaped_alike(args: list[ast.expr]) -> list[ast.expr] | None:
    """Two values without the reshaping, if one is given the shape of the other: ``x.view_as(y)``, ``x.reshape(y.shape)``."""
    for at, one in enumerate(args if len(args) == 2 else []):
        if not isinstance(one, ast.Call) or not isinstance(one.func, ast.Attribute) or len(one.args) != 1 or one.keywords:
            continue
        other = ast.unparse(args[1 - at])
        given = {"view_as": other, "reshape_as": other, "view": f"{other}.shape", "reshape": f"{other}.shape"}
        if other.replace(".", "").isidentifier() and given.get(one.func.attr) == ast.unparse(one.args[0]):
            return [one.func.value, args[1]] if at == 0 else [args[0], one.func.value]
    return None


def _fixed(keywords: list[ast.keyword]) -> bool:
    """Whether the arguments of a loss leave it the mean of one loss for each example."""
    for one in keywords:
        if one.arg is None or one.arg not in k.LOSS_ARGUMENTS or not isinstance(one.value, ast.Constant):
            return False
        allowed = k.LOSS_ARGUMENTS[one.arg]
        if allowed is not None and one.value.value not in allowed:
            return False
    return True


def over_classes(node: ast.Call, *, function: bool = False) -> bool:
    """Whether ``softmax`` or ``log_softmax`` runs over the classes of each example."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if not function and name not in ("softmax", "log_softmax"):
        return False
    given = [*node.args[int(function) :], *(one.value for one in node.keywords if one.arg == "dim")]
    return len(given) == 1 and ast.unparse(given[0]) in ("1", "-1")
