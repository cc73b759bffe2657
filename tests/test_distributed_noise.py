"""Noise inside a secure sum: the exact law, the norm that is never exceeded, and what the ledger states."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chisquare

from rasura.accounting.distributed import SumLedger, rho_epsilon, round_rho
from rasura.accounting.epsilon import epsilon
from rasura.core.errors import InputError
from rasura.defenses.secure_aggregation.noise import NORM, clipped, discrete_gaussian, sigma_of


def law(sigma: float, reach: int) -> NDArray[np.float64]:
    """The discrete Gaussian's probabilities from -reach to reach, by its definition."""
    weights = np.exp(-(np.arange(-reach, reach + 1) ** 2) / (2 * sigma * sigma))
    return np.asarray(weights / weights.sum())


def agrees(drawn: NDArray[np.int64], sigma: float) -> float:
    """The p-value of a chi-square test of ``drawn`` against the discrete Gaussian law of ``sigma``."""
    reach = int(10 * sigma) + 3
    expected = law(sigma, reach) * len(drawn)
    found = np.bincount(drawn + reach, minlength=2 * reach + 1)
    inner = np.flatnonzero(expected >= 20)
    low, high = inner[0], inner[-1]
    cells = [found[:low].sum(), *found[low : high + 1], found[high + 1 :].sum()]
    law_cells = [expected[:low].sum(), *expected[low : high + 1], expected[high + 1 :].sum()]
    keep = np.asarray(law_cells) > 1
    kept, wanted = np.asarray(cells)[keep], np.asarray(law_cells)[keep]
    return float(chisquare(kept, wanted * kept.sum() / wanted.sum()).pvalue)


@pytest.mark.parametrize("sigma", [1, 3, 40])
def test_draws_follow_the_discrete_gaussian_law(sigma: int) -> None:
    drawn = discrete_gaussian(200_000, sigma)
    assert drawn.dtype == np.int64 and agrees(drawn, sigma) > 1e-4
    # The test would see a rounded continuous Gaussian of a slightly other width.
    assert agrees(np.rint(np.random.default_rng(0).normal(0, 1.05 * sigma, 200_000)).astype(np.int64), sigma) < 1e-4


@pytest.mark.parametrize(("clients", "sigma"), [(4, 3), (8, 2)])
def test_the_sum_of_all_shares_follows_the_central_law(clients: int, sigma: int) -> None:
    total = np.sum([discrete_gaussian(40_000, sigma) for _ in range(clients)], axis=0)
    assert agrees(total, math.sqrt(clients) * sigma) > 1e-4


def test_large_deviations_have_the_right_moments() -> None:
    drawn = discrete_gaussian(200_000, 1 << 20).astype(np.float64) / (1 << 20)
    assert abs(drawn.mean()) < 0.012 and abs(drawn.std() - 1) < 0.009 and abs((drawn**4).mean() - 3) < 0.15
    for bad in (0, -1, (1 << 20) + 1, 1.5, True):
        with pytest.raises(InputError, match="noise of"):
            discrete_gaussian(3, bad)  # type: ignore[arg-type]
    assert len(discrete_gaussian(0, 3)) == 0


def test_the_norm_never_exceeds_the_clip_and_small_updates_are_sent_unchanged() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 7, 5000):
        for scale in (1e-6, 0.1, 1.0, 1e200):
            steps = clipped(rng.normal(size=size) * scale, 1.0)
            assert sum(int(s) ** 2 for s in steps) <= NORM**2
    # Halves that are all rounded up would exceed it.
    halves = np.full(1_000_000, 1.5 / NORM)
    assert int(np.square(clipped(halves * 1000 / 1.5, 1.0).astype(np.int64)).sum()) <= NORM**2
    small = rng.normal(size=50) * 1e-3
    assert np.abs(clipped(small, 1.0) / NORM - small).max() <= 0.5 / NORM * 1.001
    assert not clipped(np.zeros(3), 1.0).any()
    for values, clip in (([np.nan], 1.0), ([np.inf], 1.0), ([1.0], 0.0), ([1.0], math.inf), ([1.0], math.nan)):
        with pytest.raises(InputError):
            clipped(np.array(values), clip)


def test_the_noise_of_the_clients_together_is_what_was_asked_for() -> None:
    for multiplier, noisy in ((1.0, 1), (0.5, 4), (3.0, 100)):
        sigma = sigma_of(multiplier, noisy, (1 << 23) - 1)
        assert multiplier * NORM <= sigma * math.sqrt(noisy) < multiplier * NORM + math.sqrt(noisy) * (1 + 1e-9)
        assert round_rho(NORM, sigma, noisy, 1000) <= 1 / (2 * multiplier**2) * (1 + 1e-9)
    for multiplier, noisy in ((0.0, 1), (math.nan, 1), (math.inf, 1), (1.0, 0), (4.0, 1)):
        with pytest.raises(InputError, match="times the clip"):
            sigma_of(multiplier, noisy, (1 << 23) - 1)


