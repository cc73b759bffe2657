"""DirDP's accounting against computations of its own in high precision, and against the privacy loss itself."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from rasura.accounting import directional_epsilon, log_normaliser, renyi_divergence
from rasura.accounting.directional import GRID, MARGIN, mean_cosine
from rasura.cli import app
from rasura.core.errors import InputError

mp = pytest.importorskip("mpmath")

DIMENSIONS = (1, 2, 3, 5, 16, 59, 60, 384, 592_130, 1_000_000)
KAPPAS = (0.1, 1.0, 200.0, 1e4, 1e6, 1e9)
ORDERS = (1 + 1e-4, 1.07, 2.0, 32.0, 512.0, 2.0**30)
POINTS = [
    (dimension, kappa, order)
    for (dimension, kappa), order in zip(itertools.product(DIMENSIONS, KAPPAS), itertools.cycle((*ORDERS, ORDERS[0])))
]


def log_moment(kappa: float, dimension: int) -> Any:
    """log of the integral of exp(kappa x) over the sphere, less a constant of the dimension; to 30 digits.

    By the Bessel function of mpmath below 60 dimensions, by quadrature of the density around its peak above.
    """
    k = mp.mpf(kappa)
    if dimension == 1:
        return k + mp.log1p(mp.exp(-2 * k))
    if dimension < 60:
        v = mp.mpf(dimension) / 2 - 1
        return mp.log(mp.besseli(v, k)) - v * mp.log(k)
    m = mp.mpf(dimension - 3) / 2
    root = m + mp.sqrt(m * m + k * k)
    peak, one_less = k / root, (root - k) / root
    one_more = 1 + peak
    width = one_less * one_more / mp.sqrt(2 * m * (1 + peak * peak))

    def density(u: Any) -> Any:
        x = u * width
        inside = -one_more < x < one_less
        return mp.exp(k * x + m * (mp.log1p(-x / one_less) + mp.log1p(x / one_more))) if inside else mp.mpf(0)

    low, high = max(mp.mpf(-16), -one_more / width), min(mp.mpf(16), one_less / width)
    total = mp.quad(density, mp.linspace(low, high, 9))
    return mp.log(total * width) + k * peak + m * (mp.log(one_less) + mp.log(one_more))


def true_divergence(order: float, kappa: float, dimension: int) -> Any:
    with mp.workdps(50):
        a, k = mp.mpf(order), mp.mpf(kappa)
        return (log_moment((2 * a - 1) * k, dimension) - log_moment(k, dimension)) / (a - 1)


@pytest.mark.parametrize(("dimension", "kappa", "order"), POINTS)
def test_a_divergence_is_right_and_never_below_the_truth(dimension: int, kappa: float, order: float) -> None:
    true = true_divergence(order, kappa, dimension)
    found = mp.mpf(renyi_divergence(order, kappa, dimension))
    assert true * (1 - mp.mpf("1e-15")) <= found <= true * (1 + mp.mpf("1e-10")), (found, true)


def test_there_are_sixty_points_and_all_orders_among_them() -> None:
    assert len(POINTS) == 60 and {order for _, _, order in POINTS} == set(ORDERS)


@pytest.mark.parametrize("dimension", [1, 2, 16, 59, 384])
@pytest.mark.parametrize("kappa", [1e-6, 0.1, 20.0, 3e3, 1e9])
def test_the_normaliser_is_right(dimension: int, kappa: float) -> None:
    with mp.workdps(60):
        k, half = mp.mpf(kappa), mp.mpf(dimension) / 2
        true = -mp.log(mp.hyp0f1(half, k * k / 4)) if kappa < 1e3 else None
        if true is None:
            true = -(mp.log(mp.besseli(half - 1, k)) + mp.loggamma(half) - (half - 1) * mp.log(k / 2))
    assert log_normaliser(kappa, dimension) == pytest.approx(float(true), rel=1e-11)


def test_the_mean_cosine_is_known_in_three_dimensions_and_rises() -> None:
    kappa = np.logspace(-6, 12, 200)
    with mp.workdps(50):
        true = [float(mp.coth(mp.mpf(float(k))) - 1 / mp.mpf(float(k))) for k in kappa]
    assert mean_cosine(kappa, 3) == pytest.approx(true, rel=1e-14)
    assert (np.diff(mean_cosine(kappa, 1_000_000)) > 0).all()


def true_delta(epsilon: float, kappa: float, dimension: int) -> float:
    """The least delta at ``epsilon``, by its definition: the privacy loss of a draw x is 2 kappa x along the direction."""
    with mp.workdps(40):
        k, m, e = mp.mpf(kappa), mp.mpf(dimension - 3) / 2, mp.mpf(epsilon)
        edge = min(mp.mpf(1), e / (2 * k))
        cuts = [mp.mpf(-1), 1 - 40 * (m + 1) / k, 1 - 4 * (m + 1) / k, 1]
        cuts = sorted({max(mp.mpf(-1), c) for c in cuts})
        whole = mp.quad(lambda x: mp.exp(k * (x - 1)) * (1 - x * x) ** m, cuts)
        lost = mp.quad(
            lambda x: mp.exp(k * (x - 1)) * (1 - x * x) ** m * -mp.expm1(e - 2 * k * x),
            sorted({edge, *(c for c in cuts if c > edge)}),
        )
        return float(lost / whole)


@pytest.mark.parametrize(("kappa", "dimension"), [(0.5, 3), (20.0, 3), (20.0, 16), (200.0, 16), (200.0, 384), (1e4, 5)])
def test_epsilon_bounds_the_privacy_loss_itself_and_not_by_much(kappa: float, dimension: int) -> None:
    delta = 1e-4
    found = directional_epsilon(kappa, [dimension], 1, delta)
    assert true_delta(found, kappa, dimension) <= delta
    assert true_delta(0.85 * found - 0.2, kappa, dimension) > delta, "no looser than fits RDP"


def test_the_figures_that_were_printed_as_zero() -> None:
    assert directional_epsilon(200, [16], 1, 1e-4) == pytest.approx(397.49, abs=0.01)
    blocks = directional_epsilon(1e6, [30_522 * 384, 384, 384, 2], 1, 0.0025)
    assert 1e5 < blocks <= 2e6
    done = CliRunner().invoke(app, ["account", "--kappa", "200", "--dimension", "16", "--examples", "1000", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["rows"][0]["epsilon"] == pytest.approx(397.49, abs=0.01)


@pytest.mark.parametrize("kappa", [0.1, 3.0, 1e3, 1e9])
def test_epsilon_is_the_least_over_orders_and_at_most_the_pure_one(kappa: float) -> None:
    pure = 2 * kappa * 3
    for dimension in (1, 2, 16, 592_130):
        found = directional_epsilon(kappa, [dimension], 3, 1e-5)
        assert 0 <= found <= pure
        for order in GRID[::20]:
            spent = 3 * renyi_divergence(order, kappa, dimension)
            by_order = spent + math.log1p(-1 / order) - math.log(1e-5 * order) / (order - 1)
            assert found <= max(by_order, 0) * (1 + 3 * MARGIN)


@pytest.mark.parametrize("sizes", [[25] * 4, [25, 25, 75], [3, 400, 3, 1]])
def test_blocks_add_up_each_with_its_share_of_kappa(sizes: list[int]) -> None:
    kappa, releases, delta = 50.0, 3, 1e-5
    found = []
    for order in GRID:
        spent = releases * sum(renyi_divergence(order, kappa * size / sum(sizes), size) for size in sizes)
        found.append(spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))
    least = min(*found, 2 * kappa * releases)
    assert least <= directional_epsilon(kappa, sizes, releases, delta) <= least * (1 + 2 * MARGIN)


def test_epsilon_grows_with_kappa_and_releases_and_shrinks_with_the_dimension() -> None:
    base = directional_epsilon(50.0, [100], 2, 1e-5)
    assert directional_epsilon(40.0, [100], 2, 1e-5) < base < directional_epsilon(50.0, [100], 3, 1e-5)
    assert directional_epsilon(50.0, [1000], 2, 1e-5) < base < directional_epsilon(50.0, [100], 2, 1e-7)
    mixed = directional_epsilon(50.0, [25, 75], 2, 1e-5)
    assert mixed == directional_epsilon(50.0, [75, 25], 2, 1e-5) != base


@pytest.mark.parametrize(
    "call",
    [
        lambda: directional_epsilon(math.nan, [3], 1, 1e-5),
        lambda: directional_epsilon(math.inf, [3], 1, 1e-5),
        lambda: directional_epsilon(0.0, [3], 1, 1e-5),
        lambda: directional_epsilon(1e306, [3], 1, 1e-5),
        lambda: directional_epsilon(1e300, [3], 10**10, 1e-5),
        lambda: directional_epsilon(1.0, [3, 0], 1, 1e-5),
        lambda: directional_epsilon(1.0, [], 1, 1e-5),
        lambda: directional_epsilon(1.0, [3], 0, 1e-5),
        lambda: directional_epsilon(1.0, [3], 1, math.nan),
        lambda: directional_epsilon(1.0, [3], 1, 0.0),
        lambda: renyi_divergence(1.0, 1.0, 3),
        lambda: renyi_divergence(math.nan, 1.0, 3),
        lambda: renyi_divergence(math.inf, 1.0, 3),
        lambda: renyi_divergence(2.0, -1.0, 3),
        lambda: renyi_divergence(2.0, math.nan, 3),
        lambda: renyi_divergence(2.0, 1.0, 0),
        lambda: log_normaliser(math.nan, 3),
        lambda: log_normaliser(1.0, 0),
    ],
)
def test_what_is_no_number_is_refused_and_never_counted_as_zero(call: object) -> None:
    with pytest.raises(InputError, match="accounting: "):
        call()  # type: ignore[operator]


NOTHING = "nothing is guaranteed; choose other values"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: renyi_divergence(1.0, 1.0, 3), "orders [1.0]; expected finite numbers above 1"),
        (lambda: renyi_divergence(2.0**30, 1e300, 3), f"kappa times the order is inf, so {NOTHING}"),
        (lambda: renyi_divergence(2.0, 1.0, 0), "kappa 1.0 in 0 dimensions; expected a finite number, at least 1 dimension"),
        (lambda: directional_epsilon(1e300, [3], 10**10, 1e-5), f"kappa times the order is inf, so {NOTHING}"),
        (lambda: directional_epsilon(1e298, [3], 10**11, 1e-5), f"epsilon is inf, so {NOTHING}"),
        (lambda: directional_epsilon(math.inf, [3], 1, 1e-5), "kappa is inf; expected a finite number above 0"),
        (lambda: directional_epsilon(0.0, [3], 1, 1e-5), "kappa is 0.0; expected a finite number above 0"),
        (lambda: directional_epsilon(1.0, [3], 0, 1e-5), "0 releases of blocks [3]; expected at least one of each"),
        (
            lambda: directional_epsilon(1.0, [5, 4, 3, 2, 0], 1, 1e-5),
            "1 releases of blocks [5, 4, 3, 2]; expected at least one of each",
        ),
        (
            lambda: log_normaliser(math.inf, 3),
            "kappa inf in 3 dimensions; expected a finite number, at least 1 dimension",
        ),
    ],
)
def test_what_is_wrong_is_said(call: Callable[[], object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value) == f"accounting: {words}"


def test_nothing_is_told_apart_at_concentration_zero() -> None:
    assert renyi_divergence(2.0, 0.0, 7) == 0.0 and log_normaliser(0.0, 7) == 0.0
