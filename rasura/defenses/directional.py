"""DirDP-SGD: the direction of each text's gradient is replaced by one drawn around it (von Mises-Fisher mechanism)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rasura.core.exact import widened
from rasura.core.interfaces import InputError, Transform, made
from rasura.core.mechanisms import Directional
from rasura.core.options import options
from rasura.core.rng import Randomness
from rasura.core.specs import DefenseSpec, Strength
from rasura.core.values import Gradients, PerExample, Stage
from rasura.defenses.compose import stateless
from rasura.defenses.dp_sgd import positive
from rasura.defenses.von_mises_fisher import summed, summed_by_draws, unit

BLOCKS = ("whole", "parameters")

MOST = 1e100
"""The largest kappa: products with it stay finite."""

HELD = 2**29
"""How many numbers of all texts' gradients are held at once; beyond this, the noise of each text is drawn separately."""


def _cut(gradient: Gradients, names: Sequence[str], whole: bool) -> list[Tensor]:
    flat = [widened(gradient[n].reshape(-1)) for n in names]  # numpy knows no bfloat16
    return [torch.cat(flat)] if whole else flat


def directional(kappa: float, blocks: str = "whole") -> Transform[PerExample, Gradients, None]:
    """The mean of one draw around every text's direction, at concentration ``kappa`` (calibration paper, Algorithm 1).

    Gradients are scaled to norm 1, not clipped; for a zero gradient, a uniform direction is drawn. Directions survive only
    if ``kappa`` is of the order of the number of trained entries d. ``blocks="parameters"`` draws for each parameter tensor
    separately, with ``kappa * d_j / d`` and norm ``sqrt(d_j / d)``: the paper leaves open how a partition divides kappa, and
    the same kappa for all blocks leaves a bias of two entries almost unchanged. Raises ``InputError`` unless ``kappa`` is
    above 0 and at most 1e100.
    """
    concentration = positive("directional", "kappa", kappa)
    if concentration > MOST:
        raise InputError(f"directional: kappa is {kappa:g}; expected at most {MOST:g}, beyond which nothing can be drawn")
    if blocks not in BLOCKS:
        raise InputError(f"directional: blocks is {blocks!r}; expected {' or '.join(BLOCKS)}")

    def apply(examples: PerExample, state: None, rng: Randomness) -> tuple[Gradients, None]:
        if not examples.size:
            return examples.weighted(lambda norms: norms), None
        first: dict[str, tuple[torch.Size, torch.dtype]] = {}

        def texts() -> Iterator[list[Tensor]]:
            for gradient in examples.each():
                if not first:
                    first.update({n: (g.shape, g.dtype) for n, g in gradient.items()})
                yield [unit(part, rng) for part in _cut(gradient, list(first), blocks == "whole")]

        rows = texts()
        head = next(rows)
        sizes = [part.numel() for part in head]
        kappas = [concentration * size / sum(sizes) for size in sizes]
        if sum(sizes) * examples.size <= HELD:
            held = [torch.empty((examples.size, size), dtype=part.dtype) for size, part in zip(sizes, head)]
            for row, parts in enumerate(_again(head, rows)):
                for matrix, part in zip(held, parts):
                    matrix[row] = part
            totals = [summed(matrix, k, rng) for matrix, k in zip(held, kappas)]
        else:
            totals = [torch.zeros(size, dtype=part.dtype) for size, part in zip(sizes, head)]
            for parts in _again(head, rows):
                for total, part, k in zip(totals, parts, kappas):
                    drawn = summed_by_draws([part], k, rng)
                    assert drawn is not None  # there is one direction
                    total += drawn
        joined = torch.cat([t * math.sqrt(size / sum(sizes)) for t, size in zip(totals, sizes)]) / examples.size
        cut = torch.split(joined, [shape.numel() for shape, _ in first.values()])
        return {n: part.reshape(shape).to(dtype) for (n, (shape, dtype)), part in zip(first.items(), cut)}, None

    return made(Stage.AGGREGATE, Directional(concentration, blocks), stateless, apply)


def _again(head: list[Tensor], rest: Iterator[list[Tensor]]) -> Iterator[list[Tensor]]:
    yield head
    yield from rest


def described(text: str) -> Transform[PerExample, Gradients, None]:
    """DirDP-SGD as written on the command line: ``1e6``, ``1e6/blocks=parameters``."""
    return directional(**options("directional", f"kappa={text}", {"kappa": 1e6, "blocks": "whole"}))


SPEC = DefenseSpec(
    name="directional",
    about="replaces the gradient direction of each example by a random one near it: directional:KAPPA, "
    "directional:KAPPA/blocks=parameters",
    source="Empirical calibration with metric DP, sec. IV (von Mises-Fisher mechanism)",
    make=described,
    example="directional:1e5/blocks=parameters",
    parameter=str,
    guarantee="metric differential privacy of gradient directions, and the (epsilon, delta) that follows from it",
    known_by=("pursuit", "lamp-weighted"),
    strength=Strength(name="kappa", weakest=10.0, strongest=1e-4, points=6, entries=True),
    draws=True,
)
