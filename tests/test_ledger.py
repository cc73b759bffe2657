"""The ledger of releases: what it counts, what it spends, what it refuses; and which compositions have a proof."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from commands import rasura_command

from rasura.accounting import Draw, Ledger, Release, Run, composition, directional_epsilon, epsilon, guarantee
from rasura.accounting import compositions as table
from rasura.accounting.epsilon import ORDERS, Sampled, composed_epsilon, converted, finite
from rasura.accounting.ledger import counted, parsed
from rasura.accounting.releases import UNPROVEN, Spent, spent
from rasura.accounting.states import read
from rasura.cli.account import account
from rasura.core.errors import InputError
from rasura.core.values import Mechanism, Stage
from rasura.registry import DEFENSES, parse_defense

pytest.importorskip("dp_accounting")

RUN = Run(100, 10, 2, 1e-5)
"""20 releases at rate .1."""

CHANCE = Draw("poisson", 0.1)


def mechanisms(text: str) -> list[Mechanism]:
    return [p.mechanism for p in parse_defense(text)]


def ledger(text: str = "dp-sgd:2.0", run: Run = RUN) -> Ledger:
    return Ledger(mechanisms(text), run, sizes=[7, 3])


def filled(text: str = "dp-sgd:2.0", releases: int = 20, run: Run = RUN) -> Ledger:
    made = ledger(text, run)
    for _ in range(releases):
        made.made(CHANCE, [7, 3], secret=True)
    return made


# --- what is counted


def test_a_release_says_what_took_place() -> None:
    made = ledger("dp-sgd:2.0/clip=0.5/noise=laplace")
    made.made(CHANCE, [7, 3], secret=False)
    expected = Release("dp-sgd", "laplace", 2.0, 0.5, "poisson", 0.1, None, (10,), False)
    assert made.runs == [(expected, 1)] and made.releases == 1
    whole = Release.of(mechanisms("directional:5")[0], Draw("disjoint", number=3), [7, 3], secret=True)
    assert whole == Release("directional", "von-mises-fisher", 5.0, 1.0, "disjoint", None, 3, (10,), True)
    parts = Release.of(mechanisms("directional:5/blocks=parameters")[0], CHANCE, iter([7, 3]), secret=True)
    assert parts.blocks == (7, 3) and parts.rate == 0.1 and parts.number is None
    assert Release.of(None, CHANCE, [7, 3], secret=True) == Release(UNPROVEN)


def test_equal_releases_in_a_row_are_one_entry() -> None:
    made = filled(releases=3)
    made.made(CHANCE, [10], secret=False)
    made.made(CHANCE, [10], secret=True)
    assert [count for _, count in made.runs] == [3, 1, 1] and made.releases == 5


def test_the_plan_is_the_limit() -> None:
    made = filled(releases=19)
    made.room(CHANCE)
    made.made(CHANCE, [10], secret=True)
    for refused_call in (lambda: made.room(CHANCE), lambda: made.made(CHANCE, [10], secret=True)):
        with pytest.raises(InputError, match=r"all 20 planned releases \(2 epochs\) were made \(20\); plan a larger"):
            refused_call()
    assert made.releases == 20
    by_pass = ledger("directional:5", replace(RUN, sampling="shuffled"))
    for number in (1, 1, 3):
        by_pass.made(Draw("disjoint", number=number), [10], secret=True)
    by_pass.room(Draw("disjoint", number=3))
    with pytest.raises(InputError, match="2 planned passes over the texts were made \\(2\\);"):
        by_pass.room(Draw("disjoint", number=4))
    assert by_pass.passes == 2 and by_pass.releases == 3
    # What has no guarantee has no limit.
    free = ledger("gaussian:0.1", Run(1, 1, 1))
    for _ in range(3):
        free.made(Draw(), [10], secret=True)
    assert free.releases == 3


def test_a_ledger_counts_its_own_mechanism_alone() -> None:
    made = ledger()
    with pytest.raises(InputError, match="counts releases of dp-sgd, but this is a release of normalised"):
        made.append(Release("normalised", "gaussian", 1.0, 1.0, "poisson", 0.1, None, (10,)))
    with pytest.raises(InputError, match="but this is a release of unproven"):
        made.append(Release(UNPROVEN))
    assert made.runs == []


# --- what is spent


@pytest.mark.parametrize(("sigma", "rate", "steps"), [(2.0, 0.1, 20), (0.8, 0.02, 7), (1.5, 1.0, 1), (4.0, 1.0, 30)])
def test_epsilon_of_a_ledger_is_that_of_its_events(sigma: float, rate: float, steps: int) -> None:
    """Against dp_accounting asked directly, at a fine grid of losses."""
    import dp_accounting
    from dp_accounting import pld

    one = dp_accounting.GaussianDpEvent(sigma)
    event = dp_accounting.PoissonSampledDpEvent(rate, one) if rate < 1 else one
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    accountant.compose(event, steps)
    true = accountant.get_epsilon(1e-5)
    made = ledger(f"dp-sgd:{sigma}", Run(steps, 1, 1, 1e-5))
    for _ in range(steps):
        made.made(Draw("poisson", rate), [10], secret=True)
    assert made.epsilon == pytest.approx(true, rel=2e-3) and made.epsilon >= true * (1 - 1e-4)


@pytest.mark.parametrize(("sigma", "rate"), [(1.0, 0.1), (0.7, 0.5), (3.0, 1.0), (5.0, 0.001), (0.1, 0.05)])
@pytest.mark.parametrize("order", [2, 7, 33])
def test_divergences_of_sampled_noise_against_the_closed_form(sigma: float, rate: float, order: int) -> None:
    """Of whole orders (Mironov et al. 2019, sec. 3.3), with 50 digits; never below it."""
    import mpmath

    divergence: Any = import_module("rasura.accounting.epsilon")._divergence
    with mpmath.workdps(50):
        s, q = mpmath.mpf(sigma), mpmath.mpf(rate)
        terms = [
            mpmath.binomial(order, k) * (1 - q) ** (order - k) * q**k * mpmath.exp(k * (k - 1) / (2 * s**2))
            for k in range(order + 1)
        ]
        true = mpmath.log(mpmath.fsum(terms)) / (order - 1)
        assert true <= divergence(sigma, rate, order) <= true * (1 + 1e-9) + mpmath.mpf("2e-13")


@pytest.mark.parametrize(("sigma", "rate", "order"), [(1.0, 0.1, 1.5), (5.0, 0.001, 1.5), (1.0, 0.3, 1.0001)])
def test_divergences_between_whole_orders(sigma: float, rate: float, order: float) -> None:
    """By the integral itself; the library's series is 1 % off at the second."""
    import mpmath

    divergence: Any = import_module("rasura.accounting.epsilon")._divergence
    with mpmath.workdps(25):
        s, q, a = mpmath.mpf(sigma), mpmath.mpf(rate), mpmath.mpf(order)

        def part(x: Any) -> Any:
            density = mpmath.exp(-(x**2) / (2 * s**2)) / (s * mpmath.sqrt(2 * mpmath.pi))
            return density * (1 - q + q * mpmath.exp((2 * x - 1) / (2 * s**2))) ** a

        true = mpmath.log(mpmath.quad(part, [k * s for k in range(-12, 15, 4)])) / (a - 1)
        assert true <= divergence(sigma, rate, order) <= true * (1 + 1e-9) + 2e-13 / (a - 1)


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (0.5, 3), (3.0, 10), (0.1, 1), (20.0, 100)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6])
def test_without_sampling_it_is_the_gaussian_mechanisms_own(sigma: float, steps: int, delta: float) -> None:
    """The closed form of Balle and Wang (2018), of ``steps`` releases that are one with less noise; never below it."""
    from scipy.optimize import brentq
    from scipy.special import log_ndtr

    mu = math.sqrt(steps) / sigma

    def failing(spent: float) -> float:
        first, second = log_ndtr(mu / 2 - spent / mu), spent + log_ndtr(-mu / 2 - spent / mu)
        return math.exp(first) - math.exp(second) - delta

    true = 0.0 if failing(0.0) <= 0 else brentq(failing, 0.0, 1e4, xtol=1e-12)
    run = Run(steps, steps, steps, delta)
    found = spent([(Release("dp-sgd", "gaussian", sigma, 1.0, "poisson", 1.0, None, (3,)), steps)], run.fails).epsilon
    assert true <= found <= true * 1.002 + 2e-3


