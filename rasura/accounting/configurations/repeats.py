"""Whether the data set of a training may hold an example more than once: each copy is clipped by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from rasura.accounting.configurations.datasets import classes_of, methods, picks, sources
from rasura.accounting.configurations.scopes import Scopes, Variable, root

_REPEATING = (
    "ConcatDataset", "ChainDataset", "concatenate_datasets", "interleave_datasets", "repeat", "repeat_interleave", "tile",
    "cycle", "cat", "concat", "concatenate", "stack", "vstack", "hstack", "dstack", "row_stack", "column_stack", "expand",
    "expand_as", "broadcast_to", "as_strided", "resize", "chain", "sample", "choices", "choice", "resample",
    "fit_resample", "append", "extend", "insert", "iadd", "imul", "iconcat", "reduce", "accumulate", "tee",
    "merge", "explode", "product", "permutations", "combinations", "combinations_with_replacement", "pairwise", "windowed",
    "unfold", "sliding_window_view",
)  # fmt: skip
"""Calls that make copies of examples, or may."""

_PLACING = ("Subset", "select", "take", "index_select")
"""Calls that take the examples at given places."""

_WITH_REPLACEMENT = ("randint", "random_integers", "integers", "randrange", "multinomial")
"""Draws of numbers, of which one may come several times."""

_ONE_BY_ONE = ("enumerate", "zip", "list", "tuple", "sorted", "tqdm", "items", "values", "keys", "iter")
"""Calls with as many items as what they are given, or fewer."""

_GROWING = ("extend", "append", "insert", "add")


def repeats(scopes: Scopes, node: ast.expr) -> bool:
    """Whether the expression of a data set may hold an example more than once, as far as the variables behind it show.

    Items that are added one by one (``append``) are only doubted for the data set itself: a file is read so.
    """
    seen: set[Variable] = set()
    ahead: list[tuple[ast.expr, bool]] = [(node, True)]
    while ahead:
        one, itself = ahead.pop()
        made, grows = _made_of(scopes, one, _GROWING if itself else ("extend",))
        if grows or any(_may_repeat(scopes, value) for value in made):
            return True
        roots = {root(value) for value in made}
        for part in (part for value in made for part in ast.walk(value) if isinstance(part, ast.Name)):
            variable = scopes.read(part)
            if variable is not None and variable not in seen:
                seen.add(variable)
                ahead.append((part, itself and part in roots))  # ``data.map(f)`` is all of ``data``
    return False


def _may_repeat(scopes: Scopes, value: ast.expr) -> bool:
    """Whether an expression by itself may hold an example more than once."""
    inner = list(ast.walk(value))
    named = {scopes.original(one) for one in inner if isinstance(one, ast.Name | ast.Attribute)}
    named |= {_gets(scopes, one) for one in inner}
    comprehensions = [one for one in inner if isinstance(one, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp)]
    return (
        bool(named & set(_REPEATING))
        or any(_repeated_places(scopes, place) for one in inner for place in _places(scopes, one))
        or any(_adds_up(one) or _displayed(one) or _joined(scopes, one) for one in inner)
        or any(len(one.generators) > 1 or not _one_by_one(scopes, one.generators[0].iter) for one in comprehensions)
    )


def _places(scopes: Scopes, node: ast.AST) -> list[ast.expr]:
    """The expressions of the places at which ``node`` takes examples."""
    if isinstance(node, ast.Call) and scopes.original(node.func) in _PLACING:
        given = node.args[scopes.original(node.func) == "Subset" :]  # whose first argument is the data set
        return [*given, *(one.value for one in node.keywords if one.arg != "dataset")]
    return [node.slice] if isinstance(node, ast.Subscript) else []


def _repeated_places(scopes: Scopes, node: ast.expr) -> bool:
    """Whether the places in ``node``, or in the variables behind it, may hold one more than once."""
    seen: set[Variable] = set()
    ahead: list[ast.expr] = [node]
    for one in ahead:
        for part in ast.walk(one):
            if isinstance(part, ast.Call) and scopes.original(part.func) in _WITH_REPLACEMENT:
                return True
            if isinstance(part, ast.List | ast.Tuple):
                numbers = [each.value for each in part.elts if isinstance(each, ast.Constant)]
                if len(set(numbers)) < len(numbers):
                    return True
            if isinstance(part, ast.Name) and (variable := scopes.read(part)) is not None and variable not in seen:
                seen.add(variable)
                ahead += _made_of(scopes, part, ())[0][1:]
    return False


def _adds_up(node: ast.AST) -> bool:
    """Whether a sum or a product may be one of lists: neither of numbers nor of words."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Mult):
        return False
    plain = [type(one.value) for one in (node.left, node.right) if isinstance(one, ast.Constant)]
    words = any(isinstance(one, ast.JoinedStr) for one in (node.left, node.right))
    return not (words or float in plain or str in plain or (isinstance(node.op, ast.Add) and int in plain))


def _displayed(node: ast.AST) -> bool:
    """Whether a list that is written out may hold something twice: the items of another beside more, or the same name."""
    if isinstance(node, ast.Dict):
        return None in node.keys and len(node.keys) > 1
    if not isinstance(node, ast.List | ast.Tuple | ast.Set):
        return False
    named = [ast.unparse(one) for one in node.elts if not isinstance(one, ast.Constant) or isinstance(one.value, str)]
    return len(set(named)) < len(named) or (len(node.elts) > 1 and any(isinstance(one, ast.Starred) for one in node.elts))


