"""What may seed the generator that a mechanism draws its noise from, or tell its state.

Whoever knows the seed can subtract the noise. Many libraries seed all generators in one function, under names of their own.
So each name of a library that speaks of seeds is a doubt, apart from those that are known to seed another generator.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator

from rasura.accounting.configurations.kinds import TRACKERS
from rasura.accounting.configurations.scopes import Scopes, root

TORCH, NUMPY = "torch", "numpy"
"""The libraries whose global generator draws the noise: of Opacus and of Flower."""

_SEEDS = re.compile(r"(?i)seed|determin|rng_state|fork_rng|default_generator|random\.set_state")
_METHODS = ("manual_seed", "manual_seed_all", "set_seed", "seed_everything", "set_rng_state")
"""Names of functions that seed, also where they are not called at once and it is not known whose they are."""

_ALGORITHMS = (
    "use_deterministic_algorithms", "are_deterministic_algorithms_enabled", "set_deterministic_debug_mode",
    "get_deterministic_debug_mode", "is_deterministic_algorithms_warn_only_enabled", "backends.cudnn.deterministic",
)  # fmt: skip
_BESIDE = (
    "numpy.random.SeedSequence",
    "random.seed",
    "tensorflow.random.set_seed",
    *(f"torch.{one}" for one in _ALGORITHMS),
)
_KNOWN = {TORCH: (*_BESIDE, "numpy.random.seed", "numpy.random.set_state"), NUMPY: _BESIDE}
"""What seeds neither generator, or only the other one."""

_TRAINERS = ("lightning", "pytorch_lightning")
"""Libraries whose ``Trainer`` seeds nothing when it is made; that of transformers seeds all generators."""

_SEEDED = (
    *sys.stdlib_module_names, *TRACKERS, "numpy", "scipy", "sklearn", "pandas", "datasets", "torch", "torchvision", "jax",
    "flwr", "opacus", "rasura", "peft",
)  # fmt: skip
"""Libraries that keep a seed that they are given to themselves, or for a generator of its own."""


def seeds(scopes: Scopes, generator: str) -> Iterator[tuple[ast.AST, str]]:
    """Each place that may seed the global generator of a library, or tell its state."""
    for node in ast.walk(scopes.tree):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load) and _whole(scopes, node):
            found = _named(scopes, node, generator)
        elif isinstance(node, ast.Call):
            found = _given(scopes, node, generator)
        else:
            continue
        if found:
            yield node, f"{found} may seed the noise, or tell its seed: anyone who knows it can subtract the noise"


def _whole(scopes: Scopes, node: ast.AST) -> bool:
    """Whether a dotted name is not the beginning of a longer one."""
    around = scopes.parents.get(node)
    return not (isinstance(around, ast.Attribute) and around.value is node)


def _named(scopes: Scopes, node: ast.Name | ast.Attribute, generator: str) -> str:
    """The name, if it may be a function that seeds, or a Trainer, which seeds when it is made."""
    around, last = scopes.parents.get(node), node.attr if isinstance(node, ast.Attribute) else node.id
    called = isinstance(around, ast.Call) and around.func is node
    paths, own = _paths(scopes, node)
    for path in paths:
        seeding = _SEEDS.search(path) and not _known(path, generator)
        constant = last.isupper() and not called and not _SEEDS.search(path.rpartition(".")[0])
        trainer = path.endswith("Trainer") and path.split(".")[0] not in _TRAINERS
        if (seeding and not constant) or trainer:
            return ast.unparse(node)[:60]
    if own and isinstance(node, ast.Attribute) and _SEEDS.search(last) and (called or last in _METHODS):
        return "" if generator == NUMPY and last.startswith("manual_seed") else ast.unparse(node)[:60]
    return ""


def _known(path: str, generator: str) -> bool:
    return path in _KNOWN[generator] or (generator == NUMPY and path.split(".")[0] == TORCH)


def _paths(scopes: Scopes, node: ast.AST) -> tuple[list[str], bool]:
    """The full names that a dotted name has by the imports of its beginning; and whether it may be anything else.

    A name that the program does not bind is taken as it stands, where it is called.
    """
    attributes: list[str] = []
    first = node
    while isinstance(first, ast.Attribute | ast.Subscript | ast.Call):
        if isinstance(first, ast.Attribute):
            attributes.insert(0, first.attr)
        first = first.func if isinstance(first, ast.Call) else first.value
    if not isinstance(first, ast.Name):
        return [], True
    bound = scopes.bound(scopes.variable(first.id, first))
    around = scopes.parents.get(node)
    if not bound:
        called = isinstance(around, ast.Call) and around.func is node
        begins = {"np": NUMPY}.get(first.id, first.id)
        whole = ".".join((begins, *attributes))
        return ([whole] if called or whole.rpartition(".")[2] in _METHODS else []), False
    paths = [path for one in bound for path in _imported(one, first.id)]
    return [".".join((path, *attributes)) for path in paths], len(paths) < len(bound)


def _imported(bound: ast.AST, name: str) -> list[str]:
    """The full name of what an import binds ``name`` to."""
    if isinstance(bound, ast.ImportFrom):
        return [f"{bound.module or ''}.{one.name}" for one in bound.names if (one.asname or one.name) == name]
    if isinstance(bound, ast.Import):
        return [one.name if one.asname else name for one in bound.names if (one.asname or one.name.split(".")[0]) == name]
    return []


def _given(scopes: Scopes, node: ast.Call, generator: str) -> str:
    """The call, if it reads a function that seeds by its name, or gives a library a seed that it may use for everything."""
    paths, _ = _paths(scopes, node.func)
    name = node.args[1] if paths == ["getattr"] and len(node.args) > 1 else None
    if isinstance(name, ast.Constant) and scopes.library(node.args[0]) is not None:
        return ast.unparse(node)[:60] if _SEEDS.search(str(name.value)) else ""
    libraries = [path.split(".")[0] for path in paths if not path.endswith("TrainingArguments")]
    if not scopes.bound(scopes.variable(getattr(root(node.func), "id", ""), node)) or set(libraries) <= set(_SEEDED):
        return ""
    keys = [one.arg or "" for one in node.keywords]
    for value in (*node.args, *(one.value for one in node.keywords)):
        if isinstance(value, ast.Dict):
            keys += [one.value for one in value.keys if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "dict":
            keys += [one.arg or "" for one in value.keywords]
    return ast.unparse(node)[:60] if any(re.search(r"(?i)(^|_)seed", one) for one in keys) else ""