@pytest.mark.slow
def test_events_of_several_kinds_are_composed() -> None:
    parts = (Sampled(1.0, 0.1, 10), Sampled(2.0, 0.05, 30))
    together = composed_epsilon(parts, 1e-5)
    alone = [composed_epsilon((part,), 1e-5) for part in parts]
    assert max(alone) < together < sum(alone)
    assert together <= composed_epsilon(parts, 1e-5, by="rdp")
    runs = [(Release("dp-sgd", "gaussian", p.sigma, 1.0, "poisson", p.rate, None, (3,)), p.steps) for p in parts]
    assert spent(runs, 1e-5).epsilon == together == spent([*runs[1:], *runs[:1]], 1e-5).epsilon
    cut = [(runs[0][0], 4), runs[1], (runs[0][0], 6)]
    assert spent(cut, 1e-5).epsilon == together
    mixed = composed_epsilon((*parts, Sampled(2.0, 0.1, 5, "laplace")), 1e-5)
    assert mixed > together
    with pytest.raises(InputError, match="supports only Gaussian noise"):
        composed_epsilon((*parts, Sampled(2.0, 0.1, 5, "laplace")), 1e-5, by="rdp")


def test_laplace_noise_has_a_pure_epsilon() -> None:
    one = Release("dp-sgd", "laplace", 2.0, 1.0, "poisson", 0.25, None, (3,))
    found = spent([(one, 3)], 1e-9)
    assert found.pure == pytest.approx(3 * math.log(1 - 0.25 + 0.25 * math.exp(0.5))) and found.epsilon <= found.pure
    assert found.cross_check is None
    assert spent([(replace(one, rate=1.0), 3)], 1e-9).pure == pytest.approx(1.5)


