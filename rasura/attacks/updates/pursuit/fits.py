"""How well tokens explain a gradient: by least squares, or by logistic regression on its signs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rasura.core.updates import announced_update
from rasura.core.values import Grant, Observation

SAME, SPREAD = 0.05, 0.6
"""Deviation of the sizes of entries, by their mean, below which they are those of signs; and, where next to none is zero, of
AdamW's first steps (.36 to .50, four steps on SmolLM2-135M). In Gaussian noise it is .76, and of gradients more than 1."""

FAINT = 0.1
"""Mean size of a row's entries, by the median row's, up to which an unknown decay of the weights may be most of it: AdamW's
steps are as large as the others wherever there is a gradient."""


class Fit(Protocol):
    """A model of the gradient ``(outputs, inputs)`` as a product of unknown coefficients and known inputs."""

    def left(self, inputs: Tensor) -> Tensor:
        """What ``inputs`` ``(tokens, hidden)`` leave unexplained: the loss's slope by the product, ``(outputs, hidden)``."""
        ...


@dataclass(frozen=True)
class Squares:
    """Least squares: the likelihood under Gaussian noise. ``shown``: the entries that count (None: all)."""

    matrix: Tensor
    shown: Tensor | None = None

    def left(self, inputs: Tensor) -> Tensor:
        if not len(inputs):
            return self.matrix
        if self.shown is not None:
            # Every output has its own entries, hence its own equations.
            slope = self.matrix @ inputs.T
            curve = (inputs * self.shown[:, None, :]) @ inputs.T
            ridge = 1e-4 * curve.diagonal(dim1=1, dim2=2).mean() * torch.eye(len(inputs), dtype=curve.dtype)
            coefficients = torch.linalg.solve(curve + ridge, slope[..., None])[..., 0]
            masked: Tensor = self.matrix - self.shown * (coefficients @ inputs)
            return masked
        q = torch.linalg.qr(inputs.T).Q
        out: Tensor = self.matrix - (self.matrix @ q) @ q.T
        return out


@dataclass(frozen=True)
class Signs:
    """Logistic regression of every output's signs ``(outputs, hidden)`` on the inputs, by Newton's method."""

    signs: Tensor
    ridge: float = 1e-3
    steps: int = 8

    def left(self, inputs: Tensor) -> Tensor:
        signs, count = self.signs, len(inputs)
        coefficients = signs.new_zeros(len(signs), count)
        for _ in range(self.steps if count else 0):
            p = torch.sigmoid(-signs * (coefficients @ inputs))
            slope = (signs * p) @ inputs.T - self.ridge * coefficients
            weights = (p * (1 - p)).clamp_min(1e-6)
            curve = (inputs * weights[:, None, :]) @ inputs.T + self.ridge * torch.eye(count)
            # Signs that are separable have no finite optimum, so steps stay bounded.
            coefficients = coefficients + torch.linalg.solve(curve, slope[..., None])[..., 0].clamp(-20, 20)
        out: Tensor = signs * torch.sigmoid(-signs * (coefficients @ inputs))
        return out


def are_signs(seen: Observation, rows: Tensor) -> bool:
    """Whether the entries of ``seen`` carry little more than their sign: the update says so, or the entries of these
    ``rows`` of it have much the same size. Few levels, as of quantisation, leave many zeros."""
    if announced_update(seen).adaptive:
        return True
    sizes = rows[rows != 0].abs()
    least = SPREAD if len(sizes) > 0.99 * rows.numel() else SAME
    return bool(len(sizes)) and float(sizes.std()) < least * float(sizes.mean())


def signs_of(seen: Observation, rows: Tensor, weights: Tensor) -> Tensor:
    """The signs of the gradient of ``weights``, of which ``seen`` holds ``rows``, both ``(rows, width)``, without what AdamW
    adds as the weights' own decay; 0 for rows in which a decay that is not known may be most."""
    local = announced_update(seen)
    if local.adaptive:
        return (rows - local.decayed(seen.batch_size if Grant.BATCH_SIZE in seen else 1) * weights).sign()
    sizes = rows.abs().mean(1)
    return torch.where(sizes[:, None] > FAINT * sizes.median(), rows.sign(), 0.0)
