"""What was sent in one update is read together, so that an interval counts it once. Plain Records, no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rows import GUESS, MANY, METRIC, READ, column, of, record, stored

from rasura.metrics.intervals import mean_interval
from rasura.report.commands import next_step
from rasura.report.compare import CHANGED, UNKNOWN, Run, compared
from rasura.report.findings import findings
from rasura.report.gate import NOT_JUDGED, PASSED, gate
from rasura.report.head import Made
from rasura.report.pooled import texts_needed
from rasura.report.readings import reading
from rasura.report.scores import apart_of
from rasura.report.sums import curve, least
from rasura.report.verdicts import NOT_TOLD
from rasura.runs.plans import Plan

SENT = "dropout:0.1"


def sent(values: Sequence[float], size: int, defense: str = SENT, **more: Any) -> list[dict[str, Any]]:
    """``span`` on one update after another, each of ``size`` texts of which it reads the same share."""
    guesses = {METRIC: {"per_record": [GUESS] * size}}
    return [
        record(
            "span", defense, note=k, batch_size=size, examples=list(range(size * k, size * (k + 1))), blind=guesses,
            scores={METRIC: {"per_record": [value] * size}}, **more,
        )
        for k, value in enumerate(values)
    ]  # fmt: skip


@pytest.mark.parametrize(("size", "updates"), [(40, 1), (20, 2), (8, 5)])
def test_few_updates_of_many_texts_say_little(size: int, updates: int) -> None:
    """An update in which nothing was read let a protection hold, and the gate pass: its forty texts were forty draws."""
    base = sent([1.0] * updates, size, "none")
    found = findings([*base, *sent([GUESS] * updates, size)])
    verdict = found.verdicts[SENT]
    assert verdict.word == NOT_TOLD and not verdict.holds and verdict.draws == updates and verdict.n == 40
    assert f"40 in {updates} update" in verdict.says
    assert "too few updates to conclude that it holds, which takes 39" in verdict.says
    judged = gate(found.verdicts, 0.35)
    assert judged.exit == NOT_JUDGED and f"{updates} updates do not rule out" in " ".join(judged.says)


def test_enough_updates_hold_and_the_bound_is_theirs() -> None:
    count = texts_needed(0.1)
    found = findings([*sent([1.0] * count, 4, "none"), *sent([GUESS] * count, 4)])
    verdict = found.verdicts[SENT]
    assert verdict.holds and gate(found.verdicts, 0.35).exit == PASSED
    assert verdict.upper == pytest.approx(mean_interval([GUESS] * count)[2])


def test_attacks_that_read_all_of_an_update_or_nothing_seldom_hold() -> None:
    """30 % of updates are read in full: at 95 % coverage, few runs may say that the protection holds."""
    rng, size, count = np.random.default_rng(0), 8, 40
    held = 0
    for _ in range(40):
        values = [0.85 if hit else GUESS for hit in rng.random(count) < 0.3]  # just below "nearly whole"
        held += of([*sent([1.0] * count, size, "none"), *sent(values, size)], SENT).meets(0.35)
    assert held <= 4


def test_updates_that_share_a_text_count_once() -> None:
    assert apart_of([[1, 2], [2, 3], [4], [5, 4], [6]], {1, 2, 3, 4, 6}) == ((1, 2, 3), (4,), (6,))
    again = [*sent([1.0, 0.0], 2), record("span", SENT, batch=9, examples=[1, 2], batch_size=2,
             scores={METRIC: {"per_record": [1.0, 0.0]}}, blind={METRIC: {"per_record": [GUESS] * 2}})]  # fmt: skip
    found = reading("span", again, {}, METRIC)
    assert found.together == ((0, 1, 2, 3),) and found.level is not None and found.level.updates == 1


def test_seeds_and_texts_of_their_own_are_as_before() -> None:
    rows = [r for seed in (0, 1) for r in ({**r, "seed": seed} for r in column("span", SENT, [0.4] * MANY))]
    found = reading("span", rows, {}, METRIC)
    assert found.level is not None and (found.level.updates, found.level.n) == (0, MANY)
    assert found.level.low == mean_interval([0.4] * MANY)[1] and "updates" not in found.level.text


def test_clients_need_as_many_sums_as_other_settings_need_texts() -> None:
    """«At least 5 clients» rested on eight sums, of which the next eight were read."""
    single = [{**r, "batch_size": 1} for r in READ[:40]]
    few = curve([*single, *sent([GUESS] * 8, 5, "none")], [1, 5], METRIC)
    assert least(few) is None and not few[5].holds
    many = [*column("span", "none", [1.0] * 195), *sent([GUESS] * 39, 5, "none")]
    assert least(curve(many, [1, 5], METRIC)) == 5


def test_the_next_step_asks_for_updates() -> None:
    rows = [*sent([1.0] * 5, 8, "none"), *sent([GUESS] * 5, 8)]
    found, plan = findings(rows), {**Plan(data="notes.jsonl").canonical(), "batch_sizes": [8]}
    step = next_step(found.verdicts[SENT], found, plan, rows, {})
    assert step.says.startswith("Measure at least 312 notes, in 39 updates.") and "--limit 312" in step.command


@pytest.mark.parametrize(("updates", "size", "word"), [(2, 20, UNKNOWN), (40, 1, CHANGED)])
def test_a_comparison_is_of_updates(updates: int, size: int, word: str) -> None:
    """Two updates that were read later, and not before, were forty texts each of which changed."""
    plan = Plan(data="notes.jsonl").canonical()

    def run(value: float) -> Run:
        rows = stored(sent([value] * updates, size, "none"))
        return Run(rows, plan, Made(), findings(rows))

    change = next(c for c in compared(run(0.0), run(0.8)).changes if c.attack == "span")
    assert change.word == word and ("too few updates" in change.why) is (word == UNKNOWN)
