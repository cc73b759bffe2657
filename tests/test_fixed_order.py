"""DP-FTRL in a training loop: its steps, its noise, its epsilon, and every other way through the batches that is refused."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from private_setting import DATA, Linear, collate
from torch import Tensor
from torch.utils.data import DataLoader

import rasura
from rasura.accounting import epsilon
from rasura.accounting.banded import BandedPlan, banded_sigma
from rasura.accounting.gaussian import gaussian_epsilon
from rasura.accounting.ledger import counted
from rasura.core.interfaces import InputError
from rasura.core.rounding import above
from rasura.integrations.flower.client_rounds import begin_rounds, next_round
from rasura.runs.drawing import ROW
from rasura.runs.noise_target import solved
from rasura.runs.private import ProtectedTraining
from rasura.testing.tiny import tiny

pytest.importorskip("dp_accounting")

BAND = "dp-ftrl:2.0/band=3"
WIDTH = 3
FEATURES: Any = [(torch.randn(WIDTH, generator=torch.Generator().manual_seed(k)), k % 2) for k in range(10)]


def joined(rows: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    return {"features": torch.stack([x for x, _ in rows]), "labels": torch.tensor([y for _, y in rows])}


def linear(defense: Any = BAND, size: int = 3, data: Any = FEATURES, **options: Any) -> ProtectedTraining:
    """A loop over ten rows in batches of three, so that the last batch of a pass has one."""
    torch.manual_seed(0)
    model = Linear(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return rasura.protect_training(model, optimizer, DataLoader(data, size, collate_fn=joined), defense, **options)


def flat(model: Any) -> Tensor:
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters()])


def trained(private: ProtectedTraining, epochs: int) -> list[list[int]]:
    """The rows of every batch of a loop as documented."""
    seen = []
    for batch in itertools.chain.from_iterable(private.loader for _ in range(epochs)):
        assert private.optimizer is not None
        private.optimizer.zero_grad()
        private.model(**batch).loss.backward()
        private.optimizer.step()
        seen.append(batch[ROW].tolist())
    return seen


# --- what it does


def test_without_noise_and_clip_it_is_plain_training_in_that_order() -> None:
    private = linear("dp-ftrl:1e-12/band=3/clip=1e6", epochs=3)
    order = trained(private, 3)
    assert [len(rows) for rows in order[:4]] == [3, 3, 3, 1] and order[:4] == order[4:8] == order[8:]
    assert sorted(row for rows in order[:4] for row in rows) == list(range(10))
    torch.manual_seed(0)
    plain = Linear(WIDTH)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for rows in order:
        optimizer.zero_grad()
        # A batch that is smaller is divided by the size of the others.
        (plain(**joined([FEATURES[k] for k in rows])).loss * len(rows) / 3).backward()
        optimizer.step()
    for one, other in zip(private.model.parameters(), plain.parameters()):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("band", "epochs"), [(1, 2), (3, 2), (4, 3)])
def test_its_noise_has_the_covariance_of_the_plan(band: int, epochs: int) -> None:
    """Against the explicit matrix in float64: gradients of zero, many entries, seeded."""
    width, sigma, clip, n = 6000, 1.5, 0.5, 4
    nothing = [(torch.zeros(width), k % 2) for k in range(n * 2)]
    model = Linear(width).double()
    for p in model.parameters():
        torch.nn.init.zeros_(p)
    model.head.bias.requires_grad_(False)
    data: Any = [(x.double(), y) for x, y in nothing]
    made = rasura.protect_training(
        model,
        None,
        DataLoader(data, 2, collate_fn=joined),
        f"dp-ftrl:{sigma}/band={band}/clip={clip}",
        epochs=epochs,
        seed=3,
    )
    noise = []
    for _ in range(epochs):
        for batch in made.loader:
            model.zero_grad()
            model(**batch).loss.backward()
            assert model.head.weight.grad is not None
            noise.append(2 * model.head.weight.grad.reshape(-1).numpy())
    steps = n * epochs
    c = np.zeros((steps, steps))
    values = [math.comb(2 * k, k) / 4**k for k in range(band)]  # of (1 - x)^(-1/2)
    for row, column in itertools.product(range(steps), repeat=2):
        if 0 <= row - column < band:
            c[row, column] = values[row - column]
    inverse = np.linalg.inv(c)
    wanted = (sigma * clip) ** 2 * inverse @ inverse.T
    found = np.cov(np.stack(noise), bias=True)
    assert np.abs(found - wanted).max() < 6 * wanted.max() / math.sqrt(2 * width)
    white = c @ np.stack(noise) / (sigma * clip)
    assert np.abs(np.cov(white) - np.eye(steps)).max() < 6 / math.sqrt(2 * width)


def test_the_epsilon_is_that_of_the_plan_for_the_steps_made() -> None:
    private = linear(epochs=3)
    ledger = private.ledger
    planned = ledger.planned
    assert planned.epsilon == BandedPlan(2.0, 12, 4, 3).epsilon(0.01) and planned.sampling == "fixed"
    assert planned.neighbours == "the gradient of one text is zero in each of its steps" and not planned.warnings
    assert "differential privacy for each text, without sampling; planned, for 3 epochs (12 releases)" in planned.statement
    made = 0
    for _ in range(2):
        for batch in private.loader:
            private.model(**batch).loss.backward()
            made += 1
            assert ledger.releases == made
            assert ledger.epsilon == BandedPlan(2.0, made, 4, 3).epsilon(0.01)
    assert "counted, after 8 releases" in ledger.spent().statement


def test_band_1_is_independent_noise_without_amplification() -> None:
    private = linear("dp-ftrl:2.0/band=1", epochs=2)
    trained(private, 2)
    assert private.ledger.epsilon == gaussian_epsilon(math.sqrt(2) / 2, 0.01)
    # Each text is in two steps: Gaussian noise twice, at rate 1.
    assert private.ledger.epsilon == pytest.approx(epsilon(2.0, 1.0, 2, 0.01), rel=1e-3)


def test_batches_split_for_the_memory_release_the_same() -> None:
    weights: list[Tensor] = []
    for most in (None, 2):
        model = tiny("bert", "classification", num_labels=2)
        loader: Any = DataLoader(DATA, 6, collate_fn=collate)
        made = rasura.protect_training(
            model, torch.optim.SGD(model.parameters(), 0.1), loader, "dp-ftrl:0.5/band=2/clip=0.1", seed=1,
            physical_batch_size=most,
        )  # fmt: skip
        trained(made, 1)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.allclose(weights[0], weights[1], atol=1e-5)


def test_noise_comes_from_the_operating_system_and_a_seed_promises_nothing() -> None:
    first, second = linear(epochs=2), linear(epochs=2)
    assert trained(first, 1) != trained(second, 1) or not torch.equal(flat(first.model), flat(second.model))
    seeded = linear(epochs=2, seed=0)
    trained(seeded, 1)
    for said in (seeded.ledger.planned, seeded.ledger.spent()):
        assert said.epsilon is None and said.otherwise is not None
        assert said.statement.startswith("no formal guarantee for this run: the noise is seeded")
    assert linear("dp-ftrl:1e-9/band=2").ledger.planned.statement.startswith("no formal guarantee: sigma 1e-09 is too small")


def test_a_target_gets_the_least_noise() -> None:
    private = linear("dp-ftrl:band=4/clip=0.5", epochs=3, target_epsilon=3.0)
    spent = private.ledger.planned.epsilon or 0
    assert 2.999 < spent <= 3.0
    assert spent == BandedPlan(banded_sigma(3.0, 12, 4, 4, 0.01), 12, 4, 4).epsilon(0.01)
    tight = linear("dp-ftrl:band=4", epochs=3, target_epsilon=1e-3, delta=1e-6)
    (known,) = tight.ledger.defense
    assert 0.99e-3 < (tight.ledger.planned.epsilon or 0) <= 1e-3 and float(known.parameters["sigma"] or 0) > 100
    for target, says in ((0.0, "target epsilon is 0.0"), (float("nan"), "target epsilon is nan"), (1e-9, "no noise up to")):
        with pytest.raises(InputError, match=says):
            linear("dp-ftrl:band=4", epochs=3, target_epsilon=target, delta=1e-9)
    with pytest.raises(InputError, match="dp-ftrl needs a band"):
        linear("dp-ftrl", epochs=3, target_epsilon=3.0)
    with pytest.raises(InputError, match="names its noise, and a target epsilon was given"):
        linear(BAND, epochs=3, target_epsilon=3.0)
    with pytest.raises(InputError, match="band 5 is above the separation 4"):
        solved("dp-ftrl:band=5", 3.0, rasura.accounting.Run(10, 3, 3))


def test_max_steps_end_the_plan_within_a_pass() -> None:
    private = linear(epochs=3, max_steps=6)
    assert private.ledger.planned.epsilon == BandedPlan(2.0, 6, 4, 3).epsilon(0.01)
    trained(private, 1)
    part = iter(private.loader)
    for batch in itertools.islice(part, 2):
        private.model(**batch).loss.backward()
    assert private.ledger.epsilon == private.ledger.planned.epsilon
    with pytest.raises(InputError, match=r"all 6 planned releases \(3 epochs\) were made"):
        private.model(**next(part))


def test_a_protection_beside_it_with_a_proof_keeps_its_guarantee() -> None:
    model = tiny("bert", "classification", num_labels=2)
    loader: Any = DataLoader(DATA, 12, collate_fn=collate)
    made = rasura.protect_training(model, None, loader, f"frozen-embeddings+{BAND.replace('3', '2')}+fp16", epochs=2)
    for _ in range(2):
        for batch in made.loader:
            made.model(**batch).loss.backward()
    assert made.ledger.epsilon == BandedPlan(2.0, 4, 2, 2).epsilon(0.1 / 24)


# --- what is refused


@pytest.mark.parametrize(
    ("defense", "options", "says"),
    [
        ("dp-ftrl:1.0/band=5", {}, "the band 5 is above the 4 batches of a pass, and nothing is proven"),
        ("dp-ftrl:1.0", {}, "dp-ftrl needs a band"),
        ("dp-ftrl:1.0/band=0", {}, "dp-ftrl: band is 0"),
        ("dp-ftrl:0/band=2", {}, "dp-ftrl: sigma is 0"),
        ("dp-ftrl:1.0/band=2/clip=0", {}, "dp-ftrl: clip is 0"),
        ("dp-ftrl:1.0/band=2/quantile=0.5", {}, "dp-ftrl has no option 'quantile'"),
        ("dp-ftrl:1.0/band=2/per=layer", {}, "dp-ftrl has no option 'per'"),
        ("dp-ftrl:1.0/band=2/noise=laplace", {}, "dp-ftrl has no option 'noise'"),
        ("dp-ftrl:1.0/band=2+accumulate:4", {}, "accumulate holds an update back"),
        ("dp-ftrl:1.0/band=2+sealing:all", {}, "sealing hides entries from a server"),
        ("dp-ftrl:1.0/band=2+dp-sgd:1.0", {}, "both aggregate the batch"),
        ("dp-ftrl:1.0/band=2+qsgd:4", {}, "dp-ftrl trains only where its guarantee holds: nothing is proven"),
        (BAND, {"unit": list("aabbccddee")}, "a guarantee for persons needs dp-sgd or normalised"),
        (BAND, {"poisson": False}, "dp-ftrl draws nothing by chance"),
        (BAND, {"canaries": rasura.GradientCanaries(100)}, "gradient canaries need dp-sgd or normalised"),
    ],
)  # fmt: skip
def test_what_has_no_proof_is_refused_before_training(defense: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        linear(defense, epochs=2, **options)


def refused(private: Any, batch: Any, says: str) -> None:
    """The batch is refused, and neither was a release counted nor noise drawn."""
    before = private.ledger.releases, private.loader.order.noise.drawn
    with pytest.raises(InputError, match=says):
        private.model(**batch).loss.backward()
    assert before == (private.ledger.releases, private.loader.order.noise.drawn)


def test_batches_in_another_order_left_out_or_twice_are_refused() -> None:
    private = linear(epochs=3)
    first, second, third, last = list(private.loader)
    refused(private, second, "expected batch 1 of 4 in pass 1, and this is another batch")
    private.model(**first).loss.backward()
    for wrong in (first, third, last):
        refused(private, wrong, "expected batch 2 of 4 in pass 1")
    private.model(**second).loss.backward()
    private.model(**third).loss.backward()
    private.model(**last).loss.backward()
    refused(private, second, "expected batch 1 of 4 in pass 2")
    private.model(**first).loss.backward()
    assert private.ledger.epsilon == BandedPlan(2.0, 5, 4, 3).epsilon(0.01)


def test_batches_from_elsewhere_of_another_size_or_changed_are_refused() -> None:
    private = linear(epochs=3)
    batch = next(iter(private.loader))
    mixed = {**batch, ROW: torch.tensor([k for k in range(10) if k not in batch[ROW].tolist()][:3])}
    twice = {**batch, ROW: batch[ROW][[0, 0, 1]]}
    for wrong in ({k: v[:2] for k, v in batch.items()}, mixed, twice, {k: torch.cat([v, v]) for k, v in batch.items()}):
        refused(private, wrong, "this is another batch")
    own = {k: v for k, v in batch.items() if k != ROW}
    for wrong in (own, {**own, ROW: batch[ROW][:2]}, {**own, ROW: torch.tensor(0)}):
        refused(private, wrong, f"needs {ROW} in each batch")
    sampled = linear("dp-sgd:1.0", epochs=3)
    with pytest.raises(InputError, match="was not handed out in this pass by the loader itself"):
        sampled.model(**batch)
    given = linear("dp-sgd:1.0", epochs=3, poisson=False)
    with pytest.raises(InputError, match=f"the batches of a given loader, which have no {ROW}"):
        given.model(**batch)
    for name in own:
        refused(private, {**batch, name: batch[name] + 1}, f"{name} of row .* is not as the loader handed it out")
    private.model(**{k: v.flip(0) for k, v in batch.items()}).loss.backward()  # its rows have no order
    assert private.ledger.releases == 1


def test_a_pass_that_is_begun_again_is_refused_and_a_look_is_not() -> None:
    private = linear(epochs=3)
    next(iter(private.loader))  # a look at a batch, which trains nothing
    trained(private, 1)
    for batch in itertools.islice(private.loader, 2):
        private.model(**batch).loss.backward()
    with pytest.raises(InputError, match="the pass before ended after 2 of its 4 batches, and a pass cannot be begun again"):
        trained(private, 1)
    assert private.ledger.epsilon == BandedPlan(2.0, 6, 4, 3).epsilon(0.01)


def test_two_passes_at_once_cannot_mix() -> None:
    private = linear(epochs=3)
    one, other = iter(private.loader), iter(private.loader)
    private.model(**next(one)).loss.backward()
    refused(private, next(other), "expected batch 2 of 4 in pass 1")


def test_a_batch_without_its_backward_pass_stops_the_training_until_it_has_it() -> None:
    private = linear(epochs=3)
    first, second, *_ = list(private.loader)
    loss = private.model(**first).loss
    for batch in (first, second):
        refused(private, batch, "the noise of batch 1 of 4 in pass 1 was drawn, and nothing was released with it")
    loss.backward()
    with pytest.raises(InputError, match="already had its backward pass"):
        loss.backward()
    with torch.no_grad():
        private.model(**first)
    private.model(**second).loss.backward()
    assert private.ledger.releases == 2


def test_more_steps_than_planned_are_refused() -> None:
    private = linear(epochs=1)
    trained(private, 1)
    refused(private, next(iter(private.loader)), r"all 4 planned releases \(1 epochs\) were made")


def test_a_gradient_that_is_not_finite_releases_nothing_and_draws_no_noise() -> None:
    private = linear(epochs=1)
    batch = next(iter(private.loader))
    weight: Any = private.model.head.weight  # type: ignore[union-attr]
    before = weight.detach().clone()
    weight.data.fill_(math.nan)
    refused(private, batch, "not a finite number")
    weight.data.copy_(before)
    private.model(**batch).loss.backward()
    assert private.ledger.releases == 1


def test_other_trained_entries_than_before_are_refused() -> None:
    private = linear(epochs=2)
    first, second, *_ = list(private.loader)
    private.model(**first).loss.backward()
    private.model.head.bias.requires_grad_(False)  # type: ignore[union-attr, operator]
    refused(private, second, r"the shape is \(6,\); expected \(8,\)")


def test_a_training_cannot_be_resumed_or_copied(tmp_path: Path) -> None:
    private = linear(epochs=3)
    trained(private, 1)
    private.ledger.save(tmp_path / "ledger.json")
    again = linear(epochs=3)
    with pytest.raises(InputError, match="a training under dp-ftrl cannot be resumed: the noise of its next step depends"):
        again.ledger.load(tmp_path / "ledger.json")
    with pytest.raises(InputError, match="cannot be copied or saved"):
        copy.deepcopy(private.loader)
    assert counted(tmp_path / "ledger.json").epsilon == private.ledger.epsilon
    begin_rounds(tmp_path / "client.json")
    with pytest.raises(InputError, match="cannot be resumed"), next_round(tmp_path / "client.json", private.ledger):
        raise AssertionError("a first round of several")
    assert not (tmp_path / "client.json.running").exists()


def test_a_ledger_file_of_another_order_has_no_epsilon(tmp_path: Path) -> None:
    """The file says how many batches each pass had: every pass but the last is whole."""
    private = linear(epochs=3)
    trained(private, 2)
    state = private.ledger.state_dict()
    (first, second), path = state["runs"], tmp_path / "ledger.json"

    def said(*runs: Any, **other: Any) -> Any:
        path.write_text(json.dumps({**state, "runs": list(runs), **other}))
        return counted(path)

    def release(one: Any, **changed: Any) -> Any:
        return {**one, "release": {**one["release"], **changed}}

    assert said(first, second).epsilon == BandedPlan(2.0, 8, 4, 3).epsilon(0.01)
    short = {**first, "count": 2}
    for runs in ((short, second), (second, first), (first, first), (second,), ({**first, "count": 5},),
                 (first, release(second, multiplier=9.0)), (first, release(second, band=1)),
                 (first, release(second, clip=9.0))):  # fmt: skip
        with pytest.raises(InputError, match="not those of a fixed order"):
            said(*runs)
    assert said(first, second, batch_size=2).statement.startswith("no formal guarantee: dp-ftrl needs batches")
    unknown = {"sampling": "unknown", "number": None, "separation": None}
    assert said(release(first, **unknown)).epsilon is None
    for wrong in ({"sampling": "poisson", "rate": 0.3}, {"sampling": "disjoint"}, {"band": 5}, {"band": None},
                  {"separation": None}, {"noise": "laplace"}, {"number": None}, {"mechanism": "dp-sgd"}):  # fmt: skip
        with pytest.raises(InputError, match="accounting: a release with"):
            said(release(first, **wrong))


# --- the Trainer


def trainer(folder: Path, defense: str = "dp-ftrl:1.0/band=4", **more: Any) -> Any:
    settings: Any = {"per_device_train_batch_size": 3, "num_train_epochs": 2, "save_strategy": "epoch", **more}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1, **settings
    )
    model = tiny("bert", "classification", num_labels=2)
    return rasura.PrivateTrainer(model, arguments, collate, DATA, defense=defense)


@pytest.mark.slow
def test_the_trainer_keeps_the_order_and_refuses_to_resume(tmp_path: Path) -> None:
    run = trainer(tmp_path, gradient_accumulation_steps=2)
    run.train()
    assert run.ledger.releases == 8
    assert run.guarantee.epsilon == BandedPlan(1.0, 8, 4, 4).epsilon(0.1 / 24)
    assert [row["epsilon"] for row in run.state.log_history if "epsilon" in row][-1] == float(above(run.guarantee.epsilon))
    again = trainer(tmp_path, gradient_accumulation_steps=2)
    with pytest.raises(InputError, match="cannot be resumed"):
        again.train(resume_from_checkpoint=True)
    with pytest.raises(InputError, match="planned releases"):
        run.train()
