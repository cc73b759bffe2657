"""``rasura check-dp``: settings of other frameworks, correct and faulty ones, and the figures that are recomputed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from rasura.accounting import epsilon
from rasura.accounting.configurations import Call, Checked, Facts, Stated, check, checked_files
from rasura.accounting.configurations.drafts import HAZARDS
from rasura.accounting.configurations.files import Contents, read_files
from rasura.accounting.gaussian import gaussian_epsilon, sampled_epsilon
from rasura.cli import app
from rasura.core.errors import InputError

pytest.importorskip("dp_accounting")

SETTINGS = Path(__file__).parent / "dp_settings"
SEARCHES = {"jax_keras", "opacus_target", "opacus_more_epochs", "jax_keras_as_given"}
"""Settings for which a noise is searched, which takes seconds."""


def cases(kind: str) -> list[object]:
    names = sorted({path.stem for path in (SETTINGS / kind).iterdir()})
    return [pytest.param(name, marks=pytest.mark.slow if name in SEARCHES else ()) for name in names]


def checked(kind: str, name: str) -> Checked:
    """Of all files of a case: its settings, and a TOML file with what they do not say."""
    return checked_files(sorted((SETTINGS / kind).glob(f"{name}.*")))


def hazards(found: Checked) -> set[str]:
    return {one.code for finding in found.findings for one in finding.hazards}


FAULTS = {
    "flower_as_if_poisson": "sampling exceeds",
    "flower_client_without_mod": "no-clip",
    "flower_count": "count exceeds",
    "flower_delta": "delta",
    "flower_local_defaults": "sensitivity formula exceeds",
    "flower_local_formula": "formula exceeds",
    "flower_local_half": "sensitivity exceeds",
    "flower_local_rounds": "per-round exceeds",
    "flower_server_no_noise": "no-noise",
    "flower_weights": "weights exceeds",
    "jax_keras_as_given": "sampling exceeds",
    "jax_stddev": "multiplier exceeds",
    "nvflare_cross_site": "unfiltered-task",
    "nvflare_percentile": "no-noise",
    "nvflare_svt_defaults": "partial per-round exceeds",
    "nvflare_svt_old": "noise-before-clip",
    "nvflare_wrong_way": "unfiltered-task",
    "opacus_delta": "delta",
    "opacus_more_epochs": "steps exceeds",
    "opacus_no_clip": "no-clip",
    "opacus_seeded": "seeded-noise",
    "opacus_shuffled": "sampling exceeds",
    "own_clip_grad_norm": "clip-of-batch",
    "own_clip_of_batch": "clip-of-batch exceeds",
    "own_clip_of_layer": "clip-of-layer exceeds",
    "own_noise_on_mean": "multiplier exceeds",
    "rasura_seeded": "seeded-noise",
}
"""The hazards of each faulty configuration: these and no others are to be named."""


def test_there_are_twenty_of_each_and_every_hazard_has_a_case() -> None:
    assert len(cases("correct")) >= 20 and len(FAULTS) >= 20
    assert {path.stem for path in (SETTINGS / "faulty").iterdir()} == set(FAULTS)
    assert {code for codes in FAULTS.values() for code in codes.split()} == set(HAZARDS)


@pytest.mark.parametrize("name", cases("correct"))
def test_no_false_alarm(name: str) -> None:
    found = checked("correct", name)
    assert hazards(found) == set() and found.unknown == ()
    assert found.outcome in ("holds", "computed") and found.exit_code == 0
    assert all(finding.unknown == () for finding in found.findings)


@pytest.mark.parametrize("name", cases("faulty"))
def test_no_fault_is_missed(name: str) -> None:
    found = checked("faulty", name)
    assert hazards(found) == set(FAULTS[name].split())
    assert found.outcome == "does not hold" and found.exit_code == 3


@pytest.mark.parametrize("name", cases("unclear"))
def test_what_is_not_known_is_said(name: str) -> None:
    found = checked("unclear", name)
    assert found.outcome == "not known" and found.exit_code == 4 and hazards(found) == set()
    assert found.unknown or any(finding.unknown for finding in found.findings)


BROKEN: tuple[object, ...] = (math.nan, -1.0, 0.0, math.inf, True, "1.0", None, [1.0])


@pytest.mark.parametrize("name", ["flower_local_total", "flower_server_fixed", "own_loop_shuffled", "flower_known_weights"])
def test_an_invalid_figure_never_holds(name: str) -> None:
    contents = read_files(sorted((SETTINGS / "correct").glob(f"{name}.*")))
    (call,) = contents.calls
    for argument in call.arguments:
        for value in BROKEN:
            broken = Call(call.name, {**call.arguments, argument: value}, call.place)
            found = check(Contents((broken,), contents.facts, contents.stated))
            assert found.exit_code in (3, 4), (argument, value)
        without = {k: v for k, v in call.arguments.items() if k != argument}
        assert check(Contents((Call(call.name, without),), contents.facts, contents.stated)).exit_code in (3, 4), argument


# --- the figures


def by_definition(ratio: float, delta: float) -> float:
    """The smallest epsilon of Balle and Wang's theorem 8, in 60 digits."""
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workdps(60):
        r = mpmath.mpf(ratio)
        low, high = mpmath.mpf(0), mpmath.mpf(r * r + 1000 * r)
        for _ in range(180):
            e = (low + high) / 2
            spent = mpmath.ncdf(r / 2 - e / r) - mpmath.exp(e) * mpmath.ncdf(-r / 2 - e / r)
            low, high = (e, high) if spent > delta else (low, e)
        return float(high)


