"""``rasura check-dp``: options and arguments that contradict a file, or that are not understood, never make a figure."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rasura.accounting import epsilon
from rasura.accounting.configurations import Call, Facts, Stated, check
from rasura.accounting.configurations.facts import Unread
from rasura.accounting.configurations.files import Contents, read_files
from rasura.accounting.gaussian import gaussian_epsilon, sampled_epsilon
from rasura.cli import app
from rasura.core.errors import InputError

pytest.importorskip("dp_accounting")

SETTINGS = Path(__file__).parent / "dp_settings"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--batch-size", "64"], "batch_size is 64, but the files say 500"),
        (["--epochs", "1"], "epochs is 1, but the files say 10"),
        (["--examples", "60000"], "examples is 60000, but the files say 50000"),
        (["--epsilon", "3", "--delta", "1e-6"], "options state epsilon 3"),
        (["--epsilon", "2.5"], "options state epsilon 2.5"),
    ],
)
def test_an_option_never_contradicts_a_file(options: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["check-dp", str(SETTINGS / "correct" / "opacus_make_private.toml"), *options])
    assert done.exit_code not in (0, 3, 4) and words in str(done.exception) + done.output


def test_an_option_that_repeats_a_file_is_accepted() -> None:
    options = ["--batch-size", "500", "--epsilon", "2.5", "--delta", "1e-6", "--unit", "example"]
    done = CliRunner().invoke(app, ["check-dp", str(SETTINGS / "correct" / "opacus_make_private.toml"), *options])
    assert done.exit_code == 0, done.output


def test_fewer_epochs_than_the_call_plans_are_a_contradiction() -> None:
    facts = Facts(examples=1000, batch_size=100, epochs=1, delta=1e-5)
    (finding,) = check(Contents((Call("protect_training", {"defense": "dp-sgd:1.0", "epochs": 3}),), facts)).findings
    assert finding.bounds == () and "they contradict each other" in finding.unknown[0]


TARGET = {"target_epsilon": 3.0, "target_delta": 1e-5, "epochs": 3, "max_grad_norm": 1.0}


@pytest.mark.parametrize("accountant", ["gdp", "mine", Unread("args.accountant")])
def test_a_noise_that_an_unknown_accountant_chooses_has_no_figure(accountant: object) -> None:
    calls = (Call("PrivacyEngine", {"accountant": accountant}), Call("make_private_with_epsilon", TARGET))
    (finding,) = check(Contents(calls, Facts(examples=10_000, batch_size=100))).findings
    assert finding.bounds == () and finding.outcome == "not known"
    assert "accountant" in finding.unknown[0]


KERAS = {
    "epsilon": 3.0, "delta": 5e-5, "clipping_norm": 1.0, "batch_size": 100, "train_steps": 300, "train_size": 10_000,
    "poisson_sampling_in_fit": True,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", [Call("make_private_with_epsilon", {**TARGET, "target_delta": 1e-3}), Call("DPKerasConfig", KERAS)]
)
def test_a_noise_that_is_chosen_at_one_delta_does_not_have_its_epsilon_at_a_smaller_one(call: Call) -> None:
    facts = Facts(examples=10_000, batch_size=100)
    (finding,) = check(Contents((call,), facts, Stated(3.0, 1e-5, "example"))).findings
    bound = finding.bounds[0]
    assert finding.outcome == "does not hold" and {one.code for one in finding.hazards} == {"exceeds"}
    assert bound.delta == 1e-5 and bound.epsilon is not None and bound.epsilon > 3.2


@pytest.mark.slow
@pytest.mark.parametrize("target", [8.0, 50.0])
def test_the_figure_of_a_target_is_never_below_the_epsilon_of_the_noise_that_opacus_chooses(target: float) -> None:
    noises = pytest.importorskip("opacus.accountants.utils")
    sigma = noises.get_noise_multiplier(
        target_epsilon=target, target_delta=1e-5, sample_rate=0.05, epochs=5, accountant="prv"
    )
    call = Call("make_private_with_epsilon", {**TARGET, "target_epsilon": target, "epochs": 5})
    (finding,) = check(Contents((call,), Facts(examples=1000, batch_size=50))).findings
    told = finding.bounds[0].epsilon
    assert told == target and finding.outcome == "holds" and told >= epsilon(sigma, 0.05, 100, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{}, {"accountant": "prv"}, {"accountant": "rdp"}])
def test_a_noise_that_a_known_accountant_chooses_is_computed(arguments: dict[str, object]) -> None:
    calls = (Call("PrivacyEngine", arguments), Call("make_private_with_epsilon", TARGET))
    assert check(Contents(calls, Facts(examples=10_000, batch_size=100))).outcome == "holds"


@pytest.mark.parametrize(
    "argument",
    [{"batch_first": False}, {"grad_sample_mode": "ghost"}, {"loss_reduction": "none"}, {"wrap_model": False},
     {"rand_on_empty": True}, {"criterion": Unread("c")}, {"batch_first": Unread("args.first")}],
)  # fmt: skip
def test_an_argument_of_opacus_that_is_not_understood_has_no_figure(argument: dict[str, object]) -> None:
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
    facts = Facts(examples=1000, batch_size=100, epochs=3, delta=1e-5)
    assert check(Contents((Call("make_private", arguments),), facts)).outcome == "computed"
    (finding,) = check(Contents((Call("make_private", {**arguments, **argument}),), facts)).findings
    assert finding.bounds == () and finding.outcome == "not known"


@pytest.mark.parametrize("aggregation", [None, "median", "FedAdam"])
def test_noise_on_anything_but_an_average_has_no_figure(aggregation: str | None) -> None:
    for name in ("flower_server_fixed", "flower_server_adaptive", "flower_client_adaptive"):
        contents = read_files(sorted((SETTINGS / "correct").glob(f"{name}.*")))
        (finding,) = check(replace(contents, facts=replace(contents.facts, aggregation=aggregation))).findings
        assert finding.bounds == () and finding.outcome == "not known"
        assert "how the updates are aggregated" in finding.unknown[0]


LOOP = {"clip": 1.0, "noise_multiplier": 8.0, "mean_over": "batch_size"}


def test_a_few_steps_in_each_of_many_rounds_may_draw_an_example_in_each() -> None:
    facts = Facts(examples=10_000, batch_size=100, rounds=100, sampling="shuffled", delta=1e-5)
    steps, passes = (
        check(Contents((Call("dp_sgd", LOOP),), one)).findings[0].bounds[0].epsilon
        for one in (replace(facts, steps=10), replace(facts, epochs=1))
    )
    assert steps == passes == pytest.approx(gaussian_epsilon(math.sqrt(100) / 8.0, 1e-5))


@pytest.mark.parametrize(
    ("call", "facts"),
    [
        (Call("protect_training", {"defense": "dp-sgd:1.0", "max_steps": 40}), Facts(epochs=1, delta=1e-5)),
        (Call("PrivateTrainer", {"defense": "dp-sgd:1.0", "max_steps": 40}), Facts(epochs=1, delta=1e-5)),
        (Call("dp_sgd", LOOP), Facts(steps=40, sampling="poisson", delta=1e-5)),
    ],
)
def test_the_steps_of_every_round_count(call: Call, facts: Facts) -> None:
    facts = replace(facts, examples=10_000, batch_size=100)
    once, ten = (check(Contents((call,), replace(facts, rounds=r))).findings[0].bounds[0].epsilon for r in (1, 10))
    noise = 8.0 if call.name == "dp_sgd" else 1.0
    assert ten == pytest.approx(sampled_epsilon(noise, 0.01, 400, 1e-5), rel=0.01) and once is not None and ten > once


def test_the_steps_of_every_round_count_with_a_sampler_of_jax() -> None:
    calls = (
        Call("clipped_grad", {"l2_clip_norm": 1.0}), Call("gaussian_privatizer", {"stddev": 1.0}),
        Call("CyclicPoissonSampling", {"sampling_prob": 0.01, "iterations": 40}),
    )  # fmt: skip
    (finding,) = check(Contents(calls, Facts(examples=10_000, rounds=10, delta=1e-5))).findings
    assert finding.bounds[0].epsilon == pytest.approx(sampled_epsilon(1.0, 0.01, 400, 1e-5))


@pytest.mark.parametrize("sampling", ["shuffled", "fixed"])
@pytest.mark.parametrize(
    "call",
    [
        Call("make_private", {"noise_multiplier": 1.0, "max_grad_norm": 1.0}),
        Call("protect_training", {"defense": "dp-sgd:1.0", "epochs": 1}),
    ],
)
def test_batches_that_are_not_drawn_as_the_mechanism_draws_them_have_no_figure(call: Call, sampling: str) -> None:
    facts = Facts(examples=10_000, batch_size=100, epochs=1, sampling=sampling, delta=1e-5)
    (finding,) = check(Contents((call,), facts)).findings
    assert finding.bounds == () and finding.outcome == "not known" and "they contradict" in finding.unknown[0]


def test_two_noises_that_are_both_given_have_no_figure() -> None:
    call = Call(
        "dp_sgd", {"clip": 1.0, "noise_multiplier": 0.3, "noise_std": 8.0, "noise_on": "sum", "mean_over": "batch_size"}
    )
    facts = Facts(examples=10_000, batch_size=100, epochs=1, sampling="poisson", delta=1e-5)
    (finding,) = check(Contents((call,), facts)).findings
    assert finding.bounds == () and finding.outcome == "not known" and "both given" in finding.unknown[0]


CENTRAL = Call(
    "DifferentialPrivacyServerSideFixedClipping", {"noise_multiplier": 6.0, "clipping_norm": 1.0, "num_sampled_clients": 100}
)


def test_no_more_clients_answer_than_there_are() -> None:
    facts = Facts(rounds=10, clients=50, weights="equal", aggregation="mean")
    found = check(Contents((CENTRAL,), facts, Stated(2.0, 1e-3, "client")))
    assert found.outcome == "does not hold" and {"count", "exceeds"} <= {h.code for h in found.findings[0].hazards}
    assert found.findings[0].bounds[0].epsilon == pytest.approx(gaussian_epsilon(math.sqrt(10) / 3, 1e-3))
    with pytest.raises(InputError, match="there are 50 clients"):
        replace(facts, clients_per_round=100)


@pytest.mark.parametrize(
    ("workflows", "rounds"),
    [
        ([("ScatterAndGather", {"num_rounds": 10}), ("CrossSiteModelEval", {})], 10),
        ([("ScatterAndGather", {"num_rounds": 10}), ("ScatterAndGather", {"num_rounds": 10})], 20),
        ([("ScatterAndGather", {"num_rounds": 10}), ("CyclicController", {"num_rounds": 3})], 13),
        ([("ScatterAndGather", {"num_rounds": 10}), ("CyclicController", {})], None),
        ([("ScatterAndGather", {"num_rounds": 10}), ("FedAvg", {"num_rounds": "{rounds}"})], None),
        ([("ScatterAndGather", {"num_rounds": 10}), ("FedAvg", {"num_rounds": True})], None),
    ],
)
def test_the_rounds_of_all_workflows_add_up(
    tmp_path: Path, workflows: list[tuple[str, dict[str, object]]], rounds: int | None
) -> None:
    path = tmp_path / "config_fed_server.json"
    path.write_text(json.dumps({"workflows": [{"path": f"nvflare.{name}", "args": args} for name, args in workflows]}))
    assert read_files([path]).facts.rounds == rounds
