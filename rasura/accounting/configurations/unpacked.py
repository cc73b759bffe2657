"""What the ``forward`` of a model takes apart: outputs of a layer, or a tensor, whose parts are the examples of a batch."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from rasura.accounting.configurations.scopes import Scopes, last_name
from rasura.accounting.configurations.sizes import SHAPE, Sizes, held

_PAIRS = ("LSTM", "GRU", "RNN", "MultiheadAttention")
"""Layers of PyTorch that return several tensors."""


def taken_apart(scopes: Scopes, sizes: Sizes, node: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """A statement or an expression that takes apart what may be a tensor."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if not _fits(scopes, sizes, target, node.value):
                yield node, f"{ast.unparse(node)[:60]} takes a tensor apart, whose parts may be the examples"
    elif isinstance(node, ast.For | ast.comprehension) and not _runs(sizes, node.target, node.iter):
        yield node.iter, f"{ast.unparse(node.target)[:60]} takes a tensor apart, whose parts may be the examples"
    elif isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Load):
        own = sizes.function.args.vararg
        given = isinstance(node.value, ast.Name) and own is not None and node.value.id == own.arg
        if not given and not _parts(scopes, sizes, node.value):
            yield node, f"{ast.unparse(node)[:60]} takes a tensor apart, whose parts may be the examples"
    elif isinstance(node, ast.Match) and not held(node.subject, sizes.function):
        yield node, f"match {ast.unparse(node.subject)[:60]} may take a tensor apart"
    elif isinstance(node, ast.Compare) and any(isinstance(one, ast.In | ast.NotIn) for one in node.ops):
        word = isinstance(node.left, ast.Constant) and isinstance(node.left.value, str)
        if not word and not all(held(one, sizes.function) for one in node.comparators):
            yield node, f"{ast.unparse(node)[:60]} may look at all examples"


def _fits(scopes: Scopes, sizes: Sizes, target: ast.expr, value: ast.expr) -> bool:
    """Whether an assignment takes nothing apart but shapes and the outputs of layers."""
    if not isinstance(target, ast.Tuple | ast.List):
        return True
    starred = any(isinstance(one, ast.Starred) for one in target.elts)
    if isinstance(value, ast.Tuple | ast.List):
        same = (
            not starred and len(target.elts) == len(value.elts) and not any(isinstance(v, ast.Starred) for v in value.elts)
        )
        return same and all(_fits(scopes, sizes, one, each) for one, each in zip(target.elts, value.elts))
    return _parts(scopes, sizes, value) and not (starred and isinstance(value, ast.Call) and last_name(value.func) != "size")


def _parts(scopes: Scopes, sizes: Sizes, value: ast.expr) -> bool:
    """Whether a value has parts that are no examples."""
    if isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice):
        return _parts(scopes, sizes, value.value)
    shape = isinstance(value, ast.Attribute) and value.attr == "shape"
    if shape or sizes.kind(value) == SHAPE or held(value, sizes.function) or isinstance(value, ast.Tuple | ast.List):
        return True
    return isinstance(value, ast.Call) and held(value.func, sizes.function) and _several(scopes, value.func)


def _several(scopes: Scopes, function: ast.expr) -> bool:
    """Whether a layer, or a method of this file, returns several tensors, as far as is known."""
    name = last_name(function)
    own = [one for one in ast.walk(scopes.tree) if isinstance(one, ast.FunctionDef) and one.name == name]
    made = [
        one.value
        for one in ast.walk(scopes.tree)
        if isinstance(one, ast.Assign) and any(last_name(target) == name for target in one.targets)
    ]
    for one in made:
        if not isinstance(one, ast.Call) or scopes.library(one.func) == "":
            return False
        if scopes.library(one.func) == "torch" and scopes.original(one.func) not in _PAIRS:
            return False
        class_ = next((each for each in _classes(scopes) if each.name == last_name(one.func)), None)
        own += (
            [each for each in class_.body if isinstance(each, ast.FunctionDef) and each.name == "forward"] if class_ else []
        )
    returned = [one.value for each in own for one in ast.walk(each) if isinstance(one, ast.Return)]
    return bool(made or own) and all(isinstance(one, ast.Tuple) for one in returned)


def _classes(scopes: Scopes) -> list[ast.ClassDef]:
    return [one for one in ast.walk(scopes.tree) if isinstance(one, ast.ClassDef)]


def _runs(sizes: Sizes, target: ast.expr, over: ast.expr) -> bool:
    """Whether a loop over layers, numbers or whole tensors takes none of these tensors apart."""
    if not isinstance(target, ast.Tuple | ast.List):
        return True
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.args:
        if over.func.id == "enumerate" and len(target.elts) == 2:
            return _runs(sizes, target.elts[1], over.args[0])
        if over.func.id == "zip" and len(target.elts) == len(over.args):
            return all(_runs(sizes, one, each) for one, each in zip(target.elts, over.args))
        return over.func.id == "reversed" and _runs(sizes, target, over.args[0])
    if isinstance(over, ast.Tuple | ast.List):
        return all(isinstance(one, ast.Tuple | ast.List) for one in over.elts)
    return True  # what the module itself holds: other loops are not understood
