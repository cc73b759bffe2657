"""Canary gradients in a private training: clipped and counted as texts are, below a true claim and above a false one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_setting import DATA, Linear, collate
from torch.utils.data import DataLoader

import rasura
from rasura.accounting import Draw
from rasura.accounting.one_run import LowerBound
from rasura.core.errors import InputError
from rasura.core.interfaces import made
from rasura.core.mechanisms import DpSgd
from rasura.core.rng import generator
from rasura.core.values import PerExample
from rasura.defenses.dp_sgd import dp_sgd
from rasura.runs.gradient_canaries import CanaryBounds
from rasura.testing.tiny import tiny

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

WIDTH = 600


def trained(defense: Any, canaries: rasura.GradientCanaries, *, steps: int = 20, **options: Any) -> rasura.Ledger:
    rng = generator(0, "features")
    data: Any = [{"features": torch.randn(WIDTH, generator=rng), "labels": torch.tensor(k % 2)} for k in range(60)]
    model = Linear(WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(data, batch_size=30)
    model, _, drawn, ledger = rasura.protect_training(  # type: ignore[assignment]
        model, optimizer, loader, defense, epochs=steps // 2, delta=1e-5, canaries=canaries, **options
    )
    for _ in range(steps // 2):
        for batch in drawn:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return ledger


@pytest.mark.parametrize("defense", ["dp-sgd:2.633", "normalised:2.633", "dp-sgd:2.633/clip=0.01"])
def test_a_whole_training_keeps_its_claim_and_something_is_shown(defense: str) -> None:
    canaries = rasura.GradientCanaries(1000)
    ledger = trained(defense, canaries)
    found = canaries.measure(ledger)
    assert found.stated == ledger.epsilon and 3.9 < found.stated < 4.1
    # A bound of 0, or above the claim, comes once in thousands of runs.
    assert 0 < found.bound.epsilon < found.stated and found.bound.epsilon < found.gaussian.epsilon < found.stated
    assert not found.refuted and "Stated: 3.999" in found.statement and found.bound.guesses == 200


@pytest.mark.parametrize("width", [0.2, 1e-6])
def test_less_noise_than_is_counted_is_refuted(width: float) -> None:
    """The protection says a multiplier of 8.548, for an epsilon of 1, and draws far less."""
    less = dp_sgd(width)
    broken = made(less.stage, DpSgd(8.548), less.init, less.apply)
    canaries = rasura.GradientCanaries(1000)
    found = canaries.measure(trained((broken,), canaries))
    assert found.stated is not None and found.stated < 1 and found.refuted and found.statement.endswith("it is refuted.")


def test_noise_that_is_repeated_is_refuted() -> None:
    own, rng = dp_sgd(1e-9), generator(1)
    noise = {
        n: 8.548 / 30 * torch.randn(shape, generator=rng)
        for n, shape in {"head.weight": (2, WIDTH), "head.bias": (2,)}.items()
    }

    def apply(examples: PerExample, state: None, rng: Any) -> Any:
        found, _ = own.apply(examples, state, rng)
        return {n: g + noise[n] for n, g in found.items()}, None

    broken = made(own.stage, DpSgd(8.548), own.init, apply)
    canaries = rasura.GradientCanaries(1000)
    assert canaries.measure(trained((broken,), canaries)).refuted


def test_a_seeded_training_states_nothing() -> None:
    canaries = rasura.GradientCanaries(100)
    found = canaries.measure(trained("dp-sgd:2.0", canaries, seed=0))
    assert found.stated is None and not found.refuted and "No epsilon is stated" in found.statement


@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
@pytest.mark.parametrize("size", [0, 3])
def test_a_canary_adds_the_clip_at_its_entry(noise: str, size: int) -> None:
    shapes = {"a": (3, 4), "b": (20,)}
    rows = [{n: torch.full(s, 0.001) for n, s in shapes.items()} for _ in range(size)]
    zeros = {n: torch.zeros(s) for n, s in shapes.items()}

    def weighted(weigh: Any, by_layer: bool = False) -> Any:
        return {n: sum((r[n] for r in rows), zeros[n]) for n in shapes}

    canaries = rasura.GradientCanaries(20)
    defense, released = canaries.joined((dp_sgd(1e-9, 0.5, noise),), Draw("poisson", 1.0), shapes)
    examples = PerExample(lambda: zeros, lambda: iter(rows), size, weighted, expected=1)
    found, _ = defense[0].apply(examples, None, generator(0))
    assert canaries.releases == 0
    released()
    total = torch.cat([g.reshape(-1) for g in found.values()]) - 0.001 * size
    assert int((total.abs() > 0.4).sum()) == canaries.included.sum() and canaries.releases == 1
    assert total[total.abs() > 0.4].abs().numpy() == pytest.approx(0.5, abs=1e-6)
    totals = np.array(canaries.state_dict()["totals"])
    assert totals[canaries.included] == pytest.approx(0.5, abs=0.005)
    assert totals[~canaries.included] == pytest.approx(0.0, abs=0.005)


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for number in (19, True, 30.0):
        with pytest.raises(InputError, match="canaries; expected at least 20"):
            rasura.GradientCanaries(number)  # type: ignore[arg-type]
    for defense, options in (("none", {}), ("directional:100", {}), ("dp-sgd:1.0", {"poisson": False})):
        with pytest.raises(InputError, match="Poisson sampling"):
            trained(defense, rasura.GradientCanaries(20), **options)
    with pytest.raises(InputError, match="1202 weights are trained"):
        trained("dp-sgd:1.0", rasura.GradientCanaries(2000))
    with pytest.raises(InputError, match="saw no release"):
        rasura.GradientCanaries(20).measure(trained("dp-sgd:1.0", rasura.GradientCanaries(20), steps=2))
    canaries = rasura.GradientCanaries(20)
    trained("dp-sgd:1.0", canaries, steps=2)
    with pytest.raises(InputError, match="saw 2 releases, but the ledger counted 4"):
        canaries.measure(trained("dp-sgd:1.0", rasura.GradientCanaries(20), steps=4))
    with pytest.raises(InputError, match="other parameters"):
        canaries.joined((dp_sgd(1.0),), Draw("poisson", 0.5), {"a": (30,)})
    with pytest.raises(InputError, match="already saw 2 releases"):
        canaries.load_state_dict(canaries.state_dict())
    broken: list[dict[str, Any]] = [
        {"version": 2}, {"places": []}, {"totals": [float("nan")] * 20}, {"signs": [2.0] * 20}, {"shapes": {}}
    ]  # fmt: skip
    for wrong in broken:
        with pytest.raises(InputError, match="no state of gradient canaries"):
            rasura.GradientCanaries(20).load_state_dict({**canaries.state_dict(), **wrong})
    (tmp_path / "other.json").write_text("[")
    with pytest.raises(InputError, match="no state of gradient canaries"):
        rasura.GradientCanaries(20).load(tmp_path / "other.json")


def test_a_loss_without_its_backward_pass_counts_for_nobody() -> None:
    canaries = rasura.GradientCanaries(20)
    model = tiny("bert", "classification", num_labels=2)
    _, _, loader, ledger = rasura.protect_training(
        model, None, DataLoader(DATA, batch_size=12, collate_fn=collate), "dp-sgd:1.0", canaries=canaries
    )
    first, second = loader
    loss = model(**first).loss
    assert ledger.releases == canaries.releases == 0
    with pytest.raises(InputError, match="the batch before had no backward pass"):
        model(**second)
    loss.backward()
    assert ledger.releases == canaries.releases == 1


def trainer(output: Path, canaries: rasura.GradientCanaries, epochs: int, *callbacks: Any) -> rasura.PrivateTrainer:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(output), num_train_epochs=epochs, per_device_train_batch_size=12, save_strategy="epoch", use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    model = tiny("bert", "classification", num_labels=2)
    return rasura.PrivateTrainer(
        model, arguments, collate, DATA, defense="dp-sgd:1.0", canaries=canaries, callbacks=list(callbacks)
    )


def test_nothing_that_is_uploaded_in_a_training_holds_the_coins(tmp_path: Path) -> None:
    """They lay in the checkpoints, which wandb, MLflow and the hub are given; DVC is given the whole output folder."""
    transformers = pytest.importorskip("transformers")
    given: list[str] = []

    class Uploads(transformers.TrainerCallback):  # type: ignore[misc,name-defined]  # transformers has no types here
        def on_save(self, args: Any, *rest: Any, **more: Any) -> None:
            files = [f for f in Path(args.output_dir).rglob("*") if f.is_file()]
            given.extend(str(f.relative_to(args.output_dir)) for f in files)
            assert not [f for f in files if "canar" in f.name or b'"included"' in f.read_bytes()]

    out, kept = tmp_path / "out", tmp_path / "out.canaries"
    first, second, third = (rasura.GradientCanaries(50) for _ in range(3))
    trainer(out, first, 1, Uploads()).train()
    assert "checkpoint-2/rasura_ledger.json" in given and first.releases == 2
    assert (kept / "checkpoint-2.json").stat().st_mode & 0o077 == 0 and kept.stat().st_mode & 0o077 == 0
    second.load(kept / "checkpoint-2.json")
    assert (second.included == first.included).all() and second.releases == 2
    (kept / "checkpoint-2.json").rename(out / "moved.json")
    with pytest.raises(InputError, match=r"file of canaries \S+out\.canaries/checkpoint-2\.json cannot be read"):
        trainer(out, third, 2).train(resume_from_checkpoint=True)
    (tmp_path / "other.canaries").touch()
    refused = trainer(tmp_path / "other", third, 1)
    with pytest.raises(InputError, match=r"other\.canaries cannot be made .* choose another output_dir"):
        refused.train()
    assert third.releases == 0


@pytest.mark.slow
@pytest.mark.parametrize("earlier", [False, True])
def test_the_trainer_keeps_canaries_with_its_checkpoints(tmp_path: Path, earlier: bool) -> None:
    out, first, second = tmp_path / "out", rasura.GradientCanaries(50), rasura.GradientCanaries(50)
    trainer(out, first, 1).train()
    kept = tmp_path / "out.canaries" / "checkpoint-2.json"
    if earlier:  # as earlier versions kept them
        kept.rename(out / "checkpoint-2" / "rasura_canaries.json")
    resumed = trainer(out, second, 2)
    resumed.train(resume_from_checkpoint=True)
    assert (second.included == first.included).all() and second.releases == 4
    assert resumed.ledger is not None and second.measure(resumed.ledger).bound.canaries == 50
    assert kept.with_name("checkpoint-4.json").exists()


@pytest.mark.parametrize(("plain", "gaussian", "says"), [
    (0.0, 0.0, " The guesses show nothing"), (0.0, 0.211, " Without that assumption the guesses show nothing"),
    (0.5, 0.6, ""),
])  # fmt: skip
def test_what_guesses_do_not_show_is_said_of_the_bound_that_is_0(plain: float, gaussian: float, says: str) -> None:
    one, other = (LowerBound(epsilon, 1e-5, 0.95, 100, 20, 12) for epsilon in (plain, gaussian))
    told = CanaryBounds(one, other, 8.0).statement
    assert says in told and ("show nothing" in told) == bool(says)
