"""The public names: imported when they are first used, known to type checkers, and documented."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rasura

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
        rasura.nonsense  # noqa: B018
