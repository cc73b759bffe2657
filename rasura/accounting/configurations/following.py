"""A whole training program, followed from its beginning to its end, with the functions that it never calls."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.expressions import Where
from rasura.accounting.configurations.facts import Value
from rasura.accounting.configurations.kinds import Kind, joined, parts
from rasura.accounting.configurations.scopes import Scopes, Variable
from rasura.accounting.configurations.statements import Statements


def followed(
    scopes: Scopes,
    mechanisms: dict[ast.AST, Kind],
    inputs: frozenset[Variable],
    read: Callable[[ast.expr], Value],
    own_loss: str = "",
) -> Statements:
    """A program that was followed from its beginning to its end. ``mechanisms``: the kinds of what each of them returns.
    ``own_loss``: why the loss that the model computes is not known to be one for each example."""
    found = Statements(scopes, mechanisms=mechanisms, inputs=inputs, read=read, own_loss=own_loss)
    found.env = dict.fromkeys(inputs, k.PLAIN)
    found.block(scopes.tree.body, Where())
    # What is called at another time may find any value that a variable ever had.
    found.env = {name: _ever(kinds) for name, kinds in found.ever.items()}
    for node in found.deferred:
        if strange := parts(found.kind(node, Where(barred="it makes a learning rate"))) - {k.PUBLIC}:
            found.doubt(node, f"a schedule of learning rates depends on the {min(strange)}")
    functions = [one for one in ast.walk(scopes.tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    for holds in (True, False):  # what a framework calls comes first, if it has a mechanism
        for one in functions:
            if one in found.entered or any(node in mechanisms for node in ast.walk(one)) != holds:
                continue
            where = Where() if holds else Where(barred=f"{one.name} is not called in this file, as far as is understood")
            function = one if isinstance(one, ast.FunctionDef) else ast.FunctionDef(**vars(one))
            found.run(function, {}, where)
    return found


def _ever(kinds: Sequence[Kind]) -> Kind:
    """The kind of a variable at any time: what the mechanism returned, where it held that among other things."""
    plain = (k.PUBLIC, k.PLAIN, k.PLAIN_OPTIMIZER)
    return joined([one for one in kinds if one not in plain] or kinds)
