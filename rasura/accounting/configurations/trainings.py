"""What a program says about its training: batch size, passes, steps and rounds.

A figure counts only where it is written, and only where it belongs to the training of the mechanism: the loader of a test
set says nothing. Whatever is not understood leaves its figure unknown.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rasura.accounting.configurations.facts import Call, Unread, Value, positive
from rasura.accounting.configurations.scopes import Scopes, Variable, last_name, root
from rasura.accounting.configurations.steered import COUNTED, argument_doubts, schedule_doubts, shown

LOADERS: Mapping[str, tuple[str, int]] = {
    "make_private": ("data_loader", 99),
    "make_private_with_epsilon": ("data_loader", 99),
    "protect_training": ("loader", 2),
}
"""The argument of a mechanism that is its loader, by name and by position."""

LOADER = (
    "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory", "drop_last",
)  # fmt: skip
"""The arguments of PyTorch's ``DataLoader`` by position."""

_LOADER_BESIDE = (
    "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor", "persistent_workers",
    "pin_memory_device", "in_order",
)  # fmt: skip
_REPEATING = (
    "ConcatDataset", "ChainDataset", "concatenate_datasets", "interleave_datasets", "repeat", "repeat_interleave", "tile",
    "cycle", "cat", "concat", "concatenate", "stack", "vstack", "hstack", "expand", "chain", "sample", "choices", "choice",
    "resample",
)  # fmt: skip
"""Calls that make copies of examples, or may."""

_PLACING = ("Subset", "select", "take", "index_select")
"""Calls that take the examples at given places."""

_WITH_REPLACEMENT = ("randint", "random_integers", "integers", "randrange", "multinomial")
"""Draws of numbers, of which one may come several times."""

_ONE_BY_ONE = ("enumerate", "zip", "list", "tuple", "sorted", "tqdm", "items", "values", "keys", "iter")
"""Calls with as many items as what they are given, or fewer."""

_GROWING = ("extend", "append", "insert", "add")


@dataclass
class Training:
    """``facts`` by name, each None if two places differ or one is not read. ``doubts``: what was found and is not
    understood. ``assumed``: what the figures take for granted."""

    facts: dict[str, Value] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def take(self, name: str, value: Value) -> None:
        """Record a figure. One that is not a whole number from 1 on, or differs from an earlier one, leaves it unknown."""
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        self.facts[name] = value if whole and self.facts.get(name, value) == value else None


def training(scopes: Scopes, mechanisms: Sequence[ast.Call], read: Callable[[ast.Call], Call], path: str) -> Training:
    """The training of ``mechanisms`` in a program; ``read`` makes a call of one of its nodes."""
    found = Training()
    for node in mechanisms:
        name = scopes.original(node.func)
        if name in LOADERS:
            _loader(found, scopes, made(scopes, node, *LOADERS[name], ("DataLoader", "torch")), read)
        elif name == "PrivateTrainer":
            _data(found, scopes, argument(node, "train_dataset", 3), argument(node, "data_collator", 2), read(node).place)
            _arguments(found, made(scopes, node, "args", 1, ("TrainingArguments", "transformers")), read)
            found.doubts += schedule_doubts(scopes, argument(node, "optimizers", 99), read(node).place)
    calls = [one for one in ast.walk(scopes.tree) if isinstance(one, ast.Call)]
    _rounds(found, scopes, [one for one in calls if _gives_rounds(one)], read, path)
    deltas = {read(one).arguments.get("delta") for one in calls if last_name(one.func) == "get_epsilon"}
    if len(deltas) == 1 and isinstance(delta := deltas.pop(), float) and 0 < delta < 1:
        found.facts["delta"] = delta
    return found


def argument(node: ast.Call, name: str, position: int) -> ast.expr | None:
    """The expression of an argument that has a name and a position."""
    named = next((one.value for one in node.keywords if one.arg == name), None)
    if named is not None or position >= len(node.args):
        return named
    return None if any(isinstance(one, ast.Starred) for one in node.args) else node.args[position]


def targets(scopes: Scopes, node: ast.AST) -> list[ast.expr]:
    """The targets of the assignment whose value is ``node``, those of a tuple one by one; nothing if there is none."""
    around = scopes.parents.get(node)
    if not isinstance(around, ast.Assign) or len(around.targets) != 1:
        return []
    target = around.targets[0]
    return list(target.elts) if isinstance(target, ast.Tuple | ast.List) else [target]


def made(
    scopes: Scopes, node: ast.Call, name: str, position: int, by: tuple[str, str]
) -> ast.Call | None:  # fmt: skip
    """The call that made an argument of ``node``, if it is a call of ``by``: a name and the library that has it.

    It stands in the argument itself, or in the only assignment of the variable, apart from what ``node`` assigns.
    """
    given = argument(node, name, position)
    if given is not None and (variable := scopes.read(given)) is not None:
        given = scopes.assigned(variable, frozenset(targets(scopes, node)))
    if not isinstance(given, ast.Call) or (scopes.original(given.func), scopes.library(given.func)) != by:
        return None
    return given


