"""Distances between candidates' gradients and the observed one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from rasura.attacks.updates.gradient_matching.entrywise import deviations, squares
from rasura.attacks.updates.gradient_matching.factors import Factor, shortened

Kind = Literal["l2", "norm", "cosine", "angle", "weighted"]

SHOWN = 3.0
"""Standard deviations of a sum of squares of noise above its mean, from which a gradient shows more than noise."""

NEGLIGIBLE = 1e-6
"""Parameters whose observed gradient is smaller than this share of the largest have no direction to match."""


class Distance:
    """Distance of candidates' gradients from ``observed`` (parameter name -> ``(outputs, inputs)`` or ``(width,)``).

    ``l2``: sum over parameters of the squared L2 distance (DLG). ``norm``: of the L2 distance itself (GRAB, eq. 1).
    ``cosine``: mean over parameters of 1 - cosine (LAMP). ``angle``: 1 - cosine of all entries together, in Gaussian noise
    the likelihood at the best scale. ``weighted``: ``cosine`` behind noise of ``deviation`` an entry; a parameter counts by
    its signal over what noise lets a candidate of ``free`` numbers fit, and not at all if it shows no signal. ``alpha``
    times L1 is added to the first two (TAG, GRAB). Entries outside ``visible`` are left out of both sides. L1 and masks need
    entries, which the factors do without: with ``entries`` below 1 they are evaluated on that share of a matrix, random rows
    by random columns drawn once from ``rng``, and scaled up. ``norm``: candidates' gradients whose norm over all parameters
    is larger are scaled to it, as the client's clipping did (GRAB's norm matching).
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
        deviation: float = 0.0,
        free: int = 0,
        rng: torch.Generator | None = None,
    ) -> None:
        self.kind, self.alpha, self.norm = kind, alpha, norm
        self.masks = visible or {}
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}
        sizes = {n: g.square().sum() for n, g in observed.items()}
        if kind in ("cosine", "weighted"):
            # Some gradients are zero but for rounding (attention's key bias): their direction says nothing.
            min_square = NEGLIGIBLE**2 * max(sizes.values())
            sizes = {n: s for n, s in sizes.items() if s > min_square}
        if kind == "weighted":
            self.clear = clear_squares({n: observed[n] for n in sizes}, self.masks, deviation)
            self.fitted = free * deviation**2
            sizes = {n: sizes[n] for n in self.clear}
        self.observed = {n: observed[n] for n in sizes}
        for n in sizes if entries < 1 else ():
            if observed[n].dim() == 2 and (alpha or n in self.masks):
                drawn = [torch.randperm(k, generator=rng)[: max(1, round(k * entries**0.5))] for k in observed[n].shape]
                rows, columns = (kept.to(observed[n].device) for kept in drawn)
                self.parts[n] = rows, columns
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
        square, inner = self._moments(used)
        sizes = torch.stack([self.squares[n] for n in used])[:, None]
        if self.kind == "angle":
            return 1 - inner.sum(0) / (square.sum(0) * sum(self.squares.values())).clamp_min(1e-30).sqrt()
        if self.kind == "weighted":
            clear = torch.stack([self.clear[n] for n in used])[:, None]
            weights = clear / (clear + self.fitted)
            return ((1 - inner / (square * clear).clamp_min(1e-30).sqrt()) * weights).sum(0) / weights.sum()
        if self.kind == "cosine":
            return (1 - inner / (square * sizes).clamp_min(1e-30).sqrt()).mean(0)
        scale: Tensor | None = None
        if self.norm is not None:
            scale = (self.norm / square.sum(0).clamp_min(1e-30).sqrt()).clamp_max(1.0)
            square, inner = scale * scale * square, scale * inner
        terms = square - 2 * inner + sizes
        if self.kind == "norm":
            # The root of what rounding leaves has no slope to follow.
            terms = torch.maximum(terms, 1e-12 * sizes + 1e-30).sqrt()
        total = terms.sum(0)
        for n, f in used.items() if self.alpha else ():
            total = total + self.alpha * self.scales[n] * self._deviations(n, f, scale)
        return total

    def _moments(self, factors: Mapping[str, Factor]) -> tuple[Tensor, Tensor]:
        """Squared norms of each candidate's gradients, and inner products with the observed ones; ``(parameters,
        candidates)``. Vectors of one width are one stack."""
        found = {n: self._shown_moments(n, f) for n, f in factors.items() if n in self.shown}
        widths: dict[int, list[str]] = {}
        for n, f in factors.items():
            if n not in self.shown and f.x is None:
                widths.setdefault(f.delta.shape[1], []).append(n)
            elif n not in self.shown:
                found[n] = f.moments(self.short[n])
        for names in widths.values():
            own = torch.stack([factors[n].delta for n in names])
            goal = torch.stack([self.observed[n] for n in names])[:, None]
            found |= dict(zip(names, zip(own.square().sum(-1), (own * goal).sum(-1))))
        square, inner = (torch.stack([found[n][k] for n in factors]) for k in (0, 1))
        return square, inner

    def _drawn(self, name: str, factor: Factor) -> Factor:
        """``factor`` of the rows and columns that are evaluated."""
        if name not in self.parts or factor.x is None:
            return factor
        rows, columns = self.parts[name]
        return Factor(factor.delta[:, :, rows], factor.x[:, :, columns])

    def _shown_moments(self, name: str, factor: Factor) -> tuple[Tensor, Tensor]:
        """The same for a parameter of which only some entries are visible, ``(candidates,)``."""
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


def clear_squares(observed: Mapping[str, Tensor], visible: Mapping[str, Tensor], deviation: float) -> dict[str, Tensor]:
    """``||gradient||^2`` without the share of noise of ``deviation`` an entry, of each parameter that has ``SHOWN`` standard
    deviations more than noise gives."""
    out = {}
    for n, g in observed.items():
        shown = g if n not in visible else g * visible[n]
        count = g.numel() if n not in visible else int(visible[n].sum())
        clear = shown.square().sum() - count * deviation**2
        if clear > SHOWN * (2 * count) ** 0.5 * deviation**2:
            out[n] = clear
    return out


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean over the batch of the cross-entropy with ``targets`` (probabilities), both ``(candidates, batch, classes)``."""
    return -(targets * torch.log_softmax(logits, -1)).sum(-1).mean(-1)
