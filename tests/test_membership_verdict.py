"""What a membership run concludes where an attack gave no figure or was not run. Plain Records, no model."""

from __future__ import annotations

import math
import re
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from membership_setting import MIDDLE, PLAN, row
from rows import sentences

from rasura.metrics.membership import COIN, auc, auc_bound, largest_leakage, tpr_at, tpr_bound
from rasura.registry import DEFENSES, membership_adversaries
from rasura.report.membership import Found, _auc, membership_findings, render_membership
from rasura.report.membership_step import FORMAL
from rasura.report.membership_verdict import above, by_chance
from rasura.report.roc import roc_plot

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
        "max_length": 64, "members": "my notes.jsonl", "defense": "none",
    }  # fmt: skip
    page = sentences(render_membership([row("loss", auc=0.9)], plan))
    words = "--model smollm2 --task causal --truncate --max-length 64 --text-column Notiz --defense none,dp-sgd:1.0"
    assert f"rasura train 'my notes.jsonl' {words}" in page


def test_no_guarantee_is_advised_to_a_training_that_has_one() -> None:
    for defense in ("dp-sgd:14.3282", "gaussian:0.1+dp-ftrl:2.0"):
        page = sentences(render_membership([row("loss", auc=0.9)], {**PLAN, "attacks": ["loss"], "defense": defense}))
        assert "Train with a smaller epsilon (for dp-sgd, --target-epsilon), or check that training" in page
        assert "Train with a formal guarantee" not in page and "dp-sgd:1.0" not in page


def test_every_protection_with_an_epsilon_is_known_to_the_next_step() -> None:
    assert {n for n in DEFENSES if "differential privacy" in DEFENSES[n].guarantee} == FORMAL


def test_the_headline_names_an_attack_that_the_verdict_names() -> None:
    free: dict[str, Any] = {"defense": "none"}
    told = found(row("loss", auc=0.1, **free), row("lira", auc=0.2, **free), row("rmia", auc=0.5, **free), **free)
    assert "loss ranks a member above another text with a chance of 0.100" in told.sentences[0]
    assert told.sentences[1].startswith("Above guessing: loss, lira separate members from others beyond")
    quiet = found(row("loss", auc=0.45, **free), row("rmia", auc=0.52, **free), **free)
    assert "rmia ranks" in quiet.sentences[0] and quiet.sentences[1].startswith("Not told from guessing")


def test_no_mark_of_the_page_says_more_than_its_headline() -> None:
    def page(*rows: dict[str, Any]) -> str:
        return " ".join(render_membership(rows, {**PLAN, "attacks": [r["attack"] for r in rows]}).split())

    gap = page(row("loss"), row("lira", "crashed"))
    assert "not told from guessing by this attack alone" in gap and "Read below why an attack has no result." in gap
    assert "Add the attacks that know this protection." in page(row("loss"))
    assert "by this attack alone" not in page(row("loss"), *map(row, KNOW))


def with_rates(attack: str, *rates: tuple[str, float, float, float], auc: float = 0.5, **more: Any) -> dict[str, Any]:
    made = row(attack, auc=auc, defense="none", **more)
    made["scores"] |= {name: {"mean": mean, "low": low, "high": high, "n": 500} for name, mean, low, high in rates}
    return made


FEW = ("tpr@0.01", 0.06, 0.035, 0.107)
"""Of an attack that finds a few members surely, and ranks the others as a coin does: its AUC says nothing."""

NONE = ("tpr@0.01", 0.01, 0.0, 0.03)


def page_of(*rows: dict[str, Any], **plan: Any) -> str:
    known = {**PLAN, "defense": "none", "n_members": 500, "n_others": 500, "attacks": [r["attack"] for r in rows], **plan}
    return " ".join(render_membership(rows, known).split())


def test_an_attack_that_finds_members_is_above_guessing_everywhere_on_its_page() -> None:
    """The sentence said "above guessing", its mark "not told from guessing", and the next step "measure with more texts"."""
    page = page_of(with_rates("lira", FEW))
    assert "Above guessing: the model reveals which texts it was trained on." in page
    assert "above guessing at 1 % false alarms" in page and "not told from guessing" not in page
    assert "Train with a formal guarantee" in page and "Measure with more texts" not in page
    quiet = page_of(with_rates("lira", NONE))
    assert "not told from guessing" in quiet and "above guessing at" not in quiet and "Measure with more texts" in quiet


