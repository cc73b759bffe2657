"""What a membership run concludes where an attack gave no figure or was not run. Plain Records, no model."""

from __future__ import annotations

from typing import Any

from membership_setting import PLAN, row
from rows import sentences

from rasura.registry import membership_adversaries
from rasura.report.membership import Found, membership_findings, render_membership

KNOW = membership_adversaries("dp-sgd:1.0").attacks


def found(*rows: dict[str, Any], **plan: Any) -> Found:
    return membership_findings(rows, {**PLAN, "attacks": [r["attack"] for r in rows], **plan})


def test_a_protection_is_not_judged_without_the_attacks_that_know_it() -> None:
    told = found(row("blind"), row("loss"))
    assert "Not measured against an adversary who knows it: add --attack lira,mia,mia-r,rmia." in told.sentences
    assert told.missing and "Not told from guessing" not in " ".join(told.sentences)
    whole = found(row("loss"), *map(row, KNOW))
    assert whole.missing == () and any(s.startswith("Not told from guessing: with 60 texts") for s in whole.sentences)


def test_an_attack_that_gave_no_figure_ends_the_conclusion() -> None:
    for status, how in (("crashed", "crashed on 60 of 60"), ("not_applicable", "does not apply to 60 of 60"),
                        ("failed", "has results for 0 of 60")):  # fmt: skip
        told = found(row("loss"), *map(row, KNOW[1:]), row(KNOW[0], status))
        assert f"Not measured against an adversary who knows it: lira {how}." in told.sentences
        free = found(*(row(a, s, defense="none") for a, s in (("loss", "ok"), ("lira", status))), defense="none")
        assert f"Not measured: lira {how}." in free.sentences
    assert any(s.startswith("Not told from guessing") for s in found(row("loss", defense="none"), defense="none").sentences)


def test_an_attack_of_which_an_interrupted_run_has_no_result_ends_it_too() -> None:
    told = found(row("loss", defense="none"), defense="none", attacks=["blind", "loss", "rmia"])
    assert "Not measured: rmia has no result." in told.sentences


def test_a_record_that_does_not_say_who_knows_the_protection_judges_nothing() -> None:
    told = found(*(row(a, known_by={}) for a in ("loss", *KNOW)))
    assert "Not measured against an adversary who knows it: no attack knows dp-sgd." in told.sentences


def test_what_is_above_guessing_is_said_whoever_is_missing() -> None:
    told = found(row("loss", auc=0.8), row("lira", "crashed"))
    assert any(s.startswith("Above guessing: loss separates") for s in told.sentences)
    assert told.missing


def test_the_next_training_is_of_the_model_on_which_the_audited_one_began() -> None:
    plan = {
        **PLAN, "attacks": ["loss"], "base": "smollm2", "task": "causal", "text_column": "Notiz", "truncate": True,
        "max_length": 64, "members": "my notes.jsonl",
    }  # fmt: skip
    page = sentences(render_membership([row("loss", auc=0.9)], plan))
    words = "--model smollm2 --task causal --truncate --max-length 64 --text-column Notiz --defense none,dp-sgd:1.0"
    assert f"rasura train 'my notes.jsonl' {words}" in page


def test_the_headline_names_an_attack_that_the_verdict_names() -> None:
    free: dict[str, Any] = {"defense": "none"}
    told = found(row("loss", auc=0.1, **free), row("lira", auc=0.2, **free), row("rmia", auc=0.5, **free), **free)
    assert "loss ranks a member above another text with a chance of 0.100" in told.sentences[0]
    assert told.sentences[1].startswith("Above guessing: loss, lira separate members from others, and their intervals")
    quiet = found(row("loss", auc=0.45, **free), row("rmia", auc=0.52, **free), **free)
    assert "rmia ranks" in quiet.sentences[0] and quiet.sentences[1].startswith("Not told from guessing")


def test_no_mark_of_the_page_says_more_than_its_headline() -> None:
    def page(*rows: dict[str, Any]) -> str:
        return " ".join(render_membership(rows, {**PLAN, "attacks": [r["attack"] for r in rows]}).split())

    gap = page(row("loss"), row("lira", "crashed"))
    assert "not told from guessing by this attack alone" in gap and "Read below why an attack has no result." in gap
    assert "Add the attacks that know this protection." in page(row("loss"))
    assert "by this attack alone" not in page(row("loss"), *map(row, KNOW))
