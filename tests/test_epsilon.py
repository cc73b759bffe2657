"""Epsilon to the digit: the grid that the library is asked on, the searches for a noise, and the words of refusals."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import pytest

from rasura.accounting import checked_delta, epsilon, sigma_for
from rasura.accounting import epsilon as _function  # the name of the function hides that of its module
from rasura.accounting.epsilon import (
    MAX_SIGMA,
    MIN_SIGMA,
    ORDERS,
    PAPER_ORDERS,
    Sampled,
    _as_opacus,
    _by_library,
    _by_orders,
    _divergence,
    _least,
    _of_part,
    composed_epsilon,
    converted,
    finite,
)
from rasura.core.errors import InputError

pytest.importorskip("dp_accounting")
assert _function is epsilon


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def asked(sigma: float, rate: float, steps: int, delta: float, width: float, noise: str = "gaussian") -> float:
    """Of dp_accounting itself, at a grid of ``width``."""
    import dp_accounting
    from dp_accounting import pld

    one = dp_accounting.LaplaceDpEvent(sigma) if noise == "laplace" else dp_accounting.GaussianDpEvent(sigma)
    accountant = pld.PLDAccountant(value_discretization_interval=width)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, one) if rate < 1 else one, steps)
    return float(accountant.get_epsilon(delta))


# --- orders


@pytest.mark.parametrize("orders", [ORDERS, PAPER_ORDERS])
@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 7.0, 300.0])
def test_orders_that_are_left_out_give_no_less(sigma: float, orders: tuple[float, ...]) -> None:
    for rate, steps in ((1e-3, 1), (0.02, 1000), (1.0, 3)):
        one = Sampled(sigma, rate, steps)
        for parts in ((one,), (one, Sampled(1.0, 0.01, 50)), (one, Sampled(2.0, 0.01, 50, "laplace"))):
            spent = {order: sum(p.steps * _of_part(p, order) for p in parts) for order in orders}
            for delta in (1e-12, 1e-5, 0.3):
                assert _by_orders(parts, delta, orders) == min(converted(a, spent[a], delta) for a in orders)


# --- the grid of losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "noise"),
    [
        (20.0, 1.0, 1, "gaussian"), (0.5, 0.1, 5, "gaussian"), (0.3, 1.0, 1, "gaussian"), (0.2, 1.0, 1, "laplace"),
        (0.05, 0.02, 10, "laplace"), (0.1, 0.01, 1, "laplace"),
    ],
)  # fmt: skip
def test_the_grid_is_a_ten_thousandth_of_epsilon(sigma: float, rate: float, steps: int, noise: str) -> None:
    """Of a first guess at it; where that is far too large, a hundred-thousandth of what it gave. Never below 1e-4."""
    delta = 1e-3
    guess = steps / sigma if noise == "laplace" else epsilon(sigma, rate, steps, delta, by="rdp")
    expected = asked(sigma, rate, steps, delta, max(1e-4, guess / 1e4), noise)
    if guess >= 1.5 * expected:
        expected = asked(sigma, rate, steps, delta, max(1e-4, expected / 1e5), noise)
    assert epsilon(sigma, rate, steps, delta, noise=noise) == expected


def test_several_releases_are_asked_for_together() -> None:
    import dp_accounting
    from dp_accounting import pld

    parts = (Sampled(1.0, 0.5, 2), Sampled(2.0, 1.0, 3), Sampled(4.0, 0.5, 1, "laplace"))
    guess = composed_epsilon(parts[:2], 1e-3, by="rdp") + 0.25
    accountant = pld.PLDAccountant(value_discretization_interval=guess / 1e4)
    for part, one in zip(parts, (*map(dp_accounting.GaussianDpEvent, (1.0, 2.0)), dp_accounting.LaplaceDpEvent(4.0))):
        accountant.compose(dp_accounting.PoissonSampledDpEvent(part.rate, one) if part.rate < 1 else one, part.steps)
    assert guess > 1 and composed_epsilon(parts, 1e-3) == accountant.get_epsilon(1e-3) > composed_epsilon(parts[:2], 1e-3)


def test_the_library_is_quiet_and_then_as_it_was() -> None:
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.INFO)
    try:
        assert epsilon(1.7, 1.0, 1, 1e-3) > 0 and log.level == logging.INFO
    finally:
        log.setLevel(before)


# --- divergences


@pytest.mark.parametrize("order", [1.5, 2.0, 20.0])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0])
def test_a_divergence_without_sampling_is_known(sigma: float, order: float) -> None:
    """``order / (2 sigma^2)``; the rounding that is added is 1e-13 of the moment, and 1e-13."""
    true = order / (2 * sigma**2)
    assert true <= _divergence(sigma, 1.0, order) <= true * (1 + 1.5e-13) + 1.5e-13 / (order - 1)


def test_epsilon_by_orders_is_the_least_over_its_grid() -> None:
    for by, orders in (("rdp", ORDERS), ("paper", PAPER_ORDERS)):
        expected = min(converted(a, 3 * _divergence(1.3, 0.2, a), 1e-5) for a in orders)
        assert epsilon(1.3, 0.2, 3, 1e-5, by=by) == expected  # type: ignore[arg-type]
    parts = (Sampled(1.3, 0.2, 3), Sampled(2.0, 1.0, 1))
    both = [converted(a, 3 * _divergence(1.3, 0.2, a) + _divergence(2.0, 1.0, a), 1e-5) for a in ORDERS]
    assert composed_epsilon(parts, 1e-5, by="rdp") == min(both)


def test_a_conversion_to_the_digit() -> None:
    assert converted(2.0, 1.0, 0.1) == pytest.approx(1 + math.log(0.5) - math.log(0.2), rel=1e-15)
    assert converted(1.5, 0.0, 0.9) == 0.0 and converted(1.0001, 0.0, 1e-3) > 0
    for divergence, order in ((-1e-300, 2.0), (math.nan, 2.0), (1.0, 1.0), (1.0, math.inf)):
        assert said(lambda d=divergence, o=order: converted(o, d, 0.1)) == (  # type: ignore[misc]
            f"accounting: a divergence of {divergence} at order {order}; expected at least 0, at an order above 1"
        )
    assert converted(2.0, math.inf, 0.1) == math.inf


# --- what cannot be


def test_what_cannot_be_is_said() -> None:
    assert said(lambda: finite("x", math.nan)) == (
        "accounting: x is nan, so nothing is guaranteed; use more noise or fewer steps"
    )
    assert finite("x", -1.0) == -1.0
    rates = "expected a rate above 0 and at most 1, at least 1 step"
    for part, words in {
        Sampled(0.0, 0.1, 1): "sigma is 0.0; expected a finite number above 0",
        Sampled(math.inf, 0.1, 1): "sigma is inf; expected a finite number above 0",
        Sampled(0.000999, 0.1, 1): "sigma 0.000999 is too small for any guarantee; expected 0.001 or more",
        Sampled(1.1e100, 0.1, 1): "sigma is 1.1e+100; expected at most 1e+100",
        Sampled(1.0, 0.0, 1): f"rate 0.0, 1 steps; {rates}",
        Sampled(1.0, 1.1, 1): f"rate 1.1, 1 steps; {rates}",
        Sampled(1.0, 1.0, 0): f"rate 1.0, 0 steps; {rates}",
        Sampled(1.0, 1.0, math.inf): f"rate 1.0, inf steps; {rates}",  # type: ignore[arg-type]
        Sampled(1.0, 1.0, 1, "uniform"): "unknown noise 'uniform'; known: gaussian, laplace",
    }.items():
        assert said(part.checked) == f"accounting: {words}"
    for part in (Sampled(MIN_SIGMA, 1.0, 1), Sampled(MAX_SIGMA, 0.1, 1), Sampled(1.0, 5e-324, 1, "laplace")):
        assert part.checked() is part
    for delta in (0.0, 1.0, -1.0, math.nan):
        assert said(lambda d=delta: checked_delta(d)) == (  # type: ignore[misc]
            f"accounting: delta is {delta}; expected above 0 and below 1, less than 1 / number of texts"
        )
    assert checked_delta(5e-324) == 5e-324 and checked_delta(0.999) == 0.999


# --- the noise for an epsilon


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "rate", "steps", "by", "noise", "known"),
    [
        (1.0, 1.0, 1, "pld", "gaussian", 2.5748529), (30.0, 1.0, 3, "pld", "gaussian", 0.32418634),
        (2.0, 0.3, 2, "rdp", "gaussian", None), (1.0, 1.0, 1, "pld", "laplace", None),
        (3.0, 0.2, 2, "pld", "laplace", 0.33856352),
    ],
)  # fmt: skip
def test_the_noise_is_the_least_to_a_thousandth(
    target: float, rate: float, steps: int, by: Any, noise: str, known: float | None
) -> None:
    def spent(sigma: float) -> float:
        if by == "rdp":
            return epsilon(sigma, rate, steps, 1e-3, by=by)
        return asked(sigma, rate, steps, 1e-3, max(1e-4, target / 1e4), noise)

    sigma = sigma_for(target, rate, steps, 1e-3, by=by, noise=noise)
    assert spent(sigma) <= target < spent(sigma * (1 - 5.1e-4))
    assert known is None or sigma == pytest.approx(known, rel=1e-5), "a figure that was printed stays"


@pytest.mark.parametrize(("target", "rate", "steps", "delta"), [(8.0, 0.1, 10, 1e-5), (0.05, 1.0, 1, 1e-3)])
def test_noise_by_the_papers_accountant_follows_opacus_search(target: float, rate: float, steps: int, delta: float) -> None:
    low, high = 0.0, 20.0
    while (reached := epsilon(high, rate, steps, delta, by="paper")) > target:
        high *= 2
    while target - reached > 0.01:
        middle = (low + high) / 2
        try:
            found = epsilon(middle, rate, steps, delta, by="paper")
        except InputError:
            found = math.inf
        low, high, reached = (low, middle, found) if found < target else (middle, high, reached)
    sigma = sigma_for(target, rate, steps, delta, by="paper")
    assert sigma == pytest.approx(high) and target - 0.01 <= epsilon(sigma, rate, steps, delta, by="paper") <= target
    assert sigma != pytest.approx(sigma_for(target, rate, steps, delta), rel=1e-4)


def test_a_target_that_cannot_be_is_said() -> None:
    for target in (0.0, -1.0, 1e9, math.inf, math.nan):
        assert said(lambda t=target: sigma_for(t, 0.1, 1, 1e-5)) == (  # type: ignore[misc]
            f"accounting: the target epsilon is {target}; expected above 0 and at most 10000: more bounds nothing"
        )
    assert 0 < sigma_for(10_000, 0.1, 1, 1e-5) < sigma_for(100, 0.1, 1, 1e-5)
    for call, words in (
        (lambda: sigma_for(1.0, 1.1, 1, 1e-5), "rate 1.1, 1 steps"), (lambda: sigma_for(1.0, 1.0, 0, 1e-5), "0 steps"),
        (lambda: sigma_for(1.0, 1.0, 1, 0.0), "delta is 0.0"),
        (lambda: sigma_for(1.0, 1.0, 1, 1e-5, noise="uniform"), "unknown noise 'uniform'"),
        (lambda: sigma_for(1.0, 1.0, 1, 1e-5, by="moments"), "unknown accountant 'moments'; known: pld, rdp, paper"),  # type: ignore[arg-type]
        (lambda: sigma_for(1.0, 1.0, 1, 1e-5, by="rdp", noise="laplace"), "the accountant rdp supports only Gaussian noise"),
        (lambda: sigma_for(1.0, 1.0, 1, 1e-5, by="paper", noise="laplace"), "accountant paper supports only Gaussian noise"),
    ):  # fmt: skip
        assert words in said(call)


def test_the_first_search_comes_within_a_hundredth() -> None:
    for target in (1e-4, 0.7, 900.0):
        found = _least(lambda sigma: 1 / sigma, target)
        assert 1 / target <= found <= 1.01 / target
    assert _least(lambda sigma: 1 / sigma, 1e-5) == pytest.approx(1e5, rel=1e-12), "the end itself is allowed"
    assert said(lambda: _least(lambda sigma: 1 / sigma, 0.999e-5)) == (
        "no noise up to 100000 is shown to give epsilon 9.99e-06; choose a larger epsilon or a larger delta"
    )
    tries: list[float] = []

    def counting(sigma: float) -> float:
        tries.append(sigma)
        return 1 / sigma

    assert _least(counting, 900.0) == min(t for t in tries if t >= 1 / 900) and tries[:2] == [1e5, 10.0]
    assert len(tries) == 12, "halved on a logarithmic scale"


@pytest.mark.parametrize(
    ("spent", "target", "known"),
    [
        (lambda sigma: 100 / sigma, 3.0, 33.4375), (lambda sigma: 100 / sigma, 5.0, 20.0),
        (lambda sigma: 10 - sigma / 10, 3.0, 70.078125), (lambda sigma: 0.5 if sigma >= 655_360 else 2.0, 1.0, 655_360.0),
        (lambda sigma: 0.5 if sigma >= 13 else 2.0, 1.0, 13.000001907348633), (lambda sigma: 2.99, 3.0, 20.0),
    ],
)  # fmt: skip
def test_the_search_of_the_papers_step_by_step(spent: Callable[[float], float], target: float, known: float) -> None:
    """Opacus halves from 20 on and stops within .01 below the target: its slack is part of printed figures."""
    assert _as_opacus(spent, target) == known


def test_the_search_of_the_papers_ends() -> None:
    words = "no noise up to 1e6 gives epsilon 1.0; choose a larger epsilon or a larger delta"
    assert said(lambda: _as_opacus(lambda sigma: 2.0 if sigma < 1_310_720 else 0.5, 1.0)) == words


@pytest.mark.parametrize(("sigma", "rate"), [(0.5, 0.01), (0.05, 1e-3), (0.01, 1e-9)])
def test_wide_losses_are_rounded_to_a_coarser_grid_and_never_to_a_smaller_epsilon(
    sigma: float, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target epsilon at a rate of 1e-12 asked for 24 GiB: noise of .001 was tried on a grid of 1e-4."""
    from dp_accounting.pld import PLDAccountant

    sizes = []

    def seen(self: object, *args: object, **options: float) -> object:
        sizes.append(options["value_discretization_interval"])
        return made(self, *args, **options)

    made = PLDAccountant.__init__
    monkeypatch.setattr(PLDAccountant, "__init__", seen)
    fine = _by_library((Sampled(sigma, rate, 100),), 1e-5)
    monkeypatch.setitem(_by_library.__globals__, "MAX_LOSSES", 2000)
    coarse = _by_library((Sampled(sigma, rate, 100),), 1e-5)
    assert fine <= coarse <= 1.1 * fine + 1e-9
    assert max(sizes[-2:]) >= (0.5 / sigma**2) / 2000 and min(sizes) >= 0.5 / sigma**2 / 200_000


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("steps", [3_125_000_000, 10**12])
def test_more_releases_than_the_library_can_compose_are_bounded_at_once(steps: int, noise: str) -> None:
    """The library raises the size of a grid to the power of the number of releases: it did not end."""
    found = epsilon(1.0, 32 / steps, steps, 1e-9, noise=noise)
    fewer = epsilon(1.0, 32 / steps, 100_000, 1e-9, noise=noise)
    assert fewer < found < 100
    if noise == "gaussian":
        assert found == epsilon(1.0, 32 / steps, steps, 1e-9, by="rdp")
        assert epsilon(sigma_for(1.0, 32 / steps, steps, 1e-9), 32 / steps, steps, 1e-9) <= 1.0