def test_a_round_is_never_better_than_central_noise_and_hardly_worse() -> None:
    for clients, sigma in ((2, NORM), (8, NORM // 2), (64, NORM // 4)):
        rho = round_rho(NORM, sigma, clients, 22_700_000)
        central = NORM**2 / (2 * clients * sigma**2)
        assert central <= rho <= central * (1 + 1e-9)
    # Noise of few steps is far from Gaussian in a sum, and the bound says so.
    assert round_rho(2, 1, 8, 1000) > 1.01 * 4 / 16
    for bad in ((0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0), (1, 1.5, 1, 1), (1, True, 1, 1)):
        with pytest.raises(InputError, match="expected a whole number"):
            round_rho(*bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("multiplier", "rounds"), [(1.0, 1), (4.0, 10), (0.5, 3)])
def test_epsilon_is_a_bound_on_that_of_the_gaussian_mechanism(multiplier: float, rounds: int) -> None:
    pytest.importorskip("dp_accounting")
    rho = rounds / (2 * multiplier**2)
    exact = epsilon(multiplier, 1.0, rounds, 1e-5)
    assert exact <= rho_epsilon(rho, 1e-5) <= 1.2 * exact
    assert rho_epsilon(rho, 1e-5) <= rho + 2 * math.sqrt(rho * math.log(1e5))
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(InputError):
            rho_epsilon(bad, 1e-5)


def test_the_ledger_counts_clients_that_disappeared_and_those_that_collude() -> None:
    full, fewer, colluding = (SumLedger(NORM, 1000) for _ in range(3))
    full.made(NORM, 8, 0)
    fewer.made(NORM, 6, 0)
    colluding.made(NORM, 6, 2)
    assert full.epsilon(1e-5) < fewer.epsilon(1e-5) < colluding.epsilon(1e-5)
    with pytest.raises(InputError, match="none is left"):
        full.made(NORM, 2, 2)
    assert len(full.rounds) == 1
    full.made(NORM, 6, 2)
    assert full.rho == pytest.approx(1 / 16 + 1 / 8, rel=1e-9)
    again = SumLedger.read(json.loads(json.dumps(full.state_dict())))
    assert again.epsilon(1e-5) == full.epsilon(1e-5) and "of a client" in again.statement(1e-5)
    for words in ("in the 2 rounds that this ledger counted", "Rounds of other runs with the same clients are not counted",
                  "metrics that an app sends in the clear beside the sum are not covered"):  # fmt: skip
        assert words in again.statement(1e-5)
    with pytest.raises(InputError, match="nothing to state"):
        SumLedger(NORM, 10).epsilon(1e-5)
    for state in ({}, None, {**full.state_dict(), "version": 2}, {**full.state_dict(), "rounds": [[1]]},
                  {**full.state_dict(), "rounds": [[0, 1]]}, {**full.state_dict(), "norm": 0.5}):  # fmt: skip
        with pytest.raises(InputError):
            SumLedger.read(state)


def test_a_ledger_in_a_file_counts_rounds_of_runs_that_ended(tmp_path: Path) -> None:
    file = tmp_path / "ledger.json"
    first = SumLedger.kept(file, NORM, 1000)
    assert not file.exists() and not first.rounds
    first.made(NORM, 8, 2)
    killed = first.rho
    second = SumLedger.kept(file, NORM, 1000)
    second.made(NORM, 8, 2)
    assert second.rho == 2 * killed == SumLedger.kept(file, NORM, 1000).rho
    with pytest.raises(InputError, match="another run counts"):
        first.made(NORM, 8, 2)
    assert first.rho == killed, "a round that was not counted alone is not opened"
    assert SumLedger.kept(file, NORM, 1000).rho == 3 * killed, "and no round of the other run is lost"
    file.unlink()
    with pytest.raises(InputError, match="no ledger of sums"):
        second.made(NORM, 8, 2)
    file.unlink()
    assert SumLedger.kept(file, NORM, 5).entries == 5
    for damaged in ("", "[]", '{"version": 1}', "[1, 2]\n"):
        file.write_text(damaged)
        with pytest.raises(InputError, match="no ledger of sums"):
            SumLedger.kept(file, NORM, 1000)
    with pytest.raises(InputError, match="folder does not exist"):
        SumLedger.kept(tmp_path / "none" / "ledger.json", NORM, 1000)
    unwritable = SumLedger.kept(tmp_path / "full.json", NORM, 1000)
    (tmp_path / "full.json").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        unwritable.made(NORM, 8, 2)
    assert not unwritable.rounds
