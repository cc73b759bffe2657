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


class Distance:
    """Distance of candidates' gradients from ``observed`` (parameter name -> ``(outputs, inputs)`` or ``(width,)``).

    ``l2``: squared L2 (DLG). ``l2+l1``: plus ``alpha`` times L1 (TAG), which needs the entries. ``cosine``: mean over
    parameters of 1 - cosine (LAMP). Entries outside ``visible`` are left out of both sides, which needs the entries too.
    """

    def __init__(
        self,
        observed: Mapping[str, Tensor],
        kind: Kind,
        *,
        alpha: float = 0.0,
        visible: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.kind = kind
        self.alpha = alpha
        self.masks = visible or {}
        self.observed = observed
        self.squares = {n: g.square().sum() for n, g in observed.items()}
        if kind == "cosine":
            # Some gradients are zero but for rounding (attention's key bias): their direction says nothing.
            least = NEGLIGIBLE**2 * max(self.squares.values())
            self.squares = {n: s for n, s in self.squares.items() if s > least}

    def __call__(self, factors: Mapping[str, Factor]) -> Tensor:
        """The distance of each candidate, ``(candidates,)``, summed over parameters."""
        terms = [self._term(name, f, self.squares[name]) for name, f in factors.items() if name in self.squares]
        total = torch.stack(terms).sum(0)
        return total / len(terms) if self.kind == "cosine" else total

    def _term(self, name: str, factor: Factor, size: Tensor) -> Tensor:
        target, mask = self.observed[name], self.masks.get(name)
        extra: Tensor | float = 0.0
        if self.kind == "l2+l1" or mask is not None:
            own = factor.explicit()
            if mask is not None:
                own = own * mask.to(own.dtype)
            own, flat = own.flatten(1), target.flatten()
            square, inner = own.square().sum(1), own @ flat
            if self.kind == "l2+l1":
                extra = self.alpha * (own - flat).abs().sum(1)
        else:
            square, inner = factor.square(), factor.inner(target)
        if self.kind == "cosine":
            return 1 - inner / (square * size).clamp_min(1e-30).sqrt()
        return square - 2 * inner + size + extra


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the batch of the cross-entropy with ``targets`` (probabilities), both ``(candidates, batch, classes)``."""
    return -(targets * torch.log_softmax(logits, -1)).sum(-1).mean(-1)