def test_every_rate_counts_and_the_headline_names_the_one_that_is_above_guessing() -> None:
    rare = ("tpr@0.001", 0.03, 0.01, 0.06)
    told = found(with_rates("loss", ("tpr@0.01", 0.03, 0.0, 0.05), ("tpr@0.001", 0.0, 0.0, 0.01)),
                 with_rates("lira", NONE, rare), defense="none")  # fmt: skip
    assert "the best attack (lira) finds 3.0 % (1.0 to 6.0) of the members. It takes 0.1 % of" in told.sentences[0]
    assert told.sentences[1].startswith("Above guessing: the model reveals")
    wide = found(with_rates("loss", ("tpr@0.01", 0.09, 0.0, 0.2)), with_rates("lira", FEW), defense="none")
    assert "the best attack (lira) finds 6.0 %" in wide.sentences[0], "what loss finds may be guessing"
    assert any("in at most 12.5 % of runs" in s for s in told.checks)
    assert any("in at most 10 % of runs" in s for s in wide.checks)


def test_an_epsilon_is_compared_with_every_rate() -> None:
    """An epsilon of .5 permits finding 1.65 % of the members at 1 % false alarms; 3.5 % and more were found."""
    said = " ".join(found(with_rates("lira", FEW), defense="none", epsilon=0.5).checks)
    assert "permits finding at most 1.65 % of the members at 1 % false alarms, and lira is above it" in said
    assert "no attack is shown" not in said
    both = " ".join(found(with_rates("lira", FEW, auc=0.9), defense="none", epsilon=0.5).checks)
    assert "permits an AUC of at most 0.623, and lira is above it" in both and "1.65 % of the members" in both
    weak = " ".join(found(with_rates("lira", FEW), defense="none", epsilon=2.0).checks)
    assert "no attack is shown to exceed it" in weak and "permits finding" not in weak
    delta = " ".join(found(with_rates("lira", FEW), defense="none", epsilon=0.5, delta=0.02).checks)
    assert "no attack is shown to exceed it" in delta and tpr_bound(0.01, 0.5, 0.02) > 0.035


def test_repeated_rows_are_a_third_reason_why_an_epsilon_is_exceeded() -> None:
    """A text in six rows has up to six times the epsilon of one row, and "the guarantee does not hold" was said of it."""
    for attack in (with_rates("lira", FEW), with_rates("lira", FEW, auc=0.9)):
        said = " ".join(found(attack, defense="none", epsilon=0.5, n_repeated=5).checks)
        assert "is above it" in said and "A guarantee is for one row. Rows are repeated here" in said
        assert "A guarantee is for one row" not in " ".join(found(attack, defense="none", epsilon=0.5).checks)
    weak = " ".join(found(with_rates("lira", FEW), defense="none", epsilon=2.0, n_repeated=5).checks)
    assert "A guarantee is for one row" not in weak


def test_the_rate_that_a_guarantee_permits_is_the_lower_of_its_two_lines() -> None:
    assert tpr_bound(0.01, 0.0) == pytest.approx(0.01) and tpr_bound(0.9, 0.0) == pytest.approx(0.9)
    assert tpr_bound(0.01, 0.5) == pytest.approx(math.exp(0.5) * 0.01)
    assert tpr_bound(0.5, 1.0, 0.1) == pytest.approx(1 - math.exp(-1) * 0.4), "the second line is the lower one there"
    assert tpr_bound(0.01, 2000.0) == 1.0 and tpr_bound(0.01, 1.0, 0.995) <= 1.0


def test_lengths_that_part_members_at_a_low_rate_leave_nothing_to_say_of_the_model() -> None:
    """As where one member in twenty is longer than any other text: the AUC of lengths is near .5."""
    for rows in (
        [with_rates("blind", FEW), with_rates("lira", FEW)],
        [with_rates("lira", FEW, blind={"auc": MIDDLE, "words": MIDDLE, FEW[0]: {"mean": 0.06, "low": 0.035, "high": 0.1}})],
    ):
        told = found(*rows, defense="none")
        assert told.sentences[0] == "Not measured: members and others differ as texts.", "before any figure"
        assert any(s.startswith("Length alone finds 6.0 %") for s in told.checks)
        page = page_of(*rows)
        assert "above guessing" not in page and "Draw members and others at random from the same source" in page


