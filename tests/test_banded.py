"""Banded noise for training without sampling: its sensitivity, its law, its epsilon and what it refuses."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from rasura.accounting.banded import BandedNoise, BandedPlan
from rasura.accounting.gaussian import gaussian_epsilon
from rasura.core.errors import InputError
from rasura.core.rng import generator, normal, secret_generator


def matrix(plan: BandedPlan) -> Any:
    """``C`` entry by entry."""
    out = np.zeros((plan.steps, plan.steps))
    for row, column in itertools.product(range(plan.steps), repeat=2):
        if 0 <= row - column < plan.band:
            out[row, column] = plan.coefficients[row - column]
    return out


def searched(plan: BandedPlan) -> float:
    """The sensitivity by all sets of steps a text may take part in, and all signs of its gradient."""
    c, worst = matrix(plan), 0.0
    for signs in itertools.product((-1, 0, 1), repeat=plan.steps):
        steps = np.flatnonzero(signs)
        if all(b - a >= plan.separation for a, b in itertools.pairwise(steps)):
            worst = max(worst, float(np.linalg.norm(c @ np.array(signs))))
    return worst


@pytest.mark.parametrize("steps", [1, 4, 7])
def test_sensitivity_is_that_of_a_search_over_all_patterns_and_signs(steps: int) -> None:
    for separation in range(1, 6):
        for band in range(1, separation + 1):
            plan = BandedPlan(1.0, steps, separation, band)
            assert plan.sensitivity == pytest.approx(searched(plan), rel=1e-12)


def test_coefficients_are_those_of_the_square_root_of_the_prefix_sums() -> None:
    plan = BandedPlan(1.0, 6, 6, 6)
    assert plan.coefficients[:3] == [1.0, 0.5, 0.375]
    assert np.allclose(matrix(plan) @ matrix(plan), np.tril(np.ones((6, 6))))


def test_noise_times_the_matrix_is_the_independent_noise() -> None:
    plan = BandedPlan(1.5, 9, 4, 3)
    noise = BandedNoise(plan, 0.5, generator(3))
    found = torch.stack([noise.draw((2, 5)).flatten() for _ in range(9)]).numpy()
    rng = generator(3)
    white = torch.stack([normal((2, 5), rng).flatten() for _ in range(9)]).numpy()
    assert np.allclose(matrix(plan) @ found, 0.75 * white, atol=1e-12)
    assert not np.allclose(found, 0.75 * white)


def test_epsilon_of_independent_noise_is_that_of_gaussian_noise() -> None:
    assert BandedPlan(2.0, 10, 10, 1).epsilon(1e-5) == gaussian_epsilon(0.5, 1e-5)
    assert BandedPlan(2.0, 30, 10, 1).epsilon(1e-5) == pytest.approx(gaussian_epsilon(3**0.5 / 2, 1e-5))
    assert BandedPlan(2.0, 30, 10, 5).epsilon(1e-5) > BandedPlan(2.0, 30, 10, 1).epsilon(1e-5)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ((1.0, 9, 3, 4), "the band 4 is above the separation 3"), ((0.0, 9, 3, 2), "sigma is 0.0"),
        ((float("nan"), 9, 3, 2), "sigma is nan"), ((1.0, 0, 3, 2), "steps is 0"), ((1.0, 9, 3, True), "band is True"),
    ],
)  # fmt: skip
def test_a_plan_without_a_proof_is_refused(values: Any, told: str) -> None:
    with pytest.raises(InputError, match=told):
        BandedPlan(*values)


def test_noise_beyond_the_plan_of_another_shape_or_copied_is_refused() -> None:
    noise = BandedNoise(BandedPlan(1.0, 2, 2, 2), 1.0, secret_generator())
    noise.draw((3,))
    with pytest.raises(InputError, match=r"expected \(3,\), as in the steps before"):
        noise.draw((4,))
    for again in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InputError, match="cannot be copied or saved"):
            again(noise)  # type: ignore[operator]
    noise.draw((3,))
    with pytest.raises(InputError, match="all 2 planned steps were made"):
        noise.draw((3,))
    with pytest.raises(InputError, match="too many"):
        BandedNoise(BandedPlan(1.0, 9, 9, 9), 1.0, secret_generator()).draw((2**30,))
    with pytest.raises(InputError, match="clip is 0"):
        BandedNoise(BandedPlan(1.0, 9, 9, 9), 0, secret_generator())