def test_directional_releases_of_one_pass_count_once() -> None:
    one = Release("directional", "von-mises-fisher", 5.0, 1.0, "disjoint", None, 1, (10,))
    twice = replace(one, number=2)
    assert spent([(one, 9)], 1e-5) == spent([(one, 1)], 1e-5)
    two = spent([(one, 2), (twice, 2), (one, 1)], 1e-5)
    assert two.metric == 10 and two.pure == 20 and two.epsilon == directional_epsilon(5.0, [10], 2, 1e-5)
    assert spent([(replace(one, sampling="poisson", rate=0.1), 9)], 1e-5).metric == 45
    other = replace(one, blocks=(4, 6))
    mixed = spent([(one, 1), (other, 1)], 1e-5)
    assert mixed.metric == 10 and mixed.epsilon == pytest.approx(
        directional_epsilon(5.0, [10], 1, 5e-6) + directional_epsilon(5.0, [4, 6], 1, 5e-6)
    )


def test_nothing_released_spends_nothing() -> None:
    assert spent([], 1e-5) == Spent(0.0, 0.0)
    assert ledger().epsilon == 0.0 and "counted, after 0 releases" in ledger().spent().statement
    assert ledger("directional:5").epsilon == 0.0


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        ([(Release(UNPROVEN), 1)], "has no epsilon"),
        ([(Release("dp-sgd", "gaussian", 1.0, 1.0, "unknown", None, None, (3,)), 1)], "not known how the batch"),
        ([(Release("dp-sgd", "gaussian", 1.0, 1.0, "disjoint", None, 1, (3,)), 1)], "no composition is proven for dp-sgd"),
        (
            [
                (Release("dp-sgd", "gaussian", 1.0, 1.0, "poisson", 0.1, None, (3,)), 1),
                (Release("directional", "von-mises-fisher", 1.0, 1.0, "poisson", 0.1, None, (3,)), 1),
            ],
            "no composition is proven for directional, dp-sgd",
        ),
    ],
)
def test_what_is_not_proven_has_no_epsilon(runs: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        spent(runs, 1e-5)


GOOD = Release("dp-sgd", "gaussian", 1.0, 1.0, "poisson", 0.1, None, (3,)).to_dict()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mechanism": "gaussian"}, "unknown mechanism 'gaussian'"),
        ({"noise": "uniform"}, "noise 'uniform', expected gaussian or laplace"),
        ({"mechanism": "directional"}, "noise 'gaussian', expected von-mises-fisher"),
        ({"multiplier": 0.0}, "multiplier 0.0"),
        ({"multiplier": math.nan}, "multiplier nan"),
        ({"multiplier": math.inf}, "multiplier inf"),
        ({"multiplier": True}, "multiplier True"),
        ({"clip": -1.0}, "clip -1.0"),
        ({"clip": "1"}, "clip 1"),
        ({"sampling": "shuffled"}, "sampling 'shuffled'"),
        ({"sampling": "disjoint"}, "pass None"),
        ({"sampling": "disjoint", "number": 0}, "pass 0"),
        ({"rate": 1.1}, "rate 1.1"),
        ({"rate": 0.0}, "rate 0.0"),
        ({"rate": None}, "no rate for a batch"),
        ({"blocks": []}, r"blocks \[\]"),
        ({"blocks": [0]}, r"blocks \[0\]"),
        ({"blocks": [2.5]}, r"blocks \[2.5\]"),
        ({"blocks": "3"}, "are not a list"),
        ({"secret": 1}, "secret 1"),
        ({"mechanism": UNPROVEN}, "must not have the figures of a guarantee"),
        ({"more": 1}, "is not a release"),
    ],
)
def test_a_release_that_cannot_be_is_refused(changed: dict[str, Any], words: str) -> None:
    assert Release.read(GOOD) == Release("dp-sgd", "gaussian", 1.0, 1.0, "poisson", 0.1, None, (3,))
    with pytest.raises(InputError, match=words):
        Release.read({**GOOD, **changed})


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_figure_of_accounting_may_be_other_than_finite(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """``max(0.0, nan)`` is 0: an epsilon of 0 was printed where nothing was known."""
    with pytest.raises(InputError, match="nothing is guaranteed"):
        finite("epsilon", bad)
    for sampled in (Sampled(bad, 0.1, 1), Sampled(1.0, bad, 1), Sampled(1.0, 0.1, bad)):  # type: ignore[arg-type]
        with pytest.raises(InputError, match="accounting"):
            composed_epsilon((sampled,), 1e-5)
    with pytest.raises(InputError, match="delta is"):
        epsilon(1.0, 0.1, 1, bad)
    with pytest.raises(InputError, match="expected at least 1"):
        Run(10, 10, bad)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="delta is"):
        Run(10, 10, 1, bad)
    if bad != math.inf:
        with pytest.raises(InputError, match="a divergence of"):
            converted(2.0, bad, 1e-5)
    module = import_module("rasura.accounting.epsilon")
    monkeypatch.setattr(module, "_by_library", lambda *_: bad)
    monkeypatch.setattr(module, "_by_orders", lambda *_: bad)
    for by in ("pld", "rdp", "paper"):
        with pytest.raises(InputError, match="nothing is guaranteed"):
            composed_epsilon((Sampled(1.25, 0.1, 1),), 1.5e-5, by=by)  # type: ignore[arg-type]


