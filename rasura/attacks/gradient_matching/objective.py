"""Distances between candidates' gradients and the observed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rasura.attacks.gradient_matching.factors import Factor

Kind = Literal["l2", "l2+l1", "cosine"]

NEGLIGIBLE = 1e-6
"""Parameters whose observed gradient is smaller than this share of the largest have no direction to match."""


def distance(
    factors: Mapping[str, Factor],
    observed: Mapping[str, Tensor],
    kind: Kind,
    *,
    alpha: float = 0.0,
    visible: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Distance of each candidate from ``observed``, ``(candidates,)``, summed over parameters.

    ``l2``: squared L2 (DLG). ``l2+l1``: plus ``alpha`` times L1 (TAG), which needs the entries. ``cosine``: mean over
    parameters of 1 - cosine (LAMP). Entries outside ``visible`` are left out of both sides, which needs the entries too.
    """
    masks = visible or {}
    if kind == "cosine":
        # Some gradients are zero but for rounding (attention's key bias): their direction says nothing.
        largest = max(float(observed[n].norm()) for n in factors)
        factors = {n: f for n, f in factors.items() if float(observed[n].norm()) > NEGLIGIBLE * largest}
    total: Tensor | None = None
    for name, factor in factors.items():
        target = observed[name]
        mask = masks.get(name)
        if kind == "l2+l1" or mask is not None:
            own = factor.explicit()
            if mask is not None:
                own = own * mask.to(own.dtype)
            own, flat = own.flatten(1), target.flatten()
            square, inner = own.square().sum(1), own @ flat
        else:
            square, inner = factor.square(), factor.inner(target)
        size = target.square().sum()
        if kind == "cosine":
            term = (1 - inner / (square * size).clamp_min(1e-30).sqrt()) / len(factors)
        else:
            term = square - 2 * inner + size
        if kind == "l2+l1":
            term = term + alpha * (own - flat).abs().sum(1)
        total = term if total is None else total + term
    assert total is not None
    return total


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the batch of the cross-entropy with ``targets`` (probabilities), both ``(candidates, batch, classes)``."""
    return -(targets * torch.log_softmax(logits, -1)).sum(-1).mean(-1)
