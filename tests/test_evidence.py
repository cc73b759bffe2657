"""The report as evidence: where it comes from, each protection with its next step, and each note. Unknown facts are said."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer
from audit_setting import TEXTS, model_folder, plan_for
from browser_setting import BREAKS, axe, in_browser
from rows import GUESS, MANY, READ, column, record

from rasura.cli import app
from rasura.core.options import opened
from rasura.core.records import MASK
from rasura.core.run_store import RunStore
from rasura.registry import DEFENSES, family, parse_defense
from rasura.report.commands import OF_CALIBRATION, OF_TRAINING, OPTIONS, USUAL, command, next_step
from rasura.report.findings import findings
from rasura.report.head import UNKNOWN, Made, duration, head, settings
from rasura.report.notes import attempts, masked, notes_in
from rasura.report.page import render, write_report
from rasura.report.protections import plot, protection_rows
from rasura.report.verdicts import NOT_MEASURED
from rasura.runs.audit import audit
from rasura.runs.described import unproven
from rasura.runs.plans import Plan
from rasura.runs.service_plan import ServicePlan

__all__ = ["model_folder"]

PLAN = {**Plan(data="my notes.jsonl").canonical(), "attacks": ["blind", "span"], "limit": 3}
METHODS = {
    name: {"about": s.about, "guarantee": s.guarantee} | ({"figure": list(s.strength.keys)} if s.strength else {})
    for name, s in DEFENSES.items()
}
MADE = Made(
    ({"began": "2026-11-23T08:05:00.000001+00:00", "command": "rasura audit", "code": "c0de", "machine": "a laptop",
      "packages": {"torch": "2.6"}},),
    {"model": "0123456789abcdef", "protections": METHODS, "compositions": {"dp-sgd:1.0": ""}},
)  # fmt: skip


def step_of(rows: Sequence[dict[str, Any]], defense: str, **plan: Any) -> tuple[str, list[str]]:
    found = findings(rows)
    step = next_step(found.verdicts[defense], found, {**PLAN, **plan}, rows, METHODS)
    return step.says, shlex.split(step.command)


def parsed(words: list[str]) -> Mapping[str, Any]:
    """What the command line takes from a command; it refuses unknown options."""
    assert words[0] == "rasura"
    return dict(typer.main.get_command(app).commands[words[1]].make_context(words[1], words[2:]).params)  # type: ignore[attr-defined]


def test_a_command_gives_the_command_line_what_the_plan_holds() -> None:
    plan = Plan(data="my notes.jsonl", model="./m", attacks=("blind", "span"), defenses=("none", "dropout:0.1"), seeds=2,
                batch_sizes=(1, 4), truncate=True, entries=0.5, text_column="note text")  # fmt: skip
    took = parsed(shlex.split(command("audit", plan.canonical(), out="runs/next")))
    assert (took["file"], took["model"], took["attack"], took["defense"]) == (
        plan.data,
        "./m",
        "blind,span",
        "none,dropout:0.1",
    )
    assert (took["seeds"], took["batch_size"], took["truncate"], took["entries"]) == (2, "1,4", True, 0.5)
    assert took["text_column"] == "note text" and Path(took["folder"]) == Path("runs/next")


@pytest.mark.parametrize(
    ("verb", "told", "others"),
    [
        ("train", OF_TRAINING, {"defenses", "limit", "seeds", "seed", "updates", "batch_sizes"}),
        ("calibrate", OF_CALIBRATION, {"defenses", "limit"}),
    ],
)
def test_the_next_command_is_told_all_of_the_plan_that_it_takes(verb: str, told: Sequence[str], others: set[str]) -> None:
    """Else it would measure other texts: a training behind an audit of texts of 16 tokens took whole ones. ``others``: what
    the next command chooses itself."""
    options = {o for p in typer.main.get_command(app).commands[verb].params for o in p.opts}  # type: ignore[attr-defined]
    able = {name for name, option in OPTIONS.items() if f"--{option}" in options}
    assert able - others == {*told}


def test_what_a_command_leaves_out_is_the_default() -> None:
    usual, names = Plan().canonical(), {f.name for f in fields(Plan)}
    assert {name: usual.get(name, value) for name, value in USUAL.items()} == dict(USUAL)
    assert set(OPTIONS) <= names | {f.name for f in fields(ServicePlan)}
    options = {o for p in typer.main.get_command(app).commands["audit"].params for o in p.opts}  # type: ignore[attr-defined]
    assert {f"--{option}" for option in OPTIONS.values()} <= options


def test_what_was_read_leads_to_a_stronger_setting_or_to_another_protection() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [1.0] * MANY), *column("span", "bf16", [1.0] * MANY)]
    says, words = step_of(rows, "dropout:0.1")
    took = parsed(words)
    assert "weakest setting that holds" in says and words[1] == "calibrate"
    assert (
        family(took["defense"]).text == "dropout" and took["limit"] >= 39 and took["at_most"] == pytest.approx(GUESS + 0.1)
    )
    says, words = step_of(rows, "bf16")
    assert "does not stop" in says and parsed(words)["defense"] == "frozen-embeddings+accumulate:1.0d"
    assert "sealing:all/by=secagg" in says and "at least three clients" in says and "With fewer" in says
    assert step_of(rows, "none")[1][1] == "audit"


@pytest.mark.parametrize(
    ("defense", "searched"),
    [
        ("dp-sgd:0.1/clip=0.5", "dp-sgd/clip=0.5"),
        ("frozen-embeddings+directional:50/blocks=parameters", "frozen-embeddings+directional/blocks=parameters"),
        ("sealing:param=0.1/scheme=bfv", "sealing:param/scheme=bfv"),
        ("sealing:sens=0.1", "sealing:sens"),
    ],
)
def test_a_stronger_setting_is_one_of_the_same_protection(defense: str, searched: str) -> None:
    """Its options stay: the search was for another clip, other blocks, another significance."""
    says, words = step_of([*READ, *column("span", defense, [1.0] * MANY)], defense)
    assert "weakest setting that holds" in says and parsed(words)["defense"] == searched
    found = family(searched)
    assert opened(found.setting(0.5).split("+")[-1], found.strength.keys) == searched.split("+")[-1]


@pytest.mark.parametrize("defense", ["sealing:all", "dp-sgd:0.1+pruning:0.5"])
def test_what_has_no_figure_to_find_or_two_leads_to_another_protection(defense: str) -> None:
    says, words = step_of([*READ, *column("span", defense, [1.0] * MANY)], defense)
    assert "does not stop" in says and "calibrate" not in words


def test_what_was_not_measured_leads_to_the_attacks_that_know_it_or_says_that_there_are_none() -> None:
    rows = [*READ, *column("span", "gaussian:1", [GUESS] * MANY), *column("span", "qsgd:16", [GUESS] * MANY)]
    says, words = step_of(rows, "gaussian:1")
    assert parsed(words)["attack"] == "blind,span,pursuit,lamp-weighted" and "know this protection" in says
    assert step_of(rows, "qsgd:16") == ("No attack of this version knows qsgd. No command can measure it.", [])
    says, words = step_of(rows, "gaussian:1", attacks=["blind", "span", "pursuit", "lamp-weighted"])
    assert not words and "why an attack has no result" in says
    ghost = [*READ, *column("span", "ghost", [GUESS] * MANY)]
    assert parsed(step_of(ghost, "ghost")[1])["reference"] == "public.jsonl"


def test_too_few_lead_to_more_and_what_holds_to_its_price() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
    says, words = step_of(rows, "dropout:0.1")
    took = parsed(words)
    assert words[1] == "train" and took["defense"] == "none,dropout:0.1" and says.startswith("Measure what it costs")
    few = [r for r in rows if r["batch"] < 4]
    says, words = step_of(few, "dropout:0.1", data=None, texts=["Lena owes 7"])
    assert parsed(words)["limit"] == 39 and "notes.jsonl" in says and "Lena" not in " ".join(words)
    assert "skipped the first 5" in step_of(few, "dropout:0.1", skip=5)[0]
    assert "own training" in step_of(rows, "dropout:0.1", task="vision")[0]


def test_private_texts_are_masked_in_commands_and_settings() -> None:
    plan = {**PLAN, "data": None, "texts": ["Lena owes 7", "Max"]}
    assert command("audit", plan).split()[2:6] == ["--text", MASK, "--text", MASK]
    assert ("texts", f"2 texts ({MASK})") in settings(plan)
    assert "Put your texts in place" in step_of(READ, "none", data=None, texts=["Lena"])[0]


def test_the_head_says_where_the_run_comes_from() -> None:
    rows = [{**r, "data": "da7a", "threat_plain": "the server operator", "wall_seconds": 90.0} for r in READ]
    found = dict(head(findings(rows), PLAN, rows, MADE))
    assert found["made"] == "2026-11-23 08:05 UTC" and "0123456789abcdef" in found["model"]
    assert found["data"] == "my notes.jsonl, fingerprint da7a" and found["packages"] == "torch 2.6"
    assert found["with what means"] == "span took 90 seconds an update without protection, on a laptop"
    assert found["who could do this"] == "the server operator"
    assert [duration(s) for s in (0.2, 119, 600)] == ["less than a second", "119 seconds", "10 minutes"]


def test_what_an_old_run_does_not_know_is_said_in_words() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
    found = findings(rows)
    told = dict(head(found, PLAN, [{**r, "data": "x"} for r in rows], Made()))
    assert all(UNKNOWN in told[name] for name in ("made", "with what means", "model", "code", "command", "packages"))
    (_, row) = protection_rows(found, PLAN, rows, Made())
    assert UNKNOWN in row.about[0][1] and dict(row.costs)["guarantee"] == UNKNOWN
    assert "not known" in dict(row.costs)["bytes"], "a size of 0 is no size"


def test_a_change_during_the_run_is_said() -> None:
    (first,) = MADE.sittings
    later = {**first, "began": "2026-11-24T10:00:00.000000+00:00", "code": "other", "packages": {"torch": "2.7"}}
    rows = [{**r, "data": "x"} for r in READ]
    found = dict(head(findings(rows), PLAN, rows, Made((first, later), MADE.about)))
    assert found["made"].endswith("resumed 1 time until 2026-11-24 10:00 UTC")
    assert found["code"] == "the code changed during the run: c0de, then other"
    assert "changed during the run: torch 2.6; then torch 2.7" in found["packages"]


def test_each_protection_says_what_it_is_and_what_it_costs() -> None:
    rows = [{**r, "sent_bytes": 1000} for r in READ]
    rows += [{**r, "sent_bytes": 2000, "defense_seconds": 0.5} for r in column("span", "dp-sgd:1.0", [0.9] * MANY)]
    found = findings(rows)
    base, dp = protection_rows(found, PLAN, rows, MADE)
    assert base.baseline and not dp.baseline and dp.about == (("dp-sgd", DEFENSES["dp-sgd"].about),)
    costs = dict(dp.costs)
    assert costs["bytes"] == "2 kB an update (2 times those without protection)" and costs["time"].startswith("0.5 s")
    assert costs["accuracy"] == "not measured in this run"
    assert (
        costs["guarantee"].startswith("(epsilon, delta)-differential privacy") and "was not computed" in costs["guarantee"]
    )
    places = plot((base, dp), found)
    assert places["lines"][0]["dot"][0] == 100 and places["target"] == pytest.approx(100 * (GUESS + 0.1))
    assert places["band"][0] < 100 * GUESS < places["band"][1]


def test_what_the_author_of_another_method_states_is_no_guarantee() -> None:
    """A plug-in's own word stood among the formal guarantees, and in the page for a data-protection officer."""
    stated = {"about": "Adds noise.", "guarantee": "(1, 1e-5)-differential privacy", "unchecked": True}
    made = Made((), {"protections": {**METHODS, "mine": stated}})
    rows = [*READ, *column("span", "mine:2", [GUESS] * MANY)]
    _, alone = protection_rows(findings(rows), PLAN, rows, made)
    told = dict(alone.costs)["guarantee"]
    assert not alone.private and told.startswith("none; the verdict is empirical.")
    assert told.endswith("mine: its author states “(1, 1e-5)-differential privacy”. Rasura did not check this.")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dp-sgd:1.0", ""),
        ("dp-sgd:1.0+pruning:0.5", ""),
        ("frozen-embeddings+directional:1e3+sealing:param=0.1", ""),
        ("accumulate:9+dp-sgd:1.0", "the time of sending depends on the texts"),
        ("dp-sgd:1.0+qsgd:16", "not in the table of proven compositions"),
        ("dp-ftrl:1.0/band=4+sealing:sens=0.1", "made from the texts themselves"),
    ],
)
def test_the_page_states_differential_privacy_exactly_where_the_ledger_does(text: str, why: str) -> None:
    """It went by the parts: it stated differential privacy of accumulate+dp-sgd, for which nothing is proven."""
    made = Made((), {"protections": METHODS, "compositions": unproven({text: parse_defense(text)})})
    rows = [*READ, *column("span", text, [GUESS] * MANY)]
    _, row = protection_rows(findings(rows), PLAN, rows, made)
    told = dict(row.costs)["guarantee"]
    assert row.private is (not why) and ("Epsilon was not computed" in told) is (not why)
    assert why in told and ("No differential privacy is stated: nothing is proven" in told) is bool(why)
    _, old = protection_rows(findings(rows), PLAN, rows, Made((), {"protections": METHODS}))
    assert not old.private and UNKNOWN in dict(old.costs)["guarantee"], "an older run does not say it"


