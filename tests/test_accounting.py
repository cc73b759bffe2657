"""Accounting: Table 7 of the calibration paper, the laws of epsilon, DirDP's guarantees, and the command line."""

from __future__ import annotations

import json
import math

import pytest
import torch
from commands import rasura_command, refused

from rasura.accounting import (
    Run,
    directional_epsilon,
    epsilon,
    formal,
    guarantee,
    log_normaliser,
    renyi_divergence,
    sigma_for,
)  # fmt: skip
from rasura.accounting.banded import BandedPlan
from rasura.core.interfaces import InputError
from rasura.registry import DEFENSES, parse_defense

pytest.importorskip("dp_accounting")

# (texts, epochs) and the printed sigmas for epsilon 1 to 1e6, batches of 128, delta 1 / texts. Table 5 has other epochs for
# four rows, with which no accountant comes near: GPT2 IMDb 5, GPT2 SST2 3, BERT IMDb 5, BERT SST2 4.
TABLE_7 = {
    "GPT2 CoLA": (5056, 30, ("3.06", ".747", ".347", ".173", ".112", ".066", ".024")),
    "GPT2 IMDb": (22500, 4, ("1.01", ".472", ".226", ".121", ".089", ".052", ".019")),
    "GPT2 SST2": (53710, 6, (".957", ".458", ".234", ".127", ".096", ".072", ".034")),
    "BERT CoLA": (5056, 10, ("1.191", ".615", ".278", ".140", ".092", ".043", ".014")),
    "BERT IMDb": (22500, 3, (".993", ".460", ".216", ".116", ".086", ".072", ".016")),
    "BERT SST2": (53710, 10, ("1.00", ".478", ".254", ".137", ".101", ".078", ".042")),
}
MISPRINTS = {("BERT CoLA", 0): "1.91", ("BERT IMDb", 5): ".047"}
"""1.191 is not between its neighbours' ratios, .072 breaks the row: with these digits both agree."""


@pytest.mark.slow
@pytest.mark.parametrize("row", TABLE_7)
def test_table_7_in_paper_mode(row: str) -> None:
    texts, epochs, printed = TABLE_7[row]
    run = Run(texts, 128, epochs, 1 / texts)
    for power, text in enumerate(printed):
        found = sigma_for(10.0**power, run.rate, run.steps, run.fails, by="paper")
        meant = MISPRINTS.get((row, power), text)
        # The table cuts digits off: 3.0664 stands there as 3.06.
        places = 10 ** len(meant.split(".")[1])
        assert abs(math.floor(found * places) / places - float(meant)) <= 0.003, (power, found)
        if meant != text:
            assert abs(found - float(text)) > 0.02


@pytest.mark.parametrize(("row", "power", "true"), [("BERT CoLA", 6, 58_390), ("BERT SST2", 6, 7_080)])
def test_the_true_epsilon_behind_a_nominal_one(row: str, power: int, true: float) -> None:
    texts, epochs, printed = TABLE_7[row]
    run = Run(texts, 128, epochs, 1 / texts)
    assert epsilon(float(printed[power]), run.rate, run.steps, run.fails) == pytest.approx(true, rel=0.015)


def test_the_accountants_order_and_the_gaussian_mechanism() -> None:
    tight, loose = (epsilon(1.1, 0.02, 200, 1e-5, by=by) for by in ("pld", "rdp"))  # type: ignore[arg-type]
    assert tight < loose < 1.5 * tight
    assert epsilon(1.1, 0.02, 200, 1e-5, by="paper") == pytest.approx(loose, rel=1e-3)
    # One release without sampling has a closed form (Balle and Wang 2018).
    spent, sigma = epsilon(1.0, 1.0, 1, 1e-5), 1.0
    normal = torch.distributions.Normal(0.0, 1.0)
    a, b = (float(normal.cdf(torch.tensor(s / (2 * sigma) - spent * sigma, dtype=torch.float64))) for s in (1, -1))
    assert a - math.exp(spent) * b == pytest.approx(1e-5, rel=0.02)


def test_more_noise_fewer_steps_and_rarer_texts_give_away_less() -> None:
    base = epsilon(1.0, 0.05, 100, 1e-5)
    for less in (epsilon(1.5, 0.05, 100, 1e-5), epsilon(1.0, 0.03, 100, 1e-5), epsilon(1.0, 0.05, 60, 1e-5)):
        assert less < base
    assert epsilon(1.0, 0.05, 100, 1e-6) > base


@pytest.mark.parametrize("target", [pytest.param(4.0, marks=pytest.mark.slow), 20.0])
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_a_noise_that_was_asked_for_never_protects_less(noise: str, target: float) -> None:
    run = Run(1000, 50, 2, 1e-4)
    sigma = sigma_for(target, run.rate, run.steps, run.fails, noise=noise)
    spent = epsilon(sigma, run.rate, run.steps, run.fails, noise=noise)
    assert spent <= target * (1 + 1e-4) and epsilon(0.99 * sigma, run.rate, run.steps, run.fails, noise=noise) > target


