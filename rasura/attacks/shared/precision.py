"""Weights in half precision, for attacks that take small steps."""

from __future__ import annotations

import copy
from dataclasses import replace

from rasura.core.exact import half, widened
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.values import Grant, Observation


def in_full_precision(seen: Observation, budget: Budget) -> Observation:
    """``seen`` with a copy of its model that has no weights in half precision, and with its gradients as wide; ``seen``
    itself where the model has none.

    Raises ``NotApplicable`` where the copy needs more memory than ``budget`` has.
    """
    weights = list(seen.model.parameters())
    if not any(half(p) for p in weights):
        return seen
    if sum(4 * p.numel() for p in weights) > budget.memory_mb << 20:
        raise NotApplicable("the weights have 16 bits, and a copy of 32 bits needs more memory than the budget has")
    wide = {name: widened(g) for name, g in seen.gradients.items()}
    granted = {**seen.granted, Grant.MODEL: copy.deepcopy(seen.model).float()}
    return replace(seen, granted=granted, message=replace(seen.message, gradients=wide))
