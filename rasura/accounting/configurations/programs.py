"""Calls in a Python program that set up differential privacy. The program is read and never run.

An argument counts only where its value is written: a literal, a name that is assigned once, or arithmetic of these.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import rasura.accounting.configurations.flower as flower
import rasura.accounting.configurations.jax_privacy as jax_privacy
import rasura.accounting.configurations.nvflare as nvflare
from rasura.accounting.configurations.bypasses import bypasses
from rasura.accounting.configurations.facts import Call, Unknown, Unread, Value
from rasura.accounting.configurations.following import followed
from rasura.accounting.configurations.handled import LIBRARIES, OPACUS, Handled
from rasura.accounting.configurations.kinds import Kind
from rasura.accounting.configurations.losses import rows_of_choices, unknown_loss
from rasura.accounting.configurations.models import loaded_weights, mixed_examples
from rasura.accounting.configurations.mods import given_mods
from rasura.accounting.configurations.prepared import begun_by_data
from rasura.accounting.configurations.scopes import Scopes, changed, last_name
from rasura.accounting.configurations.trainings import LOADER, Training, training

POSITIONS: Mapping[str, tuple[str, ...]] = {
    "LocalDpMod": flower.LOCAL,
    "DifferentialPrivacyServerSideFixedClipping": flower.FIXED[:4],
    "DifferentialPrivacyClientSideFixedClipping": flower.FIXED[:4],
    "DifferentialPrivacyServerSideAdaptiveClipping": flower.ADAPTIVE,
    "DifferentialPrivacyClientSideAdaptiveClipping": flower.ADAPTIVE,
    "SVTPrivacy": nvflare.ARGUMENTS[:7],
    "PercentilePrivacy": ("percentile", "gamma", "data_kinds"),
    "ExcludeVars": ("exclude_vars", "data_kinds"),
    "make_private": (),
    "make_private_with_epsilon": (),
    "PrivacyEngine": (),
    "clipped_grad": ("fun", "argnums", "has_aux"),
    "gaussian_privatizer": (),
    "CyclicPoissonSampling": (
        "sampling_prob", "iterations", "truncated_batch_size", "cycle_length", "partition_type",
    ),
    "DPKerasConfig": jax_privacy.KERAS,
    "protect_training": ("model", "optimizer", "loader", "defense"),
    "PrivateTrainer": ("model", "args", "data_collator", "train_dataset"),
    "clip_grad_norm_": ("parameters", "max_norm"),
    "DataLoader": LOADER,
    "TrainingArguments": ("output_dir",),
    "ServerConfig": ("num_rounds",),
    "get_epsilon": ("delta",),
}  # fmt: skip
"""The calls that are read, with the names of their arguments by position."""

_LOOKS_PRIVATE = re.compile(r"(?i:priva|differential)|(?<![A-Z])D[pP](?=[A-Z]|$)(?!O)|(?:^|_)dp(?:_|$)")
"""Names of calls that seem to be about differential privacy. One that is not known leaves the whole file open."""

_HARMLESS = ("get_privacy_spent", "privacy_spent", "is_private")
_KNOWN_BESIDE = ("RdpAccountant", "PrivacyConfig", "GaussianPrivacyEvent")

_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.Pow: lambda base, power: float(base) ** float(power), ast.FloorDiv: operator.floordiv,
}  # fmt: skip


class _Reader:
    """The names that a program assigns once, and the calls that it makes."""

    def __init__(self, tree: ast.AST) -> None:
        self.tree = tree
        self.aliases: dict[str, str] = {}
        self.assigned: dict[str, ast.expr | None] = {}
        self.reads: dict[str, int] = {}
        counts: dict[str, int] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.reads[node.id] = self.reads.get(node.id, 0) + 1
            for name in changed(node):
                counts[name] = counts.get(name, 0) + 1
            if isinstance(node, ast.ImportFrom):
                self.aliases |= {one.asname: one.name for one in node.names if one.asname}
        if "*" in counts:  # an import of everything may change any name
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if counts.get(name) == 1:
                    self.assigned[name] = node.value

    def name(self, node: ast.AST) -> str:
        """The last part of a dotted name, as it was before an import gave it another."""
        found = last_name(node)
        return self.aliases.get(found, found) if isinstance(node, ast.Name) else found

    def value(self, node: ast.expr, depth: int = 0) -> Value:
        """The value of an expression, ``Unread`` if it is not written in the program."""
        unread = Unread(ast.unparse(node)[:80])
        if depth > 9:
            return unread
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            known = self.assigned.get(node.id)
            # A list that is read elsewhere may be changed there.
            changes = isinstance(known, ast.List) and self.reads.get(node.id, 0) > 1
            return unread if known is None or changes else self.value(known, depth + 1)
        if isinstance(node, ast.List | ast.Tuple):
            each = [self.value(one, depth + 1) for one in node.elts]
            return unread if any(isinstance(one, Unread) for one in each) else each
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand, depth + 1)
            return -inner if isinstance(inner, int | float) else unread
        if isinstance(node, ast.BinOp) and (made := _ARITHMETIC.get(type(node.op))) is not None:
            return self._computed(made, node, depth, unread)
        if isinstance(node, ast.Call) and ast.unparse(node) in ("float('inf')", 'float("inf")'):
            return float("inf")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("math.inf", "np.inf", "jnp.inf", "numpy.inf"):
            return float("inf")
        return self._sensitivity(node, unread)

    def _computed(self, made: object, node: ast.BinOp, depth: int, unread: Unread) -> Value:
        left, right = self.value(node.left, depth + 1), self.value(node.right, depth + 1)
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            return unread
        try:
            found = made(left, right)  # type: ignore[operator]  # one of _ARITHMETIC
        except (ArithmeticError, ValueError):
            return unread
        return found if isinstance(found, int | float) else unread

    def _sensitivity(self, node: ast.expr, unread: Unread) -> Value:
        """Of ``name.sensitivity()`` or ``name.l2_norm_bound``, where the name is assigned a ``clipped_grad``."""
        inner = node.func if isinstance(node, ast.Call) and not node.args and not node.keywords else node
        if not isinstance(inner, ast.Attribute) or inner.attr not in ("sensitivity", "l2_norm_bound"):
            return unread
        made = self.assigned.get(inner.value.id) if isinstance(inner.value, ast.Name) else None
        if not isinstance(made, ast.Call) or self.name(made.func) != "clipped_grad":
            return unread
        try:
            return jax_privacy.jax_sensitivity(self.call(made, ""))
        except Unknown:
            return unread

    def call(self, node: ast.Call, place: str) -> Call:
        """A call with its arguments by name."""
        name = self.name(node.func)
        names = POSITIONS.get(name, ())
        arguments: dict[str, Value] = {}
        for position, one in enumerate(node.args):
            if position < len(names):
                arguments[names[position]] = self.value(one)
            else:
                arguments[f"argument {position + 1}"] = Unread(ast.unparse(one)[:80])
        for keyword in node.keywords:
            arguments[keyword.arg or "**"] = self.value(keyword.value)
        return Call(name, arguments, place, {"program": True})


def program(text: str, path: str) -> tuple[list[Call], Training]:
    """The calls in a program that are known here, and what it says about its training.

    Raises ``SyntaxError`` if ``text`` is not a Python program.
    """
    tree = ast.parse(text)
    reader, scopes = _Reader(tree), Scopes(tree)
    calls: list[Call] = []
    nodes: list[ast.Call] = []
    doubts: list[tuple[ast.AST, str]] = []
    strange: list[tuple[ast.Call, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = reader.name(node.func)
        if name in POSITIONS or any(k.arg == "num_rounds" for k in node.keywords):
            calls.append(reader.call(node, f"{path}:{node.lineno}"))
            nodes.append(node)
        elif _LOOKS_PRIVATE.search(name) and name not in (*_HARMLESS, *_KNOWN_BESIDE):
            strange.append((node, f"{name} looks like a mechanism, but it is not known here"))
    handled = {}
    for number, node in enumerate(nodes):
        if (name := scopes.original(node.func)) in LIBRARIES:
            handled[number] = one = Handled(scopes, node, name)
            one.read()
            doubts += one.doubts
    trained = {number: one for number, one in handled.items() if one.followed}
    made, read, assumed = _followed(scopes, list(trained.values()), reader)
    doubts += read
    calls = [
        replace(call, extra={**call.extra, "passes": made}) if number in trained else call
        for number, call in enumerate(calls)
    ]
    held = {variable for one in handled.values() for variable in one.held.values()}
    doubts += [(node, why) for node, why in strange if scopes.read(node.func) not in held]
    mods, wrong = given_mods(scopes, [one for one in handled.values() if one.name == "LocalDpMod"])
    calls += [Call(one, {}, path) for one in mods]
    doubts += wrong
    if handled:
        doubts += _whole(scopes)
    found = training(scopes, nodes, lambda one: reader.call(one, f"{path}:{one.lineno}"), path)
    found.assumed += assumed
    found.doubts += dict.fromkeys(f"{why} ({path}:{getattr(node, 'lineno', 1)})" for node, why in doubts)
    return calls, found


def _followed(
    scopes: Scopes, trained: list[Handled], reader: _Reader
) -> tuple[int | None, list[tuple[ast.AST, str]], list[str]]:
    """The passes that the loops of a program make, what it does that is not understood, and what is taken for granted."""
    if not trained:
        return None, [], []
    mechanisms: dict[ast.AST, Kind] = {one.node: one.kinds for one in trained}
    inputs = frozenset(variable for one in trained for variable in one.inputs())
    own = [unknown_loss(scopes, one.node) for one in trained if one.name in OPACUS]
    found = followed(scopes, mechanisms, inputs, reader.value, next((why for why in own if why), ""))
    rows = list(rows_of_choices(scopes)) if own else []
    weights, assumed = loaded_weights(scopes)
    passes = list(found.passes.values())
    whole = [one for one in passes if one is not None]
    made = sum(whole) if whole and len(whole) == len(passes) else None
    begun = [doubt for one in trained for doubt in begun_by_data(scopes, one.node)]
    return made, [*found.doubts, *rows, *mixed_examples(scopes), *weights, *begun], assumed


def _whole(scopes: Scopes) -> Iterator[tuple[ast.AST, str]]:
    """What is not understood in the rest of a program that has mechanisms."""
    known = frozenset((*POSITIONS, *flower.MODS))
    yield from bypasses(scopes, known)
    called = {node.func for node in ast.walk(scopes.tree) if isinstance(node, ast.Call)}
    for node in ast.walk(scopes.tree):
        name = scopes.original(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if name in LIBRARIES and node not in called:
            yield node, f"{name} is not called where it is named"