@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0, 4.0, 30.0, 41_000.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
def test_epsilon_of_gaussian_noise_is_exact(ratio: float, delta: float) -> None:
    found, true = gaussian_epsilon(ratio, delta), by_definition(ratio, delta)
    assert true * (1 - 1e-12) <= found <= true * (1 + 1e-7) + 1e-8


@pytest.mark.slow
def test_sampling_is_counted_and_never_below_the_accountant() -> None:
    assert sampled_epsilon(1.0, 0.01, 100, 1e-5) == epsilon(1.0, 0.01, 100, 1e-5)
    assert sampled_epsilon(2.0, 1.0, 4, 1e-5) == gaussian_epsilon(1.0, 1e-5)
    assert sampled_epsilon(0.01, 0.5, 4, 1e-5) == gaussian_epsilon(200.0, 1e-5)
    for wrong in ((0.0, 0.1, 1), (1.0, 0.0, 1), (1.0, 1.1, 1), (1.0, 0.1, 0), (math.nan, 0.1, 1)):
        with pytest.raises(InputError):
            sampled_epsilon(*wrong, 1e-5)


def figures(found: Checked) -> dict[str, float | None]:
    (finding,) = found.findings
    return {one.unit: one.epsilon for one in finding.bounds}


def test_the_defaults_of_a_federated_product_have_an_epsilon_in_the_hundred_millions() -> None:
    deviation = 1e-4 * math.sqrt(2 * math.log(1.25e5)) / 10
    true = by_definition(2 / deviation, 1e-5)
    assert figures(checked("faulty", "flower_local_defaults")) == pytest.approx({"client": true, "example": true}, rel=1e-6)
    assert true == pytest.approx(8.52e8, rel=1e-3)


def test_rounds_of_the_central_guarantee_add_up() -> None:
    # A hundred rounds at multiplier 10 are one release at multiplier 1; another client in its place is twice as far.
    found = figures(checked("correct", "flower_server_fixed"))
    expected = {"client": by_definition(1.0, 1e-5), "example": by_definition(2.0, 1e-5)}
    assert found == pytest.approx(expected, rel=1e-6)


def test_a_weight_that_is_twice_as_large_halves_the_noise() -> None:
    found = figures(checked("correct", "flower_known_weights"))
    assert found["client"] == pytest.approx(by_definition(5 * 2 / 8, 1e-4), rel=1e-6)


def test_nvflares_sparse_vector_spends_what_its_release_spends() -> None:
    # 22,713,216 parameters, of which a tenth is sent with epsilon 0.1 each, in each of ten rounds.
    found = figures(checked("faulty", "nvflare_svt_defaults"))["client"]
    assert found is not None and 2_271_322 < found < 2_271_322 + 10 * (0.1 / 0.1) + 1
    # 100 of 1,000 values: 2 for the values, and 1 for 100 accepted values, of which there may be 1,000.
    share = 1 / (1 + 200 ** (2 / 3))
    assert figures(checked("correct", "nvflare_svt_small"))["client"] == pytest.approx(share + (1 - share) * 10 + 2)


def test_adaptive_clipping_counts_the_clip_that_moved_before_the_noise() -> None:
    found = figures(checked("correct", "flower_client_adaptive"))["client"]
    assert found is not None
    assert found > gaussian_epsilon(math.sqrt(20) / 4, 1e-5)  # as if the clip stood still
    assert found < gaussian_epsilon(math.sqrt(20) / 4 * math.exp(0.2 * 0.8), 0.9e-5)


def test_dp_sgd_says_what_the_accountant_says() -> None:
    found = figures(checked("correct", "opacus_make_private"))
    assert found == {"example": epsilon(1.0, 0.01, 1000, 1e-6), "client": None}


# --- against the frameworks themselves