@pytest.mark.slow
def test_scores_that_say_nothing_are_above_guessing_no_more_often_than_the_page_says() -> None:
    rng, wrong = np.random.default_rng(0), 0
    members = [True] * 200 + [False] * 200
    for _ in range(400):
        values = rng.normal(size=400).tolist()
        most, chance = largest_leakage(values, members)
        scores = {"auc": asdict(auc(values, members)), "tpr@0.01": asdict(tpr_at(values, members, 0.01)),
                  "largest_leakage": {"mean": most, "chance": chance}}  # fmt: skip
        wrong += above(scores)
    assert wrong / 400 <= by_chance(1, COIN)


def test_members_that_lie_together_amid_others_are_told_from_guessing() -> None:
    """The AUC of such scores is .5, and the mark said "not told from guessing" beside a leakage "above chance"."""
    members = [True] * 100 + [False] * 100
    values = [*np.linspace(-0.3, 0.3, 100).tolist(), *np.linspace(-1, 1, 100).tolist()]
    most, chance = largest_leakage(values, members)
    attack = row("mia-n", defense="none")
    attack["scores"] |= {
        "auc": asdict(auc(values, members)),
        "largest_leakage": {"mean": most, "chance": chance, "level": COIN},
    }
    page = page_of(attack, n_members=100, n_others=100)
    assert attack["scores"]["auc"]["mean"] == 0.5 and "0.350 (above chance, 0.190)" in page
    assert "Above guessing: mia-n separates members from others beyond the level of chance." in page
    assert "above guessing by its largest leakage" in page and "not told from guessing" not in page
    assert "Train with a formal guarantee" in page and "stays at or below 0.190 in 97.5 % of draws" in page


def test_no_curve_shows_members_at_fewer_false_alarms_than_one() -> None:
    """Members found before any false alarm stood at .1 %, though there were 50 other texts."""
    attack = row("loss", details={"roc": [(0.0, 0.3), (0.02, 0.6), (1.0, 1.0)]})
    plot = roc_plot([attack], {"attacks": ["loss"], "n_members": 400, "n_others": 50})
    across = [float(point.split(",")[0]) for point in plot["curves"][0]["points"].split()]
    assert [t["label"] for t in plot["ticks"]] == ["100 %", "10 %", "1 %", "0.1 %"], "400 members show a rate of .25 %"
    assert across[0] == across[1] == pytest.approx(400 - 340 * math.log10(50) / 3, abs=0.1)


def test_no_bound_of_an_auc_is_rounded_to_what_it_does_not_promise() -> None:
    lira = with_rates("lira", FEW)
    lira["scores"]["auc"] |= {"mean": 0.6, "low": 0.4996, "high": 0.7304}
    told = " ".join(found(lira, defense="none", epsilon=2.5).checks)
    ((permitted, open_),) = re.findall(r"AUC of at most (\S+); no attack .* up to (\S+) is not", told)
    assert f"{auc_bound(2.5):.3f}" == "0.924" and float(permitted) >= auc_bound(2.5), "to the nearest it would be less"
    assert open_ == "0.731" and _auc(lira["scores"]["auc"]) == "0.600 (0.499 to 0.731)"


def test_a_model_in_which_no_training_shows_reveals_nothing_of_it() -> None:
    """Others were members with their words shuffled, so the attacks were above guessing: it "reveals" what it never saw."""
    for rates in ((), (FEW,)):
        attack = with_rates("loss", *rates, auc=0.9)
        told = found(attack, defense="none", untrained=True, epsilon=0.5)
        assert told.sentences[0] == "Not measured: the model answers as the one on which its training began."
        assert any("this run does not tell whether attacks stay below it" in s for s in told.checks)
        page = page_of(attack, untrained=True, epsilon=0.5)
        assert "above guessing" not in page and "is above it" not in page and "reveals" not in page
        assert "Pass the model as it was after training" in page and "Train with a formal guarantee" not in page
        assert "not measured: the model answers as the one" in page, "in the plot"
