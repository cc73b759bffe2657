"""The examples in the docstrings are true. Run by importing the modules that have any, which costs less than all of them."""

from __future__ import annotations

import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "rasura").rglob("*.py")
    if re.search(r"^ +>>> ", path.read_text(encoding="utf-8"), re.M)
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_are_true(name: str) -> None:
    done = doctest.testmod(import_module(name))
    assert done.failed == 0 and done.attempted > 0


def test_the_doors_of_the_package_have_examples() -> None:
    doors = {"rasura.defenses.compose", "rasura.runs.plans", "rasura.registry.tables", "rasura.metrics.intervals"}
    assert doors <= set(MODULES)
