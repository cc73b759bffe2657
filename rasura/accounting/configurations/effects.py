"""Calls that may run by private values: those that read, compute or tell. Any other may change what is trained or kept.

And calls that may read again what was told: files, and what a tracker keeps.
"""

from __future__ import annotations

import ast
import sys

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
_WRITING = ("write", "writerow", "log", "log_metric", "log_metrics", "info", "debug", "warning", "error")
_BACK = (
    "open", "input", "eval", "exists", "lexists", "is_file", "isfile", "is_dir", "isdir", "is_symlink", "islink", "resolve",
    "listdir", "scandir", "walk", "glob", "iglob", "rglob", "iterdir", "stat", "lstat", "run", "popen", "Popen", "call",
    "check_output", "check_call", "communicate", "system", "genfromtxt", "memmap", "connect", "execute", "which",
)  # fmt: skip
_BEGINNINGS = (
    "read", "load", "fetch", "from", "parse", "getsize", "getmtime", "getctime", "getatime", "getenv", "getoutput",
)  # fmt: skip
"""Names of what may read a file, a process or a database, and how others begin."""

_CLOSED = frozenset((
    *sys.stdlib_module_names, "torch", "torchvision", "numpy", "pandas", "sklearn", "transformers", "tokenizers", "datasets",
    "peft", "opacus", "accelerate", "tqdm", __name__.partition(".")[0],
))  # fmt: skip
"""Libraries that read a file only where the name of the function says so."""

_CONTEXTS = ("no_grad", "inference_mode", "autocast", "device", "empty_cache", "synchronize")
_LOSSES = (*k.FUNCTIONAL, *k.ALIKE, *k.LOSSES, *k.LOSSES_ALIKE)


def harmless(scopes: Scopes, node: ast.Call) -> bool:
    """Whether a call of a function that this file does not have only reads, computes or tells, as far as its name says."""
    name, library = scopes.original(node.func), scopes.library(node.func)
    if any(one.arg in ("out", "copy", "key", "default") and not isinstance(one.value, ast.Lambda) for one in node.keywords):
        return False
    if isinstance(node.func, ast.Name) and library == "":
        if name == "open":
            return _opened(node) == "read"
        return name in (*k.BUILTINS, *k.COMPUTED, *_LOSSES, "enumerate")
    if library in k.MATHEMATICS:
        return name in (*k.COMPUTED, *_LOSSES, *_CONTEXTS)
    if library in k.TRACKERS:
        return name in (*k.TOLD, "tqdm", "trange") or library == "logging"
    if isinstance(node.func, ast.Attribute) and library in (None, ""):
        return name in (*k.TOLD, *_WORDS) or (name in k.READS and (name != "copy" or not node.args))
    return library in k.BESIDE


def writes_down(scopes: Scopes, node: ast.Call) -> bool:
    """Whether a call may write what it is given where the program can read it again."""
    name = scopes.original(node.func)
    if name == "print":
        return any(one.arg in ("file", None) for one in node.keywords)
    return (
        name in (*_WRITING, *k.SAVES) or name.startswith(("add_scalar", "save")) or scopes.library(node.func) in k.TRACKERS
    )


def reads_back(scopes: Scopes, node: ast.Call) -> bool:
    """Whether a call may read what the program wrote before, in a file or a tracker."""
    name, library = scopes.original(node.func), scopes.library(node.func)
    if name == "open" and not isinstance(node.func, ast.Attribute):
        return _opened(node) != "write"
    return name in _BACK or name.startswith(_BEGINNINGS) or library not in (None, "", *_CLOSED)


def _opened(node: ast.Call) -> str:
    """What a call of ``open`` is for: to read, to write, or both, which is also said where its mode is not written."""
    modes = [*node.args[1:2], *(one.value for one in node.keywords if one.arg in ("mode", None))]
    mode = "r" if not modes else modes[0].value if isinstance(modes[0], ast.Constant) else None
    if not isinstance(mode, str) or "+" in mode:
        return "both"
    return "read" if "r" in mode or not set(mode) & set("wax") else "write"
