"""A yardstick that did not finish measures nothing, nor does an active server without an active attack. No model."""

from __future__ import annotations

from typing import Any

import pytest
from rows import GUESS, MANY, READ, column, of

from rasura.core.records import ACTIVE_THREATS
from rasura.core.threat import THREATS
from rasura.report.commands import next_step
from rasura.report.findings import findings
from rasura.report.page import ACTIVE, not_tested
from rasura.report.verdicts import NOT_MEASURED, NOT_TOLD, READS

QUIET = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
"""A column that holds by ``span`` alone."""


# --- every yardstick finishes


def tag(behind: list[float | None], status: str, without: list[float | None] | None = None) -> list[dict[str, Any]]:
    open_ = column("tag", "none", without or [1.0] * MANY, "crashed")
    return [*QUIET, *open_, *column("tag", "dropout:0.1", behind, status)]


def test_one_finished_yardstick_does_not_speak_for_another_that_crashed() -> None:
    assert of(QUIET, "dropout:0.1").holds
    found = of(tag([None] * MANY, "crashed"), "dropout:0.1")
    assert (found.word, found.holds, found.counted) == (NOT_MEASURED, False, ("span",))
    assert found.says == "not measured: of the attacks that work without protection, tag crashed on 60 of 60"
    assert not of(tag([GUESS] * (MANY - 1) + [None], "crashed"), "dropout:0.1").holds, "one text is enough"
    assert of(tag([None] * MANY, "failed"), "dropout:0.1").holds, "it looked and named nothing"


def test_a_yardstick_that_never_applies_here_is_no_gap_but_one_that_sometimes_does_is() -> None:
    assert of(tag([None] * MANY, "not_applicable"), "dropout:0.1").word == NOT_TOLD
    some = of(tag([GUESS, *[None] * (MANY - 1)], "not_applicable"), "dropout:0.1")
    assert some.missing == ("of the attacks that work without protection, tag does not apply to 59 of 60",)
    short = [
        r
        for r in tag([None] * MANY, "not_applicable")
        if (r["attack"], r["defense"], r["batch"]) != ("tag", "dropout:0.1", 3)
    ]
    assert of(short, "dropout:0.1").word == NOT_MEASURED, "a text on which nobody tried it"


@pytest.mark.parametrize("without", [[1.0] * (MANY - 1) + [None], [1.0, *[GUESS] * (MANY - 1)], [0.5] * MANY])
def test_an_attack_that_read_anything_without_protection_may_not_crash_behind_it(without: list[float | None]) -> None:
    assert of(tag([None] * MANY, "crashed", without), "dropout:0.1").word == NOT_MEASURED


def test_an_attack_that_reads_nothing_anywhere_may_crash() -> None:
    assert of(tag([None] * MANY, "crashed", [GUESS] * MANY), "dropout:0.1").holds
    assert of(tag([None] * MANY, "crashed", [None] * MANY), "dropout:0.1").holds


def test_a_portfolio_that_worked_may_not_crash() -> None:
    kept = [{**r, "details": {"ran": "tag", "attack": "tag"}} for r in column("best", "none", [1.0] * MANY)]
    crashed = column("best", "dropout:0.1", [None] * MANY, "crashed")
    assert of([*QUIET, *kept, *crashed], "dropout:0.1").says == (
        "not measured: of the attacks that work without protection, best crashed on 60 of 60"
    )
    ran = [{**r, "details": {"ran": "tag"}} for r in column("best", "dropout:0.1", [None] * MANY, "failed")]
    assert of([*QUIET, *kept, *ran], "dropout:0.1").holds


# --- an active server


def active(
    attack: str, defense: str, values: list[float | None], status: str = "crashed", **more: Any
) -> list[dict[str, Any]]:
    return [{**r, "threat": "malicious-server", "crafted": False, **more} for r in column(attack, defense, values, status)]


PASSIVE = [*active("span", "none", [1.0] * MANY), *active("span", "dropout:0.1", [GUESS] * MANY)]


def test_the_threats_with_a_server_that_may_send_crafted_weights_are_known_without_torch() -> None:
    assert {t.name for t in THREATS.values() if t.active} == set(ACTIVE_THREATS)


def test_passive_attacks_do_not_measure_a_server_that_may_send_crafted_weights() -> None:
    found = of(PASSIVE, "dropout:0.1")
    assert (found.word, found.holds) == (NOT_MEASURED, False)
    assert found.says == "not measured: no active attack was run to its end"
    plan = {"attacks": ["span"], "defenses": ["dropout:0.1"], "threats": ["malicious-server"], "data": "notes.jsonl"}
    step = next_step(found, findings(PASSIVE, plan), plan, PASSIVE, {})
    assert "--threat malicious-server" in step.command and "--attack span,decepticons" in step.command
    old = [{k: v for k, v in r.items() if k != "crafted"} for r in PASSIVE]
    assert of(old, "dropout:0.1").word == NOT_MEASURED, "a record that does not say so"
    assert of([r | {"threat": "honest-server"} for r in PASSIVE], "dropout:0.1").holds


def test_an_active_attack_measures_where_it_worked_and_ended() -> None:
    def with_crafted(open_: list[float | None], behind: list[float | None], status: str = "crashed") -> Any:
        rows = active("decepticons", "none", open_, crafted=True)
        return of([*PASSIVE, *rows, *active("decepticons", "dropout:0.1", behind, status, crafted=True)], "dropout:0.1")

    assert with_crafted([1.0] * MANY, [GUESS] * MANY).holds
    assert with_crafted([1.0] * MANY, [None] * MANY, "failed").holds
    assert with_crafted([1.0] * MANY, [1.0] * MANY).word == READS
    told = "no active attack was run to its end"
    nothing: list[float | None] = [None]
    for some in (nothing * MANY, [GUESS] * (MANY - 1) + nothing):
        for status in ("crashed", "not_applicable"):
            assert told in with_crafted([1.0] * MANY, some, status).missing
    assert with_crafted([GUESS] * MANY, [GUESS] * MANY).missing == ("no active attack was shown to work without protection",)


def test_a_crashed_active_attack_is_not_a_test_of_active_attacks() -> None:
    assert ACTIVE in not_tested(active("decepticons", "none", [None], "crashed", crafted=True))
    for value, status in ((1.0, "ok"), (None, "failed")):
        assert ACTIVE not in not_tested(active("decepticons", "none", [value], status, crafted=True))
