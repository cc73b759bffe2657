"""``rasura check-dp``: batch size, passes and steps that a program gives its training, and those that it hides."""

from __future__ import annotations

from pathlib import Path

import pytest

from rasura.accounting import Run, guarantee
from rasura.accounting.configurations import Call, Checked, Facts, Finding, check, checked_files
from rasura.accounting.configurations.files import Contents
from rasura.accounting.gaussian import gaussian_epsilon, sampled_epsilon
from rasura.registry import parse_defense

pytest.importorskip("dp_accounting")

LOADER = (
    "from torch.utils.data import DataLoader\nloader = DataLoader(train, {})\ntest = DataLoader(held_out, batch_size=8)\n"
)
OPACUS = (
    "from opacus import PrivacyEngine\nmodel, optimizer, loader = PrivacyEngine().make_private(module=model, "
    "optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0)\n"
)
OURS = (
    "import rasura\nmodel, optimizer, loader, ledger = rasura.protect_training("
    'model, optimizer, loader, "dp-sgd:1.0", epochs=3, delta=1e-5)\n'
)
TRAINER = (
    "from transformers import TrainingArguments\nfrom rasura import PrivateTrainer\n{}\n"
    'trainer = PrivateTrainer(model, args, train_dataset=data, defense="dp-sgd:1.0", delta=1e-5)\n'
)


def read(folder: Path, text: str, **facts: int | float) -> Checked:
    path = folder / "training.py"
    path.write_text(text, encoding="utf-8")
    return checked_files([path], Facts(**facts))  # type: ignore[arg-type]


def figure(found: Checked) -> float | None:
    (finding,) = found.findings
    assert found.outcome == "computed", (found, finding)
    return next(one.epsilon for one in finding.bounds if one.unit == "example")


def planned(run: Run) -> float | None:
    return guarantee([part.mechanism for part in parse_defense("dp-sgd:1.0")], run).epsilon


@pytest.mark.parametrize(
    ("arguments", "run"),
    [
        ("per_device_train_batch_size=8, gradient_accumulation_steps=16, num_train_epochs=3", Run(1000, 128, 3, 1e-5)),
        ("per_device_train_batch_size=32, max_steps=2000", Run(1000, 32, 63, 1e-5, max_steps=2000)),
        ("num_train_epochs=1.5, learning_rate=args.rate, logging_steps=1", Run(1000, 8, 2, 1e-5)),
    ],
)
def test_a_trainer_is_counted_as_it_counts_itself(tmp_path: Path, arguments: str, run: Run) -> None:
    found = read(tmp_path, TRAINER.format(f'args = TrainingArguments("out", {arguments})'), examples=1000)
    assert figure(found) == planned(run)


def test_our_loader_draws_at_batch_size_over_examples(tmp_path: Path) -> None:
    found = figure(read(tmp_path, LOADER.format("batch_size=96") + OURS, examples=100))
    assert found == planned(Run(100, 96, 3, 1e-5)) and found == pytest.approx(12.5529, rel=1e-4)
    shorter = LOADER.format("96, drop_last=True") + OURS.replace("epochs=3", "epochs=3, max_steps=4")
    assert figure(read(tmp_path, shorter, examples=100)) == planned(Run(100, 96, 3, 1e-5, max_steps=4))


def own_mean(sampling: str, examples: int, **more: object) -> Finding:
    facts = Facts(examples=examples, batch_size=100, epochs=3, sampling=sampling, delta=1e-5)
    arguments = {"clip": 1.0, "noise_std": 0.02, "noise_on": "mean", **more}
    (finding,) = check(Contents((Call("dp_sgd", arguments),), facts)).findings
    return finding


def test_noise_on_a_mean_is_as_large_as_what_the_mean_divides_by() -> None:
    whole = own_mean("poisson", 1000, mean_over="batch_size").bounds[0].epsilon
    assert whole == sampled_epsilon(2.0, 0.1, 30, 1e-5)
    # Of n examples alike and one that is opposite, the mean moves by 2 clips / (n + 1) where it divides by their number.
    for more, words in (({"mean_over": "batch"}, "nothing is proven"), ({}, "mean_over is not given")):
        found = own_mean("poisson", 1000, **more)
        assert found.bounds == () and found.outcome == "not known" and words in found.unknown[0]


NOISES: tuple[dict[str, object], ...] = (
    {"noise_std": None, "noise_multiplier": 1.0},
    {"noise_on": "sum"},
    {"clip_of": "batch"},
    {"clip_of": "layer", "layers": 4, "noise_std": None, "noise_multiplier": 1.0},
)


