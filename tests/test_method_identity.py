"""The identity of a researcher's method: whatever changes what it does changes it, and nothing else does."""

from __future__ import annotations

import enum
import functools
import importlib
import json
import random
import re
import subprocess
import sys
import types
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rasura.runs import sources
from rasura.runs.identity import identity_of
from rasura.runs.sources import imports, library, modules
from rasura.testing.tiny import tiny

FILES = {
    "own_deep.py": "TOP = 7\n",
    "own_helpers.py": "import own_deep\nRATE = 0.9\n\n"
    "def strength(x):\n    import own_late\n    return x * RATE + own_deep.TOP\n",
    "own_late.py": "LATE = 1\n",
    "own_pack/__init__.py": "",
    "own_pack/part.py": "from .inner import INNER\n\ndef strength(x):\n    return x * INNER\n",
    "own_pack/inner.py": "INNER = 2\n",
    "own_other.py": "OTHER = 1\n",
}
METHODS = {
    "module": "import own_helpers\n\ndef method(x):\n    return own_helpers.strength(x)\n",
    "name": "from own_helpers import strength\n\ndef method(x):\n    return strength(x)\n",
    "inside": "def method(x):\n    from own_helpers import strength\n    return strength(x)\n",
    "part": "import own_pack.part\n\ndef method(x):\n    return own_pack.part.strength(x)\n",
    "from-package": "def method(x):\n    from own_pack import part\n    return part.strength(x)\n",
    "late-part": "import own_pack\n\ndef method(x):\n    import own_pack.part\n    return own_pack.part.strength(x)\n",
    "class": "import own_helpers\n\nclass method:\n    def __call__(self, x):\n"
             "        def inner():\n            return own_helpers.strength(x)\n        return inner()\n",
}  # fmt: skip
Loaded = Callable[..., Any]


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """The method of a module, in a folder of its own."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def load(method: str, changed: dict[str, str] | None = None) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in {**FILES, "own_method.py": method, **(changed or {})}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        for name in [name for name in sys.modules if name.startswith("own_")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "path", [str(folder), *(p for p in sys.path if not p.startswith(str(tmp_path)))])
        importlib.invalidate_caches()
        return importlib.import_module("own_method").method

    return load


@pytest.mark.parametrize("way", METHODS)
def test_a_change_in_a_module_that_a_method_uses_changes_it(loaded: Loaded, way: str) -> None:
    before = identity_of(loaded(METHODS[way]))
    assert identity_of(loaded(METHODS[way])) == before, "the same code elsewhere"
    assert identity_of(loaded(METHODS[way], {"own_other.py": "OTHER = 2\n"})) == before, "a file that it does not use"
    packaged = way in ("part", "from-package", "late-part")
    for name in ("own_pack/part.py", "own_pack/inner.py") if packaged else ("own_helpers.py",):
        changed = FILES[name].replace("* RATE", "* RATE * 2").replace("* INNER", "* INNER * 2").replace("= 2", "= 3")
        assert identity_of(loaded(METHODS[way], {name: changed})) != before, name
    if way != "name":
        deeper = "own_pack/__init__.py" if packaged else "own_deep.py"
        assert identity_of(loaded(METHODS[way], {deeper: "TOP = 8\n"})) != before, "what that module imports"
    if not packaged:
        assert identity_of(loaded(METHODS[way], {"own_late.py": "LATE = 2\n"})) != before, "what it imports when called"


def test_a_value_that_a_script_writes_into_a_module_counts(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    method = loaded(METHODS["module"])
    before = identity_of(method)
    monkeypatch.setattr(sys.modules["own_helpers"], "RATE", 0.5)
    assert identity_of(method) != before


def test_nothing_is_imported_to_identify_a_method(loaded: Loaded) -> None:
    method = loaded(METHODS["from-package"])
    before = identity_of(method)
    assert "own_pack" not in sys.modules
    assert method(1) == 2 and "own_pack.part" in sys.modules
    assert identity_of(method) == before, "also after it ran"


def test_modules_that_cannot_be_read_never_equal_themselves(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    method = loaded("def method(x):\n    import own_made\n    return own_made.f(x)\n")
    assert identity_of(method) == identity_of(method), "it does not exist"
    monkeypatch.setitem(sys.modules, "own_made", types.ModuleType("own_made"))
    assert identity_of(method) != identity_of(method), "it was made in memory"
    assert identity_of(sys.modules["own_made"]) != identity_of(sys.modules["own_made"])


def test_imports_are_found_wherever_they_stand() -> None:
    text = "import a.b as c\ndef f():\n    class K:\n        from ..d import e, g\n        from . import h\n"
    code = compile(text, "text", "exec")
    assert imports(code, "p.q") == ["a", "a.b", "p", "p.d", "p.d.e", "p.d.g", "p.q", "p.q.h"]
    assert imports(code, "") == ["a", "a.b"], "relative ones need a package"
    assert list(modules(["json", "torch.nn", "no_such_module"])) == ["module torch.nn of torch", "module json of json"]


@pytest.mark.parametrize(
    ("direct", "installer", "expected"),
    [
        (None, "pip", "own-plugin 1.0"),
        ({"vcs_info": {"commit_id": "abc"}}, "pip", "own-plugin 1.0 abc"),
        ({"dir_info": {"editable": True}}, "pip", None),
        ({"dir_info": {}}, "uv", None),
        ({"dir_info": {}}, "conda", "own-plugin 1.0"),
    ],
)
def test_what_is_installed_counts_by_its_version_unless_it_is_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: object, installer: str, expected: str | None
) -> None:
    place = tmp_path / "site"
    about = place / "own_plugin-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: own-plugin\nVersion: 1.0\n", encoding="utf-8")
    (about / "top_level.txt").write_text("own_plugin\n", encoding="utf-8")
    (about / "RECORD").write_text("own_plugin.py,,\n", encoding="utf-8")
    (about / "INSTALLER").write_text(installer + "\n", encoding="utf-8")
    if direct:
        (about / "direct_url.json").write_text(json.dumps({"url": "file:///x", **(direct or {})}), encoding="utf-8")  # type: ignore[dict-item]
    monkeypatch.setattr(sys, "path", [str(place), *sys.path])
    for cached in (library, sources._packages):
        cached.cache_clear()
    assert library("own_plugin", str(place / "own_plugin.py")) == expected
    assert library("own_plugin", str(tmp_path / "src" / "own_plugin.py")) is None, "the folder where it is written"
    (about / "RECORD").unlink()
    library.cache_clear()
    assert library("own_plugin", str(place / "own_plugin.py")) is None, "a folder on the path"
    library.cache_clear()
    sources._packages.cache_clear()


def test_names_of_libraries_do_not_hide_a_module_of_ones_own() -> None:
    assert library("json", "/home/me/json.py") is None and library("pytest", "/home/me/pytest.py") is None
    assert library("json", json.__file__) == "json" and library("sys", None) == "sys"
    assert library("torch.nn", nn.__file__) == "torch" and str(library("pytest", pytest.__file__)).startswith("pytest ")
    assert library("__main__", None) is None


# --- objects


class Net(nn.Module):
    def __init__(self, rate: float, drop: float = 0.5) -> None:
        super().__init__()
        self.rate, self.parts = rate, nn.Sequential(nn.Dropout(drop))


def hooked(by: float) -> nn.Module:
    net = Net(0.1)
    net.register_forward_hook(lambda module, given, out: by * out)
    return net


def first(base: type, **more: Any) -> Any:
    return type("Same", (base,), {"go": lambda self: 1, **more})


def second(base: type, **more: Any) -> Any:
    return type("Same", (base,), {"go": lambda self: 2, **more})


def modes(by: int) -> Any:
    class Mode(enum.Enum):
        A = 1

        def factor(self) -> int:
            return by

    return Mode.A


def noted(k: int) -> Callable[[], None]:
    def method() -> None: ...

    method.k = k  # type: ignore[attr-defined]
    return method


def wrapping(by: float) -> Callable[[float], float]:
    @functools.wraps(torch.nn.functional.relu)
    def relu(x: float) -> float:
        return by * x

    return relu


def squared(x: int) -> int:
    return x * x


def cubed(x: int) -> int:
    return x**3


def frozen(rate: float) -> Callable[..., Any]:
    """A library's wrapper around a function of one's own."""
    return torch.no_grad()(lambda x: rate * x)


def keyword(x: int, *, y: int = 1) -> int:
    return x - y


def positional(x: int, y: int = 1) -> int:
    return x - y


positional.__qualname__ = "keyword"

KINDS = (dict, list, set, tuple, frozenset)
DIFFERENT: dict[str, tuple[Any, ...]] = {
    "modules": (lambda: Net(0.1), lambda: Net(0.9), lambda: Net(0.1, 0.25), lambda: Net(0.1).eval(), lambda: hooked(1.0),
                lambda: hooked(2.0)),
    "classes of containers": tuple(functools.partial(made(kind)) for made in (first, second) for kind in KINDS),
    "classes of plain values": tuple(functools.partial(made(kind), 1) for made in (first, second) for kind in (int, str)),
    "plain values": (lambda: first(str)("a"), lambda: first(str)("b")),
    "classes made by a library": (lambda: types.new_class("Same", (), {}, lambda body: body.update(go=squared)),
                                  lambda: types.new_class("Same", (), {}, lambda body: body.update(go=cubed))),
    "dictionaries": (lambda: defaultdict(int), lambda: defaultdict(list), dict),
    "enums": (lambda: modes(1), lambda: modes(2)),
    "functions": (lambda: noted(1), lambda: noted(2), lambda: wrapping(1.0), lambda: wrapping(2.0), lambda: frozen(1.0),
                  lambda: frozen(2.0), lambda: keyword, lambda: positional),
    "cached": (lambda: functools.cache(squared), lambda: functools.cache(cubed), lambda: functools.cache(lambda: 1)),
    "bound": (lambda: [1].append, lambda: [2].append, lambda: {1: 2}.get, lambda: {1: 3}.get),
    "special methods": (lambda: first(object, __call__=functools.partialmethod(squared)),
                        lambda: first(object, __call__=functools.partialmethod(cubed))),
    "generators": (lambda: random.Random(1), lambda: random.Random(2), lambda: np.random.default_rng(1),
                   lambda: np.random.default_rng(2)),
    "made in C": (lambda: re.compile("a"), lambda: re.compile("a", re.I), lambda: deque([1], 2), lambda: deque([1], 3)),
    "tensors": (lambda: torch.ones(2, dtype=torch.bfloat16), lambda: torch.zeros(2, dtype=torch.bfloat16)),
    "arrays": (lambda: np.array([1, "a"], object), lambda: np.array([1, "b"], object),
               lambda: np.ma.masked_equal([1, 2], 1), lambda: np.ma.masked_equal([1, 2], 2)),
}  # fmt: skip


@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_differs_has_another_identity(kind: str) -> None:
    made = DIFFERENT[kind]
    found = [identity_of(make()) for make in made]
    assert len(set(found)) == len(made)
    assert found == [identity_of(make()) for make in made], "and each its own"


def test_what_cannot_be_compared_never_equals_itself() -> None:
    for one in (
        torch.ones(2).to_sparse(),
        (n for n in "ab"),
        np.frompyfunc(squared, 1, 1),
        torch.jit.script(nn.Linear(2, 2)),
    ):
        assert identity_of(one) != identity_of(one), type(one)


def test_chains_of_any_length_and_circles_end() -> None:
    method: Callable[[int], int] = squared
    for _ in range(3000):
        method = functools.partial(lambda x, inner: inner(x), inner=method)
    assert identity_of(method) == identity_of(method)
    circle: Any = first(object)()
    circle.all = {circle}
    assert identity_of(circle) == identity_of(circle)

    def never() -> object:
        return absent

    before = identity_of(never)
    absent = 1
    assert identity_of(never) != before


@pytest.mark.slow
def test_models_are_the_same_in_every_process_and_folder(tmp_path: Path) -> None:
    code = (
        "import sys; from transformers import AutoModelForCausalLM as M; from rasura.runs.identity import identity_of\n"
        "print(identity_of(M.from_pretrained(sys.argv[1])))"
    )
    found = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        tiny("gpt2", "causal").save_pretrained(folder)
        found.add(subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1
