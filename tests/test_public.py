"""The public names: imported when they are first used, known to type checkers, and documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rasura

ROOT = Path(__file__).resolve().parents[1]
NAMES = sorted(set(rasura.__all__) - {"__version__"})


def typed_names() -> dict[str, str]:
    """What type checkers read in the package: each public name with the module that it is imported from."""
    tree = ast.parse(Path(rasura.__file__).read_text(encoding="utf-8"))
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    found: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names:
            assert alias.asname == alias.name and alias.name not in found  # "X as X" makes a name public
            found[alias.name] = node.module
    return found


def test_both_lists_of_public_names_are_equal() -> None:
    assert typed_names() == rasura._NAMES
    assert dir(rasura) == sorted([*NAMES, "__version__"])


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(rasura, name) is not None


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        rasura.nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_documented(name: str) -> None:
    found = getattr(rasura, name).__doc__
    assert found and found.strip()
    assert not found.startswith(f"{name}(")  # the text that ``dataclass`` writes where there is none


def documented() -> Iterator[tuple[str, object]]:
    """Every public name, and the public methods and properties that a public class defines itself."""
    for name in NAMES:
        one = getattr(rasura, name)
        yield name, one
        for part, value in vars(one).items() if inspect.isclass(one) else ():
            found = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if inspect.isfunction(found) and not part.startswith("_"):
                yield f"{name}.{part}", found


def test_methods_of_public_classes_are_documented() -> None:
    assert [name for name, one in documented() if not (one.__doc__ or "").strip()] == []


ARRAYS = re.compile(r"\b(?:Tensor|ndarray)\b|(?:Sequence|tuple|Iterable|list)\[(?:int|float|tuple\[int)")
SHAPE_OR_UNIT = re.compile(r"``\([\w, ]+\)``|\bshapes?\b|\b(?:ids?|tokens|unit|rates|epsilon|entries|texts)\b")


def test_where_arrays_are_taken_or_given_the_shape_or_the_unit_is_said() -> None:
    """Arrays of tensors, and of numbers: what a reader of the signature alone cannot know."""
    taken = {}
    for name, one in documented():
        if ARRAYS.search(" ".join(map(str, getattr(one, "__annotations__", {}).values()))):
            taken[name] = bool(SHAPE_OR_UNIT.search(one.__doc__ or ""))
    assert len(taken) > 9 and [name for name, said in taken.items() if not said] == []


WRONG = ("protect_training", "train", "audit", "obfuscate_file")
"""Functions that the program calls with numbers and a parameter that they do not have."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What mypy says of a program that uses the package: the messages of each line. One run for all tests."""
    pytest.importorskip("mypy")
    lines = ["import rasura", *(f"reveal_type(rasura.{name})" for name in NAMES)]
    lines += [f"rasura.{name}(1, 2, 3, nonsense=4)" for name in WRONG]
    lines += ["rasura.nonsense"]
    path = tmp_path_factory.mktemp("typed") / "program.py"
    path.write_text("\n".join(lines), encoding="utf-8")
    # From the repository's folder, so that what `make test` found of the package a moment ago is not found anew.
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", "--no-error-summary", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 1, done.stdout + done.stderr
    messages: dict[str, list[str]] = {line: [] for line in lines}
    for number, message in re.findall(r"^.*program\.py:(\d+): (.*)$", done.stdout, re.M):
        messages[lines[int(number) - 1]].append(message)
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_no_public_name_is_any(name: str, said: dict[str, list[str]]) -> None:
    (message,) = said[f"reveal_type(rasura.{name})"]
    found = re.fullmatch(r'note: Revealed type is "(.*)"', message)
    assert found and found.group(1) != "Any"
    assert not found.group(1).endswith("-> Any") and not found.group(1).startswith("def (*Any, **Any)")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_refused(name: str, said: dict[str, list[str]]) -> None:
    errors = [m for m in said[f"rasura.{name}(1, 2, 3, nonsense=4)"] if m.startswith("error: ")]
    assert any(m.endswith(("[call-arg]", "[call-overload]")) for m in errors), errors


def test_misspelled_names_are_refused(said: dict[str, list[str]]) -> None:
    assert said["rasura.nonsense"] == ['error: Module has no attribute "nonsense"  [attr-defined]']
