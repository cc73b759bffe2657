"""Adapters for model families from installed packages (entry points ``rasura.models``)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from rasura.core.errors import FAULTS, in_its_words
from rasura.core.specs import ModelSpec

log = logging.getLogger(__name__)


@cache
def _specs() -> tuple[ModelSpec, ...]:
    found: list[ModelSpec] = []
    for point in entry_points(group="rasura.models"):
        try:
            loaded: Any = point.load()
            found += [loaded] if isinstance(loaded, ModelSpec) else [s for s in loaded if isinstance(s, ModelSpec)]
        except FAULTS as error:  # somebody else's code: the other families work without it
            log.warning("the adapter %s could not be loaded: %s", point.name, in_its_words(error))
    return tuple(found)


def plugged(model_type: str) -> Callable[..., Any] | None:
    """The function that finds the parts of models whose ``config.model_type`` is ``model_type``; None where no package has
    one."""
    return next((spec.make for spec in _specs() if spec.name == model_type), None)
