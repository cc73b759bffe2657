"""Calibration: the least that meets the target, the same when resumed, and what is said where nothing does."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_auditing import model_folder
from typer.testing import CliRunner

from rasura.auditing import Audit
from rasura.calibration import UNPROTECTED, Calibration, CalibrationPlan, _not_found, calibrate, least
from rasura.cli import app
from rasura.interfaces import InputError
from rasura.plan import Plan
from rasura.records import RunStore
from rasura.registry import family, parse_defense, strengths
from rasura.report.levels import point, yardstick
from rasura.report.page import write_report

__all__ = ["model_folder"]

NOTES = tuple(" ".join(f"w{(31 * k + n) % 275}" for n in range(36)) for k in range(8))
TARGET = 0.7
"""Four texts of which nothing is read leave so much possible, and a bit less."""

WAITING = "frozen-embeddings+accumulate"


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("notes") / "notes.jsonl"
    path.write_text("".join(json.dumps({"text": t, "label": k % 2}) + "\n" for k, t in enumerate(NOTES)))
    return path


def wanted(folder: Path, notes: Path, **more: Any) -> CalibrationPlan:
    plan = Plan(
        str(folder), data=str(notes), limit=4, attacks=("span",), budget="quick",
        defenses=(WAITING,), metrics=("token_recall",),
    )  # fmt: skip
    fields: dict[str, Any] = {"plan": plan, "risk": "token_recall", "at_most": TARGET, "steps": 1}
    return CalibrationPlan(**{**fields, **more})


# --- the search


def searched(bounds: dict[float, float | None], at_most: float = 0.1, steps: int = 0) -> float | None:
    return least(lambda where: [bounds[t] for t in where], sorted(bounds), at_most, steps)


def test_the_search_finds_the_edge_of_a_falling_bound() -> None:
    asked: list[float] = []

    def measure(positions: Sequence[float]) -> list[float | None]:
        asked.extend(positions)
        return [1 - t if t >= 0 else 1.0 for t in positions]

    found = least(measure, (UNPROTECTED, 0.0, 0.25, 0.5, 0.75, 1.0), 0.4, 8)
    assert found is not None and 0.6 <= found < 0.6 + 0.25 / 2**8 * 1.01
    assert max(t for t in asked if t < found) < 0.6, "the next weaker one tried does not hold"


def test_the_search_asks_that_all_stronger_ones_hold() -> None:
    assert searched({0.0: 0.05, 0.5: 0.2, 1.0: 0.1}) == 1.0, "a bound is met where it is equal; the weak one was luck"
    assert searched({UNPROTECTED: 0.1, 0.0: 0.0, 1.0: 0.0}) == UNPROTECTED
    assert searched({0.0: 0.9, 1.0: 0.11}) is None
    assert searched({0.0: 0.9, 0.5: 0.1, 1.0: None}) == 0.5, "nothing was sent at the strongest"
    assert searched({0.0: None, 1.0: None}) is None


@pytest.mark.parametrize("name", strengths())
def test_every_figure_goes_from_weak_to_strong_and_is_a_defense(name: str) -> None:
    one = family(f"frozen-embeddings+{name}", 23_000_000)
    values = [one.strength.value(t, one.entries) for t in one.strength.positions()]
    assert values == sorted(values, reverse=name == "directional") and len(set(values)) == len(values)
    for position in one.strength.positions():
        parts = [p.mechanism for p in parse_defense(one.setting(position))]
        assert {"frozen-embeddings", name} == {p.name for p in parts}


def test_options_of_a_protection_stay() -> None:
    assert family("directional/blocks=parameters", 1000).setting(0.4) == "directional:100/blocks=parameters"
    assert family("sealing:param/scheme=bfv").setting(1.0) == "sealing:param=1/scheme=bfv"
    assert family("ghost:k=30").setting(0.6) == "ghost:group=8/k=30"
    assert family("dropout:0.1+accumulate").setting(0.75) == "dropout:0.1+accumulate:1d"
    assert family("dropout:0.1+accumulate").rest == "dropout:0.1"
    assert family("pruning").setting(1.0) == "pruning:0.9999"


# --- one setting, one attack


def record(attack: str, values: list[float], *, seed: int = 0, status: str = "ok", guess: float = 0.2) -> dict[str, Any]:
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
    rows = [record("span", [1.0, 0.0]), record("span", [0.0, 0.0], seed=1, status="failed", guess=0.3)]
    (blind, span) = measured("gaussian:1", rows)["levels"]
    assert (span["n"], span["mean"], span["failed"], span["cells"]) == (2, pytest.approx((0.65 + 0.15) / 2), 1, 2)
    assert (blind["n"], blind["mean"], blind["cells"]) == (2, pytest.approx(0.25), 2)
    mixed = [record("span", [v]) | {"batch": k, "examples": [k]} for k, v in enumerate((0.1, 0.9, 0.4, 0.7))]
    assert measured("none", mixed) == measured("none", mixed[::-1]), "whatever the order"
    silent = measured("gaussian:1", [record("span", [0.0], status="failed")])
    assert silent["risk"]["mean"] == 0.2, "an attack that gives up guesses"
    worse = measured("gaussian:1", [record("span", [0.0, 0.0, 0.0])])["risk"]
    assert worse["attack"] == "blind", "nobody does worse than guessing"
    assert measured("accumulate:9", [])["risk"] is None
    for status in ("not_applicable", "crashed"):
        nobody = measured("pruning:0.9", [record("span", [0.0], status=status)])
        assert nobody["risk"] is None and len(nobody["levels"]) == 1, "that no attack could be tried says nothing"
        assert nobody["bound"] is None and nobody["verdict"]["verdict"] == "not measured"


def at(means: list[float], guess: float = 0.1) -> list[dict[str, Any]]:
    def level(attack: str, mean: float) -> dict[str, Any]:
        return {"attack": attack, "mean": mean, "low": mean - 0.05, "high": mean + 0.05}

    return [{"levels": [level("blind", guess), level("span", m)]} for m in means]


def test_yardsticks() -> None:
    good = yardstick("span", at([1.0, 0.8, 0.3, 0.1]))
    assert good["well_behaved"] and good["spearman"] == pytest.approx(-1.0) and good["bottom"]
    assert yardstick("span", at([0.9, 0.3, 0.7, 0.1]))["violations"] == 1
    flat = yardstick("span", at([0.1, 0.1, 0.1]))
    assert not flat["well_behaved"] and flat["why"] == "never above guessing" and flat["spearman"] is None
    assert "no lower at the strongest" in yardstick("span", at([0.9, 0.92, 0.9]))["why"]
    assert yardstick("span", at([0.9, 0.0, 0.1]))["well_behaved"], "from below guessing to guessing is no rise"
    assert not yardstick("pursuit", at([0.9, 0.1]))["well_behaved"], "it was not run"


# --- on a model


@pytest.fixture(scope="module")
def done(model_folder: Path, notes: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("calibrated")
    return folder, calibrate(wanted(model_folder, notes), out=folder)


def test_what_is_found_meets_the_target_and_the_next_weaker_does_not(
    done: tuple[Path, dict[str, Any]], model_folder: Path, notes: Path, tmp_path: Path
) -> None:
    result = done[1]
    assert [f["status"] for f in result["families"]] == ["found"]
    for f in result["families"]:
        settings = [p["setting"] for p in f["points"]]
        place = settings.index(f["setting"])
        assert all(p["bound"] is None or p["bound"] <= TARGET for p in f["points"][place:])
        if not f["not_verified"]:
            assert f["points"][place - 1]["bound"] > TARGET
        assert f["verification"]["risk"]["mean"] <= TARGET and not f["verification"]["verdict"]["missing"]
        assert f["verification"]["on"] == "other texts, other seeds" and f["verification"]["seed"] == 1
        assert f["chosen"]["verdict"]["verdict"] == "not told from guessing"
        assert f["chosen"]["verdict"]["counted"] == ["span"]
        assert f["points"][0]["verdict"]["verdict"] == "reads"
        assert f["guarantee"]["statement"].startswith("no formal guarantee") and f["guarantee"]["examples"] == len(NOTES)
    assert any(y["well_behaved"] for f in result["families"] for y in f["yardsticks"])
    assert result["checks"] == []


@pytest.mark.parametrize(
    ("defense", "at_most", "why"),
    [
        ("gaussian", TARGET, "gaussian: not measured against an adversary who knows it: add --attack pursuit,grab."),
        (WAITING, 0.5, f"{WAITING}: 4 notes; it takes at least 6 to keep the upper bound at or below 50 %."),
    ],
)
def test_nothing_is_recommended_that_the_verdict_does_not_say(
    model_folder: Path, notes: Path, tmp_path: Path, defense: str, at_most: float, why: str
) -> None:
    plan = wanted(model_folder, notes, at_most=at_most, steps=0)
    result = calibrate(replace(plan, plan=replace(plan.plan, defenses=(defense,))), out=tmp_path)
    (part,) = result["families"]
    assert (part["status"], part["setting"]) == ("not measured", None)
    assert result["recommendation"] == f"Nothing can be recommended. {why}"
    assert any(p["risk"] and p["bound"] is None for p in part["points"]), "it was tried, and could not be judged"
    assert why in write_report(tmp_path).read_text().replace("&#39;", "'")


def outcome_of(bounds: Sequence[float | None], tried: bool = True) -> str:
    unjudged = [{"bound": b, "risk": {} if tried else None, "unjudged": ["why"] if b is None else []} for b in bounds]
    return str(_not_found(unjudged, 0.5)["status"])


def test_a_target_is_missed_only_where_nothing_stronger_is_unknown() -> None:
    assert outcome_of([1.0, 0.6]) == "unreached"
    assert outcome_of([1.0, None]) == outcome_of([None]) == "not measured"
    assert outcome_of([None, 0.6]) == "unreached", "stronger ones are worse"
    assert outcome_of([1.0, None], tried=False) == "unreached", "nothing was sent there"
    assert outcome_of([None], tried=False) == "not measured"


def test_the_page_says_it_and_fetches_nothing(done: tuple[Path, dict[str, Any]]) -> None:
    folder, result = done
    html = write_report(folder).read_text()
    for f in result["families"]:
        assert f"<strong>{f['setting']}</strong>" in html
    assert html.count('class="ring"') == 1 and "stroke-dasharray" in html and "no formal guarantee" in html
    assert not re.search(r"""(?:src|href)=["'](?!#)|url\(|@import|https?://""", html) and "<script" not in html
    assert not any(n in html.lower() for n in ("w11 ", "w20")), "it shows no text"


