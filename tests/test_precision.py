"""The precision of passes: what autocast changes, and that a slow one is said."""

from __future__ import annotations

import logging

import pytest
import torch

from rasura.core import precision
from rasura.core.precision import SLOW, line_of, passes_in, times_as_long


@pytest.mark.parametrize(("name", "kind"), [("float32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_in_the_precision_that_was_asked_for(name: str, kind: torch.dtype) -> None:
    with passes_in(name, "cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == kind


@pytest.mark.parametrize(("times", "said"), [(SLOW - 0.1, False), (SLOW, True), (31.7, True)])
def test_a_slow_processor_is_told_once(
    times: float, said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A training of 50 minutes took eight hours, and nothing said why."""
    monkeypatch.setattr(precision, "times_as_long", lambda: times)
    precision._say_if_slow.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            passes_in("bf16", "cpu")
            passes_in("float32", "cpu")
    precision._say_if_slow.cache_clear()
    lines = [r.getMessage() for r in caplog.records if r.name == precision.__name__]
    assert lines == ([line_of(times)] if said else []) and (not said or f"{times:.0f} times as slowly" in lines[0])


def test_what_a_product_takes_is_measured() -> None:
    assert 0 < times_as_long() < 1e6
