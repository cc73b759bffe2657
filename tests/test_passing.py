"""What active dropout left of the inputs: exact by message passing, and nothing where chance would give it."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import beta

from rasura.attacks.updates.span.passing import FALSE, TOLERANT, Passing, fitted_chance, largest_residual
from rasura.attacks.updates.span.rows import TOLERANCE, RowSpace
from rasura.core.interfaces import AttackFailed
from rasura.core.rng import generator


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.3])
def test_message_passing_recovers_masked_vectors_exactly_and_rejects_others(rate: float) -> None:
    rng = generator(7)
    width, rank = 120, 8
    full = torch.randn(rank, width, generator=rng, dtype=torch.double)
    masks = torch.rand(rank, width, generator=rng) > rate
    basis = torch.linalg.qr((full * masks).T).Q
    other = torch.randn(20, width, generator=rng, dtype=torch.double)
    fit = Passing(RowSpace(basis, torch.full((rank,), 1e-9)), rate)(torch.cat([full, other]), steps=60)
    assert fit.accepted.tolist() == [True] * rank + [False] * 20
    assert torch.equal(fit.inputs[:rank], full * masks)
    assert float(fit.residual[:rank].max()) < 1e-6 < 0.1 < float(fit.residual[rank:].min())


def test_a_noisy_row_space_takes_no_token_that_lies_outside() -> None:
    rng = generator(7)
    full = torch.randn(8, 60, generator=rng, dtype=torch.double)
    basis = torch.linalg.qr(full.T).Q
    others = torch.randn(200, 60, generator=rng, dtype=torch.double)
    noisy = RowSpace(basis, torch.full((8,), 0.6))
    assert float(noisy.tolerance(others).min()) > TOLERANT
    fit = Passing(noisy, 0.1)(torch.cat([full, others]), steps=60)
    assert fit.accepted.tolist() == [True] * 8 + [False] * 200


def test_each_of_a_tokens_copies_is_found_once_the_others_are_excluded() -> None:
    rng = generator(8)
    width = 200
    others = torch.randn(40, width, generator=rng, dtype=torch.double)
    one = torch.randn(width, generator=rng, dtype=torch.double)
    copies = one * (torch.rand(3, width, generator=rng) > 0.1)
    passing = Passing(RowSpace(torch.linalg.qr(torch.cat([others, copies]).T).Q, torch.full((43,), 1e-9)), 0.1)
    found: list[int] = []
    for _ in range(3):
        kept = torch.zeros(24, width, dtype=torch.bool)
        for copy in found:
            kept[:, int(((copies[copy] == 0) & (one.abs() > 0.5)).nonzero()[0])] = True
        fit = passing(one.expand(24, -1), steps=160, spread=2.0, kept=kept, rng=rng)
        new = {int((fit.inputs[i] - copies).norm(dim=1).argmin()) for i in fit.accepted.nonzero().flatten()}
        assert new and not new & set(found)
        assert all(float((x - copies).norm(dim=1).min()) < 1e-9 for x in fit.inputs[fit.accepted])
        found += sorted(new)
        if len(found) == 3:
            break
    assert sorted(found) == [0, 1, 2]


def test_changing_coordinates_one_by_one_ends_at_the_row_space() -> None:
    rng = generator(9)
    full = torch.randn(5, 100, generator=rng, dtype=torch.double)
    gone = torch.rand(5, 100, generator=rng) < 0.1
    passing = Passing(RowSpace(torch.linalg.qr(torch.where(gone, 0.0, full).T).Q, torch.full((5,), 1e-9)), 0.1)
    small = full.abs().topk(3, largest=False).indices
    wrong = gone.scatter(1, small, ~gone.gather(1, small))
    assert torch.equal(passing.changed(full, wrong), gone)
    assert torch.equal(passing.changed(full, gone), gone)


def test_fits_under_dropout_are_chance_hits_near_the_width_only() -> None:
    assert fitted_chance(8, 128, 1e-4, 12000) < 1e-6 < 0.01 < fitted_chance(120, 128, 1e-4, 12000)
    assert fitted_chance(50, 64, 1e-4, 1e4) < 0.01 < fitted_chance(50, 64, 0.1, 1e4)
    assert fitted_chance(20, 64, 1e-2, 1e4) == pytest.approx(1e3 * fitted_chance(20, 64, 1e-2, 10.0))
    for rank, residual in ((20, 0.3), (1, 0.5), (60, 0.9)):
        exact = math.log(float(beta.cdf(residual**2, (64 - rank) / 2, rank / 2))) + 64 * math.log(2)
        assert exact <= math.log(fitted_chance(rank, 64, residual, 1.0)) + 1e-9
    for nothing in (1.0, 2.0, math.nan):
        assert fitted_chance(8, 128, nothing, 1.0) > 1e300
    assert fitted_chance(64, 64, 1e-9, 1.0) > 1e300


def test_the_chance_of_fits_under_dropout_stays_a_number() -> None:
    assert fitted_chance(10**5 - 1, 10**5, 0.5, 1e6) == pytest.approx(math.exp(700.0), rel=1e-9)
    assert fitted_chance(1, 10**5, 0.0, 1e6) == 0.0
    assert fitted_chance(60, 64, 0.01, 0.0) == fitted_chance(60, 64, 0.01, 1.0)
    assert fitted_chance(60, 64, 0.01, 1.0) == pytest.approx(fitted_chance(60, 64, 0.01, 2.0) / 2)


def test_the_largest_residual_is_one_that_chance_does_not_give() -> None:
    def of(rank: int) -> RowSpace:
        return RowSpace(torch.eye(128, dtype=torch.double)[:, :rank], torch.full((rank,), 1e-9))

    for rank in range(1, 128):
        try:
            found = largest_residual(of(rank), 1e6)
        except AttackFailed:
            assert fitted_chance(rank, 128, TOLERANCE, 1e6) > FALSE
        else:
            assert fitted_chance(rank, 128, found, 1e6) <= FALSE and found in (TOLERANT, TOLERANCE)
    assert largest_residual(of(8), 1e6) == TOLERANT
    with pytest.raises(AttackFailed, match="rank 126 of 128 takes any token"):
        largest_residual(of(126), 1e6)