def test_only_what_holds_is_recommended() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY), *column("span", "bf16", [1.0] * MANY)]
    assert [r.name for r in protection_rows(findings(rows), PLAN, rows, MADE) if r.chosen] == ["dropout:0.1"]
    few = [r for r in rows if r["batch"] < 4]
    assert not any(r.chosen for r in protection_rows(findings(few), PLAN, few, MADE))


# --- each note


def test_every_attack_on_a_note_says_how_it_ended_and_how_sure_it_is() -> None:
    told = {"sent": "x", "read": "Lena owes", "score": 1.0, "words": [["Lena", True, True], ["owes", False, False]]}
    rows = [record("span", "none", 1.0, note=4, confidence="verified", recovered=[told]),
            record("tag", "none", note=4, status="crashed"), record("grab", "none", note=4, status="failed"),
            record("span", "bf16", 0.5, note=4, confidence="matched", recovered=[told]), record("blind", note=4),
            record("span", "none", 1.0, note=5, confidence="new")]  # fmt: skip
    found = findings(rows)
    assert notes_in(rows, found) == (4, 5)
    span, grab, tag, matched = attempts(4, rows, found, False)
    assert (span.attack, span.score, span.guess) == ("span", 1.0, GUESS) and span.sure.startswith(
        "verified: there is a proof"
    )
    assert span.words == ((MASK, True, True), (MASK, False, False)) and span.read == f"{MASK} {MASK}"
    assert grab.score == GUESS and grab.how.startswith("gave up, which counts as guessing") and grab.sure == "no guess"
    assert tag.score is None and tag.how == "crashed: it crashed" and "no proof" in matched.sure
    (new,) = attempts(5, rows, found, False)
    assert new.sure == "how sure is not known" and new.words == ()


