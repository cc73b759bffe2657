"""Training to a target epsilon, in batches larger than the memory: the noise found, what is released and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from audit_setting import model_folder
from private_setting import DATA, collate
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader
from training_setting import notes
from typer.testing import CliRunner

import rasura
from rasura.accounting import Run, epsilon
from rasura.cli import app
from rasura.core.interfaces import InputError
from rasura.defenses.dp_sgd import dp_sgd
from rasura.runs.noise_target import noiseless, solved, solved_all, with_noise
from rasura.runs.private import ProtectedTraining
from rasura.testing.tiny import tiny
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.per_example import fault
from rasura.victims.step import message_for

__all__ = ["model_folder"]

pytest.importorskip("dp_accounting")

RUN = Run(1000, 50, 3)


def loop(defense: Any, size: int = 4, **options: Any) -> ProtectedTraining:
    loader = DataLoader(DATA, size, shuffle=True, collate_fn=collate)
    model = tiny("bert", "classification", num_labels=2)
    return rasura.protect_training(model, torch.optim.SGD(model.parameters(), 0.1), loader, defense, **options)


def one_pass(private: ProtectedTraining) -> int:
    count = 0
    for batch in private.loader:
        private.model(**batch).loss.backward()
        count += 1
    return count


@pytest.mark.parametrize("target", [3.0])
def test_the_noise_is_the_least_that_keeps_the_target(target: float) -> None:
    text = solved("dp-sgd", target, RUN)
    sigma = float(text.removeprefix("dp-sgd:"))
    spent = [epsilon(s, RUN.rate, RUN.steps, RUN.fails) for s in (sigma, 0.997 * sigma)]
    assert spent[0] <= target < spent[1]


def test_only_the_part_with_noise_changes() -> None:
    assert with_noise("frozen-blocks:1+dp-sgd:clip=0.5+fp16", 1.5) == "frozen-blocks:1+dp-sgd:1.5/clip=0.5+fp16"
    assert solved("frozen-blocks:1+normalised", 3.0, RUN).startswith("frozen-blocks:1+normalised:")
    none, text = solved_all(("none", "dp-sgd"), 3.0, RUN)
    assert none == "none" and text == solved("dp-sgd", 3.0, RUN)
    assert not noiseless("gaussian:0.1")


@pytest.mark.slow
def test_laplace_noise_is_found_too() -> None:
    text = solved("dp-sgd:noise=laplace", 3.0, RUN)
    assert text != solved("dp-sgd", 3.0, RUN) and text.endswith("/noise=laplace")


@pytest.mark.parametrize(
    ("defense", "target", "run", "says"),
    [
        ("dp-sgd:1.0", 3.0, RUN, "names its noise, and a target epsilon was given"),
        ("dp-sgd:sigma=1.0", 3.0, RUN, "names its noise"),
        ("gaussian:0.1", 3.0, RUN, "no part whose noise a target epsilon sets"),
        ("dp-sgd+normalised", 3.0, RUN, "2 protections with noise"),
        ("dp-sgd", 3.0, Run(1000, 50, 3, sampling="shuffled"), "nothing is proven for a loader that shuffles"),
        ("dp-sgd", 0.0, RUN, "the target epsilon is 0"),
        ("dp-sgd", float("nan"), RUN, "the target epsilon is nan"),
        ("dp-sgd", 1e-9, RUN, "no noise up to 100000 is shown to give epsilon 1e-09"),
    ],
)
def test_what_cannot_be_reached_is_refused_in_words(defense: str, target: float, run: Run, says: str) -> None:
    with pytest.raises(InputError, match=says):
        solved(defense, target, run)


@pytest.mark.slow
def test_a_loop_spends_its_target_and_no_more() -> None:
    private = loop("dp-sgd", target_epsilon=3.0, epochs=2)
    assert 2.9 < (private.ledger.planned.epsilon or 0) <= 3.0
    assert one_pass(private) + one_pass(private) == 12
    assert private.ledger.epsilon == pytest.approx(private.ledger.planned.epsilon) and private.ledger.epsilon <= 3.0
    with pytest.raises(InputError, match="all 12 planned releases"):
        one_pass(private)
    with pytest.raises(InputError, match=r"epsilon 3 was not reached: no formal guarantee"):
        loop("dp-sgd", target_epsilon=3.0, seed=1)
    with pytest.raises(InputError, match="needs the protection as text"):
        loop((dp_sgd(1.0),), target_epsilon=3.0)
    with pytest.raises(InputError, match="a loader that shuffles"):
        loop("dp-sgd", target_epsilon=3.0, poisson=False)


def kept(private: ProtectedTraining) -> Any:
    """The state of its ledger, as it is read from a file."""
    return json.loads(json.dumps(private.ledger.state_dict()))


@pytest.mark.slow
def test_a_resumed_training_keeps_its_target() -> None:
    """The target was that of the new plan alone: 3.9 was spent under a target of 3."""
    first = loop("dp-sgd", target_epsilon=3.0, epochs=2)
    one_pass(first)
    half = kept(first)
    one_pass(first)
    longer = loop("dp-sgd", target_epsilon=3.0, epochs=6)
    with pytest.raises(
        InputError, match=r"^epsilon 3 was not reached: the loaded releases count as well\. Plan fewer epochs"
    ):
        longer.ledger.load_state_dict(kept(first))
    assert longer.ledger.releases == 0
    again = loop("dp-sgd", target_epsilon=3.0, epochs=2)
    again.ledger.load_state_dict(half)
    assert again.ledger.planned.epsilon == pytest.approx(first.ledger.epsilon) and again.ledger.planned.steps == 12
    one_pass(again)
    assert again.ledger.releases == 12 and 2.9 < again.ledger.epsilon <= 3.0
    with pytest.raises(InputError, match="all 12 planned releases"):
        one_pass(again)


@pytest.mark.slow
@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "directional:1e3"])
def test_the_plan_of_a_resumed_training_has_what_was_spent_before(defense: str) -> None:
    first = loop("dp-sgd:0.5" if defense.startswith("dp") else defense, epochs=1)
    one_pass(first)
    second = loop(defense, epochs=3)
    fresh = second.ledger.planned
    second.ledger.load_state_dict(kept(first))
    planned = second.ledger.planned
    assert planned.steps == fresh.steps and (planned.epsilon == fresh.epsilon) == defense.startswith("directional")
    one_pass(second)
    one_pass(second)
    assert second.ledger.epsilon == pytest.approx(planned.epsilon) and second.ledger.spent().pure == planned.pure


def test_a_release_that_would_pass_the_target_is_refused() -> None:
    private = loop("dp-sgd", target_epsilon=3.0, epochs=2)
    one_pass(private)
    ((release, count),) = private.ledger.runs
    assert count == 6
    for changed in ({"multiplier": release.multiplier / 2}, {"rate": 1.0}, {"sampling": "unknown"}):
        with pytest.raises(InputError, match=r"^epsilon 3 was not reached: with a release apart from the plan, "):
            private.ledger.append(dataclasses.replace(release, **changed))
    private.ledger.append(dataclasses.replace(release, multiplier=2 * release.multiplier))
    assert private.ledger.releases == 7


@pytest.mark.slow
def test_steps_end_at_max_steps_and_need_less_noise() -> None:
    private = loop("dp-sgd", target_epsilon=3.0, epochs=2, max_steps=7)
    assert one_pass(private) == 6
    with pytest.raises(InputError, match="all 7 planned releases"):
        one_pass(private)
    assert private.ledger.releases == 7 and 2.9 < private.ledger.epsilon <= 3.0
    sigma = private.ledger.runs[0][0].multiplier
    whole = loop("dp-sgd", target_epsilon=3.0, epochs=2)
    one_pass(whole)
    assert sigma < whole.ledger.runs[0][0].multiplier


# --- logical and physical batches


@pytest.mark.parametrize("most", [1, 3, 4, 5, 100])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_batch_in_parts_releases_what_it_releases_whole(most: int, family: str) -> None:
    """Against the loop over single texts, with next to no noise."""
    model = tiny(family, "classification", num_labels=2).double()
    inputs = collate(DATA[:5])
    rng = torch.Generator().manual_seed(0)
    message, loss, _ = message_for(model, inputs, 5, (dp_sgd(1e-12, 0.5),), rng, most=most)
    wanted: dict[str, Any] = {}
    losses = []
    for k in range(5):
        model.zero_grad()
        one = model(**{n: v[k : k + 1] for n, v in inputs.items()}).loss
        one.backward()
        losses.append(float(one.detach()))
        found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = sum(float(g.square().sum()) for g in found.values()) ** 0.5
        for n, g in found.items():
            wanted[n] = wanted.get(n, 0) + g * min(1.0, 0.5 / norm) / 5
    assert loss == pytest.approx(sum(losses) / 5, rel=1e-6)
    assert all(torch.allclose(message.gradients[n], g, rtol=1e-5, atol=1e-9) for n, g in wanted.items())


def test_a_loop_in_parts_counts_one_release_a_batch() -> None:
    private = loop("dp-sgd:1.0", size=8, physical_batch_size=3)
    assert one_pass(private) == 3 == private.ledger.releases
    for wrong, defense in ((0, "dp-sgd:1.0"), (3, "gaussian:0.1")):
        with pytest.raises(InputError, match="physical_batch_size is"):
            loop(defense, physical_batch_size=wrong)


def trainer(folder: Path, defense: str, **options: Any) -> Any:
    pytest.importorskip("accelerate")
    target = options.pop("target_epsilon", None)
    usual = {"save_strategy": "no", "logging_steps": 4, "report_to": [], "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(str(folder), per_device_train_batch_size=2, **{**usual, **options})
    private = rasura.PrivateTrainer(
        tiny("bert", "classification", num_labels=2), arguments, train_dataset=DATA, data_collator=collate, defense=defense,
        target_epsilon=target,
    )  # fmt: skip
    assert arguments.gradient_accumulation_steps == options.get("gradient_accumulation_steps", 1), "the caller's own"
    return private


@pytest.mark.slow
def test_the_trainers_accumulation_is_one_release_a_step(tmp_path: Path) -> None:
    private = trainer(tmp_path, "dp-sgd", target_epsilon=4.0, gradient_accumulation_steps=3, num_train_epochs=2)
    assert private.train().global_step == 8 == private.ledger.releases
    assert private.ledger.runs[0][0].rate == 6 / 24 and 3.9 < private.ledger.epsilon <= 4.0
    logged = [row["epsilon"] for row in private.state.log_history if "epsilon" in row]
    assert logged == sorted(logged) and private.ledger.epsilon <= logged[-1] <= private.ledger.epsilon * 1.001


@pytest.mark.slow
def test_the_trainer_ends_at_max_steps(tmp_path: Path) -> None:
    private = trainer(tmp_path, "dp-sgd", target_epsilon=4.0, max_steps=15)
    assert private.train().global_step == 15 == private.ledger.releases and 3.9 < private.ledger.epsilon <= 4.0
    with pytest.raises(InputError, match="all 15 planned releases"):
        private.train()


# --- fail closed, precisions, copies


def test_a_gradient_that_is_not_a_number_is_not_released() -> None:
    """A clip of nan is nan: one text made the whole release not a number, and it was counted as private."""
    private = loop("dp-sgd:1.0", len(DATA))  # every text is drawn: a batch that the draw leaves empty is noise, and released
    with torch.no_grad():
        next(p for n, p in private.model.named_parameters() if "classifier" in n).fill_(torch.nan)
    with pytest.raises(InputError, match="no clip bounds it, and nothing was released"):
        one_pass(private)
    assert private.ledger.releases == 0


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_adapters_train_on_a_base_in_half_precision(kind: torch.dtype) -> None:
    pytest.importorskip("peft")
    model = with_fresh_adapter(tiny("llama", "causal"), "causal", 4, 0)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(kind)
    rows: Any = [{**row, "labels": row["input_ids"]} for row in DATA]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fault(model, collate(rows[:3])) is None, "texts go together"
        loader = DataLoader(rows, 4, shuffle=True, collate_fn=collate)
        private = rasura.protect_training(model, None, loader, "dp-sgd:1.0")
        one_pass(private)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad) and private.ledger.releases == 6


def test_an_average_of_weights_is_a_copy_that_only_answers() -> None:
    private = loop("dp-sgd:1.0")
    average = AveragedModel(private.model)
    assert private.optimizer is not None
    for batch in private.loader:
        private.optimizer.zero_grad()
        private.model(**batch).loss.backward()
        private.optimizer.step()
        average.update_parameters(private.model)
    with torch.no_grad():
        assert torch.isfinite(average(**collate(DATA[:3])).logits).all()
    with pytest.raises(InputError, match="copy of a protected one"):
        average(**collate(DATA[:3])).loss.backward()


# --- rasura train


@pytest.mark.slow
def test_rasura_train_keeps_to_its_target(tmp_path: Path, model_folder: Path) -> None:
    command = ["train", notes(tmp_path), "--model", model_folder, "--defense", "none,dp-sgd", "--target-epsilon", "8"]
    command += ["--epochs", "2", "--batch-size", "4", "--physical-batch-size", "3", "--out", tmp_path / "run", "--json"]
    done = CliRunner().invoke(app, [str(part) for part in command])
    assert done.exit_code == 0, done.output
    plain, private = json.loads(done.output)
    assert plain["defense"] == "none" and private["defense"].startswith("dp-sgd:")
    assert 7.5 < private["planned"]["epsilon"] <= 8 and private["privacy"]["epsilon"] <= 8
    assert [0 < row["epsilon"] <= 8 for row in private["history"]] == [True] * len(private["history"])
    assert private["ledger"]["runs"][0]["count"] == 2 * -(-private["n_train"] // 4), "one release a batch, not a part"
    again = CliRunner().invoke(app, [str(part) for part in command])
    assert json.loads(again.output) == [plain, private], "the same command reads the finished trainings"
    wrong = CliRunner().invoke(app, [*map(str, command[:4]), "--defense", "none", "--target-epsilon", "8"])
    assert isinstance(wrong.exception, InputError) and "no defense is dp-sgd or normalised" in str(wrong.exception)