def test_resumed_it_is_the_same_and_another_target_measures_little(
    done: tuple[Path, dict[str, Any]], model_folder: Path, notes: Path
) -> None:
    folder, result = done
    # Kept: what an interruption in the middle would have left.
    parts = folder.with_name("parts")
    plan = wanted(model_folder, notes)
    stopped = Calibration(plan, parts)
    half = Audit(replace(plan.checked().plan, defenses=("none", f"{WAITING}:0.12d")), victim=stopped.victim)
    for _ in zip(range(5), half.run(stopped.store)):
        pass
    stopped.close()
    # Seconds are the machine's mood.
    moods = re.compile(r'"seconds": [^,]+')
    again = calibrate(plan, out=parts)
    assert moods.sub("", json.dumps(again)) == moods.sub("", json.dumps(result))

    def keys() -> set[str]:
        store = RunStore(folder)
        try:
            return {r["key"] for r in store}
        finally:
            store.close()

    before = keys()
    assert json.dumps(calibrate(plan, out=folder)) == json.dumps(result) and keys() == before, "nothing is measured twice"
    out_of_reach = calibrate(wanted(model_folder, notes, at_most=0.1), out=folder)
    assert keys() == before, "what the first target measured is enough to refuse the second"
    assert {f["status"] for f in out_of_reach["families"]} == {"not measured"}
    assert "it takes at least 39" in out_of_reach["recommendation"]
    with pytest.raises(InputError, match="another plan"):
        calibrate(replace(plan, plan=replace(plan.plan, limit=2)), out=folder)


