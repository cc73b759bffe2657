"""Calls that may run by private values: those that read, compute or tell. Any other may change what is trained or kept."""

from __future__ import annotations

import ast

import rasura.accounting.configurations.kinds as k
from rasura.accounting.configurations.scopes import Scopes

READING = frozenset((
    "parameters", "named_parameters", "modules", "named_modules", "children", "state_dict", "generate", "get_last_lr",
    "get_epsilon", "spent", "epsilon", "evaluate", "predict", "log", "log_metrics", "print_trainable_parameters",
    "set_postfix", "set_postfix_str", "set_description", "update", "write", "items", "values", "keys", "cpu", "detach",
    "numpy", "clone", "norm", "numel", "size", "dim",
))  # fmt: skip
"""Methods of models, optimizers, loaders, ledgers and the like that leave them as they are, and write no file."""

_WORDS = (
    "split", "strip", "rstrip", "lstrip", "lower", "upper", "startswith", "endswith", "replace", "isoformat", "strftime",
)  # fmt: skip
_CONTEXTS = ("no_grad", "inference_mode", "autocast", "device", "empty_cache", "synchronize")
_LOSSES = (*k.FUNCTIONAL, *k.ALIKE, *k.LOSSES, *k.LOSSES_ALIKE)


def harmless(scopes: Scopes, node: ast.Call) -> bool:
    """Whether a call of a function that this file does not have only reads, computes or tells, as far as its name says."""
    name, library = scopes.original(node.func), scopes.library(node.func)
    if any(one.arg in ("out", "copy", "key", "default") and not isinstance(one.value, ast.Lambda) for one in node.keywords):
        return False
    if isinstance(node.func, ast.Name) and library == "":
        return name in (*k.BUILTINS, *k.COMPUTED, *_LOSSES, "enumerate")
    if library in k.MATHEMATICS:
        return name in (*k.COMPUTED, *_LOSSES, *_CONTEXTS)
    if library in k.TRACKERS:
        return name in (*k.TOLD, "tqdm", "trange") or library == "logging"
    if isinstance(node.func, ast.Attribute) and library in (None, ""):
        return name in (*k.TOLD, *_WORDS) or (name in k.READS and (name != "copy" or not node.args))
    return library in k.BESIDE