@pytest.mark.parametrize("noise", NOISES)
def test_a_mean_over_the_drawn_has_no_figure_however_its_noise_is_given(noise: dict[str, object]) -> None:
    """With ``noise_multiplier`` it held: what one example adds to the number of the drawn was not seen."""
    found = own_mean("poisson", 1000, mean_over="batch", **noise)
    assert found.bounds == () and found.outcome == "not known" and "nothing is proven" in found.unknown[0]
    assert "mean_over is 'texts'" in own_mean("poisson", 1000, mean_over="texts", **noise).unknown[0]
    assert own_mean("poisson", 1000, mean_over="batch_size", **noise).bounds


def test_the_mean_of_a_last_batch_that_is_smaller_has_less_noise() -> None:
    alike = own_mean("shuffled", 1000).bounds[0].epsilon
    assert alike == gaussian_epsilon(3**0.5 / 2.0, 1e-5)
    assert own_mean("shuffled", 1010, mean_over="batch_size").bounds[0].epsilon == alike
    assert own_mean("shuffled", 1010, mean_over="batch").bounds[0].epsilon == gaussian_epsilon(3**0.5 / 0.2, 1e-5)
    for wrong in ({}, {"mean_over": "examples"}):
        found = own_mean("shuffled", 1010, **wrong)
        assert found.bounds == () and "mean_over" in found.unknown[0]


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loop_of_ones_own_draws_no_less_than_batch_size_over_examples(drop_last: bool) -> None:
    facts = Facts(examples=100, batch_size=60, epochs=3, sampling="poisson", delta=1e-5, drop_last=drop_last)
    found = check(Contents((Call("dp_sgd", {"clip": 1.0, "noise_multiplier": 1.0}),), facts))
    rate, steps = (1.0, 3) if drop_last else (0.6, 6)
    assert figure(found) == sampled_epsilon(1.0, rate, steps, 1e-5)


def test_opacus_draws_at_one_over_the_length_of_its_loader(tmp_path: Path) -> None:
    found = read(tmp_path, LOADER.format("batch_size=60") + OPACUS, examples=100, epochs=3, delta=1e-5)
    assert figure(found) == sampled_epsilon(1.0, 0.5, 6, 1e-5)
    found = read(tmp_path, LOADER.format("batch_size=60, drop_last=True") + OPACUS, examples=100, epochs=3, delta=1e-5)
    assert figure(found) == sampled_epsilon(1.0, 1.0, 3, 1e-5)


def test_more_steps_than_passes_are_counted() -> None:
    for steps, made in ((5, 30), (300, 300)):
        facts = Facts(examples=1000, batch_size=100, epochs=3, steps=steps, delta=1e-5)
        found = check(Contents((Call("make_private", {"noise_multiplier": 1.0, "max_grad_norm": 1.0}),), facts))
        assert figure(found) == sampled_epsilon(1.0, 0.1, made, 1e-5)


PLAIN = (
    'lr_scheduler_type="cosine", warmup_ratio=0.1, optim="adamw_torch", save_strategy="steps", save_steps=9, '
    'save_total_limit=2, eval_strategy="steps", eval_steps=10, logging_strategy="no"'
)


@pytest.mark.parametrize("arguments", [PLAIN, 'metric_for_best_model="loss", eval_strategy="epoch"'])
def test_arguments_that_look_at_nothing_leave_the_figure(tmp_path: Path, arguments: str) -> None:
    found = read(tmp_path, TRAINER.format(f'args = TrainingArguments("out", {arguments})'), examples=1000)
    assert figure(found) == planned(Run(1000, 8, 3, 1e-5))


STEERED = (
    'lr_scheduler_type="reduce_lr_on_plateau"', 'lr_scheduler_type="greedy"', "lr_scheduler_type=given.schedule",
    'lr_scheduler_type="mine"', 'save_strategy="best"', "save_strategy=given.when", 'eval_strategy="mine"',
    'optim="grokadamw"', 'optim="mine"', 'optim_args="a=1"', 'optim_target_modules="all-linear"', "save_mine=True",
    'lr_mine="loss"', 'eval_mine="x"', 'metric_for_best_model="loss", save_total_limit=1',
    'metric_for_best_model=given.best, save_total_limit=given.most',
)  # fmt: skip


@pytest.mark.parametrize("arguments", STEERED)
def test_arguments_that_a_loss_may_steer_have_no_figure(tmp_path: Path, arguments: str) -> None:
    """A rate that falls with the loss, and a checkpoint that is kept by it, held: every name that begins with lr_ did."""
    found = read(tmp_path, TRAINER.format(f'args = TrainingArguments("out", {arguments})'), examples=1000)
    assert found.outcome == "not known" and found.exit_code == 4 and not any(one.bounds for one in found.findings)
    assert any(arguments.split("=")[0] in one for one in found.unknown), found.unknown


