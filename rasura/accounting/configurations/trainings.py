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
from rasura.accounting.configurations.repeats import repeats
from rasura.accounting.configurations.scopes import Scopes, last_name
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


def _data(found: Training, scopes: Scopes, data: ast.expr | None, rows: ast.expr | None, place: str) -> None:
    """The data set, which must not repeat an example, and what makes rows of its examples."""
    if data is not None and repeats(scopes, data):
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
