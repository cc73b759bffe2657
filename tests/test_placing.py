"""Which of the tokens that block 0 accepts at a place stand there: by the coefficients with the least sum of norms."""

from __future__ import annotations

import itertools

import torch

from rasura.attacks.updates.span.placing import LIKELY, norms
from rasura.attacks.updates.span.rows import row_space
from rasura.core.rng import generator


def test_tokens_stand_where_the_fewest_coefficients_explain_the_gradient() -> None:
    """The slow way: of all sets of pairs of a token and a place that explain the gradient, the one with the least sum."""
    rng = generator(0)
    words, places = torch.randn(4, 24, generator=rng).double(), torch.randn(2, 24, generator=rng).double()
    pairs = list(itertools.product(range(4), range(2)))
    inputs = torch.stack([words[w] + places[p] for w, p in pairs])
    true = [(0, 0), (1, 0), (1, 1), (2, 1), (3, 1)]
    deltas = torch.randn(len(true), 40, generator=rng).double()
    gradient = sum(torch.outer(d, inputs[pairs.index(one)]) for d, one in zip(deltas, true))
    assert isinstance(gradient, torch.Tensor)
    space = row_space([gradient])
    assert space is not None and space.rank == 5  # so that all eight pairs lie in it
    assert float(space.residual(inputs).max()) < 1e-9
    best, least = (), float("inf")
    for some in itertools.combinations(range(8), 5):
        fitted = torch.linalg.lstsq(inputs[list(some)].T, gradient.T)
        if float((inputs[list(some)].T @ fitted.solution - gradient.T).norm()) < 1e-8:
            total = float((fitted.solution.norm(dim=1) * inputs[list(some)].norm(dim=1)).sum())
            best, least = (some, total) if total < least else (best, least)  # type: ignore[assignment]
    found = norms([gradient], space, inputs)
    kept = [k for k in range(8) if float(found[k]) > LIKELY * float(found.max())]
    assert tuple(kept) == best and [pairs[k] for k in kept] == true
