"""Releases and the file of a ledger to the letter: what is written down, what is refused, and in which words."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rasura.accounting import Draw, Ledger, Release, Run, composition, epsilon
from rasura.accounting.ledger import counted, parsed
from rasura.accounting.releases import UNPROVEN, Spent, spent
from rasura.accounting.states import read
from rasura.core.errors import InputError
from rasura.core.mechanisms import Directional, DpSgd, Gaussian, Normalised
from rasura.core.values import Mechanism, Stage

pytest.importorskip("dp_accounting")

RUN = Run(100, 10, 2, 1e-5)
DP_SGD = Release("dp-sgd", "gaussian", 2.0, 1.0, "poisson", 0.1, None, (10,))
DIRECTION = Release("directional", "von-mises-fisher", 5.0, 1.0, "disjoint", None, 1, (10,))
FIELDS = "blocks, clip, mechanism, multiplier, noise, number, rate, sampling, secret"


def said(call: Any) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


# --- one release


def test_a_release_as_plain_values() -> None:
    assert DP_SGD.to_dict() == {
        "mechanism": "dp-sgd", "noise": "gaussian", "multiplier": 2.0, "clip": 1.0, "sampling": "poisson", "rate": 0.1,
        "number": None, "blocks": [10], "secret": True,
    }  # fmt: skip
    for one in (DP_SGD, DIRECTION, Release(UNPROVEN, secret=False)):
        assert Release.read(json.loads(json.dumps(one.to_dict()))) == one
    assert vars(Release(UNPROVEN)) == {
        "mechanism": UNPROVEN, "noise": "", "multiplier": 0.0, "clip": 0.0, "sampling": "unknown", "rate": None,
        "number": None, "blocks": (), "secret": True, "band": None, "separation": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"noise": "uniform"}, "noise 'uniform', expected gaussian or laplace"),
        ({"mechanism": "directional"}, "noise 'gaussian', expected von-mises-fisher"),
        ({"multiplier": 0.0}, "multiplier 0.0, expected a finite number above 0"),
        ({"multiplier": math.inf}, "multiplier inf, expected a finite number above 0"),
        ({"clip": 0.0}, "clip 0.0, expected a finite number above 0"),
        ({"clip": True}, "clip True, expected a finite number above 0"),
        ({"clip": None}, "clip None, expected a finite number above 0"),
        ({"sampling": "shuffled"}, "sampling 'shuffled'"),
        ({"rate": 1.001}, "rate 1.001, expected above 0 and at most 1"),
        ({"rate": 0}, "rate 0, expected above 0 and at most 1"),
        ({"rate": None}, "no rate for a batch drawn by Poisson sampling"),
        ({"sampling": "disjoint"}, "pass None, expected a whole number from 1 on"),
        ({"sampling": "disjoint", "number": 0}, "pass 0, expected a whole number from 1 on"),
        ({"sampling": "disjoint", "number": True}, "pass True, expected a whole number from 1 on"),
        ({"sampling": "disjoint", "number": 1.0}, "pass 1.0, expected a whole number from 1 on"),
        ({"blocks": []}, "blocks [], expected whole numbers from 1 on"),
        ({"blocks": [3, 2, 1, 0, 5]}, "blocks [3, 2, 1, 0], expected whole numbers from 1 on"),
        ({"blocks": [True]}, "blocks [True], expected whole numbers from 1 on"),
        ({"secret": 1}, "secret 1, expected true or false"),
        (
            {"multiplier": -1.0, "secret": None},
            "multiplier -1.0, expected a finite number above 0; secret None, expected true or false",
        ),
    ],
)
def test_what_is_wrong_with_a_release_is_said(changed: dict[str, Any], words: str) -> None:
    assert said(lambda: Release.read({**DP_SGD.to_dict(), **changed})) == f"accounting: a release with {words}"


@pytest.mark.parametrize("changed", [{"rate": 1.0}, {"rate": 1}, {"blocks": (1,)}, {"multiplier": 1, "clip": 5e-324}])
def test_the_ends_of_what_a_release_may_be(changed: dict[str, Any]) -> None:
    assert replace(DP_SGD, **changed) != DP_SGD and replace(DIRECTION, number=1) == DIRECTION


def test_what_is_no_release_is_said() -> None:
    known = "dp-sgd, normalised, directional, dp-ftrl"
    assert said(lambda: Release("x" * 3)) == f"accounting: unknown mechanism 'xxx'; known: {known}"
    wanted = f"is not a release; expected an object with {FIELDS}"
    long = {"a": "x" * 200}
    assert said(lambda: Release.read(long)) == f"accounting: {str(long)[:80]} {wanted}"
    assert said(lambda: Release.read([*DP_SGD.to_dict()])).endswith(wanted)
    assert (
        said(lambda: Release.read({**DP_SGD.to_dict(), "blocks": (10,)}))
        == "accounting: the blocks of a release are not a list"
    )
    figures = "accounting: a release without a formal guarantee must not have the figures of a guarantee"
    for changed in (
        {"noise": "gaussian"}, {"multiplier": 1.0}, {"clip": 1.0}, {"sampling": "poisson"}, {"rate": 0.1}, {"number": 1},
        {"blocks": (1,)}, {"band": 1}, {"separation": 1},
    ):  # fmt: skip
        assert said(lambda one=changed: Release(UNPROVEN, **one)) == figures  # type: ignore[misc]


def test_the_release_of_a_mechanism() -> None:
    chance = Draw("poisson", 0.25)
    one = Release.of(Normalised(3.0), chance, iter([7, 3]), secret=False)
    assert one == Release("normalised", "gaussian", 3.0, 1.0, "poisson", 0.25, None, (10,), False)
    assert Release.of(DpSgd(0.5, 4.0, "laplace"), Draw(), [2], secret=True) == Release(
        "dp-sgd", "laplace", 0.5, 4.0, "unknown", None, None, (2,), True
    )
    third = Draw("disjoint", number=3)
    parts = Release.of(Directional(5.0, "parameters"), third, [7, 3], secret=False)
    assert parts == Release("directional", "von-mises-fisher", 5.0, 1.0, "disjoint", None, 3, (7, 3), False)
    assert Release.of(None, third, [7, 3], secret=False) == Release(UNPROVEN, secret=False)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("directional", {"kappa": None, "blocks": "whole"}, "multiplier 0.0"),
        ("dp-sgd", {"sigma": None, "clip": 1.0, "noise": "gaussian"}, "multiplier 0.0"),
        ("dp-sgd", {"sigma": 1.0, "clip": None, "noise": "gaussian"}, "clip 0.0"),
    ],
)
def test_a_mechanism_that_does_not_tell_its_noise_has_no_release(name: str, parameters: dict[str, Any], words: str) -> None:
    told = Mechanism(name, Stage.AGGREGATE, parameters)
    expected = f"accounting: a release with {words}, expected a finite number above 0"
    assert said(lambda: Release.of(told, Draw("poisson", 0.1), [10], secret=True)) == expected


# --- what several spend


def test_what_releases_spend_together() -> None:
    found = spent([(DP_SGD, 3), (replace(DP_SGD, clip=7.0), 2)], 1e-5)
    assert found == Spent(epsilon(2.0, 0.1, 5, 1e-5), None, None, epsilon(2.0, 0.1, 5, 1e-5, by="rdp"))
    laplace = replace(DP_SGD, noise="laplace", multiplier=1.0)
    mixed = spent([(DP_SGD, 1), (laplace, 1)], 1e-5)
    assert mixed.pure is None and mixed.cross_check is None and mixed.metric is None
    least = spent([(laplace, 1)], 1e-9)
    pure = math.log(1 - 0.1 + 0.1 * math.e)
    assert least.pure == pytest.approx(pure, rel=1e-12) and least.epsilon <= least.pure and least.metric is None
    assert spent([(replace(laplace, rate=1.0), 2), (laplace, 1)], 1e-5).pure == pytest.approx(2 + pure, rel=1e-12)


def test_a_sum_that_is_no_number_is_refused() -> None:
    """Each kind of release has an epsilon, all of them together have none."""
    kinds = [replace(DIRECTION, sampling="poisson", rate=0.1, multiplier=k * 1e297) for k in range(10, 20)]
    assert spent([(kinds[0], 10**9)], 1e-5).pure == pytest.approx(2e307)
    assert said(lambda: spent([(one, 10**9) for one in kinds], 1e-5)) == (
        "accounting: epsilon is inf, so nothing is guaranteed; use more noise or fewer steps"
    )


def test_what_is_not_proven_is_said() -> None:
    assert said(lambda: spent([(DP_SGD, 1), (Release(UNPROVEN), 1)], 1e-5)) == (
        "accounting: a release without a formal guarantee has no epsilon"
    )
    assert said(lambda: spent([(DP_SGD, 1), (replace(DP_SGD, sampling="unknown"), 1)], 1e-5)) == (
        "accounting: it is not known how the batch of a release was drawn, so nothing is proven for it"
    )
    by_pass = replace(DP_SGD, sampling="disjoint", number=1)
    other = Release("normalised", "gaussian", 1.0, 1.0, "poisson", 0.1, None, (10,))
    for runs, names in (
        ([DP_SGD, by_pass], "dp-sgd"), ([DP_SGD, DIRECTION], "directional, dp-sgd"),
        ([other, by_pass, DP_SGD], "dp-sgd, normalised"),
    ):  # fmt: skip
        words = said(lambda those=runs: spent([(one, 1) for one in those], 1e-5))  # type: ignore[misc]
        assert words == f"accounting: no composition is proven for {names} with these batches"
    assert spent([(DP_SGD, 1), (replace(other, multiplier=2.0), 1)], 1e-5) == spent([(DP_SGD, 2)], 1e-5)


def test_the_words_of_a_composition() -> None:
    alone = composition([DpSgd(1.0)])
    assert (alone.verdict, alone.why, alone.formal) == ("proven", "the mechanism alone", DpSgd(1.0))
    assert composition([]).why == "nothing is proven for none" and composition([]).formal is None
    assert composition([Gaussian(1.0), Gaussian(2.0)]).why == "nothing is proven for gaussian + gaussian"
    both = composition([DpSgd(1.0), Gaussian(1.0), Directional(1.0)])
    assert (both.verdict, both.why) == ("refused", "'dp-sgd' and 'directional' both aggregate the batch")
    afterwards = "computed from the protected update alone, so it reveals nothing more (post-processing)"
    mean = Mechanism("mean", Stage.AGGREGATE)
    beside = composition([mean, DpSgd(1.0), Gaussian(1.0), Gaussian(2.0)])
    assert beside.why == f"nothing is added; {afterwards}" and beside.formal == DpSgd(1.0)
    for metric in ({}, {"metric": "sens"}, {"metric": "sensitivity"}):
        sealed = composition([DpSgd(1.0), Mechanism("sealing", Stage.WIRE, metric)])
        assert sealed.verdict == "no formal guarantee" and sealed.formal is None
        assert sealed.why == (
            "nothing is proven for dp-sgd + sealing: the mask of sealing by sensitivity is made from the texts themselves"
        )
    assert composition([Mechanism("sealing", Stage.WIRE, {"metric": "all"}), DpSgd(1.0)]).why == afterwards
    new = composition([Mechanism("new", Stage.WIRE), DpSgd(1.0)])
    assert new.why == "nothing is proven for new + dp-sgd: new is not in the table of proven compositions"
    waiting = composition([DpSgd(1.0), Mechanism("accumulate", Stage.WIRE)])
    assert waiting.why.endswith("accumulate: the time of sending depends on the texts, and random batches are merged")


# --- the ledger


def filled(releases: int = 3, run: Run = RUN) -> Ledger:
    made = Ledger([Gaussian(0.1), DpSgd(2.0)], run)
    for _ in range(releases):
        made.made(Draw("poisson", 0.1), [7, 3], secret=True)
    return made


def test_the_state_of_a_ledger() -> None:
    made = filled()
    assert made.begin() == 1 and made.begin() == 2 and made.passes == 0 and made.releases == 3
    assert made.state_dict() == {
        "version": 1, "examples": 100, "batch_size": 10, "delta": 1e-5, "passes": 2, "defense": ["gaussian", "dp-sgd"],
        "runs": [{"release": DP_SGD.to_dict(), "count": 3}],
    }  # fmt: skip
    again = filled(0)
    again.load_state_dict(made.state_dict())
    assert again.state_dict() == made.state_dict() and again.begin() == 3
    assert (made.run, made.defense, made.formal) == (RUN, (Gaussian(0.1), DpSgd(2.0)), DpSgd(2.0))


def test_a_ledgers_file_can_be_read_by_a_person(tmp_path: Path) -> None:
    made = filled()
    made.save(tmp_path / "a.json")
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert text.startswith('{\n "version": 1,\n') and text.endswith("}\n") and json.loads(text) == made.state_dict()
    assert parsed(tmp_path / "a.json") == (made.state_dict(), [])
    whole = {"ledger": {"é": 1}, "privacy": {"warnings": ["x"]}}
    (tmp_path / "b.json").write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    assert parsed(str(tmp_path / "b.json")) == ({"é": 1}, ["x"])
    (tmp_path / "b.json").write_text("[1]")
    assert parsed(tmp_path / "b.json") == ([1], [])
    (tmp_path / "b.json").write_text("{")
    assert said(lambda: parsed(tmp_path / "b.json")) == (
        f"{tmp_path / 'b.json'} is not a ledger: JSONDecodeError; expected a JSON file that a training wrote"
    )


@pytest.mark.slow
def test_what_a_file_says_was_spent(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    made = filled()
    made.save(path)
    assert counted(path) == made.spent() and counted(path).warnings == ()
    assert counted(path, 0.02) == filled(run=replace(RUN, delta=0.02)).spent()
    assert counted(path, 0.02).warnings[0].startswith("delta 0.02 is not below 1 / 100 texts")
    free = Ledger([Gaussian(0.1)], RUN)
    free.made(Draw(), [10], secret=True)
    free.save(path)
    assert counted(path).statement == (
        "no formal guarantee: its releases were made without a proof; only an audit can show what it stops"
    )
    assert free.spent().statement == (
        "no formal guarantee: nothing is proven for gaussian; only an audit can show what it stops"
    )
    assert said(lambda: free.epsilon) == free.spent().statement
    unknown = Ledger([DpSgd(2.0)], RUN)
    for _ in range(25):  # more than planned: what is not known has no limit
        unknown.made(Draw(), [10], secret=True)
    unknown.save(path)
    assert counted(path) == unknown.spent() and "the loader shuffles" in counted(path).warnings[0]
    assert counted(path).otherwise == (epsilon(2.0, 0.1, 25, 1e-5), 1e-5)
    several = {**made.state_dict(), "runs": [{"release": r.to_dict(), "count": 1} for r in (DP_SGD, DIRECTION)], "passes": 1}
    path.write_text(json.dumps(several))
    assert said(lambda: counted(path)) == f"{path} holds releases of 2 mechanisms; expected one"


def test_what_a_ledger_refuses_is_said() -> None:
    told = "plan a larger number of epochs; the guarantee holds only for the planned number"
    full = filled(20)
    assert said(lambda: full.room(Draw("poisson", 0.1))) == f"all 20 planned releases (2 epochs) were made (20); {told}"
    full.room(Draw())
    shuffled = Ledger([Directional(5.0)], replace(RUN, sampling="shuffled"))
    for number in (1, 2):
        shuffled.made(Draw("disjoint", number=number), [10], secret=True)
    shuffled.room(Draw("disjoint", number=2))
    assert said(lambda: shuffled.room(Draw("disjoint", number=3))) == (
        f"all 2 planned passes over the texts were made (2); {told}"
    )
    shuffled.made(Draw("disjoint", number=2), [10], secret=True)  # a pass that was begun may be finished
    assert shuffled.releases == 3
    assert (
        said(lambda: full.append(Release(UNPROVEN)))
        == "this ledger counts releases of dp-sgd, but this is a release of unproven"
    )
    free = Ledger([Gaussian(0.1)], RUN)
    assert said(lambda: free.append(DP_SGD)) == "this ledger counts releases of unproven, but this is a release of dp-sgd"
    state = filled().state_dict()
    assert said(lambda: filled(2).load_state_dict(state)) == (
        "this ledger has already counted 2 releases; load a state before training begins"
    )
    assert (
        said(lambda: filled(0, Run(99, 10, 2)).load_state_dict(state))
        == "the ledger is for 100 texts, but this training has 99"
    )
    assert said(lambda: Ledger([DpSgd(2.0), Gaussian(0.1)], RUN).load_state_dict(state)) == (
        "the ledger is for gaussian + dp-sgd, but this training uses dp-sgd + gaussian"
    )
    # Batches and delta may be others: what is spent is told at those of this training.
    filled(0, Run(100, 20, 5, 1e-6)).load_state_dict(state)


def test_the_plan_of_a_ledger_knows_its_sizes_and_its_seed() -> None:
    made = Ledger([Directional(5.0)], replace(RUN, sampling="shuffled"), sizes=[600, 400], secure=False)
    assert made.planned.otherwise is not None and made.planned.otherwise[1] == 1e-5
    assert made.planned.warnings[0].startswith("the noise is seeded") and made.why == "the mechanism alone"
    assert Ledger([Directional(5.0)], RUN).planned.delta == 0.0


NUMBERS = "the state of a ledger lacks a list of releases, or has invalid numbers"
ENTRY = "the state of a ledger holds an entry that is not a release with its count"
PASS = "the state of a ledger has a release in a pass that did not begin"
NAMES = "batch_size, defense, delta, examples, passes, runs, version"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": 0}, f"no state of a ledger; expected an object of version 1 with {NAMES}"),
        ({"passes": -1}, NUMBERS), ({"passes": 1.0}, NUMBERS), ({"examples": 0}, NUMBERS), ({"batch_size": 0}, NUMBERS),
        ({"batch_size": True}, NUMBERS), ({"delta": 1}, NUMBERS), ({"runs": ()}, NUMBERS), ({"runs": None}, NUMBERS),
        ({"runs": [{"release": DP_SGD.to_dict(), "count": 0}]}, ENTRY),
        ({"runs": [{"release": DP_SGD.to_dict(), "count": True}]}, ENTRY),
        ({"runs": [{"release": DP_SGD.to_dict(), "count": 1, "more": 1}]}, ENTRY), ({"runs": [["release", "count"]]}, ENTRY),
        ({"runs": [{"release": replace(DIRECTION, number=3).to_dict(), "count": 1}]}, PASS),
        ({"runs": [{"release": replace(DIRECTION, number=n).to_dict(), "count": 1} for n in (3, 1)]}, PASS),
    ],
)  # fmt: skip
def test_what_is_no_state_is_said(changed: dict[str, Any], words: str) -> None:
    state = {**filled().state_dict(), "passes": 2}
    assert said(lambda: read({**state, **changed})) == words


def test_the_ends_of_what_a_state_may_be() -> None:
    least = {**filled().state_dict(), "examples": 1, "batch_size": 1, "passes": 0}
    assert read(least) == ([(DP_SGD, 3)], 0)
    begun = [{"release": replace(DIRECTION, number=n).to_dict(), "count": 1} for n in (2, 1)]
    assert read({**least, "runs": begun, "passes": 2}) == ([(replace(DIRECTION, number=n), 1) for n in (2, 1)], 2)
    assert read({**least, "runs": []}) == ([], 0)
