"""Inputs of which active dropout removed coordinates, found again by vector approximate message passing.

An input x of the adversary's model was sent as ``x * (1 - z)``, with z of zeros and ones, and lies in the row space. So what
the row space leaves of ``x * z`` is what it leaves of x: as many linear equations for z as the layer has inputs beyond the
rank. The posterior means of z under these equations and a prior of the dropout rate are found by passing messages between
the two (Rangan, Schniter and Fletcher 2019, Algorithm 2, with damping; here the equations hold exactly, up to the noise of
the basis). Then z is rounded, coordinates are changed one by one while that brings the input nearer to the row space, and it
is tested as any other input is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rasura.attacks.updates.span.rows import TOLERANCE, RowSpace
from rasura.core.interfaces import AttackFailed

USUAL = 0.1
"""The dropout rate that is assumed where none is announced."""

DAMPING = 0.8
"""Share of the last message that is kept. Without it a batch's near copies of a token lead to mixtures of them: of 40 such
tokens of a batch of 32 texts one was found, with .3 twelve, with .7 34 and with .9 35."""

CHECK = 20
"""Steps between tests of what was found."""

PRECISION = 1e-4
"""Least variance of a message, relative to the mean square of an input. With less, messages are sure of small coordinates
too early: in the same batch 160 steps found 275 of 309 tokens with 1e-8, 283 with 1e-4. With more, of copies at neighbouring
places only mixtures are found."""

TOLERANT = 2e-2
"""Residual up to which a fit is accepted when it has ended, unless more is known. A true input's residual is 1e-7, or .01
where the model's weights were rounded."""

NEAR = 0.1
"""Residual of a rounded input from which it is too far off for single coordinates to be changed; tokens that were not in the
batch have .04 and more."""

FALSE = 0.01
"""Expected number of tokens that may lie in the row space by chance, over all tokens and positions tried."""

CHANGES = 60
"""Most coordinates that are changed."""


def fitted_chance(rank: int, width: int, residual: float, trials: float) -> float:
    """An upper bound on how many of ``trials`` tokens under dropout come within ``residual`` of a row space by chance.

    Of a vector in a direction of its own, the squared share outside a row space of rank ``rank`` has the distribution
    Beta((width - rank) / 2, rank / 2), whose probability up to x is at most ``x^a / (a B(a, b) sqrt(1 - x))``. Any of the
    ``2^width`` ways to remove coordinates may come so near.
    """
    a, b = (width - rank) / 2, rank / 2
    if a <= 0 or not 0 <= residual < 1:
        return math.exp(700.0)
    beta = math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)
    within = a * math.log(max(residual**2, 1e-300)) - math.log(a) - beta - 0.5 * math.log1p(-(residual**2))
    return math.exp(min(math.log(max(trials, 1.0)) + width * math.log(2) + within, 700.0))


def largest_residual(space: RowSpace, trials: float) -> float:
    """How much a fit to ``space`` may leave, so that none of ``trials`` tokens comes so near by chance.

    Raises ``AttackFailed`` if some would even within ``TOLERANCE``.
    """
    rank, width = space.rank, len(space.basis)
    for residual in (TOLERANT, TOLERANCE):
        if fitted_chance(rank, width, residual, trials) <= FALSE:
            return residual
    raise AttackFailed(
        f"under dropout, a row space of rank {rank} of {width} takes any token: the batch has about as many tokens "
        "as the layer has inputs"
    )


@dataclass(frozen=True)
class Fit:
    """Of each candidate: ``inputs`` ``(k, hidden)`` float64 with zeros where dropout removed them, their ``residual``
    ``(k,)``, and whether it is in tolerance: ``accepted`` ``(k,)`` bool."""

    inputs: Tensor
    residual: Tensor
    accepted: Tensor


