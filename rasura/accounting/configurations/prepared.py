"""The weights that a training program begins with, where it makes them of the examples that it trains on: no noise covers
these."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from rasura.accounting.configurations.scopes import Scopes, Variable, root
from rasura.accounting.configurations.trainings import LOADERS, argument, made

_HELD_BY = ("TensorDataset", "Subset")
"""Data sets of PyTorch that hold what they are given."""

_PUBLIC = ("classes", "num_classes", "class_to_idx", "column_names", "features", "shape", "__class__")
"""What may be read of a data set to make a model: the form of an example, and the names of classes."""


def weights_of_data(scopes: Scopes, node: ast.Call, models: Iterable[Variable]) -> Iterator[tuple[ast.AST, str]]:
    """Where the plain model of the mechanism ``node``, or a part of any object, is made of the data set of its loader."""
    private = _private(scopes, _data_of(scopes, node))
    stores = [one.value for one in ast.walk(scopes.tree) if isinstance(one, ast.Assign) and _of_an_object(scopes, one)]
    seen, ahead = set[Variable](), stores + [value for one in models for value in _values(scopes, one)]
    for value in ahead if private else ():
        if any(part is node for part in ast.walk(value)):
            continue
        for part in (part for part in ast.walk(value) if isinstance(part, ast.Name)):
            variable = scopes.variable(part.id, part)
            if variable in private and not _told(scopes, part):
                yield part, f"the model may be made of the examples, before any noise: {ast.unparse(value)[:60]}"
            elif variable not in seen:
                seen.add(variable)
                ahead += _values(scopes, variable)


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


def _told(scopes: Scopes, node: ast.Name) -> bool:
    """Whether only the size or the form of a data set is read, or a function of this file takes it."""
    around = scopes.parents[node]
    if isinstance(around, ast.Attribute):
        return around.attr in _PUBLIC
    if isinstance(around, ast.Call) and node in around.args and scopes.original(around.func) == "len":
        return True
    call = scopes.parents[around] if isinstance(around, ast.keyword) else around
    called = scopes.read(call.func) if isinstance(call, ast.Call) else None
    return called is not None and any(isinstance(one, ast.FunctionDef) for one in scopes.bound(called))