def test_flowers_own_mod_adds_the_noise_that_is_counted() -> None:
    pytest.importorskip("flwr")
    from flwr.app import ArrayRecord, RecordDict
    from flwr.clientapp.mod import LocalDpMod

    def message(value: float) -> SimpleNamespace:
        arrays = ArrayRecord([np.full(200_000, value, np.float32)])
        return SimpleNamespace(content=RecordDict({"arrays": arrays}), has_error=lambda: False)

    sent = LocalDpMod(1.0, 1e-2, 0.5, 1e-5)(message(0.0), None, lambda *_: message(3.0))
    (entries,) = sent.content["arrays"].to_numpy_ndarrays()
    deviation = 1e-2 * math.sqrt(2 * math.log(1.25e5)) / 0.5
    assert float(entries.std()) == pytest.approx(deviation, rel=0.02)
    assert float(entries.mean()) == pytest.approx(1 / math.sqrt(200_000), abs=5 * deviation / math.sqrt(200_000))


def test_opacus_adds_the_noise_that_is_counted() -> None:
    opacus = pytest.importorskip("opacus")
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300, bias=False)
    loader = DataLoader(TensorDataset(torch.zeros(10, 300)), batch_size=5)
    model, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 1.0), data_loader=loader,
        noise_multiplier=2.0, max_grad_norm=0.3, loss_reduction="sum",
    )  # fmt: skip
    (weight,) = model.parameters()
    before = weight.detach().clone()
    model(torch.zeros(5, 300)).sum().backward()
    optimizer.step()
    assert float((weight.detach() - before).std()) == pytest.approx(2.0 * 0.3, rel=0.02)
    assert loader.sample_rate == 0.5  # one over the length of the loader


# --- reading


def test_a_program_is_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "client.py"
    path.write_text(
        "import os\nos.abort()\nC = 1.0\nfor e in (1, 2):\n    mod = LocalDpMod(C, 2 * C, e, 1e-5)\n", encoding="utf-8"
    )
    (finding,) = checked_files([path], Facts(rounds=1)).findings
    assert finding.bounds == () and "epsilon of LocalDpMod is e" in finding.unknown[0]


def test_a_name_that_is_assigned_twice_has_no_value(tmp_path: Path) -> None:
    path = tmp_path / "client.py"
    path.write_text("S = 2.0\nS *= 0.1\nmod = LocalDpMod(1.0, S, 0.5, 1e-5)\n", encoding="utf-8")
    assert checked_files([path], Facts(rounds=1)).outcome == "not known"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.toml", "[run]\nround = 3\n", "unknown fact about the run"),
        ("a.toml", "[stated]\ndelta = 1e-5\n", "no epsilon"),
        ("a.toml", "rounds = 3\n", "stands alone"),
        ("a.toml", "[run\n", "not valid TOML"),
        ("a.json", "{}", "not a configuration of NVFlare"),
        ("a.py", "def (", "not valid PY"),
        ("a.yaml", "a: 1", "expected a file .toml, .json or .py"),
        ("a.toml", "[run]\nrounds = 0\n", "rounds is 0"),
        ("a.toml", "[run]\nweights = 1.5\n", "weights is 1.5"),
        ("a.toml", "[stated]\nepsilon = nan\n", "stated epsilon is nan"),
    ],
)
def test_files_that_are_wrong_are_refused(tmp_path: Path, name: str, text: str, words: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=words):
        checked_files([path])


def test_two_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    for name, rounds in (("a.toml", 3), ("b.toml", 4)):
        (tmp_path / name).write_text(f"[run]\nrounds = {rounds}\n", encoding="utf-8")
    with pytest.raises(InputError, match="another file says"):
        checked_files(sorted(tmp_path.iterdir()))


# --- the command