def test_a_rate_of_a_trainer_that_the_examples_decide_has_no_figure(tmp_path: Path) -> None:
    for rate, known in (("1 / len(data)", True), ("float(data.x.std())", False), ("given.rate", True)):
        found = read(tmp_path, TRAINER.format(f'args = TrainingArguments("out", learning_rate={rate})'), examples=1000)
        assert (found.exit_code == 0) is known, rate


BESIDE = (
    "from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR\nfrom transformers import get_scheduler\n"
    'args = TrainingArguments("out")'
)


@pytest.mark.parametrize(
    ("schedule", "known"),
    [("None", True), ("StepLR(optimizer, 9)", True), ("ReduceLROnPlateau(optimizer)", False), ("mine", False),
     ('get_scheduler("greedy", optimizer)', False)],
)  # fmt: skip
@pytest.mark.parametrize("named", [False, True])
def test_a_schedule_beside_the_optimizer_must_not_look_at_a_loss(
    tmp_path: Path, schedule: str, known: bool, named: bool
) -> None:
    before = BESIDE + "\noptimizer = given.optimizer" + (f"\nrates = {schedule}" if named else "")
    text = TRAINER.format(before).replace("data,", f"data, optimizers=(optimizer, {'rates' if named else schedule}),")
    found = read(tmp_path, text, examples=1000)
    assert (found.outcome != "not known") == known, found.unknown


HIDDEN = {
    "further arguments": TRAINER.format('args = TrainingArguments("out", **config)'),
    "an unread accumulation": TRAINER.format('args = TrainingArguments("out", gradient_accumulation_steps=k)'),
    "unread steps": TRAINER.format('args = TrainingArguments("out", max_steps=given.steps)'),
    "unread epochs": TRAINER.format('args = TrainingArguments("out", num_train_epochs=given.epochs)'),
    "a batch size that is searched": TRAINER.format('args = TrainingArguments("out", auto_find_batch_size=True)'),
    "arguments by position": TRAINER.format('args = TrainingArguments("out", True)'),
    "arguments of another training": TRAINER.format('args = given\nothers = TrainingArguments("out")'),
    "arguments of two kinds": TRAINER.format('args = TrainingArguments("out")\nif big:\n    args = TrainingArguments("b")'),
    "arguments of another class": TRAINER.format('from mine import TrainingArguments\nargs = TrainingArguments("out")'),
    "an unread batch size (ours)": LOADER.format("batch_size=given.size") + OURS,
    "an unread batch size (Opacus)": LOADER.format("batch_size=given.size") + OPACUS,
    "a loader made elsewhere": LOADER.format("8").replace("loader =", "other =") + OPACUS,
    "two loaders of one name": LOADER.format("8") + "if big:\n    loader = DataLoader(train, 512)\n" + OPACUS,
    "a sampler of batches": LOADER.format("batch_sampler=sampler") + OPACUS,
    "further arguments of a loader": LOADER.format("batch_size=8, **more") + OPACUS,
    "whether the last batch is left out": LOADER.format("batch_size=8, drop_last=given.drop") + OPACUS,
}


@pytest.mark.parametrize("name", HIDDEN)
def test_a_figure_that_a_program_hides_is_not_known(tmp_path: Path, name: str) -> None:
    facts = {"examples": 10_000} | ({"epochs": 3, "delta": 1e-5} if "TrainingArguments" not in HIDDEN[name] else {})
    found = read(tmp_path, HIDDEN[name], **facts)
    assert found.outcome == "not known" and found.exit_code == 4
    assert not any(one.bounds for one in found.findings)


ROUNDS = (
    "from flwr.clientapp import ClientApp\nfrom flwr.clientapp.mod import LocalDpMod\nfrom flwr.server import ServerConfig\n"
)
MOD = "app = ClientApp(mods=[LocalDpMod(1.0, 2.0, 0.5, 1e-5)])\n"


@pytest.mark.parametrize(
    "rounds",
    [
        "a = ServerConfig(num_rounds=1)\nb = ServerConfig(num_rounds=given.rounds)\n",
        "a = ServerConfig(num_rounds=1)\nb = ServerConfig(num_rounds=1)\n",
        "if quick:\n    config = ServerConfig(num_rounds=1)\n",
        "for trial in range(9):\n    run(num_rounds=1)\n",
        "def once():\n    run(num_rounds=1)\nonce()\nonce()\n",
    ],
)
def test_rounds_that_a_program_hides_are_not_known(tmp_path: Path, rounds: str) -> None:
    assert read(tmp_path, ROUNDS + MOD + rounds, clients=1000).outcome == "not known"
    assert read(tmp_path, ROUNDS + MOD + rounds, clients=1000, rounds=1).outcome == "holds"  # as stated
