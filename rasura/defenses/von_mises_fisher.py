"""The von Mises-Fisher distribution on the sphere in any dimension: density proportional to exp(kappa <mu, x>).

``scipy.stats.vonmises_fisher`` builds a d x d matrix; here a draw takes O(d), and the sum of a whole batch of draws needs
one Gaussian vector in all. Everything is exact: no limit, no approximation but that of floating-point numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rasura.core.errors import InputError
from rasura.core.exact import norm
from rasura.core.rng import Randomness, gamma, normal, uniform

TOGETHER = 32
"""Rows of one Gaussian vector: more of them cost more in products of the rows with each other than they save in draws."""


CACHED = 16384
"""Entries of a row that are taken at once, so that what two products need is read once."""


def one_minus_cosine(kappa: float, dimension: int, count: int, rng: Randomness) -> Tensor:
    """``count`` draws of 1 - <mu, x>, float64: in this form nothing cancels where x hardly leaves mu.

    Wood (1994), written in t = 1 - w with the acceptance as a logarithm: good for kappa from 0 to 1e9 and beyond, and for
    any dimension. On the line (dimension 1) x is mu or -mu. Raises ``InputError`` where ``kappa`` is too large to draw.
    """
    if dimension == 1:
        away: Tensor = uniform((count,), rng) * (1 + math.exp(-2 * kappa)) > 1
        return 2 * away.double()
    m = dimension - 1.0
    b = m / (2 * kappa + math.hypot(2 * kappa, m))
    mode = 2 * b / (1 + b)
    out = torch.empty(count, dtype=torch.float64)
    missing = torch.arange(count)
    while len(missing):
        one, other = gamma(torch.full((2 * len(missing),), m / 2, dtype=torch.float64), rng).chunk(2)
        z = one / (one + other)
        t = 2 * b * z / (1 - (1 - b) * z)
        log_accept = kappa * (mode - t) + m * torch.log1p((t - mode) * (1 - mode) / (mode * (2 - mode)))
        if bool(log_accept.isnan().any()):  # none would ever be accepted
            raise InputError(f"no direction can be drawn at kappa {kappa:g}, which is too large; choose a smaller one")
        good = uniform((len(missing),), rng).log() <= log_accept
        out[missing[good]] = t[good]
        missing = missing[~good]
    return out


def unit(vector: Tensor, rng: Randomness) -> Tensor:
    """The direction of ``vector``. A vector that is zero or holds a number that is not finite has none, so one is drawn
    uniformly: the guarantee holds for every gradient."""
    largest = _largest(vector)
    if not 0 < float(largest) < math.inf:
        vector = normal(vector.shape, rng, vector.dtype)
        largest = _largest(vector)
    # Divided by its largest entry first: neither the squares nor the norm underflow.
    vector = vector / largest
    return vector.div_(norm([vector]))


def _largest(vector: Tensor) -> Tensor:
    """The largest absolute value; without the vector of all of them, NaN where there is one."""
    low, high = vector.aminmax()
    return torch.maximum(-low, high)


def summed_by_draws(units: Iterable[Tensor], kappa: float, rng: Randomness) -> Tensor | None:
    """The sum of one draw around each of ``units`` ``(dimension,)``, one after the other; None where there are none."""
    total = None
    for mu in units:
        t = float(one_minus_cosine(kappa, mu.numel(), 1, rng))
        if mu.numel() == 1:
            drawn = (1 - t) * mu
        else:
            z = normal(mu.shape, rng, mu.dtype)
            along = float(torch.dot(z, mu))
            # What is left of z beside mu, at the length that keeps the draw on the sphere.
            share = math.sqrt(t * (2 - t)) / math.sqrt(max(float(torch.dot(z, z)) - along**2, 1e-300))
            drawn = z.mul_(share).add_(mu, alpha=1 - t - share * along)
        total = drawn if total is None else total.add_(drawn)
    return total


def summed(units: Tensor, kappa: float, rng: Randomness) -> Tensor:
    """The same sum for the rows of ``units`` ``(batch, dimension)``, with one Gaussian vector for ``TOGETHER`` rows (ours).

    It has the law of ``summed_by_draws`` to the last moment. Beside its mean direction each draw has a Gaussian direction.
    In the span of all mean directions these are a few numbers; off the span B Gaussian vectors are, by Bartlett's
    decomposition, a random triangle of B x B numbers on random orthonormal axes, and a sum of them points into one random
    direction, at a length that the triangle gives.
    """
    total = torch.zeros(units.shape[1], dtype=units.dtype)
    for start in range(0, len(units), TOGETHER):
        some = units[start : start + TOGETHER]
        if len(some) < 2 or units.shape[1] < 2 * len(some) + 1:
            drawn = summed_by_draws(some, kappa, rng)
            total += 0 if drawn is None else drawn
        else:
            _add(total, some, kappa, rng)
    return total


def _add(total: Tensor, units: Tensor, kappa: float, rng: Randomness) -> None:
    batch, dimension = units.shape
    t = one_minus_cosine(kappa, dimension, batch, rng)
    cosine, sine = 1 - t, (t * (2 - t)).sqrt()
    z = normal((dimension,), rng, units.dtype)
    gram, on_rows = np.zeros((batch, batch)), np.zeros(batch)
    for start in range(0, dimension, CACHED):
        part = units[:, start : start + CACHED].numpy()
        # numpy's product of a matrix with itself takes half of the work.
        gram += part @ part.T
        on_rows += part @ z[start : start + CACHED].numpy()
    values, vectors = torch.linalg.eigh(torch.from_numpy(gram))
    keep = values > 10 * batch * torch.finfo(units.dtype).eps * values[-1]
    values, vectors = values[keep], vectors[:, keep]
    rank = len(values)
    # Coordinates of the mean directions in their span, and of what Gaussian noise has there beside each.
    means = vectors * values.sqrt()
    means = means / means.norm(dim=1, keepdim=True)
    inside = normal((batch, rank), rng)
    inside = inside - (inside * means).sum(1, keepdim=True) * means
    outside = torch.triu(normal((batch, batch), rng), 1)
    freedom = dimension - rank - torch.arange(batch, dtype=torch.float64)
    outside.diagonal().copy_((2 * gamma(freedom / 2, rng)).sqrt())
    share = sine / (inside.square().sum(1) + outside.square().sum(0)).sqrt()
    in_rows = vectors @ ((share @ inside) / values.sqrt())
    length = float((outside @ share).norm())
    along = torch.from_numpy(on_rows)
    projected = vectors @ ((vectors.T @ along) / values)
    left = math.sqrt(max(float(torch.dot(z, z)) - float(along @ projected), 1e-300))
    weights = cosine + in_rows - projected * (length / left)
    total.addmv_(units.T, weights.to(units.dtype)).add_(z, alpha=length / left)
