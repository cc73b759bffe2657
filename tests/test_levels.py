"""One setting, one attack, and the search over settings: upper bounds and where they come from. No model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from rows import GUESS, MANY, METRIC, READ, column, record

from rasura.metrics.intervals import mean_interval
from rasura.registry import adversaries
from rasura.report.calibration import outcome
from rasura.report.levels import bound, point, yardstick
from rasura.report.pooled import texts_needed
from rasura.report.search import UNPROTECTED, holds, least, not_found, searchable, why_not
from rasura.report.verdicts import ABOVE, NOT_MEASURED, NOT_TOLD, READS, Verdict

# --- the search


def searched(bounds: dict[float, float | None], at_most: float = 0.1, steps: int = 0) -> float | None:
    return least(lambda t: bounds[t], [(t, bounds[t]) for t in sorted(bounds)], at_most, steps)


def test_the_search_finds_the_edge_of_a_falling_bound() -> None:
    asked: list[float] = []

    def measure(position: float) -> float:
        asked.append(position)
        return 1 - position if position >= 0 else 1.0

    found = least(measure, [(t, measure(t)) for t in (UNPROTECTED, 0.0, 0.25, 0.5, 0.75, 1.0)], 0.4, 8)
    assert found is not None and 0.6 <= found < 0.6 + 0.25 / 2**8 * 1.01
    assert max(t for t in asked if t < found) < 0.6, "the next weaker one tried does not hold"


def test_the_search_asks_that_all_stronger_ones_hold() -> None:
    assert searched({0.0: 0.05, 0.5: 0.2, 1.0: 0.1}) == 1.0, "a bound is met where it is equal; the weak one was luck"
    assert searched({UNPROTECTED: 0.1, 0.0: 0.0, 1.0: 0.0}) == UNPROTECTED
    assert searched({0.0: 0.9, 1.0: 0.11}) is None
    assert searched({0.0: None, 1.0: None}) is None


def test_a_setting_that_could_not_be_judged_does_not_hold_for_the_weaker_ones() -> None:
    assert searched({0.0: 0.9, 0.25: 0.1, 0.5: None, 1.0: 0.0}) == 1.0
    assert searched({UNPROTECTED: 0.1, 0.0: None, 1.0: 0.0}) == 1.0, "what protects nothing was no better judged"
    assert searched({0.0: 0.9, 0.5: 0.1, 1.0: None}) is None
    assert least(lambda t: 0.0, [(0.0, 0.9), (0.5, None), (1.0, 0.1)], 0.1, 1) == 0.75, "none is looked for below it"


def test_settings_under_which_nothing_is_sent_have_no_part_in_the_search() -> None:
    points = {t: {"bound": b, "sent": sent} for t, b, sent in (
        (0.0, 0.9, True), (0.25, None, False), (0.5, 0.1, True), (0.75, None, False), (1.0, None, False)
    )}  # fmt: skip
    assert searchable(points) == [(0.0, 0.9), (0.25, None), (0.5, 0.1)], "from where on there is nothing to read"
    assert searchable({0.0: points[1.0]}) == []


@pytest.mark.parametrize(("bounds", "expected", "halvings"), [
    ({0.0: 0.9, 0.5: 0.1, 1.0: 0.0}, 0.5, [0.25]), ({0.0: 0.9, 0.25: 0.1, 0.5: 0.1, 1.0: 0.0}, 0.25, [0.125]),
    ({UNPROTECTED: 0.9, 0.0: 0.1, 1.0: 0.0}, 0.0, []), ({0.0: 0.1, 1.0: 0.0}, 0.0, []),
    ({UNPROTECTED: 0.1, 0.0: 0.1, 1.0: 0.0}, UNPROTECTED, []),
])  # fmt: skip
def test_halvings_need_two_figures(bounds: dict[float, float], expected: float, halvings: list[float]) -> None:
    """Between a protection and none there is no middle, nor below the weakest that was tried."""
    asked: list[float] = []

    def measure(position: float) -> float:
        asked.append(position)
        return 0.9

    assert least(measure, list(bounds.items()), 0.1, 1) == expected
    assert asked == halvings


@pytest.mark.parametrize(("middle", "expected"), [(0.1, 0.5), (0.11, 1.0), (None, 1.0)])
def test_a_halving_holds_where_its_bound_is_known_and_at_most_the_target(middle: float | None, expected: float) -> None:
    assert least(lambda t: middle, [(0.0, 0.9), (1.0, 0.0)], 0.1, 1) == expected


def test_a_point_holds_by_its_bound() -> None:
    assert [holds({"bound": b}, 0.2) for b in (0.1, 0.2, 0.21, None)] == [True, True, False, False]


def outcome_of(bounds: Sequence[float | None], tried: bool = True) -> str:
    unjudged: list[dict[str, Any]] = [
        {"setting": "none", "bound": b, "risk": {} if tried else None, "unjudged": ["why"] if b is None else []}
        for b in bounds
    ]
    return str(not_found(unjudged, 0.5)["status"])


def test_a_target_is_missed_only_where_nothing_stronger_is_unknown() -> None:
    assert outcome_of([1.0, 0.6]) == "unreached"
    assert outcome_of([1.0, None]) == outcome_of([None]) == "not measured"
    assert outcome_of([None, 0.6]) == "unreached", "stronger ones are worse"
    assert outcome_of([1.0, None], tried=False) == outcome_of([None], tried=False) == "not measured"
    assert outcome_of([0.5, None]) == outcome_of([0.5]) == "not measured", "a bound at the target does not miss it"
    points: list[dict[str, Any]] = [
        {"bound": b, "risk": {}, "unjudged": why} for b, why in ((1.0, []), (None, ["b", "a"]), (None, ["a", "c"]))
    ]
    assert not_found(points, 0.5) == {"status": "not measured", "unjudged": ["a", "c"]}, "of the strongest"
    assert not_found([{"bound": None, "risk": {}, "unjudged": ["a"]}, *points[:1]], 0.5)["unjudged"] == []


def test_where_no_attack_could_be_tried_the_weakest_unknown_setting_says_why() -> None:
    missed: dict[str, Any] = {"setting": "none", "bound": 1.0, "risk": {}, "unjudged": []}
    untried: list[dict[str, Any]] = [
        {"setting": f"waits:{k}", "bound": None, "risk": None, "unjudged": [f"no {k}", "few"]} for k in (2, 3)
    ]
    assert not_found([missed, *untried], 0.5) == {"status": "not measured", "unjudged": ["at waits:2 no 2; few"]}
    assert not_found([{**untried[0], "setting": "none"}], 0.5)["unjudged"] == ["without protection no 2; few"]
    judged = {**untried[0], "risk": {}, "unjudged": ["few"]}
    assert not_found([missed, judged, untried[1]], 0.5)["unjudged"] == ["few"]


@pytest.mark.parametrize(("word", "missing", "risk", "expected"), [
    (NOT_TOLD, (), {"mean": 0.5}, []), (NOT_TOLD, (), None, ["span: too much noise"]),
    (READS, (), {"mean": 0.5}, ["its words"]), (NOT_MEASURED, ("no",), {"mean": 0.5}, ["its words"]),
    (READS, ("no",), None, ["its words"]),
])  # fmt: skip
def test_why_a_fresh_audit_does_not_confirm(word: str, missing: tuple[str, ...], risk: Any, expected: list[str]) -> None:
    said = {"verdict": word, "missing": list(missing), "says": "its words"}
    assert why_not({"verdict": said, "risk": risk, "reasons": ("span: too much noise",)}) == expected


# --- one setting, one attack


def scores(attack: str, values: list[float], *, seed: int = 0, status: str = "ok", guess: float = 0.2) -> dict[str, Any]:
    scored = {"rougeL": {"per_record": values}} if status == "ok" else {}
    guesses = {"rougeL": {"per_record": [guess] * len(values)}}
    return {
        "attack": attack, "status": status, "reason": "" if status == "ok" else "too much noise", "seed": seed, "batch": 0,
        "examples": list(range(len(values))), "threat": "honest-server", "batch_size": len(values), "confidence": "none",
        "scores": scored, "blind": guesses, "sent_bytes": 8, "defense_seconds": 0.0,
    }  # fmt: skip


def measured(setting: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return point(setting, rows, [], ["span"], "rougeL", 0.5)


def test_failures_and_guessing_count_and_seeds_add_no_texts() -> None:
    rows = [scores("span", [1.0, 0.0]), scores("span", [0.0, 0.0], seed=1, status="failed", guess=0.3)]
    (blind, span) = measured("gaussian:1", rows)["levels"]
    assert (span["n"], span["mean"], span["failed"], span["cells"]) == (2, pytest.approx((0.65 + 0.15) / 2), 1, 2)
    assert (blind["n"], blind["mean"], blind["cells"]) == (2, pytest.approx(0.25), 2)
    mixed = [scores("span", [v]) | {"batch": k, "examples": [k]} for k, v in enumerate((0.1, 0.9, 0.4, 0.7))]
    assert measured("none", mixed) == measured("none", mixed[::-1]), "whatever the order"
    silent = measured("gaussian:1", [scores("span", [0.0], status="failed")])
    assert silent["risk"]["mean"] == 0.2, "an attack that gives up guesses"
    rows = [
        scores("span", [0.0] * 9, status="failed"),
        scores("span", [0.0], status="crashed") | {"batch": 1, "examples": [9]},
    ]
    wide = measured("gaussian:1", rows)
    assert wide["risk"]["attack"] == "span"
    family = {
        "family": "gaussian",
        "status": "unreached",
        "unjudged": [],
        "points": [{**wide, "position": 0.0, "bound": 1.0}],
    }
    said = outcome(family, {"at_most": 0.1, "risk": "rougeL"})
    assert "by guessing alone" in said and "span" not in said, "an attack that named nothing reached nothing"
    worse = measured("gaussian:1", [scores("span", [0.0, 0.0, 0.0])])["risk"]
    assert worse["attack"] == "blind", "nobody does worse than guessing"
    assert measured("accumulate:9", [])["risk"] is None
    for status in ("not_applicable", "crashed"):
        nobody = measured("pruning:0.9", [scores("span", [0.0], status=status)])
        assert nobody["risk"] is None and len(nobody["levels"]) == 1, "that no attack could be tried says nothing"
        assert nobody["bound"] is None and nobody["verdict"]["verdict"] == "not measured"


def at(means: list[float], guess: float = 0.1) -> list[dict[str, Any]]:
    def level(attack: str, mean: float) -> dict[str, Any]:
        return {"attack": attack, "mean": mean, "low": mean - 0.05, "high": mean + 0.05, "works": mean > guess}

    return [{"levels": [level("blind", guess), level("span", m)]} for m in means]


def test_yardsticks() -> None:
    good = yardstick("span", at([1.0, 0.8, 0.3, 0.1]))
    assert good["well_behaved"] and good["spearman"] == pytest.approx(-1.0) and good["bottom"]
    assert yardstick("span", at([0.9, 0.3, 0.7, 0.1]))["violations"] == 1
    flat = yardstick("span", at([0.1, 0.1, 0.1]))
    assert not flat["well_behaved"] and flat["why"] == "never above guessing" and flat["spearman"] is None
    assert "not lower at the strongest setting" in yardstick("span", at([0.9, 0.92, 0.9]))["why"]
    assert yardstick("span", at([0.9, 0.0, 0.1]))["well_behaved"], "from below guessing to guessing is no rise"
    assert yardstick("span", at([0.9, 0.9, 0.3]))["spearman"] == pytest.approx(-math.sqrt(3) / 2), "two of three are equal"


def test_an_attack_that_gave_a_figure_once_measures_no_strength() -> None:
    for attack, points in (("pursuit", at([0.9, 0.1])), ("span", at([0.9]))):
        assert yardstick(attack, points) == {
            "attack": attack, "settings": int(attack == "span"), "spearman": None, "well_behaved": False, "violations": 0,
            "above_blind": False, "bottom": False, "why": "it gave a result at fewer than two settings",
        }  # fmt: skip
    two = yardstick("span", at([0.9, 0.3]))
    assert two == {
        "attack": "span", "settings": 2, "spearman": pytest.approx(-1.0), "well_behaved": True, "violations": 0,
        "above_blind": True, "bottom": False, "why": "",
    }  # fmt: skip


@pytest.mark.parametrize(("levels", "expected"), [
    ([(0.75, 0.5, 1.0), (0.25, 0.125, 0.5)], {"above_blind": True, "bottom": True, "why": ""}),
    ([(0.75, 0.125, 1.0), (0.1, 0.0, 0.5)], {"above_blind": False, "why": "never above guessing"}),
    ([(0.75, 0.5, 1.0), (0.5, 0.25, 0.75)], {"bottom": False, "why": "not lower at the strongest setting than at the "
    "weakest"}),
    ([(0.75, 0.5, 1.0), (0.625, 0.5, 0.75), (0.375, 0.25, 0.5)], {"violations": 0, "why": ""}),
    ([(0.75, 0.5, 1.0), (0.25, 0.2, 0.375), (0.375, 0.25, 0.5)], {"violations": 0, "why": ""}),
    ([(0.75, 0.5, 1.0), (0.25, 0.2, 0.375), (0.4, 0.25, 0.5)],
     {"violations": 1, "why": "risk rises with protection 1 times"}),
])  # fmt: skip
def test_how_an_attack_behaves_at_the_edges(levels: list[tuple[float, float, float]], expected: dict[str, Any]) -> None:
    """Guessing scores .125 with an interval to .25: at an end of an interval nothing is above it."""
    names = ("mean", "low", "high")
    points = [
        {"levels": [{"attack": a, **dict(zip(names, v)), "works": v[1] > 0.125}
                    for a, v in (("blind", (0.125, 0.0, 0.25)), ("span", level))]}
        for level in levels
    ]  # fmt: skip
    found = yardstick("span", points)
    assert found == {**found, **expected} and found["well_behaved"] == (not expected["why"])


def test_no_attack_is_reliable_that_the_verdict_saw_nothing_of() -> None:
    """Four texts, each read better than by guessing: too few for an interval above it, so no verdict rests on the attack."""
    settings = {"none": [0.85, 0.8, 0.85, 0.8], "gaussian:1": [GUESS] * 4}
    base = column("span", "none", settings["none"])
    points = [point(s, column("span", s, values), base, ["span"], METRIC, 0.5) for s, values in settings.items()]
    assert "no attack of this run was shown to work" in points[0]["verdict"]["says"]
    found = yardstick("span", points)
    assert not found["well_behaved"] and found["why"] == "never above guessing"
    many = {s: [*values] * 15 for s, values in settings.items()}
    base = column("span", "none", many["none"])
    assert yardstick("span", [point(s, column("span", s, v), base, ["span"], METRIC, 0.5) for s, v in many.items()])[
        "well_behaved"
    ]


def test_a_search_goes_by_the_verdict() -> None:
    quiet = [r | {"sent_bytes": 8, "defense_seconds": 0.5} for r in column("span", "dropout:0.1", [GUESS] * MANY)]
    found = point("dropout:0.1", quiet, READ, ["span", "tag"], METRIC, 0.4)
    high = mean_interval([GUESS] * MANY)[2]
    assert found["bound"] == high == found["risk"]["high"] and found["unjudged"] == [] and found["seconds"] == 0.5
    assert [level["attack"] for level in found["levels"]] == ["blind", "span"] and found["verdict"]["verdict"] == NOT_TOLD
    few = point("dropout:0.1", quiet[:4], READ[:4], ["span"], METRIC, 0.4)
    assert few["bound"] is None and few["unjudged"] == [f"4 notes; at least {texts_needed(0.4)} are needed to keep the "
    f"upper "
                                                        "bound at or below 40 %"]  # fmt: skip
    noise = {"defense": "gaussian:1", "known_by": asdict(adversaries("gaussian:1"))}
    noisy = point("gaussian:1", [r | noise for r in quiet], READ, ["span"], METRIC, 0.4)
    assert noisy["bound"] is None and noisy["unjudged"] == [
        "not measured against an adversary who knows it: add --attack pursuit,lamp-weighted"
    ]


def test_a_point_tells_its_levels_its_price_and_why_an_attack_has_no_figure() -> None:
    rows = [
        record("span", "bf16", GUESS, sent_bytes=8, defense_seconds=0.5),
        record("tag", "bf16", status="crashed", reason="it broke", sent_bytes=0, defense_seconds=9.0),
        record("dlg", "bf16", status="failed", sent_bytes=0, defense_seconds=9.0),
    ]
    found = point("bf16", rows, READ[:1], ["span", "tag", "dlg"], METRIC, 0.4)
    assert found["setting"] == "bf16" and found["reasons"] == ["dlg: it failed", "tag: it broke"]
    assert (found["sent_bytes"], found["seconds"]) == (8.0, 0.5), "of what was sent"
    assert [(level["attack"], level["failed"], level["cells"]) for level in found["levels"]] == [
        ("blind", 0, 1), ("span", 0, 1), ("dlg", 1, 1)
    ]  # fmt: skip
    twice = point("bf16", [*rows, rows[0] | {"sent_bytes": 24, "defense_seconds": 1.0}], [], ["span"], METRIC, 0.4)
    assert (twice["sent_bytes"], twice["seconds"]) == (16.0, 0.75)
    nothing = point("bf16", rows[1:], [], ["tag"], METRIC, 0.4)
    assert (nothing["sent_bytes"], nothing["seconds"]) == (0.0, 0.0)
    known_by = asdict(adversaries("gaussian:1", task="vision"))
    images = point("gaussian:1", [r | {"known_by": known_by} for r in rows], READ[:1], ["span"], METRIC, 0.4, images=True)
    assert images["unjudged"][0] == "not measured against an adversary who knows it: no attack on images knows gaussian"
    assert images["unjudged"][1].startswith("1 images; at least")


def test_a_bound_says_why_it_is_none() -> None:
    need = texts_needed(0.2)
    at_need = bound(Verdict(NOT_MEASURED, "x", need, 0.1, 0.15, missing=("no",)), 0.2)
    assert at_need == {"bound": None, "unjudged": ["not measured: no"]}, "there are enough"
    few = f"{need - 1} notes; at least {need} are needed to keep the upper bound at or below 20 %"
    assert bound(Verdict(NOT_MEASURED, "x", need - 1, missing=("no",)), 0.2)["unjudged"] == ["not measured: no", few]


@pytest.mark.parametrize(("v", "expected"), [
    (Verdict(NOT_TOLD, "x", 3, 0.2, 0.7), None), (Verdict(NOT_TOLD, "x", 3, 0.21, 0.7), 1.0),
    (Verdict(NOT_TOLD, "x", 99, 0.1, 0.15), 0.15), (Verdict(ABOVE, "x", 99, 0.1, 0.2), 0.2),
    (Verdict(NOT_TOLD, "x", 99, 0.1, 0.21), 0.21), (Verdict(READS, "x", 99, 0.1, 0.15), 1.0),
    (Verdict(ABOVE, "x", 99, 0.3, 0.35, missing=("no",)), 1.0),
    (Verdict(NOT_MEASURED, "x", 99, 0.1, 0.15, missing=("no",)), None),
    (Verdict(ABOVE, "x", 99, 0.1, 0.15, missing=("no",)), None), (Verdict(NOT_TOLD, "x", 3, 0.1, 0.7), None),
    (Verdict(NOT_MEASURED, "x", 0, missing=("no",)), None),
])  # fmt: skip
def test_what_a_bound_is(v: Verdict, expected: float | None) -> None:
    found = bound(v, 0.2)
    assert found["bound"] == expected and bool(found["unjudged"]) == (expected is None)


def test_no_setting_holds_by_another_metric_where_every_word_is_read() -> None:
    """``rougeL``, the usual risk, called a protection enough under which an attack named every word of every note."""
    from rows import GUESS, MANY, record

    def named(attack: str, defense: str, words: float, order: float) -> list[dict[str, Any]]:
        def both(a: float, b: float) -> dict[str, Any]:
            return {"token_recall": {"per_record": [a]}, "rougeL": {"per_record": [b]}}

        return [
            record(attack, defense, note=k, scores=both(words, order), blind=both(GUESS, 0.1), sent_bytes=1)
            for k in range(MANY)
        ]

    base = [*named("span", "none", 1.0, 1.0), *named("embedding-rows", "none", 1.0, 0.3)]
    for words, judged in ((1.0, (READS, 1.0)), (GUESS, (NOT_TOLD, None))):
        rows = [*named("span", "dropout:0.1", GUESS, 0.1), *named("embedding-rows", "dropout:0.1", words, 0.1)]
        found = point("dropout:0.1", rows, base, ["span", "embedding-rows"], "rougeL", 0.5)
        assert found["verdict"]["verdict"] == judged[0]
        assert found["bound"] == judged[1] if judged[1] else found["bound"] < 0.5
