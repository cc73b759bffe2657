"""How close a guessed update is to the observed one, over the visible entries."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

CHUNK, SHORT, SMALL = 2**20, 2**10, 2**14
"""Entries that are compared at once; those of them that are added up in the entries' own precision; and the most of a tensor
that is compared in float64 as a whole, which is faster there."""

MARGIN = 10.0
"""Every decoy's error must be at least this many times the error of the guess."""

PRECISION = 1e-6
"""Errors below this, the precision of float32, count as this value."""

CHANCE = 1e-6
"""Expected number of texts that may fit as well by chance, over all texts of these lengths."""


def _shown(
    guess: Mapping[str, Tensor], observed: Mapping[str, Tensor], visible: Mapping[str, Tensor] | None
) -> Iterator[tuple[Tensor | None, Tensor]]:
    """The visible entries of each observed tensor, flat, behind those that ``guess`` has there; None where it has none."""
    for name, target in observed.items():
        mask = None if visible is None else visible.get(name)
        own = guess.get(name)
        if mask is None:
            yield None if own is None else own.flatten(), target.flatten()
        else:
            yield None if own is None else own[mask], target[mask]


def _products(pairs: Sequence[tuple[Tensor | None, Tensor]]) -> tuple[float, float, float]:
    """``<guess, observed>``, ``||guess||^2`` and ``||observed||^2``."""
    both = [(a, b) for a, b in pairs if a is not None]
    inner, own = sum(inner_product(a, b) for a, b in both), sum(inner_product(a, a) for a, _ in both)
    return inner, own, sum(inner_product(b, b) for _, b in pairs)


def relative_error(
    guess: Mapping[str, Tensor],
    observed: Mapping[str, Tensor],
    visible: Mapping[str, Tensor] | None = None,
    *,
    turned: bool = False,
) -> float:
    """``||a * guess - observed|| / ||observed||`` over visible entries, at the best scale ``a`` (clipping rescales). It is
    below 0 only where ``observed`` may be ``turned`` around."""
    pairs = list(_shown(guess, observed, visible))
    inner, own, square = _products(pairs)
    if square == 0.0 or own == 0.0:
        return math.inf
    scale = (inner if turned else max(inner, 0.0)) / own
    # The difference itself, not 1 - cos^2: that would vanish below the square root of the precision.
    error = sum(inner_product(b, b) if a is None else _missed(a, b, scale) for a, b in pairs)
    return math.sqrt(error / square)


def scale(guess: Mapping[str, Tensor], observed: Mapping[str, Tensor], visible: Mapping[str, Tensor] | None = None) -> float:
    """How many times the size of ``guess`` that of ``observed`` is, over visible entries; NaN if ``guess`` is zero there."""
    inner, own, _ = _products(list(_shown(guess, observed, visible)))
    return inner / own if own else math.nan


def cosine(
    guess: Mapping[str, Tensor], observed: Mapping[str, Tensor], visible: Mapping[str, Tensor] | None = None
) -> float:
    """The cosine of ``guess`` and ``observed`` over visible entries; NaN if either is zero or not finite."""
    inner, own, square = _products(list(_shown(guess, observed, visible)))
    return inner / math.sqrt(own * square) if 0 < own * square < math.inf else math.nan


def inner_product(a: Tensor, b: Tensor) -> float:
    """``<a, b>`` of flat tensors. Long float32 sums are off by up to a thousandth, so short ones are added up in float64."""
    if len(a) <= SMALL:
        return float((a.double() * b.double()).sum())
    return sum(_total(x * y) for x, y in zip(torch.split(a, CHUNK), torch.split(b, CHUNK)))


def _missed(a: Tensor, b: Tensor, scale: float) -> float:
    """``||b - scale * a||^2`` of flat tensors, added up likewise."""
    if len(a) <= SMALL:
        return float((b.double() - scale * a.double()).square().sum())
    return sum(_total((y - scale * x).square()) for x, y in zip(torch.split(a, CHUNK), torch.split(b, CHUNK)))


def _total(x: Tensor) -> float:
    whole = len(x) // SHORT * SHORT
    return float(x[:whole].view(-1, SHORT).sum(1).double().sum() + x[whole:].double().sum())


def apart(error: float, min_decoy: float) -> bool:
    """Whether a guess with the error ``error`` is distinguished from decoys with errors of ``min_decoy`` or more."""
    return min_decoy > MARGIN * max(error, PRECISION)


def told(shown: int, error: float, min_decoy: float, free: int, choices: int) -> bool:
    """Whether ``shown`` numbers tell a guess of ``error`` from all texts of ``free`` places with ``choices`` words each.

    Texts lie about ``min_decoy`` apart, so the chance that a text fits as well as the guess is
    ``(error / min_decoy) ** (shown - 1)``: one number is lost to the scale. Over all texts fewer than ``CHANCE`` may.
    """
    if not 0 <= error < min_decoy < math.inf or shown < 2:
        return False
    alone = (shown - 1) * math.log(min_decoy / max(error, PRECISION))
    return alone > free * math.log(max(choices, 2)) - math.log(CHANCE)
