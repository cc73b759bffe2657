"""Whether the loss that a model computes itself is the mean of one loss for each example.

Opacus clips the gradient that each row of a batch has in the loss of the whole batch. One example must then not change what
another has in it. That holds for a mean over the examples. A language model takes the mean over all tokens of the batch: one
long text makes the gradients of all others smaller, and their sum moves by many clips. Only classes of transformers whose
loss is known count here, and the program must show that no other model can be meant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rasura.accounting.configurations.scopes import Scopes, Variable, last_name
from rasura.accounting.configurations.trainings import argument

_CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification", "ForVideoClassification")
"""Endings of classes of transformers whose loss is a mean of one for each example (``LOSS_MAPPING``, 5.23 was read), and
that make one row of each. Those for multiple choice do not: there a row is one choice, and a clip bounds only that."""

_WORDS = ("LM", "LMHeadModel", "ForTokenClassification", "ForQuestionAnswering", "ForConditionalGeneration")
_MAKES = ("from_pretrained", "from_config", "_from_config")
_ITSELF = ("to", "cuda", "cpu", "float", "double", "half", "bfloat16", "train", "eval", "requires_grad_")
"""Methods of a module that return it."""

_AROUND = {"fix": "opacus", "get_peft_model": "peft", "deepcopy": "copy"}
"""Functions that return the model that they are given, or one around it with the same loss."""

_PRIVATE = ("make_private", "make_private_with_epsilon")
_REPLACED = ("loss_function", "_loss_function", "loss_type")
"""Attributes of a model of transformers that are its loss."""

REMEDY = "compute one loss for each example, and train on their mean, as rasura.protect_training does"


def rows_of_choices(scopes: Scopes) -> Iterator[tuple[ast.AST, str]]:
    """Each name of a class for multiple choice: whatever the loss, Opacus clips the gradient of a choice."""
    for node in ast.walk(scopes.tree):
        if isinstance(node, ast.Name | ast.Attribute) and scopes.original(node).endswith("ForMultipleChoice"):
            yield node, f"{ast.unparse(node)[:60]} makes a row of each of an example's choices, and the clip bounds a row"


def unknown_loss(scopes: Scopes, node: ast.Call) -> str:
    """Why the loss of the model of Opacus' call ``node`` is not known to be one for each example; empty if it is."""
    for one in ast.walk(scopes.tree):
        replaced = isinstance(one, ast.Attribute) and one.attr in _REPLACED and not isinstance(one.ctx, ast.Load)
        if replaced or (isinstance(one, ast.Attribute) and one.attr == "register"):  # of a class, under the name of another
            return f"{last_name(one)} may give the model another loss; {REMEDY}"
    given = argument(node, "module", 99)
    strange: ast.AST | None = node if given is None else _Origins(scopes).other(given)
    if strange is None:
        return ""
    shown, name = ast.unparse(strange)[:60], _class(scopes, strange)
    if name.endswith(_WORDS):
        return f"{shown}: the loss is a mean over all tokens, so that one text changes the gradients of others; {REMEDY}"
    return (
        f"it is not known that {shown} is a classifier of whole examples, whose loss is one for each; "
        f"it may be a mean over all tokens of a batch; {REMEDY}"
    )


def _class(scopes: Scopes, node: ast.AST) -> str:
    """The name of the class that an expression names or makes something of."""
    found = node.func if isinstance(node, ast.Call) else node
    if isinstance(found, ast.Attribute) and found.attr in _MAKES:
        found = found.value
    return scopes.original(found)