class Passing:
    """Fits candidates to ``space``. ``rate``: the dropout rate, 0 if it is not known. ``most``: no fit with a larger
    residual is accepted, however noisy the basis is."""

    def __init__(self, space: RowSpace, rate: float = 0.0, most: float = TOLERANT) -> None:
        self.space, self.coarse = space, replace(space, basis=space.basis.float())
        self.rate, self.most = rate or USUAL, most
        self.left = torch.eye(len(space.basis), dtype=torch.double) - space.basis @ space.basis.T
        self.equations = max(1, len(space.basis) - space.rank) / len(space.basis)

    def __call__(
        self,
        targets: Tensor,
        *,
        steps: int,
        tolerant: float = TOLERANT,
        spread: float = 0.0,
        kept: Tensor | None = None,
        rng: torch.Generator | None = None,
    ) -> Fit:
        """Fit each of ``targets`` ``(k, hidden)`` within ``steps``; what ends with a residual of ``tolerant`` is accepted.

        Copies of a token at its place are solutions as well. ``spread``: the deviation of random starts, relative to the
        mean size of an input; each start may end at another copy. ``kept`` ``(k, hidden)`` bool: coordinates that were not
        removed; one that dropout removed of a copy excludes this copy.
        """
        whole, x = targets.double(), self.space.shown(targets.double())
        out = Fit(whole.clone(), whole.new_ones(len(whole)), torch.zeros(len(whole), dtype=torch.bool))
        alive = torch.arange(len(x))
        state = self._start(x.float(), spread, kept, rng)
        for step in range(1, steps + 1):
            removed = state.step(self)
            if step % CHECK and step != steps:
                continue
            gone = self.changed(x[alive], (removed > 0.5) & (x[alive] != 0))
            found = torch.where(gone, 0.0, whole[alive])
            # Nothing but zeros would fit any row space.
            residual = self.space.residual(found).where(gone.double().mean(1) < 0.5, 1.0)
            allowed = self.space.tolerance(found, tolerant if step == steps else TOLERANCE)
            good = residual < allowed.clamp(max=self.most)
            out.inputs[alive], out.residual[alive], out.accepted[alive] = found, residual, good
            alive, state = alive[~good], state.of(~good)
            if not len(alive):
                break
        return out

    def changed(self, x: Tensor, gone: Tensor) -> Tensor:
        """``gone`` ``(k, hidden)`` bool, with those coordinates changed, the best first, that bring ``x`` nearer to the row
        space."""
        gone = gone.clone()
        rows = (self.space.residual(torch.where(gone, 0.0, x)) < NEAR).nonzero().flatten()
        outside = torch.where(gone[rows], 0.0, x[rows]) @ self.left
        for _ in range(CHANGES):
            change = torch.where(gone[rows], x[rows], -x[rows])
            gain, best = (change * (2 * outside + change * self.left.diagonal())).min(1)
            better = gain < -1e-12 * x[rows].square().sum(1)
            rows, best, outside, change = rows[better], best[better], outside[better], change[better]
            if not len(rows):
                break
            outside = outside + change.gather(1, best[:, None]) * self.left[best]
            gone[rows, best] ^= True
        return gone

    def _start(self, x: Tensor, spread: float, kept: Tensor | None, rng: torch.Generator | None) -> _State:
        prior = torch.full_like(x, math.log(self.rate / (1 - self.rate)))
        mean = self.rate * x
        if spread:
            mean = mean + spread * x.abs().mean(1, keepdim=True) * torch.randn(x.shape, generator=rng)
        if kept is not None:
            prior, mean = prior.masked_fill(kept, -torch.inf), mean.masked_fill(kept, 0.0)
        square = x.square().mean(1, keepdim=True).clamp_min(1e-30)
        noise = (self.space.doubt(x) / self.equations).square()[:, None] * square + PRECISION * square
        return _State(x, self.coarse.outside(x), prior, mean, self.rate * (1 - self.rate) * square, noise)


@dataclass
class _State:
    """The message about ``x * z`` that the prior sends, ``mean`` ``(k, hidden)`` and ``variance`` ``(k, 1)``, and what does
    not change: the inputs, the equations' right sides, the prior's log odds, and the least variance."""

    x: Tensor
    right: Tensor
    prior: Tensor
    mean: Tensor
    variance: Tensor
    noise: Tensor

    def of(self, rows: Tensor) -> _State:
        return _State(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def step(self, fit: Passing) -> Tensor:
        """One exchange of messages. Returns the posterior means of z."""
        x, share = self.x, fit.equations
        told = self.mean + (self.right - fit.coarse.outside(self.mean)) / share
        width = self.variance * (1 - share) / share + self.noise
        removed = torch.sigmoid(self.prior + x * (2 * told - x) / (2 * width))
        spread = (removed * (1 - removed) * x * x).mean(1, keepdim=True)
        spread = torch.minimum(spread.clamp_min(0.1 * self.noise), 0.98 * width)
        variance = 1 / (1 / spread - 1 / width)
        mean = variance * (removed * x / spread - told / width)
        self.mean = (1 - DAMPING) * mean + DAMPING * self.mean
        self.variance = (1 - DAMPING) * variance + DAMPING * self.variance
        return removed
