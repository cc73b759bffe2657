"""The mods of a Flower ``ClientApp`` in a program: which clip, and whether every client has them."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import rasura.accounting.configurations.flower as flower
from rasura.accounting.configurations.handled import Handled
from rasura.accounting.configurations.scopes import Scopes
from rasura.accounting.configurations.trainings import argument

_KNOWN = (*flower.MODS, "secagg_mod", "secaggplus_mod", "message_size_mod", "parameters_size_mod")


def given_mods(scopes: Scopes, local: Sequence[Handled]) -> tuple[list[str], list[tuple[ast.AST, str]]]:
    """The clipping mods that every ``ClientApp`` of a program has, and what is not understood about its mods.

    ``local``: the calls of ``LocalDpMod``, which every ``ClientApp`` must have, if there is any.
    """
    apps = [one for one in ast.walk(scopes.tree) if isinstance(one, ast.Call) and scopes.original(one.func) == "ClientApp"]
    mods: list[str] = []
    doubts: list[tuple[ast.AST, str]] = []
    nodes, held = {one.node for one in local}, {variable for one in local for variable in one.held.values()}
    for app in apps:
        given = argument(app, "mods", 1)
        listed = given.elts if isinstance(given, ast.List) else []
        has = [one in nodes or scopes.read(one) in held for one in (*listed, *([] if given is None else [given]))]
        names = [scopes.original(one) for one in listed if scopes.library(one) in ("", "flwr")]
        if (why := scopes.unsure(app, framework=True)) and (local or mods):
            doubts.append((app, f"a ClientApp may not be used, or not this one: {why}"))
        if local and not any(has):
            doubts.append((app, "a ClientApp has no LocalDpMod, as far as its list of mods is written"))
        if strange := [one for one, own in zip(listed, has) if not own and scopes.original(one) not in _KNOWN]:
            doubts.append((app, f"{ast.unparse(strange[0])[:80]} among the mods is not known here"))
        mods += [one for one in names if one in flower.MODS]
    named = [
        n for n in ast.walk(scopes.tree) if isinstance(n, ast.Name | ast.Attribute) and scopes.original(n) in flower.MODS
    ]
    if len(named) != len(mods) or any(mods.count(one) != len(apps) for one in mods):
        doubts += [(one, f"{scopes.original(one)} is not among the mods of every ClientApp") for one in named]
        return [], doubts
    return list(dict.fromkeys(mods)), doubts