def _joined(scopes: Scopes, node: ast.AST) -> bool:
    """Whether a call may join lists, or the parts of a data set, that have an example in common."""
    if not isinstance(node, ast.Call):
        return False
    given = [*node.args, *(one.value for one in node.keywords)]
    if scopes.original(node.func) == "sum" and scopes.library(node.func) == "" and len(given) > 1:
        return True  # it begins with a list
    if scopes.library(node.func) == "operator" and scopes.original(node.func) in ("add", "mul"):
        return True
    if scopes.original(node.func) in ("zip", "map", "zip_longest"):
        rows = [ast.unparse(_whole(one)) for one in given]
        return len(set(rows)) < len(rows)  # a row beside its neighbour
    parts = [one.value.value for one in node.keywords if one.arg == "split" and isinstance(one.value, ast.Constant)]
    return any(isinstance(one, str) and "+" in one for one in parts)  # ``train+train`` of datasets


def _whole(node: ast.expr) -> ast.expr:
    """What some rows are taken of; a column is not."""
    rows = isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Constant)
    return _whole(node.value) if isinstance(node, ast.Subscript) and rows else node


def _gets(scopes: Scopes, node: ast.AST) -> str:
    """The name of an attribute that a call reads, where it is written as a text."""
    if not isinstance(node, ast.Call) or scopes.original(node.func) != "getattr" or len(node.args) < 2:
        return ""
    return str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""


def _one_by_one(scopes: Scopes, node: ast.expr) -> bool:
    """Whether a loop over ``node`` takes each item of something once."""
    if isinstance(node, ast.Call):
        return scopes.original(node.func) in _ONE_BY_ONE and all(_one_by_one(scopes, one) for one in node.args)
    return isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Constant)


def _made_of(scopes: Scopes, node: ast.expr, growing: Sequence[str]) -> tuple[list[ast.expr], bool]:
    """The expressions that a data set is made by: its own, those that its variable is assigned, and what functions of this
    file return for them. And whether the variable grows, by a method in ``growing`` or by itself."""
    variable = scopes.read(node)
    made = [node]
    for one in [*scopes.bound(variable), *scopes.loads.get(variable, [])] if variable is not None else ():
        statement = scopes.statement(one)
        if isinstance(statement, ast.AugAssign):
            changed = ast.BinOp(statement.target, statement.op, statement.value)
            if not isinstance(statement.value, ast.Constant) or _adds_up(changed):
                return made, True
        stores = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.Assign) and any(_begins(scopes, store, variable) for store in stores):
            made.append(statement.value)
        around = scopes.parents.get(one)
        while isinstance(around, ast.Attribute | ast.Subscript):
            if isinstance(around, ast.Attribute) and around.attr in growing:
                return made, True
            around = scopes.parents.get(around)
    followed: list[ast.FunctionDef | ast.ClassDef] = []
    for value in made:  # which grows
        makers: list[ast.FunctionDef | ast.ClassDef] = [*_makers(scopes, value), *classes_of(scopes, value)]
        for maker in (one for one in makers if one not in followed):
            followed.append(maker)
            rows, again = _rows_of(scopes, maker)
            made += rows
            if again:
                return made, True
    return made, False


def _rows_of(scopes: Scopes, maker: ast.FunctionDef | ast.ClassDef) -> tuple[list[ast.expr], bool]:
    """What a function or a class of this file takes its rows from, and whether it may give one of them more than once."""
    if isinstance(maker, ast.ClassDef):
        rows, grows = sources(maker)
        return rows, grows or _class_repeats(scopes, maker)
    given = [one for one in ast.walk(maker) if isinstance(one, ast.Return | ast.Yield | ast.YieldFrom)]
    return [one.value for one in given if one.value is not None], _yields_again(maker)


def _class_repeats(scopes: Scopes, node: ast.ClassDef) -> bool:
    """Whether the methods of a data set may give a row more than once, or those of what it inherits from."""
    joins = any(scopes.original(one) in (*_REPEATING, *_PLACING) for one in node.bases)
    given = methods(node).get("__iter__")
    return joins or picks(node) or (given is not None and _yields_again(given))


def _makers(scopes: Scopes, value: ast.expr) -> Iterator[ast.FunctionDef]:
    """The functions of this file that make a data set: ``make()``, ``list(make())``, ``Texts(make().map(f))``."""
    if isinstance(value, ast.Attribute | ast.Subscript):
        yield from _makers(scopes, value.value)
    if not isinstance(value, ast.Call):
        return
    called = scopes.read(value.func)
    found = [one for one in scopes.bound(called) if isinstance(one, ast.FunctionDef)] if called is not None else []
    yield from found
    name = scopes.original(value.func)
    if not found and (name in _ONE_BY_ONE or name[:1].isupper()):
        for one in (*value.args, *(each.value for each in value.keywords)):
            yield from _makers(scopes, one)
    elif isinstance(value.func, ast.Attribute):
        yield from _makers(scopes, value.func.value)


def _yields_again(function: ast.FunctionDef) -> bool:
    """Whether a generator may give a row several times: in a loop in a loop, or at several places."""
    inner = [one for one in ast.walk(function) if isinstance(one, ast.Yield | ast.YieldFrom)]
    loops = [one for one in ast.walk(function) if isinstance(one, ast.For | ast.While)]
    within = [one for one in loops if any(part in ast.walk(one) for part in inner)]
    return len(inner) > 1 or len(within) > 1 or any(isinstance(one, ast.While) for one in within)


def _begins(scopes: Scopes, node: ast.expr, variable: Variable | None) -> bool:
    """Whether what is assigned is a variable, or a part of it."""
    first = root(node)
    return isinstance(first, ast.Name) and scopes.variable(first.id, first) == variable