def test_not_even_the_length_of_a_masked_word_is_shown() -> None:
    older = {"read": "██ ████████", "words": [["███████████", True, True], ["█", False, False]]}
    shown = masked(older, False)
    assert {w for w, _, _ in shown["words"]} == {MASK} and set(shown["read"].split()) == {MASK}


# --- the page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("run")
    list(
        audit(
            plan_for(model_folder, defenses=("none", "frozen-embeddings+dropout:0.1", "gaussian:0.1", "qsgd:16")), out=folder
        )
    )
    return folder


def test_a_stored_text_is_masked_word_by_word(run: Path) -> None:
    with closing(RunStore(run)) as store:
        rows = [row for r in store for row in r["recovered"]]
    words = {w for row in rows for w, *_ in row["words"]} | {
        w for row in rows for w in f"{row['sent']} {row['read']}".split()
    }
    assert rows and words == {MASK}


def test_the_page_holds_what_an_officer_files(run: Path) -> None:
    page = write_report(run).read_text()
    with closing(RunStore(run)) as store:
        (sitting,), about = store.sittings, store.about
    for fact in (str(sitting["code"]), about["model"], str(sitting["began"])[:10], "fingerprint", "(honest-but-curious)"):
        assert fact in page
    assert all(about["protections"][n]["about"] in page.replace("&#39;", "'") for n in ("dropout", "gaussian", "qsgd"))
    with closing(RunStore(run)) as store:
        words = [v.word for v in findings(list(store), store.plan).verdicts.values()]
    assert len(words) == 4 and page.count('class="dot"') == 4 - words.count(NOT_MEASURED) > 0
    assert 'class="band"' in page and 'class="target"' in page
    assert len(page) < 500_000