def test_renyi_divergence_against_the_bessel_function() -> None:
    from scipy import special

    def log_constant(kappa: float, dimension: int) -> float:
        nu = dimension / 2 - 1
        return nu * math.log(kappa) - math.log(special.ive(nu, kappa)) - kappa

    for dimension in (2, 3, 8, 59, 60, 61, 200):
        for kappa in (0.5, 5.0, 80.0):
            for order in (1.5, 4.0, 20.0):
                expected = log_constant(kappa, dimension) - log_constant((2 * order - 1) * kappa, dimension)
                assert renyi_divergence(order, kappa, dimension) == pytest.approx(expected / (order - 1), rel=1e-6)
    assert log_normaliser(2.0, 1) == pytest.approx(-math.log(math.cosh(2.0)))
    assert log_normaliser(1e-6, 592_130) == pytest.approx(-1e-12 / (2 * 592_130), rel=1e-6)


def test_directional_guarantees() -> None:
    spent = directional_epsilon(1e3, [592_130], 1, 1 / 5056)
    # Near that of a Gaussian mechanism of sensitivity 2 kappa / sqrt(d).
    assert 12 < spent < 13.5 and spent < 2e3
    assert directional_epsilon(1e-3, [592_130], 3, 1e-5) <= 6e-3
    assert directional_epsilon(1e3, [592_130], 10, 1 / 5056) > spent
    # Blocks share kappa: in pure form it is the whole's; each is a smaller sphere, but they add up to about the same.
    blocks = directional_epsilon(1e3, [592_130 // 10] * 10, 1, 1 / 5056)
    assert blocks == pytest.approx(spent, rel=0.01)
    run = Run(5056, 128, 10, sampling="shuffled")
    told = guarantee([parse_defense("directional:1e3")[0].mechanism], run, sizes=[592_128, 2])
    assert told.pure == 2e4 and told.metric == 1e4 and told.steps == 10 and told.neighbours == "one text is replaced"
    assert told.epsilon == pytest.approx(directional_epsilon(1e3, [592_130], 10, run.fails))
    overlapping = guarantee([parse_defense("directional:1e3")[0].mechanism], Run(5056, 128, 10), sizes=[592_130])
    assert overlapping.pure == 2e3 * 400 and "overlap" in overlapping.warnings[0]


@pytest.mark.parametrize("name", sorted(set(DEFENSES) - {"dp-sgd", "dp-ftrl", "normalised", "directional", "ghost"}))
def test_every_other_mechanism_has_no_formal_guarantee_and_no_number(name: str) -> None:
    known = [p.mechanism for p in parse_defense(DEFENSES[name].example)]
    told = guarantee(known, Run(100, 10, 1))
    assert formal(known) is None and told.statement.startswith("no formal guarantee")
    assert set(told.to_dict()) == {"statement"}


def test_a_guarantee_says_what_weakens_it() -> None:
    known = [p.mechanism for p in parse_defense("dp-sgd:1.0")]
    good = guarantee(known, Run(1000, 50, 2))
    assert good.warnings == () and good.delta == pytest.approx(1e-4) and good.cross_check > good.epsilon  # type: ignore[operator]
    weak = guarantee(known, Run(1000, 50, 2, delta=0.001), secure=False)
    assert "seeded" in weak.warnings[0] and "one random text in full" in weak.warnings[1]
    shuffled = guarantee(known, Run(1000, 50, 2, sampling="shuffled"))
    assert shuffled.statement.startswith("no formal guarantee for this run") and "not proven" in shuffled.warnings[0]
    pure = guarantee([p.mechanism for p in parse_defense("dp-sgd:1.0/noise=laplace")], Run(1000, 50, 2))
    assert pure.pure is not None and pure.epsilon is not None and pure.epsilon < pure.pure < 40


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: epsilon(0.0, 0.1, 10, 1e-5), "sigma is 0.0; expected a finite number above 0"),
        (lambda: epsilon(-1.0, 0.1, 10, 1e-5), "sigma is -1.0"),
        (lambda: epsilon(1.0, 1.1, 10, 1e-5), "rate 1.1"),
        (lambda: epsilon(1.0, 0.1, 0, 1e-5), "0 steps"),
        (lambda: epsilon(1.0, 0.1, 10, 0.0), "delta is 0.0"),
        (lambda: epsilon(1.0, 0.1, 10, 1e-5, by="rdp", noise="laplace"), "supports only Gaussian noise"),
        (lambda: epsilon(1.0, 0.1, 10, 1e-5, by="moments"), "unknown accountant 'moments'"),  # type: ignore[arg-type]
        (lambda: sigma_for(0.0, 0.1, 10, 1e-5), "target epsilon is 0.0"),
        (lambda: directional_epsilon(-1.0, [10], 1, 1e-5), "kappa is -1.0"),
        (lambda: directional_epsilon(1.0, [], 1, 1e-5), "releases of blocks"),
        (lambda: Run(0, 10, 1), "examples is 0"),
        (lambda: Run(10, 10, 1, delta=2.0), "delta is 2.0"),
    ],
)
def test_bad_figures_are_refused(call: object, words: str) -> None:
    with pytest.raises(InputError, match=words):
        call()  # type: ignore[operator]