def test_the_command_says_what_it_found() -> None:
    runner = CliRunner()
    path = SETTINGS / "faulty" / "flower_local_defaults.toml"
    done = runner.invoke(app, ["check-dp", str(path)])
    assert done.exit_code == 3
    for words in ("stated: epsilon 10 at delta 1e-05", "epsilon 8.52", "two of them differ by up to 2", "Not private"):
        assert words in done.stdout
    done = runner.invoke(app, ["check-dp", str(path), "--epsilon", "1e9", "--delta", "1e-5", "--unit", "client", "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 3 and told["findings"][0]["stated"]["epsilon"] == 1e9
    assert "exceeds" not in {one["code"] for one in told["findings"][0]["hazards"]}
    done = runner.invoke(app, ["check-dp", str(SETTINGS / "unclear" / "flower_no_rounds.toml")])
    assert done.exit_code == 4 and "pass --rounds" in done.stdout
    done = runner.invoke(app, ["check-dp", str(SETTINGS / "unclear" / "flower_no_rounds.toml"), "--rounds", "1"])
    assert done.exit_code == 0 and "The stated guarantee holds" in done.stdout


def restated(name: str, stated: Stated) -> Checked:
    """A correct configuration under another statement."""
    contents = read_files(sorted((SETTINGS / "correct").glob(f"{name}.*")))
    return check(replace(contents, stated=stated))


def test_a_statement_of_one_client_and_one_of_one_example_are_compared_by_themselves() -> None:
    assert restated("flower_server_fixed", Stated(4.0, 1e-5, "client")).exit_code == 3
    assert restated("flower_server_fixed", Stated(9.0, 1e-5, "example")).exit_code == 3  # 10 for an example


# --- what must not pass

PROGRAMS = {
    "the sensitivity is imported again": "S = 2.0\nfrom settings import S\nmod = LocalDpMod(1.0, S, 0.5, 1e-5)\n",
    "anything may be imported": "S = 2.0\nfrom settings import *\nmod = LocalDpMod(1.0, S, 0.5, 1e-5)\n",
    "further arguments": "mod = LocalDpMod(clipping_norm=1.0, sensitivity=2.0, epsilon=0.5, **more)\n",
    "further arguments of a clip": (
        "g = clipped_grad(f, l2_clip_norm=0.1, **more)\np = gaussian_privatizer(stddev=1.0)\n"
        "b = CyclicPoissonSampling(sampling_prob=0.01, iterations=10)\n"
    ),
    "two plans of sampling": (
        "g = clipped_grad(f, l2_clip_norm=0.1)\np = gaussian_privatizer(stddev=1.0)\n"
        "a = CyclicPoissonSampling(0.01, 10)\nb = CyclicPoissonSampling(0.5, 10_000)\n"
    ),
    "a filter whose tasks are not read": "job.to(SVTPrivacy(epsilon_release=1.0), 'site-1', tasks=['x'])\n",
    "a mechanism under another name": (
        "from mine import DpNoise as Plain\nmod = LocalDpMod(1.0, 2.0, 0.5, 1e-5)\nother = Plain(3)\n"
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_program_hides_is_not_known(tmp_path: Path, name: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAMS[name], encoding="utf-8")
    facts = Facts(examples=1000, clients=1000, rounds=1, parameters=1000, version="2.9.0", delta=1e-5)
    assert checked_files([path], facts, Stated(50.0, 1e-5)).outcome == "not known"


def test_a_mechanism_that_is_imported_under_another_name_is_found(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text("from flwr.clientapp.mod import LocalDpMod as Mod\nmod = Mod(1.0, 2.0, 0.5, 1e-5)\n", encoding="utf-8")
    assert checked_files([path], Facts(rounds=1, clients=1000)).outcome == "holds"


@pytest.mark.parametrize("name", ["flower_server_fixed", "opacus_make_private", "flower_local_total"])
def test_gaussian_noise_has_no_guarantee_at_delta_zero(name: str) -> None:
    assert restated(name, Stated(100.0, 0.0)).exit_code in (3, 4)


def test_a_pure_statement_is_compared_with_the_pure_figure() -> None:
    assert restated("nvflare_svt_delta", Stated(10.0, 1e-5)).exit_code == 0
    assert restated("nvflare_svt_delta", Stated(10.0, 0.0)).exit_code == 3


def test_without_poisson_sampling_the_way_of_drawing_must_be_known() -> None:
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
    for sampling, figure in ((None, None), ("shuffled", math.sqrt(3)), ("fixed", math.sqrt(30)), ("poisson", 0.0)):
        facts = Facts(examples=1000, batch_size=100, epochs=3, delta=1e-5, sampling=sampling)
        (finding,) = check(Contents((Call("make_private", arguments),), facts)).findings
        found = {one.unit: one.epsilon for one in finding.bounds}
        if figure is None:
            assert found == {} and finding.unknown
        elif figure:
            assert found["example"] == pytest.approx(gaussian_epsilon(figure, 1e-5))
        else:
            assert found["example"] == epsilon(1.0, 0.1, 30, 1e-5) and finding.outcome == "computed"


def test_a_filter_without_tasks_is_not_known(tmp_path: Path) -> None:
    path = tmp_path / "client.json"
    chain = {"tasks": ["other"], "filters": [{"name": "SVTPrivacy", "args": {"epsilon_release": 1.0}}]}
    path.write_text(json.dumps({"task_result_filters": [chain]}), encoding="utf-8")
    facts = Facts(rounds=1, parameters=1000, version="2.9.0")
    assert checked_files([path], facts, Stated(50.0)).outcome == "not known"