def test_utility_and_what_it_guarantees(model_folder: Path, notes: Path, tmp_path: Path) -> None:
    plan = wanted(model_folder, notes, utility="accuracy", steps=0)
    plan = replace(plan, recipe=replace(plan.recipe, epochs=1, batch_size=3))
    (found,) = calibrate(plan, out=tmp_path)["families"]
    priced = found["utility"]
    assert priced["reference"] == "frozen-embeddings"
    assert priced["cost"] == pytest.approx(priced["without"] - priced["behind"])
    assert found["guarantee"]["examples"] == priced["n_train"] == 7
    html = write_report(tmp_path).read_text()
    assert "Risk against accuracy" in html and f"{priced['behind']:.3f} behind it" in html


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"risk": "rougeK"}, "unknown risk 'rougeK'; did you mean rouge"),
        ({"at_most": 1.0}, "at-most is 1.0; expected a share above 0 and below 1"),
        ({"at_most": 0.0}, "at-most is 0.0"),
        ({"steps": -1}, "steps is -1"),
        ({"defenses": ("frozen-embeddings",)}, "frozen-embeddings has no figure to calibrate; expected one of .*gaussian"),
        ({"defenses": ("gaussian:0.1",)}, "gaussian:0.1 has its value already; calibrate finds it: pass gaussian alone"),
        ({"defenses": ("sealing:grad=0.1",)}, "sealing:grad=0.1 has its value already"),
        ({"defenses": ("gaussian+pruning",)}, "gaussian and pruning have no value"),
        ({"defenses": ("gausian",)}, "unknown defense 'gausian'; did you mean gaussian"),
        ({"defenses": ("gaussian", "gaussian")}, "or one twice"),
        ({"attacks": ("blind",)}, "only the attack blind"),
        ({"threats": ("honest-server", "with-labels")}, "takes one threat, found 2"),
        ({"utility": "perplexity"}, "unknown utility for the task classification"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(
    model_folder: Path, notes: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    plan = wanted(model_folder, notes)
    mine = {k: v for k, v in change.items() if hasattr(plan, k)}
    plan = replace(plan, plan=replace(plan.plan, **{k: v for k, v in change.items() if k not in mine}), **mine)
    with pytest.raises(InputError, match=message) as caught:
        Calibration(plan, tmp_path / "x")
    assert "\n" not in str(caught.value) and not (tmp_path / "x").exists()


def test_the_command_tells_a_missed_target_from_one_that_nobody_can_judge(
    model_folder: Path, notes: Path, tmp_path: Path
) -> None:
    common = ["calibrate", str(notes), "--model", str(model_folder), "--limit", "4", "--attack", "span"]
    common += ["--risk", "token_recall", "--steps", "0", "--budget", "quick", "--out", str(tmp_path / "run")]
    unknown = CliRunner().invoke(app, [*common, "--at-most", "0.5", "--defense", WAITING])
    assert unknown.exit_code == 4, unknown.output
    assert (tmp_path / "run" / "report.html").is_file() and "it takes at least 6" in " ".join(unknown.output.split())
    found = CliRunner().invoke(app, [*common, "--at-most", str(TARGET), "--defense", WAITING])
    assert found.exit_code == 0, found.output
    assert "the least that holds" in " ".join(found.output.split())
    common[common.index("span")] = "embedding-rows"
    refused = CliRunner().invoke(app, [*common, "--at-most", str(TARGET), "--defense", "accumulate"])
    assert isinstance(refused.exception, InputError), "which main turns into one line and exit code 2"
    assert "no setting of accumulate keeps the upper bound" in str(refused.exception)
