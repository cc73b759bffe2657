"""Where code comes from: installed packages count by name and version, any other module by its source and its imports."""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import os
import site
import sys
import sysconfig
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, distribution, packages_distributions
from importlib.util import resolve_name, spec_from_file_location
from pathlib import Path
from typing import Any

STORED = ("rasura", "torch", "transformers", "tokenizers", "numpy", "rouge-score")
"""Packages whose versions every run stores: with other versions it is continued, and its report says so."""


def unknown() -> str:
    """A line for what cannot be compared. It never equals another one."""
    return f"unknown {os.urandom(8).hex()}"


@functools.cache
def library(name: str, file: str | None) -> str | None:
    """The library that the module ``name`` in ``file`` belongs to, with its version unless a run stores that.

    None for a researcher's own code. Packages installed from a folder are that too, editable or not: their code can change
    while their version stays.
    """
    top = name.partition(".")[0]
    if top.replace("_", "-") in STORED:
        return top
    if file is None and top != name:
        return library(top, getattr(sys.modules.get(top), "__file__", None))
    places = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    if top in sys.stdlib_module_names and (file is None or any(_lies_in(file, place) for place in places)):
        return top
    return _installed(top, file) if file else None


def modules(wanted: Iterable[str | ModuleSpec]) -> Iterator[str]:
    """Lines that say what the modules ``wanted`` are, and all modules that these import. Nothing is imported for it.

    Modules that do not exist give no line. Compiled modules count by their bytes.
    """
    waiting, told = list(wanted), set[str]()
    while waiting:
        one = waiting.pop()
        name = one if isinstance(one, str) else one.name
        if name in told:
            continue
        told.add(name)
        try:
            spec = _found(name) if isinstance(one, str) else one
            if spec is None:
                continue
            file = spec.origin if spec.has_location else None
            if known := library(spec.name, file):
                yield f"module {name} of {known}"
            elif file is not None:
                digest, imported = _read(Path(file).read_bytes(), file.endswith(".py"), spec.parent or "")
                yield f"module {name} {digest}"
                waiting += imported
            else:
                yield f"folder {name}" if spec.submodule_search_locations else unknown()
        except (OSError, ValueError, SyntaxError):
            yield unknown()


def spec_of(module: types.ModuleType) -> ModuleSpec | None:
    """Where a loaded ``module`` comes from; none if it was made in memory."""
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    return spec if isinstance(spec, ModuleSpec) or not file else spec_from_file_location(module.__name__, file)


def package_of(held: Mapping[str, Any]) -> str:
    """The package of a module with the globals ``held``: what relative imports start from."""
    return getattr(held.get("__spec__"), "parent", None) or held.get("__package__") or ""


def imports(code: types.CodeType, package: str) -> list[str]:
    """The names of all modules that ``code`` of ``package`` may import, their packages among them."""
    found = set[str]()
    steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
    for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
        if step.opname == "IMPORT_NAME":
            try:
                name = resolve_name("." * level.argval + step.argval, package)
            except ImportError:  # it cannot run either
                continue
            for one in (name, *(f"{name}.{part}" for part in names.argval or ())):
                pieces = one.split(".")
                found |= {".".join(pieces[: n + 1]) for n in range(len(pieces))}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= set(imports(inner, package))
    return sorted(found)


def _found(name: str) -> ModuleSpec | None:
    """Where the module ``name`` is, without importing its package."""
    if name in sys.modules:
        loaded = sys.modules[name]
        spec = spec_of(loaded)
        if spec is None and loaded is not None and not library(name, None):
            raise ValueError(f"{name} was made in memory")
        return spec
    parent, path = name.rpartition(".")[0], None
    if parent:
        above = _found(parent)
        if above is None or above.submodule_search_locations is None:
            return None
        path = above.submodule_search_locations
    return next((spec for finder in sys.meta_path if (spec := finder.find_spec(name, path))), None)


@functools.cache
def _read(held: bytes, source: bool, package: str) -> tuple[str, list[str]]:
    """A digest of a file that holds ``held``, and the modules that it imports if it is Python's source."""
    if not source:
        return hashlib.sha256(held).hexdigest(), []
    with warnings.catch_warnings(action="ignore"):  # of the source
        code = compile(held, "source", "exec", dont_inherit=True)
    return hashlib.sha256(held.replace(b"\r\n", b"\n")).hexdigest(), imports(code, package)


def _installed(top: str, file: str) -> str | None:
    found = [distribution(name) for name in sorted({*_packages().get(top, ())})]
    holding = [one for one in found if _holds(one, file)]
    if not holding or any(
        "dir_info" in _origin(one) and (one.read_text("INSTALLER") or "").strip() != "conda" for one in holding
    ):
        return None  # Conda's packages name the folder that they were built in
    return ", ".join(map(_version, holding))


@functools.cache
def _packages() -> Mapping[str, list[str]]:
    return packages_distributions()


def _holds(one: Distribution, file: str) -> bool:
    """Whether ``file`` lies where ``one`` is installed, which is not the folder that it is developed in."""
    place = str(one.locate_file(""))
    return _lies_in(file, place) and (place in site.getsitepackages() or one.read_text("RECORD") is not None)


def _origin(one: Distribution) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(one.read_text("direct_url.json") or "{}")
    return found


def _version(one: Distribution) -> str:
    commit = _origin(one).get("vcs_info", {}).get("commit_id", "")
    return f"{one.metadata['Name']} {one.version} {commit}".strip()


def _lies_in(file: str, folder: str) -> bool:
    return os.path.normcase(os.path.abspath(file)).startswith(os.path.join(os.path.normcase(os.path.abspath(folder)), ""))