def test_the_conversion_is_the_published_one() -> None:
    order, divergence, delta = 3.0, 0.5, 1e-3
    assert converted(order, divergence, delta) == pytest.approx(0.5 + math.log(2 / 3) - math.log(3e-3) / 2)
    assert converted(2.0, 0.0, 0.9) == 0.0  # never below nothing
    for bad in (1.0, 0.5, math.inf, math.nan):
        with pytest.raises(InputError, match="at an order above 1"):
            converted(bad, 0.5, 1e-3)
    assert min(ORDERS) > 1 and list(ORDERS[:60]) == sorted(ORDERS[:60])


def test_too_little_noise_and_no_release_have_no_epsilon() -> None:
    with pytest.raises(InputError, match="too small for any guarantee"):
        epsilon(9.99e-4, 0.1, 1, 1e-5)
    assert math.isfinite(epsilon(1e-3, 0.1, 1, 1e-5))
    with pytest.raises(InputError, match="there is no release"):
        composed_epsilon((), 1e-5)
    with pytest.raises(InputError, match="unknown noise 'uniform'"):
        composed_epsilon((Sampled(1.0, 0.1, 1, "uniform"),), 1e-5)


# --- kept and gone on with


def test_a_ledger_is_kept_and_gone_on_with(tmp_path: Path) -> None:
    first = filled(releases=5)
    first.begin()
    path = tmp_path / "ledger.json"
    first.save(path)
    second = ledger()
    second.load(path)
    assert second.runs == first.runs and second.releases == 5 and second.begin() == 2
    second.made(CHANCE, [7, 3], secret=True)
    assert second.runs == [(first.runs[0][0], 6)]
    with pytest.raises(InputError, match="has already counted 6 releases; load a state before"):
        second.load(path)
    with pytest.raises(InputError, match="for 100 texts, but this training has 200"):
        ledger(run=Run(200, 10, 2, 1e-5)).load(path)
    with pytest.raises(InputError, match="for dp-sgd, but this training uses normalised"):
        ledger("normalised:2.0").load(path)
    assert counted(path).epsilon == first.epsilon
    assert counted(path, 1e-7).epsilon > first.epsilon and counted(path, 1e-7).delta == 1e-7  # type: ignore[operator]


