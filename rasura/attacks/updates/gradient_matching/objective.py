"""Distances between candidates' gradients and the observed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rasura.attacks.updates.gradient_matching.entrywise import deviations, squares
from rasura.attacks.updates.gradient_matching.factors import Factor, shortened

Kind = Literal["l2", "norm", "cosine", "angle"]

NEGLIGIBLE = 1e-6
"""Parameters whose observed gradient is smaller than this share of the largest have no direction to match."""


class Distance:
    """Distance of candidates' gradients from ``observed`` (parameter name -> ``(outputs, inputs)`` or ``(width,)``).

    ``l2``: sum over parameters of the squared L2 distance (DLG). ``norm``: of the L2 distance itself (GRAB, eq. 1).
    ``cosine``: mean over parameters of 1 - cosine (LAMP). ``angle``: 1 - cosine of all entries together, in Gaussian noise
    the likelihood at the best scale. ``alpha`` times L1 is added to the first two (TAG, GRAB). Entries
    outside ``visible`` are left out of both sides. L1 and masks need entries, which the factors do without: with ``entries``
    below 1 they are evaluated on that share of a matrix, random rows by random columns drawn once from ``rng``, and scaled
    up. ``norm``: candidates' gradients whose norm over all parameters is larger are scaled to it, as the client's clipping
    did (GRAB's norm matching).
    """

    def __init__(
        self,
        observed: Mapping[str, Tensor],
        kind: Kind,
        *,
        alpha: float = 0.0,
        visible: Mapping[str, Tensor] | None = None,
        entries: float = 1.0,
        norm: float | None = None,
        rng: torch.Generator | None = None,
    ) -> None:
        self.kind, self.alpha, self.norm = kind, alpha, norm
        self.masks = visible or {}
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}
        sizes = {n: g.square().sum() for n, g in observed.items()}
        if kind == "cosine":
            # Some gradients are zero but for rounding (attention's key bias): their direction says nothing.
            min_square = NEGLIGIBLE**2 * max(sizes.values())
            sizes = {n: s for n, s in sizes.items() if s > min_square}
        self.observed = {n: observed[n] for n in sizes}
        for n in sizes if entries < 1 else ():
            if observed[n].dim() == 2 and (alpha or n in self.masks):
                drawn = [torch.randperm(k, generator=rng)[: max(1, round(k * entries**0.5))] for k in observed[n].shape]
                self.parts[n] = (drawn[0], drawn[1])
        self.targets = {n: self._part(n, g).contiguous() for n, g in self.observed.items()}
        self.shown = {n: self._part(n, m).to(self.targets[n].dtype) for n, m in self.masks.items() if n in sizes}
        self.scales = {n: g.numel() / self.targets[n].numel() for n, g in self.observed.items()}
        for n in self.shown:
            self.targets[n] = self.targets[n] * self.shown[n]
            sizes[n] = self.targets[n].square().sum() * self.scales[n]
        self.squares = sizes
        whole = {n: g for n, g in self.observed.items() if n not in self.shown}
        self.short = {n: shortened(g) if g.dim() == 2 else g for n, g in whole.items()}

    def _part(self, name: str, matrix: Tensor) -> Tensor:
        if name not in self.parts:
            return matrix
        rows, columns = self.parts[name]
        return matrix[rows][:, columns]

    def __call__(self, factors: Mapping[str, Factor]) -> Tensor:
        """The distance of each candidate, ``(candidates,)``."""
        used = {n: f for n, f in factors.items() if n in self.observed}
        found = {n: self._moments(n, f) for n, f in used.items()}
        scale: Tensor | None = None
        if self.norm is not None:
            whole = torch.stack([square for square, _ in found.values()]).sum(0).clamp_min(1e-30)
            scale = (self.norm / whole.sqrt()).clamp_max(1.0)
        if self.kind == "angle":
            square = torch.stack([m[0] for m in found.values()]).sum(0)
            inner = torch.stack([m[1] for m in found.values()]).sum(0)
            return 1 - inner / (square * sum(self.squares.values())).clamp_min(1e-30).sqrt()
        terms = [self._term(n, *moments, scale) for n, moments in found.items()]
        if self.alpha and self.kind != "cosine":
            terms += [self.alpha * self.scales[n] * self._deviations(n, f, scale) for n, f in used.items()]
        total = torch.stack(terms).sum(0)
        return total / len(terms) if self.kind == "cosine" else total

    def _term(self, name: str, square: Tensor, inner: Tensor, scale: Tensor | None) -> Tensor:
        size = self.squares[name]
        if self.kind == "cosine":
            return 1 - inner / (square * size).clamp_min(1e-30).sqrt()
        if scale is not None:
            square, inner = scale * scale * square, scale * inner
        out = square - 2 * inner + size
        if self.kind == "norm":
            # The root of what rounding leaves has no slope to follow.
            out = out.clamp_min(1e-12 * float(size) + 1e-30).sqrt()
        return out

    def _drawn(self, name: str, factor: Factor) -> Factor:
        """``factor`` of the rows and columns that are evaluated."""
        if name not in self.parts or factor.x is None:
            return factor
        rows, columns = self.parts[name]
        return Factor(factor.delta[:, :, rows], factor.x[:, :, columns])

    def _moments(self, name: str, factor: Factor) -> tuple[Tensor, Tensor]:
        """Squared norm of each candidate's gradient, and its inner product with the observed one."""
        if name not in self.shown:
            return factor.square(), factor.inner(self.short[name])
        part, mask, up = self._drawn(name, factor), self.shown[name], self.scales[name]
        square = (part.delta * mask).square().sum(1) if part.x is None else squares(part.delta, part.x, mask)
        return up * square, up * part.inner(self.targets[name])

    def _deviations(self, name: str, factor: Factor, scale: Tensor | None) -> Tensor:
        """The L1 distance of each candidate's gradient from the observed one."""
        part, mask, target = self._drawn(name, factor), self.shown.get(name), self.targets[name]
        delta = part.delta if scale is None else part.delta * scale.view(-1, *[1] * (part.delta.dim() - 1))
        if part.x is not None:
            return deviations(delta, part.x, target, mask)
        return ((delta if mask is None else delta * mask) - target).abs().sum(1)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the batch of the cross-entropy with ``targets`` (probabilities), both ``(candidates, batch, classes)``."""
    return -(targets * torch.log_softmax(logits, -1)).sum(-1).mean(-1)
