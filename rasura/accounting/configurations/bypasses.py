"""What in a program may change a mechanism without a call that is read: names, imports and assignments.

A finding here is not a fault of the program. It is something that is not understood, so that no figure stands.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from rasura.accounting.configurations.scopes import Scopes, last_name, root

DYNAMIC = ("exec", "eval", "compile", "setattr", "delattr", "globals", "locals", "vars", "__import__")
MODULES = ("builtins", "importlib", "mock", "ctypes", "inspect", "gc", "patch", "import_module")
OPACUS = ("opacus", "PrivacyEngine", "utils", "batch_memory_manager", "BatchMemoryManager", "validators", "ModuleValidator")
"""The names of Opacus that are understood. Others, such as its schedulers, may change the noise."""

_VALIDATOR = ("is_valid", "fix", "validate")
_SUSPECT = re.compile(r"[Nn]oise|[Cc]lip|[Ss]chedul")
_SETTING = re.compile(r"(?i)noise|clip|grad_|^grad$|sampler|sample_rate|accountant|secure|hook|^params$|^step$|^forward$")
_HARMLESS = re.compile(
    r"lr_scheduler|\w*LRScheduler|get_scheduler|get_(\w+_)?schedule\w*|SchedulerType|noise_addition|clip|clip_grad_(norm|value)_"
)
_SPECIAL = ("__name__", "__init__", "__file__", "__version__", "__doc__", "__len__", "__getitem__")


def bypasses(scopes: Scopes, known: frozenset[str]) -> Iterator[tuple[ast.AST, str]]:
    """Each node that may change a mechanism, with what it does. ``known``: names that are read as calls."""
    for node in ast.walk(scopes.tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node, why) for why in _imported(node, known))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            bound = scopes.bound(scopes.variable(node.id, node))
            if node.id in DYNAMIC and not bound:
                yield node, f"{node.id} may change any value"
            if _suspect(node.id, known) and not bound:
                yield node, f"{node.id} is not known here"
        elif isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if why := _stored(scopes, node):
                yield node, why
        elif isinstance(node, ast.Attribute):
            if why := _read(scopes, node, known):
                yield node, why
        elif isinstance(node, ast.Call) and last_name(node.func) == "getattr":
            name = node.args[1] if len(node.args) > 1 else None
            if not isinstance(name, ast.Constant) or _SETTING.search(str(name.value)) or str(name.value) in known:
                yield node, "getattr reads an attribute that is not written here"


def _imported(node: ast.Import | ast.ImportFrom, known: frozenset[str]) -> Iterator[str]:
    module = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    for one in node.names:
        path = [*module.split("."), *one.name.split(".")]
        if one.name == "*":
            yield f"everything is imported from {module}, which may replace any name"
        elif set(path) & set(MODULES):
            yield f"{one.name} may replace any name"
        elif "opacus" in path[:2]:
            yield from (f"{part} of Opacus is not known here" for part in path if part and part not in OPACUS)
        elif _suspect(one.name.rsplit(".", 1)[-1], known):
            yield f"{one.name} is not known here"


def _suspect(name: str, known: frozenset[str]) -> bool:
    return bool(_SUSPECT.search(name)) and name not in known and not _HARMLESS.fullmatch(name)


def _stored(scopes: Scopes, node: ast.Attribute | ast.Subscript) -> str:
    """Whether an assignment changes a module, a class that was imported, or something that is named like a setting."""
    text = ast.unparse(node)
    if text.startswith(("torch.backends.", "os.environ[")):
        return ""
    if scopes.library(node):
        return f"{text} is replaced"
    if isinstance(node, ast.Attribute) and node.attr.startswith("__"):
        return f"{text} is assigned, which may change any value"
    if isinstance(node, ast.Subscript):
        key = node.slice.value if isinstance(node.slice, ast.Constant) else ""
        return f"{text} is assigned" if isinstance(key, str) and _SETTING.search(key) else ""
    around = scopes.parents.get(node)
    none = isinstance(around, ast.Assign) and isinstance(around.value, ast.Constant) and around.value.value is None
    if not _SETTING.search(node.attr) or (node.attr == "grad" and none):
        return ""
    return f"{text} is assigned"


def _read(scopes: Scopes, node: ast.Attribute, known: frozenset[str]) -> str:
    """Whether reading an attribute reaches what a mechanism does not cover."""
    around = scopes.parents.get(node)
    called = isinstance(around, ast.Call) and around.func is node
    text, first = ast.unparse(node), root(node)
    if isinstance(first, ast.Name) and scopes.library(first) == "opacus" and node.attr not in (*OPACUS, *_VALIDATOR, *known):
        return f"{text} of Opacus is not known here"
    if node.attr.startswith("__") and node.attr not in _SPECIAL:
        return f"{text} may change any value"
    if _suspect(node.attr, known) and (called or node.attr[0].isupper()):
        return f"{text} is not known here"
    return ""
