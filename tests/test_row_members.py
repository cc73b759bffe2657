"""Which public rows an obfuscated row was mixed from, exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rasura.attacks.services.members import COARSEST, FINEST, exactness, joined, members, pursued
from rasura.core.rng import generator
from rasura.service_protections.obfuslm.model import obfuscate_embedding
from rasura.service_protections.obfuslm.settings import ObfuscationSettings


def mixed(rows: int, width: int, settings: ObfuscationSettings) -> tuple[Tensor, Tensor, Tensor]:
    """A public table, what is served of it, and the token that each of its rows stands for."""
    table = torch.randn(rows, width, generator=generator(2))
    embedding = nn.Embedding(rows, width)
    embedding.weight = nn.Parameter(table, requires_grad=False)
    made = obfuscate_embedding(embedding, settings, rng=generator(3))
    return table, made.model.get_parameter("weight").detach(), made.tokens.argsort()


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("k", [1, 4])
def test_a_row_shows_the_cluster_that_it_was_mixed_from(k: int, calibrated: bool) -> None:
    table, served, tokens = mixed(120, 96, ObfuscationSettings(k, 0.1, calibrated=calibrated))
    alone = pursued(served, table, torch.arange(120), 32, FINEST)
    for one, row in zip(alone, served, strict=True):
        assert one is not None and sum(one.values()) == pytest.approx(1, abs=1e-4)
        again = (torch.tensor(list(one.values()))[:, None] * table[list(one)]).sum(0)
        assert torch.allclose(again, row, atol=1e-4)
    found = members(served, served, table, torch.arange(120), k, FINEST)
    assert sum(one is not None and own in one for one, own in zip(found, tokens.tolist(), strict=True)) > 0.9 * len(served)


def test_rows_that_lost_their_small_weights_show_the_cluster_together() -> None:
    table, served, tokens = mixed(400, 128, ObfuscationSettings(12, 0.1, calibrated=True))
    some, every = torch.arange(0, 400, 10), torch.arange(400)
    alone = pursued(served[some], table, every, 36, FINEST)
    found = members(served[some], served, table, every, 12, FINEST)
    held = [
        sum(one is not None and own in one for one, own in zip(r, tokens[some].tolist(), strict=True))
        for r in (alone, found)
    ]
    assert held[0] < 0.6 * len(some) and held[1] > 0.7 * len(some), held
    assert max(len(one) for one in found if one is not None) < 200, "clusters of their own do not run together"


def test_what_is_no_mixture_of_few_rows_is_none() -> None:
    table, served, _ = mixed(120, 48, ObfuscationSettings(4, 0.1))
    moved = served + 1e-3 * torch.randn(served.shape, generator=generator(5))
    moved[0] = torch.nan
    assert pursued(moved, table, torch.arange(120), 12, COARSEST) == [None] * 120
    assert members(moved, moved, table, torch.arange(120), 4, COARSEST) == [None] * 120


def test_clusters_join_where_rows_share_a_member() -> None:
    found = joined([{1: 0.5, 2: 0.5}, None, {3: 1.0}, {2: 0.9, 4: 0.1}, {4: 1.0, 3: 1e-7}], 1e-6)
    assert {t: sorted(group) for t, group in found.items()} == {1: [1, 2, 4], 2: [1, 2, 4], 4: [1, 2, 4], 3: [3]}


def test_special_rows_tell_how_exact_a_table_is() -> None:
    table = torch.randn(20, 8, generator=generator(1))
    assert exactness(table, table, [0, 1]) == FINEST
    assert FINEST < exactness(table * (1 + 2e-6), table, [0, 1]) < COARSEST
    assert exactness(table + 0.1, table, [0]) == COARSEST and exactness(table, table, []) == FINEST
    assert exactness(torch.full_like(table, torch.nan), table, [0]) == COARSEST
    table[0] = 0.0
    assert exactness(table, table, [0, 1]) == FINEST, "padding of zeros says nothing"