SHUFFLED = Run(100, 50, 4, sampling="shuffled")


def test_a_smaller_batch_does_not_lower_what_larger_ones_spent() -> None:
    """Of a loader that shuffles: all releases were counted at the rate of the last plan."""
    first, second = ledger("dp-sgd:1.0", SHUFFLED), ledger("dp-sgd:1.0", replace(SHUFFLED, batch_size=1))
    for _ in range(8):
        first.made(Draw(), [10], secret=True)
    before = first.spent().otherwise
    assert before is not None and before == first.planned.otherwise
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.made(Draw(), [10], secret=True)
    after = second.spent().otherwise
    assert after is not None and after[0] >= before[0] and after[1] == before[1]


def test_a_release_whose_rate_was_not_kept_counts_as_one_of_all_texts() -> None:
    first, second = ledger("dp-sgd:1.0", SHUFFLED), ledger("dp-sgd:1.0", SHUFFLED)
    first.made(Draw(), [10], secret=True)
    state = first.state_dict()
    state["runs"][0]["release"]["rate"] = None
    second.load_state_dict(state)
    every = Ledger(mechanisms("dp-sgd:1.0"), replace(SHUFFLED, batch_size=100))
    every.made(Draw(), [10], secret=True)
    known, unknown, largest = (one.spent().otherwise for one in (first, second, every))
    assert known is not None and unknown is not None and known[0] < unknown[0] and unknown == largest


@pytest.mark.parametrize(
    "changed",
    [
        {"version": 2}, {"examples": 0}, {"examples": True}, {"batch_size": 0}, {"delta": None}, {"passes": -1},
        {"runs": {}}, {"runs": [1]}, {"runs": [{"release": GOOD, "count": 0}]}, {"runs": [{"release": GOOD, "count": 1.5}]},
        {"runs": [{"release": GOOD}]}, {"runs": [{"release": None, "count": 1}]}, {"more": 1},
        {"runs": [{"release": {**GOOD, "sampling": "disjoint", "number": 1}, "count": 1}]},
    ],
)  # fmt: skip
def test_what_is_no_ledger_is_refused(changed: dict[str, Any]) -> None:
    state = json.loads(json.dumps(filled(releases=5).state_dict()))
    assert read(state)[0][0][1] == 5
    made = ledger()
    with pytest.raises(InputError):
        made.load_state_dict({**state, **changed})
    assert made.runs == []
    nothing: Any
    for nothing in (None, [], "x", {}):
        with pytest.raises(InputError, match="no state of a ledger"):
            read(nothing)


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path) -> None:
    for text in ("{", "\x00", ""):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(InputError, match="is not a ledger"):
            parsed(tmp_path / "x.json")
    with pytest.raises(InputError, match="is not a ledger: FileNotFoundError"):
        parsed(tmp_path / "y.json")
    for privacy in (None, {"warnings": None}, {"warnings": [1]}):
        (tmp_path / "x.json").write_text(json.dumps({"ledger": filled(releases=1).state_dict(), "privacy": privacy}))
        with pytest.raises(InputError, match="holds no list of warnings"):
            parsed(tmp_path / "x.json")
    (tmp_path / "result.json").write_text(json.dumps({"ledger": filled(releases=1).state_dict()}))
    assert counted(tmp_path / "result.json").steps == 1
    ledger().save(tmp_path / "x.json")
    with pytest.raises(InputError, match="0 mechanisms"):
        counted(tmp_path / "x.json")


def test_the_command_tells_what_a_training_spent(tmp_path: Path) -> None:
    made = filled(releases=5)
    made.save(tmp_path / "ledger.json")
    done = rasura_command("account", "--ledger", str(tmp_path / "ledger.json"), "--json")
    assert json.loads(done.stdout)["epsilon"] == made.epsilon
    with pytest.raises(InputError, match="--ledger can be combined with --delta only"):
        account(ledger=tmp_path / "ledger.json", sigma="1")


# --- which compositions have a proof

