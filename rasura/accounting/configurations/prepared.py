"""What a training program begins with: weights and learning rates that it makes of the examples that it trains on. No noise
covers these."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from rasura.accounting.configurations.kinds import SCHEDULES
from rasura.accounting.configurations.scopes import Scopes, Variable, root
from rasura.accounting.configurations.trainings import LOADERS, argument, made

_MADE = {"module": 99, "model": 0, "optimizer": 1, "args": 1, "optimizers": 99, "optimizer_cls_and_kwargs": 99}
"""Arguments of the mechanisms that are neither data nor judge it, with their positions."""

_HELD_BY = ("TensorDataset", "Subset")
"""Data sets of PyTorch that hold what they are given."""

_PUBLIC = ("classes", "num_classes", "class_to_idx", "column_names", "features", "shape", "__class__")
"""What may be read of a data set to make a model: the form of an example, and the names of classes."""


def begun_by_data(scopes: Scopes, node: ast.Call) -> Iterator[tuple[ast.AST, str]]:
    """Where the plain model or the optimizer of the mechanism ``node``, a schedule, or a part of any object is made of the
    data set of its loader."""
    private = _private(scopes, _data_of(scopes, node))
    seen, ahead = set[Variable](), list(_made_before(scopes, node)) if private else []
    for value in ahead:
        if any(part is node for part in ast.walk(value)):
            continue
        for part in (part for part in ast.walk(value) if isinstance(part, ast.Name) and not _sized(scopes, part)):
            variable = scopes.variable(part.id, part)
            if variable in private and not _taken(scopes, part):
                shown = ast.unparse(value)[:60]
                yield part, f"the model, or how it is trained, may depend on the examples, before any noise: {shown}"
            elif variable not in seen:
                seen.add(variable)
                ahead += _values(scopes, variable)


def _made_before(scopes: Scopes, node: ast.Call) -> Iterator[ast.expr]:
    """The expressions of the model, the optimizer and the arguments of the mechanism ``node``, of schedules, and of what is
    written to parts of objects."""
    for name, place in _MADE.items():
        given = argument(node, name, place)
        if given is not None:
            yield given
    for one in ast.walk(scopes.tree):
        if isinstance(one, ast.Assign) and _of_an_object(scopes, one):
            yield one.value
        elif isinstance(one, ast.Call) and re.fullmatch(SCHEDULES, scopes.original(one.func)):
            yield one


def _data_of(scopes: Scopes, node: ast.Call) -> ast.expr | None:
    name = scopes.original(node.func)
    if name not in LOADERS:
        return argument(node, "train_dataset", 3)
    loader = made(scopes, node, *LOADERS[name], ("DataLoader", "torch"))
    return None if loader is None else argument(loader, "dataset", 0)


def _private(scopes: Scopes, data: ast.expr | None) -> set[Variable]:
    """The variables of a data set, of what it is a part of, and the parameters that functions of this file take them by."""
    found = set[Variable]()
    ahead = [] if data is None else [data]
    for one in ahead:
        first = root(one)
        if isinstance(one, ast.Call) and scopes.original(one.func) in _HELD_BY:
            ahead += one.args
        if not isinstance(first, ast.Name) or (isinstance(one, ast.Call) and first is one.func):
            continue
        variable = scopes.variable(first.id, first)
        if variable in found or any(isinstance(by, ast.Import) for by in scopes.bound(variable)):
            continue
        found.add(variable)
        ahead += _values(scopes, variable)
        for read in scopes.loads.get(variable, []):
            if (parameter := _parameter(scopes, read)) is not None:
                ahead.append(parameter)
    return found


def _parameter(scopes: Scopes, read: ast.Name) -> ast.Name | None:
    """A reading of the parameter by which a function of this file takes a variable, if it is read."""
    around = scopes.parents[read]
    call = scopes.parents[around] if isinstance(around, ast.keyword) else around
    called = scopes.read(call.func) if isinstance(call, ast.Call) else None
    for function in scopes.bound(called) if called is not None else ():
        if not isinstance(function, ast.FunctionDef) or not isinstance(call, ast.Call):
            continue
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        name = around.arg if isinstance(around, ast.keyword) else dict(zip(map(id, call.args), names)).get(id(read))
        return next(iter(scopes.loads.get(Variable(function, name), [])), None) if name else None
    return None


def _values(scopes: Scopes, variable: Variable) -> list[ast.expr]:
    """What a variable is assigned, what a loop gives it, and what a function of this file returns."""
    found: list[ast.expr] = []
    for one in scopes.bound(variable):
        if isinstance(one, ast.FunctionDef):
            found += [each.value for each in ast.walk(one) if isinstance(each, ast.Return) and each.value is not None]
        elif isinstance(one, ast.Name):
            statement = scopes.statement(one)
            value = getattr(statement, "iter", getattr(statement, "value", None))
            found += [value] if isinstance(value, ast.expr) else []
    return found


def _of_an_object(scopes: Scopes, node: ast.Assign) -> bool:
    """Whether an assignment writes to a part of an object, apart from the first parameter of a method."""
    parts = [one for one in node.targets if isinstance(one, ast.Attribute | ast.Subscript)]
    firsts = [one.id for part in parts if isinstance(one := root(part), ast.Name)]
    return any(name != "self" for name in firsts)


def _sized(scopes: Scopes, node: ast.Name) -> bool:
    """Whether only the size or the form of a data set is read."""
    whole: ast.AST = node
    while isinstance(around := scopes.parents[whole], ast.Attribute):
        if around.attr in _PUBLIC:
            return True
        whole = around
    return isinstance(around, ast.Call) and whole in around.args and scopes.original(around.func) == "len"


def _taken(scopes: Scopes, node: ast.Name) -> bool:
    """Whether a function of this file takes a data set, whose parameter is private as well."""
    around = scopes.parents[node]
    call = scopes.parents[around] if isinstance(around, ast.keyword) else around
    called = scopes.read(call.func) if isinstance(call, ast.Call) else None
    return called is not None and any(isinstance(one, ast.FunctionDef) for one in scopes.bound(called))