def test_the_command_line() -> None:
    done = rasura_command(
        "account", "--sigma", "1", "--target-epsilon", "8", "--kappa", "1e3", "--dimension", "592130", "--examples", "1000",
        "--batch-size", "50", "--epochs", "2", "--json",
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert told["steps"] == 40 and told["rate"] == 0.05 and told["delta"] == pytest.approx(1e-4)
    first, second, third = told["rows"]
    assert first["pld"] < first["rdp"] and second["target"] == 8 and second["pld"] <= 8.001 and third["pure"] == 4000
    table = rasura_command("account", "--sigma", "1", "--examples", "1000", "--delta", "0.001")
    assert "epsilon (PLD)" in table.stdout and "Poisson" in table.stdout and "publishing one example in full" in table.stderr
    shown = rasura_command(
        "account", "--target-epsilon", "8", "--examples", "1000", "--batch-size", "50", "--epochs", "2"
    ).stdout
    (sigma,) = [cell for cell in shown.replace("│", " ").split() if cell.startswith(f"{second['sigma']:.3f}"[:-1])]
    assert second["sigma"] <= float(sigma) < second["sigma"] + 2e-4
    assert "sigma is -1.0" in refused("account", "--sigma", "-1", "--examples", "10")
    assert "--sigma, --target-epsilon or --kappa" in refused("account", "--examples", "10")


def test_a_plan_states_what_its_own_mechanisms_assume_and_no_other() -> None:
    asked = ("account", "--kappa", "50", "--dimension", "1000", "--examples", "5000")
    shown = rasura_command(*asked).stdout
    assert "DirDP-SGD" in shown and "disjoint" in shown and "Poisson" not in shown and " DP-SGD" not in shown
    (only,) = json.loads(rasura_command(*asked, "--json").stdout)["assumptions"]
    assert only.startswith("DirDP-SGD")
    both = json.loads(rasura_command(*asked, "--sigma", "1", "--json").stdout)["assumptions"]
    assert [line.split(":")[0] for line in both] == ["DP-SGD", "DirDP-SGD"]
    assert "--rate and --noise need --sigma" in refused(*asked, "--rate", "0.1")
    assert "--rate and --noise need --sigma" in refused(*asked, "--noise", "laplace")


@pytest.mark.parametrize(
    ("rate", "epochs", "steps"), [(0.001, 1, 1000), (0.015, 1, 67), (0.015, 3, 200), (0.07, 7, 100), (1.0, 4, 4)]
)
def test_a_rate_has_the_steps_in_which_each_text_comes_up_once_an_epoch(rate: float, epochs: int, steps: int) -> None:
    asked = ("account", "--sigma", "1", "--examples", "100", "--delta", "1e-5", "--json")
    told = json.loads(rasura_command(*asked, "--rate", str(rate), "--epochs", str(epochs)).stdout)
    assert told["steps"] == steps and told["rate"] == rate
    assert told["rows"][0]["pld"] == epsilon(1.0, rate, steps, 1e-5)
    assert "--rate is 1e-310; expected at least 1e-12" in refused(*asked, "--rate", "1e-310")


def test_the_command_plans_training_in_a_fixed_order() -> None:
    asked = ("account", "--band", "1,4", "--examples", "600", "--batch-size", "30", "--epochs", "3")
    told = json.loads(rasura_command(*asked, "--sigma", "3", "--target-epsilon", "8", "--json").stdout)["rows"]
    assert [(r["band"], r.get("target")) for r in told] == [(1, None), (1, 8.0), (4, None), (4, 8.0)]
    for row in told:
        assert row["epsilon"] == BandedPlan(row["sigma"], 60, 20, row["band"]).epsilon(0.1 / 600) <= row.get("target", 99)
    table = rasura_command(*asked, "--target-epsilon", "8").stdout
    # The noise that is printed is not smaller than the noise that was found.
    assert all(f" {row['sigma']:.4f}".rstrip("0") in table for row in told if "target" in row) and "same order" in table
    assert "the band 40 is above the separation 20" in refused(*asked[:2], "40", *asked[3:], "--sigma", "3")
    assert "nothing is sampled" in refused(*asked, "--sigma", "3", "--rate", "0.1")
    assert "nothing is sampled" in refused(*asked)


def test_epsilon_is_finite_and_falls_with_noise_where_the_library_overflows() -> None:
    # At 0.001 and at 0.1 dp-accounting's own numbers overflow for this run.
    sigmas = (0.001, 0.01, 0.08, 0.1, 0.12, 1.0)
    found = [epsilon(s, 32 / 900, 145, 1e-4) for s in sigmas]
    assert all(math.isfinite(e) for e in found)
    assert found == sorted(found, reverse=True) and len(set(found)) == len(found)
    assert found[3] <= epsilon(0.1, 32 / 900, 145, 1e-4, by="rdp") * 1.001