def _repeats(scopes: Scopes, node: ast.expr) -> bool:
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
    comprehensions = [one for one in inner if isinstance(one, ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp)]
    return (
        bool(named & set(_REPEATING))
        or any(_repeated_places(scopes, place) for one in inner for place in _places(scopes, one))
        or any(map(_adds_up, inner))
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
        if isinstance(statement, ast.AugAssign) and not isinstance(statement.value, ast.Constant):
            return made, True
        stores = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.Assign) and any(_begins(scopes, store, variable) for store in stores):
            made.append(statement.value)
        around = scopes.parents.get(one)
        while isinstance(around, ast.Attribute | ast.Subscript):
            if isinstance(around, ast.Attribute) and around.attr in growing:
                return made, True
            around = scopes.parents.get(around)
    for value in list(made):  # a function of this file that makes the data set
        called = scopes.read(value.func) if isinstance(value, ast.Call) else None
        for function in scopes.bound(called) if called is not None else ():
            if isinstance(function, ast.FunctionDef):
                made += [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value is not None]
    return made, False


def _begins(scopes: Scopes, node: ast.expr, variable: Variable | None) -> bool:
    """Whether what is assigned is a variable, or a part of it."""
    first = root(node)
    return isinstance(first, ast.Name) and scopes.variable(first.id, first) == variable


def _data(found: Training, scopes: Scopes, data: ast.expr | None, rows: ast.expr | None, place: str) -> None:
    """The data set, which must not repeat an example, and what makes rows of its examples."""
    if data is not None and _repeats(scopes, data):
        found.doubts.append(f"the data set ({place}) may hold an example more than once: {ast.unparse(data)[:60]}")
    found.assumed.append("the data set holds each example once, and none was prepared by looking at the others")
    if rows is not None:
        found.assumed.append(f"{ast.unparse(rows)[:60]} makes one row of each example")


def _loader(found: Training, scopes: Scopes, node: ast.Call | None, read: Callable[[ast.Call], Call]) -> None:
    """The batch size of a PyTorch loader, and whether it leaves out the last batch."""
    if node is None:
        found.take("batch_size", None)
        found.assumed.append("the loader was made elsewhere: it has the batch size given here, and drop_last is false")
        return
    call = read(node)
    given = {name: value for name, value in call.arguments.items() if value is not None}
    _data(found, scopes, argument(node, "dataset", 0), argument(node, "collate_fn", 6), call.place)
    strange = [name for name in given if name not in (*LOADER, *_LOADER_BESIDE) or name in ("sampler", "batch_sampler")]
    drops = given.get("drop_last", False)
    if strange or not isinstance(drops, bool):
        of = ", ".join(strange) or f"drop_last {shown(drops)}"
        found.doubts.append(f"the loader ({call.place}) has arguments that are not understood: {of}")
    found.take("batch_size", call.arguments.get("batch_size", 1))
    if drops is True:
        found.facts["drop_last"] = True


def _arguments(found: Training, node: ast.Call | None, read: Callable[[ast.Call], Call]) -> None:
    """Batch size, passes and steps that ``TrainingArguments`` give a ``PrivateTrainer``."""
    if node is None:
        found.take("batch_size", None)
        found.take("epochs", None)
        found.assumed.append("the arguments of the Trainer were made elsewhere: they fit the figures given here")
        return
    call = read(node)
    given = call.arguments
    found.doubts += argument_doubts(given, call.place)
    if "**" in given:
        given = {**dict.fromkeys(COUNTED, Unread("**")), **{k: v for k, v in given.items() if k in COUNTED}}
    size, parts = given.get("per_device_train_batch_size", 8), given.get("gradient_accumulation_steps", 1)
    whole = isinstance(size, int) and isinstance(parts, int) and size >= 1 and parts >= 1
    found.take("batch_size", int(size) * int(parts) if whole and isinstance(size, int) and isinstance(parts, int) else None)
    epochs, most = given.get("num_train_epochs", 3), given.get("max_steps", -1)
    if isinstance(most, int) and most > 0:
        found.take("steps", most)
    elif most == -1 and positive(epochs) and isinstance(epochs, int | float):
        found.take("epochs", math.ceil(epochs))
    else:
        found.take("epochs", None)


def _gives_rounds(node: ast.Call) -> bool:
    named = any(one.arg == "num_rounds" for one in node.keywords)
    return named or (last_name(node.func) == "ServerConfig" and bool(node.args or node.keywords))


def _rounds(found: Training, scopes: Scopes, calls: Sequence[ast.Call], read: Callable[[ast.Call], Call], path: str) -> None:
    """The rounds, where one call gives them and runs once, as far as the program shows."""
    for node in calls:
        if why := scopes.unsure(node, framework=True):
            found.take("rounds", None)
            found.assumed.append(f"the rounds are those given here ({path}:{node.lineno}: {why})")
        else:
            found.take("rounds", read(node).arguments.get("num_rounds") if len(calls) == 1 else None)
