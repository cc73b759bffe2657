"""The models of a training program: what their ``forward`` does with a batch, and the files that they are read from.

One example must not change what is computed for another: then a clip of each example bounds nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from rasura.accounting.configurations.kinds import CHANGES
from rasura.accounting.configurations.scopes import Scopes, last_name
from rasura.accounting.configurations.sizes import SHAPE, Sizes, of_self
from rasura.accounting.configurations.unpacked import taken_apart

_FUNCTIONS = (
    "relu", "gelu", "silu", "elu", "leaky_relu", "tanh", "sigmoid", "softplus", "hardtanh", "softmax", "log_softmax",
    "max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d", "dropout",
    "layer_norm", "group_norm", "normalize", "pad", "interpolate", "flatten", "cat", "squeeze", "unsqueeze", "relu6",
    "mish", "arange", "zeros", "ones", "len", "range", "enumerate", "zip", "int", "isinstance", "super",
)  # fmt: skip
_METHODS = (
    "relu", "tanh", "sigmoid", "softmax", "log_softmax", "view", "reshape", "flatten", "squeeze", "unsqueeze", "mean",
    "sum", "max", "size", "dim", "float", "long", "to", "contiguous", "masked_fill", "items", "values",
)  # fmt: skip
"""What computes for each example by itself, over the dimensions that ``_dimension`` accepts."""

_OVER: Mapping[str, tuple[int, bool]] = {
    **dict.fromkeys(("softmax", "log_softmax", "mean", "sum", "max", "flatten", "cat", "unsqueeze"), (0, False)),
    "squeeze": (0, True),
    "normalize": (1, True),
}
"""What runs over a dimension: where it stands behind the tensor, and whether it may be left out. It must not be the first,
which is that of the examples."""

_OVER_EXAMPLES: Mapping[str, bool] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Softmin", "Unflatten"), False),
    **dict.fromkeys(("Flatten", "CosineSimilarity"), True),
}
"""Layers that are made for a dimension, and whether it may be left out."""

_DIMENSIONS = ("1", "2", "3", "-1", "(2, 3)", "[2, 3]", "(1, 2)", "[1, 2]")
"""From the end only the last: the one before it is that of the examples where these have no other."""

_TRANSPOSED = ("T", "mT", "H", "data", "grad")
_SEQUENCES = (
    "LSTM", "GRU", "RNN", "MultiheadAttention", "Transformer", "TransformerEncoderLayer", "TransformerDecoderLayer",
)  # fmt: skip
"""Layers that take the first dimension for that of time, unless they are told otherwise."""

_BASES = ("Module", "LightningModule")
_LOADS = ("load", "load_file", "from_pretrained", "load_model", "load_checkpoint")
_SAVES = ("save", "save_file", "save_pretrained", "save_model", "save_checkpoint")


def mixed_examples(scopes: Scopes) -> Iterator[tuple[ast.AST, str]]:
    """What the ``forward`` of a module of this file does and is not understood to keep examples apart."""
    for node in _modules(scopes.tree):
        for one in node.body:
            if isinstance(one, ast.FunctionDef) and one.name not in ("__init__", "__repr__", "extra_repr"):
                for inner, what in _strange(scopes, one):
                    yield inner, f"whether {one.name} of {node.name} keeps examples apart is not known: {what}"
    for call in ast.walk(scopes.tree):
        if not isinstance(call, ast.Call):
            continue
        name, shown = scopes.original(call.func), ast.unparse(call)[:60]
        first = [ast.unparse(one.value) for one in call.keywords if one.arg == "batch_first"]
        if name.removeprefix("DP") in _SEQUENCES and first != ["True"]:
            yield call, f"without batch_first=True, {ast.unparse(call.func)} may run over the examples of a batch"
        if name in _OVER_EXAMPLES and not _dimension(call, 0, _OVER_EXAMPLES[name]):
            yield call, f"{shown} may run over the examples of a batch"


def _modules(tree: ast.AST) -> list[ast.ClassDef]:
    """The classes of a program that are modules, or that a module of this program inherits from, or is inherited by."""
    classes = [one for one in ast.walk(tree) if isinstance(one, ast.ClassDef)]
    names = {
        one.name
        for one in classes
        if any(last_name(base) in _BASES for base in one.bases)
        or any(isinstance(inner, ast.FunctionDef) and inner.name in ("forward", "__call__") for inner in one.body)
    }
    for _ in classes:  # as often as a name can be handed on
        for one in classes:
            bases = {last_name(base) for base in one.bases}
            if one.name in names or bases & names:
                names |= {one.name, *(bases & {other.name for other in classes})}
    return [one for one in classes if one.name in names]


def _strange(scopes: Scopes, function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str]]:
    shapes, sizes = 0, Sizes(scopes, function)
    yield from sizes.strange()
    for node in (inner for statement in function.body for inner in ast.walk(statement)):
        shown = ast.unparse(node)[:60] if isinstance(node, ast.expr) else ""
        yield from taken_apart(scopes, sizes, node)
        if isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield node, f"{shown} is assigned"
        elif isinstance(node, ast.Attribute) and node.attr in _TRANSPOSED:
            yield node, shown
        elif isinstance(node, ast.Subscript) and not _all_rows(node, sizes):
            yield node, f"{shown} takes some of the examples"
        elif isinstance(node, ast.Call):
            shapes += last_name(node.func) in ("view", "reshape")
            if not _apart(scopes, node, sizes) or (shapes > 1 and last_name(node.func) in ("view", "reshape")):
                yield node, shown
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            yield node, shown
        elif isinstance(node, ast.For | ast.comprehension) and not _of_layers(scopes, node.iter, function):
            yield node.iter, f"a loop over {ast.unparse(node.iter)[:60]}, which may be the examples"


def _all_rows(node: ast.Subscript, sizes: Sizes) -> bool:
    """Whether an index keeps all examples: ``x[:, 0]``, or an item by a name, of a shape, or of a layer."""
    if isinstance(node.slice, ast.Tuple) and node.slice.elts:
        first = node.slice.elts[0]
        return isinstance(first, ast.Slice) and first.lower is first.upper is first.step is None
    text = isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    layer = of_self(node, sizes.function) and not any(isinstance(one, ast.Call) for one in ast.walk(node.value))
    size = isinstance(node.value, ast.Call) and sizes.kind(node.value) == SHAPE
    return text or layer or size or (isinstance(node.value, ast.Attribute) and node.value.attr == "shape")


def _apart(scopes: Scopes, node: ast.Call, sizes: Sizes) -> bool:
    """Whether a call computes for each example by itself, as far as its name and its dimensions say."""
    function = sizes.function
    name, library = scopes.original(node.func), scopes.library(node.func)
    if any(one.arg == "out" for one in node.keywords) or re.fullmatch(CHANGES, name):
        return False
    method = isinstance(node.func, ast.Attribute) and any(isinstance(one, ast.Call) for one in ast.walk(node.func))
    if not method and of_self(node.func, function):
        return not name.startswith("register_")  # a layer, or a method of this class
    if isinstance(node.func, ast.Name) and library is None:
        bound = scopes.bound(variable := scopes.variable(node.func.id, node.func))
        return variable.scope is function and all(_layers(scopes, one, function) for one in bound)
    method = method or (isinstance(node.func, ast.Attribute) and library is None)
    known = name in _METHODS if method else library in ("", "torch") and name in _FUNCTIONS
    if name in _OVER and not (name == "unsqueeze" and _made_here(scopes, node)):
        place, optional = _OVER[name]
        known = known and _dimension(node, place if method else place + 1, optional)
    return known and (name not in ("view", "reshape", "layer_norm") or _shaped(sizes, node, name, method))


def _layers(scopes: Scopes, node: ast.AST, function: ast.FunctionDef) -> bool:
    """Whether what binds a name gives it a layer: an assignment of a part of the module, or a loop over its parts."""
    around = scopes.parents.get(node)
    while isinstance(around, ast.Tuple | ast.List):
        around = scopes.parents.get(around)
    given = around.value if isinstance(around, ast.Assign) else getattr(around, "iter", None)
    ahead = [given] if isinstance(node, ast.Name) and isinstance(given, ast.expr) else []
    for one in ahead:
        if isinstance(one, ast.Call) and scopes.original(one.func) in ("enumerate", "zip", "reversed"):
            ahead += one.args
        elif isinstance(one, ast.Tuple | ast.List):
            ahead += one.elts
        elif not of_self(one, function) or any(isinstance(inner, ast.Call) and inner.args for inner in ast.walk(one)):
            return False
    return bool(ahead)


def _of_layers(scopes: Scopes, node: ast.expr, function: ast.FunctionDef) -> bool:
    """Whether a loop runs over numbers, or over what the module itself holds."""
    if isinstance(node, ast.Call) and scopes.original(node.func) in ("enumerate", "zip", "reversed"):
        return all(_of_layers(scopes, one, function) for one in node.args)
    if isinstance(node, ast.Call) and scopes.original(node.func) == "range":
        return True
    given = [one for one in ast.walk(node) if isinstance(one, ast.Call) and (one.args or one.keywords)]
    return isinstance(node, ast.Constant | ast.List | ast.Tuple) or (of_self(node, function) and not given)


def _dimension(node: ast.Call, place: int, optional: bool) -> bool:
    """Whether a call names the dimension that it runs over, and it is not that of the examples."""
    named = [one.value for one in node.keywords if one.arg in ("dim", "axis", "start_dim")]
    given = named or node.args[place : place + 1]
    return ast.unparse(given[0]) in _DIMENSIONS if given else optional


def _made_here(scopes: Scopes, node: ast.expr) -> bool:
    """Whether a chain of methods begins with a tensor that no example is in."""
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if scopes.original(node.func) in ("arange", "zeros", "ones"):
            return True
        node = node.func.value
    return False


def _shaped(sizes: Sizes, node: ast.Call, name: str, method: bool) -> bool:
    """Whether a new shape keeps a row for each example, or a normalisation runs over entries of one example."""
    named = [one.value for one in node.keywords if one.arg in ("shape", "normalized_shape")]
    given = named or node.args[int(not method) :]
    if not given:
        return False
    if name != "layer_norm":
        entries = given[0].elts if isinstance(given[0], ast.Tuple | ast.List) and given[0].elts else given
        several = len(entries) > 1 or isinstance(sizes.scopes.parents[node], ast.Return)
        return bool(sizes.kind(entries[0])) or (ast.unparse(entries[0]) == "-1" and several)
    shape = ast.unparse(given[0])
    return not (shape.isidentifier() or re.search(r"size\(0\)|shape\[0\]|len\(|\.size\(\)$|(?<!self)\.shape$", shape))


def loaded_weights(scopes: Scopes) -> tuple[list[tuple[ast.AST, str]], list[str]]:
    """Files that weights are read from: a doubt where this program may write the same file, an assumption otherwise."""
    calls = [one for one in ast.walk(scopes.tree) if isinstance(one, ast.Call)]
    loads = [one for one in calls if last_name(one.func) in _LOADS and _of_weights(scopes, one.func)]
    saves = [one for one in calls if last_name(one.func) in _SAVES]
    written = {_place(scopes, arg) for one in saves for arg in (*one.args, *(each.value for each in one.keywords))}
    doubts: list[tuple[ast.AST, str]] = []
    assumed = []
    for one in loads:
        given = [*one.args, *(each.value for each in one.keywords)]
        place = _place(scopes, given[0]) if given else ""
        if place in written:
            doubts.append(
                (one, f"weights are read from {place}, which this program writes: earlier sessions are not counted")
            )
        else:
            assumed.append(f"weights that are read from {place[:60]}, if any, were not trained on these examples")
    return doubts, assumed


def _of_weights(scopes: Scopes, function: ast.expr) -> bool:
    """Whether a function that loads may load weights: not a text, a tokenizer, or the state of something of this program."""
    if scopes.library(function) in ("json", "yaml", "tomllib") or "Tokenizer" in ast.unparse(function):
        return False
    return last_name(function) != "load" or scopes.library(function) is not None


def _place(scopes: Scopes, node: ast.expr) -> str:
    """The text of a path, through a name that is assigned once."""
    variable = scopes.read(node)
    made = scopes.assigned(variable) if variable is not None else None
    return ast.unparse(made if made is not None else node)
