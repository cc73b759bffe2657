"""Epsilon at a delta that privacy loss distributions cannot resolve: never below the true value."""

from __future__ import annotations

import math

import pytest

from rasura.accounting import epsilon, sigma_for
from rasura.accounting.gaussian import gaussian_epsilon

pytest.importorskip("dp_accounting")


@pytest.mark.parametrize("delta", [1e-9, 1e-10, 9.9e-11, 1e-12, 1e-13, 1e-14, 1e-30, 1e-300])
@pytest.mark.parametrize(("steps", "ratio"), [(1000, 2.0), (100_000, 6.0)])
def test_epsilon_is_at_least_that_of_the_gaussian_mechanism(steps: int, ratio: float, delta: float) -> None:
    exact = gaussian_epsilon(ratio, delta)
    # Hardly any text is ever left out, so that the exact epsilon is that without sampling.
    found = epsilon(math.sqrt(steps) / ratio, 1 - 1e-9, steps, delta)
    assert exact * (1 - 1e-6) <= found <= 1.1 * exact


def test_the_noise_for_a_target_keeps_it_at_a_small_delta() -> None:
    sigma = sigma_for(60.0, 1 - 1e-9, 100_000, 1e-14)
    assert gaussian_epsilon(math.sqrt(100_000) / sigma, 1e-14) <= 60.0 * (1 + 1e-6)
    assert epsilon(0.99 * sigma, 1 - 1e-9, 100_000, 1e-14) > 60.0


def loss_tail(epsilon_: float, scale: float) -> float:
    """Delta of the Laplace mechanism of sensitivity 1 at ``epsilon_``, in closed form."""
    return max(0.0, -math.expm1((epsilon_ - 1 / scale) / 2))


@pytest.mark.parametrize("delta", [1e-11, 1e-14, 1e-100])
def test_laplace_noise_has_a_bound_at_a_small_delta(delta: float) -> None:
    one = epsilon(2.0, 1.0, 1, delta, noise="laplace")
    assert loss_tail(one, 2.0) <= delta * (1 + 1e-6) and one <= 0.5 * (1 + 1e-9)
    many = epsilon(20.0, 0.1, 1000, delta, noise="laplace")
    pure = 1000 * math.log1p(0.1 * math.expm1(1 / 20))
    assert epsilon(20.0, 0.1, 1000, 1e-9, noise="laplace") <= many <= pure * (1 + 1e-9)
    sigma = sigma_for(1.0, 0.1, 100, delta, noise="laplace")
    assert epsilon(sigma, 0.1, 100, delta, noise="laplace") <= 1.0