class _Origins:
    """What a model may have been made by, through the variables and functions of a program."""

    def __init__(self, scopes: Scopes) -> None:
        self.scopes = scopes
        self.seen: set[tuple[ast.AST, int | None]] = set()

    def other(self, node: ast.expr, at: int | None = None) -> ast.AST | None:
        """What may make a model that is no known classifier; None if nothing does. ``at``: the place in a tuple.

        What was looked at before says nothing more: a variable that is made of itself is what its other bindings are.
        """
        if (node, at) in self.seen:
            return None
        self.seen.add((node, at))
        if isinstance(node, ast.Tuple | ast.List) and at is not None:
            whole = at < len(node.elts) and not any(isinstance(one, ast.Starred) for one in node.elts)
            return self.other(node.elts[at]) if whole else node
        if isinstance(node, ast.Name):
            return self._variable(node, at)
        if isinstance(node, ast.IfExp):
            return self._first(node, [(node.body, at), (node.orelse, at)])
        if isinstance(node, ast.NamedExpr):
            return self.other(node.value, at)
        return self._call(node, at) if isinstance(node, ast.Call) else node

    def _first(self, node: ast.AST, every: list[tuple[ast.expr, int | None]]) -> ast.AST | None:
        """The first of several expressions that is another; ``node`` where there are none."""
        if not every:
            return node
        return next((found for one, at in every if (found := self.other(one, at)) is not None), None)

    def _variable(self, node: ast.Name, at: int | None) -> ast.AST | None:
        every: list[tuple[ast.expr, int | None]] = []
        for one in self.scopes.bound(self.scopes.variable(node.id, node)):
            found = self._parameter(one) if isinstance(one, ast.arg) else self._assigned(one)
            if not found or (at is not None and any(place is not None for _, place in found)):
                return node
            every += [(value, at if place is None else place) for value, place in found]
        return self._first(node, every)

    def _assigned(self, bound: ast.AST) -> list[tuple[ast.expr, int | None]]:
        """What a binding gives a variable, with its place in a tuple; nothing if that is not understood."""
        target = bound
        statement = self.scopes.parents.get(target)
        place: int | None = None
        if isinstance(statement, ast.Tuple | ast.List):
            if any(isinstance(one, ast.Starred) for one in statement.elts):
                return []
            place = next(number for number, one in enumerate(statement.elts) if one is target)
            target, statement = statement, self.scopes.parents.get(statement)
        if isinstance(statement, ast.Assign) and any(one is target for one in statement.targets):
            return [(statement.value, place)]
        if isinstance(statement, ast.AnnAssign | ast.NamedExpr) and statement.value is not None and place is None:
            return [(statement.value, None)]
        return []

    def _parameter(self, bound: ast.arg) -> list[tuple[ast.expr, int | None]]:
        """What the calls of a function of this file give a parameter; nothing if it may get something else."""
        function = self.scopes.scope(bound)
        if not isinstance(function, ast.FunctionDef) or function.decorator_list or not self._only(function):
            return []
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        place = names.index(bound.arg) if bound.arg in names else 99
        variable = self.scopes.variable(function.name, function)
        found: list[tuple[ast.expr, int | None]] = []
        for read in self.scopes.loads.get(variable, []):
            call = self.scopes.parents[read]
            if not isinstance(call, ast.Call) or call.func is not read or any(one.arg is None for one in call.keywords):
                return []
            if (given := argument(call, bound.arg, place)) is None:
                return []
            found.append((given, None))
        return found

    def _only(self, function: ast.FunctionDef) -> bool:
        """Whether a name means one function of this file, and not a method."""
        variable = self.scopes.variable(function.name, function)
        return self.scopes.bound(variable) == [function] and not isinstance(variable.scope, ast.ClassDef)

    def _call(self, node: ast.Call, at: int | None) -> ast.AST | None:
        func, name = node.func, self.scopes.original(node.func)
        if name in _PRIVATE and at == 0:
            given = argument(node, "module", 99)
            return node if given is None else self.other(given)
        if isinstance(func, ast.Name) and (functions := self._functions(self.scopes.variable(func.id, func))):
            returns = [(one.value, at) for one in _returned(functions[0]) if one.value is not None]
            simple = len(functions) == 1 and self._only(functions[0]) and not functions[0].decorator_list
            return self._first(node, returns) if simple and len(returns) == len(_returned(functions[0])) else node
        if at is not None:
            return node
        if self.scopes.library(func) == _AROUND.get(name) is not None and node.args:
            return self.other(node.args[0])
        if isinstance(func, ast.Attribute) and name in _ITSELF:
            return self.other(func.value)
        made = func.value if isinstance(func, ast.Attribute) and name in _MAKES else func
        return None if self._classifier(made) and not any(map(_other_code, node.keywords)) else self._named(node, made)

    def _functions(self, variable: Variable) -> list[ast.FunctionDef]:
        return [one for one in self.scopes.bound(variable) if isinstance(one, ast.FunctionDef)]

    def _classifier(self, node: ast.expr, depth: int = 0) -> bool:
        """Whether an expression names a class of transformers that classifies whole examples, whatever it is bound to."""
        if isinstance(node, ast.Attribute):
            return self.scopes.library(node) == "transformers" and node.attr.endswith(_CLASSIFIERS)
        if isinstance(node, ast.IfExp):
            return self._classifier(node.body, depth) and self._classifier(node.orelse, depth)
        if not isinstance(node, ast.Name) or depth > 9:
            return False
        found = self.scopes.bound(self.scopes.variable(node.id, node))
        return bool(found) and all(self._bound_classifier(one, node.id, depth) for one in found)

    def _bound_classifier(self, bound: ast.AST, name: str, depth: int) -> bool:
        if isinstance(bound, ast.ImportFrom):
            names = [one.name for one in bound.names if (one.asname or one.name) == name]
            library = (bound.module or "").split(".")[0] == "transformers" and not bound.level
            return library and all(one.endswith(_CLASSIFIERS) for one in names)
        given = self._assigned(bound)
        return bool(given) and all(place is None and self._classifier(value, depth + 1) for value, place in given)

    def _named(self, node: ast.Call, made: ast.expr) -> ast.AST:
        """The call itself, or what the variable of its class is assigned, which says more."""
        variable = self.scopes.read(made)
        value = self.scopes.assigned(variable) if variable is not None else None
        return value if value is not None and last_name(value) else node


def _other_code(given: ast.keyword) -> bool:
    """Whether an argument may have a class of other code loaded."""
    return given.arg is None or (given.arg == "trust_remote_code" and ast.unparse(given.value) != "False")


def _returned(function: ast.FunctionDef) -> list[ast.Return]:
    """The statements by which a function returns, apart from those of functions in it."""
    ahead: list[ast.AST] = list(function.body)
    found: list[ast.Return] = []
    for one in ahead:
        if isinstance(one, ast.Return):
            found.append(one)
        elif not isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            ahead += ast.iter_child_nodes(one)
    return found