SETTINGS = {
    "frozen-blocks": ":1", "dropout": ":0.1", "gaussian": ":0.1", "laplace": ":0.1", "pruning": ":0.5", "sealing": ":all",
    "random-pruning": ":0.5", "accumulate": ":16", "dp-sgd": ":1.0", "normalised": ":1.0", "directional": ":1e3",
    "dp-ftrl": ":1.0/band=4",
}  # fmt: skip
CARRIERS = {"dp-sgd", "normalised", "directional", "dp-ftrl"}
BESIDE = {
    "none", "frozen-embeddings", "frozen-blocks", "dropout", "gaussian", "laplace", "pruning", "random-pruning", "fp16",
    "bf16", "sign", "sealing",
}  # fmt: skip


def written(name: str) -> str:
    return name + SETTINGS[name] if name in SETTINGS else DEFENSES[name].example


def expected(first: str, second: str) -> str:
    pair = {first, second}
    if first in CARRIERS and second in CARRIERS:
        return "refused"
    return "proven" if pair & CARRIERS and pair - CARRIERS <= BESIDE else "no formal guarantee"


@pytest.mark.parametrize(("first", "second"), list(product(DEFENSES, DEFENSES)))
def test_every_ordered_pair_is_proven_refused_or_has_no_guarantee(
    first: str, second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "+".join(map(written, (first, second)))
    if first == "sealing" and any(part.stage is Stage.WIRE for part in parse_defense(written(second))):
        with pytest.raises(InputError, match=r"behind sealing|seals twice"):
            parse_defense(text)
        return
    wanted = expected(first, second)
    if wanted == "refused":
        with pytest.raises(InputError, match="both aggregate the batch"):
            parse_defense(text)
        both = mechanisms(first + SETTINGS[first]) + mechanisms(second + SETTINGS[second])
        assert composition(both).verdict == "refused" and composition(both).formal is None
        return
    if "ghost" in (first, second):
        pytest.importorskip("simplemma")
    known = mechanisms(text)
    found = composition(known)
    assert found.verdict == wanted and (found.formal is not None) == (wanted == "proven") and found.why
    monkeypatch.setattr("rasura.accounting.guarantees.spent", lambda *_: Spent(1.0, 1.0, 1.0))
    told = guarantee(known, Run(1000, 10, 1, sampling="fixed" if "dp-ftrl" in text else "poisson"), sizes=[10])
    assert (told.epsilon is not None) == (wanted == "proven")
    assert told.statement.startswith("no formal guarantee") == (wanted != "proven")


def test_the_table_names_registered_protections_and_no_other_has_a_guarantee() -> None:
    """A new protection has no guarantee beside a mechanism until its proof stands in the table."""
    assert set(DEFENSES) >= CARRIERS | set(table.PROVEN) - {"mean"} | set(table.OPEN)
    assert set(table.FORMAL) == CARRIERS and not set(table.PROVEN) & set(table.OPEN)
    unknown = Mechanism("something-new", Stage.WIRE)
    found = composition([*mechanisms("dp-sgd:1.0"), unknown])
    assert found.verdict == "no formal guarantee" and "something-new is not in the table" in found.why
    assert composition([]).verdict == "no formal guarantee" and composition([]).formal is None


def test_what_a_third_part_voids_is_void() -> None:
    for text in (
        "frozen-embeddings+dp-sgd:1.0+sign+accumulate:16",
        "dp-sgd:1.0+sealing:sens=0.1",
        "dp-sgd:1.0+accumulate:16",
    ):
        told = guarantee(mechanisms(text), Run(1000, 10, 1))
        assert told.epsilon is None and told.statement.startswith("no formal guarantee: nothing is proven for"), text
    assert "merged" in composition(mechanisms("dp-sgd:1.0+accumulate:16")).why
    assert "made from the texts themselves" in composition(mechanisms("dp-sgd:1.0+sealing:sens=0.1")).why
    whole = composition(mechanisms("frozen-blocks:1+dropout:0.1+dp-sgd:1.0+pruning:0.5+fp16"))
    assert whole.verdict == "proven" and whole.formal == mechanisms("dp-sgd:1.0")[0]
    assert whole.why.count("post-processing") == 1 and "smaller model" in whole.why and "masks" in whole.why


def test_the_page_on_guarantees_has_the_same_table() -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "differential-privacy.md"
    rows = [line.split("|")[1:3] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    told = {name.strip().strip("`"): verdict.strip() for name, verdict in rows}
    for name in DEFENSES:
        if name not in CARRIERS:
            assert told.get(name, "no formal guarantee") == expected("dp-sgd", name), name