def test_the_page_links_a_page_for_each_note(run: Path) -> None:
    page = write_report(run).read_text()
    links = re.findall(r'href="(notes/\d+\.html)"', page)
    assert links == [f"notes/{k}.html" for k in (1, 2, 3)]
    for link in links:
        note = (run / link).read_text()
        assert MASK in note and not any(w in note for t in TEXTS for w in ("Alpha", "Bravo", "Carol", "Delta") if w in t)
        assert (run / link).stat().st_mode & 0o077 == 0
        assert all(attack in note for attack in ("embedding-rows", "span"))


def test_nothing_breaks_mid_word(run: Path, tmp_path: Path) -> None:
    write_report(run)
    pages = {"report": (run / "report.html").read_text(), "note": (run / "notes" / "1.html").read_text()}
    for found in in_browser(pages, tmp_path, BREAKS, widths=(1280, 390)).values():
        assert found["broken"] == [] and found["wide"] <= 0


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_violation(run: Path, tmp_path: Path, dark: bool) -> None:
    write_report(run)
    pages = {"report": (run / "report.html").read_text(), "note": (run / "notes" / "1.html").read_text()}
    for violations, passes in in_browser(pages, tmp_path, axe(), dark=dark).values():
        assert violations == [] and passes > 15


def test_a_run_without_any_record_makes_a_page() -> None:
    page = render([], PLAN)
    assert UNKNOWN in page and "no records" in page
