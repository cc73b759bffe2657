"""Noise in a secure sum covers every entry that is sent, or there is none: a ledger that states less would be false."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rounds_setting import model

from rasura.accounting.distributed import SumLedger
from rasura.core.errors import InputError
from rasura.defenses.sealing import parsed
from rasura.defenses.secure_aggregation.noise import NORM
from rasura.integrations.flower.agreement import Agreement, agree
from rasura.integrations.flower.collector import Collector
from rasura.integrations.flower.secure_sums import SecureSums

NOISY = "sealing:all/by=secagg/noise=1.0/clip=0.1"


def agreed() -> Agreement:
    return agree(NOISY, model())


@pytest.mark.parametrize("embeddings", ["counted", "sealed"])
def test_noise_with_every_entry_in_the_sum_is_agreed_on(embeddings: str) -> None:
    made = agree(f"{NOISY}/embeddings={embeddings}", model())
    assert made.noise == 1.0 and made.count == sum(t.numel() for t in made.start.values())


def test_noise_beside_a_clear_embedding_table_is_refused_when_it_is_read() -> None:
    with pytest.raises(InputError, match="without embeddings=clear; clear entries have none"):
        parsed("all/by=secagg/noise=1.0/clip=0.1/embeddings=clear")
    assert parsed("all/by=secagg/embeddings=clear").noise == 0


def test_an_agreement_on_noise_has_no_hole_in_its_mask_whoever_made_it() -> None:
    whole = agreed()
    name = next(iter(whole.masked))
    hole = whole.masked[name].clone()
    hole.view(-1)[0] = False
    holes = {**whole.masked, name: hole}
    missing = {n: m for n, m in whole.masked.items() if n != name}
    counted = {n: torch.ones(t.shape) for n, t in whole.start.items()}
    for masked in (holes, missing, counted, {}):
        with pytest.raises(InputError, match="summed securely, and the rest would be sent in the clear"):
            replace(whole, masked=masked)
    assert replace(whole, masked=holes, noise=0.0).count == whole.count - 1


def test_a_sum_with_noise_is_counted_by_a_ledger_of_as_many_entries(tmp_path: Path) -> None:
    made = agreed()
    ledger = SumLedger(NORM, made.count - 1)
    with pytest.raises(InputError, match=f"counts sums of {made.count - 1} entries, and an update has {made.count}"):
        SecureSums(made, 1, bytes(32), print, lambda stage, data: (), ledger)
    assert Collector(made).ledger.entries == made.count
    for wrong in (ledger, SumLedger(NORM + 1, made.count)):
        with pytest.raises(InputError, match=f"expected {made.count} entries of the norm {NORM}"):
            Collector(made, earlier=wrong)
    earlier = SumLedger(NORM, made.count)
    earlier.made(NORM, 8, 2)
    going_on = Collector(made, earlier=SumLedger.read(earlier.state_dict()))
    going_on.ledger.made(NORM, 8, 2)
    assert going_on.ledger.rho == 2 * earlier.rho, "a run that goes on from saved weights is no first run"
    for runs in (1, 2):
        counting = Collector(made, earlier=tmp_path / "ledger.json").ledger
        counting.made(NORM, 8, 2)
        assert counting.rho == runs * earlier.rho
    SumLedger.kept(tmp_path / "other.json", NORM, made.count - 1).made(NORM, 8, 2)
    with pytest.raises(InputError, match=f"expected {made.count} entries"):
        Collector(made, earlier=tmp_path / "other.json")
    SecureSums(made, 1, bytes(32), print, lambda stage, data: (), Collector(made).ledger)
