"""The page of every kind of run: whole, in three languages, on a desktop and on a phone."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path
from string import Formatter

import pytest
from browser_setting import BREAKS, axe, in_browser
from jinja2 import nodes
from pages_setting import MADE, PLAN, audit_page, calibration_result, pages, rows, training_folder
from rows import column, sentences
from rows import stored as whole
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.errors import InputError
from rasura.core.records import LABELS, MASK
from rasura.core.threat import MODEL_USER, SERVICE_OPERATOR, THREATS
from rasura.registry import ATTACKS, DEFENSES, SERVICE_ATTACKS, SERVICE_PROTECTIONS
from rasura.report import (
    assessment,
    calibration,
    cut,
    head,
    language,
    matrix,
    missing,
    notes,
    page,
    sealed,
    services,
    training,
    verdicts,
    ways,
)
from rasura.report.assessment import markdown
from rasura.report.findings import findings
from rasura.report.language import LANGUAGES, catalogue, number, tell, written_in
from rasura.report.page import render, write_notes, write_report
from rasura.report.template import environment, pieces

OTHERS = [name for name in LANGUAGES if name != "en"]
REPORT = Path(str(language.__file__)).parent
CHOSEN = {
    "it gave a result at fewer than two settings", "never above guessing",
    "not lower at the strongest setting than at the weakest",
    "other texts, other seeds", "unreached", "not verified", "most read", "median",
    "least read", "verified", "span", "matched",
    "no formal guarantee", "none",
    "There are too few texts to measure how many members are found at a low false positive rate.",
}  # fmt: skip
"""Sentences that runs store, or that code chooses from, beside those of the registry."""


def literals() -> Iterator[str]:
    """Every sentence that code or a template tells."""
    for path in REPORT.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tell":
                assert isinstance(node.args[0], ast.Constant), f"{path.name}:{node.lineno}: not a literal"
                yield str(node.args[0].value)
    for path in REPORT.glob("*.html"):
        for call in environment().parse(path.read_text(encoding="utf-8")).find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == "tell":
                assert isinstance(call.args[0], nodes.Const), f"{path.name}:{call.lineno}: not a literal"
                yield str(call.args[0].value)


def stored() -> set[str]:
    """Every description that pages take over from the registry and from constants."""
    specs = [*DEFENSES.values(), *ATTACKS.values(), *SERVICE_ATTACKS.values(), *SERVICE_PROTECTIONS.values()]
    found = {s.about for s in specs} | {s.guarantee for s in DEFENSES.values()}
    found |= {t.plain for t in (*THREATS.values(), MODEL_USER, SERVICE_OPERATOR)}
    for words in (matrix.TEXTS, matrix.IMAGES, services.WORDS):
        found |= {words.one, words.many, words.share, words.unit, *words.more.values()}
    found |= {*verdicts.WORDS, missing.AGAINST, *notes.SURE.values(), head.UNKNOWN, *services.MEASURES.values()}
    found |= {page.ACTIVE, page.ACTIVE_SERVICE, page.REMEMBERED, assessment.NO_ADVICE, assessment.OPEN, assessment.TITLE}
    found |= {
        *calibration.WORDS.values(),
        *matrix.RISKS.values(),
        training.LESS,
        training.NOT_LESS,
        training.CHANCE,
        training.UNKNOWN,
        cut.OF_WHAT_IS_LEFT,
    }
    found |= {sealed.LEFT_OUT, sealed.ENCRYPTED, sealed.SUMMED, sealed.SUMMED_WITH_NOISE, sealed.OMITS, sealed.SUMS}
    found |= {text for w in ways.WAYS for text in (w.name, w.reads, w.colluders, w.gone) if text}
    return found | CHOSEN


def places(sentence: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(sentence) if name is not None}


@pytest.mark.parametrize("name", OTHERS)
def test_every_sentence_is_translated_with_the_same_places(name: str) -> None:
    told = {*literals(), *stored()}
    there = catalogue(name)
    assert told - there.keys() == set(), "sentences without a translation"
    assert there.keys() - told == set(), "translations that no page uses"
    assert [s for s, translated in there.items() if places(s) != places(translated) or not translated.strip()] == []


def test_a_missing_translation_is_an_error_and_an_unknown_language_is_refused() -> None:
    with written_in("de"), pytest.raises(LookupError):
        tell("no catalogue has this")
    with pytest.raises(InputError, match="language"), written_in("xx"):
        pass


def test_figures_and_dates_are_written_as_in_the_language() -> None:
    when = {"de": "23.11.2026, 08:05 Uhr (UTC)", "fr": "23/11/2026 à 08:05 (UTC)", "en": "2026-11-23 08:05 UTC"}
    for name, expected in when.items():
        with written_in(name):
            assert MADE.date == expected
            assert number(0.25, ".2f") == ("0.25" if name == "en" else "0,25")
    assert number(0.25, ".2f") == "0.25", "the language ends with its context"


class Emptied(dict[str, str]):
    """A catalogue that leaves the values of every sentence and nothing else."""

    def __missing__(self, sentence: str) -> str:
        return " ".join(f"{{{name}}}" for name in sorted(places(sentence)))

    def get(self, sentence: str, default: object = None) -> str:  # type: ignore[override]  # as ``recorded`` calls it
        return ""


def visible(page: str) -> str:
    body = page.partition("<main>")[2]
    body = re.sub(r'<(pre|code)>.*?</\1>|<(span|ul) lang="en">.*?</\2>', " ", body, flags=re.DOTALL)
    return unescape(re.sub(r"<[^>]+>", " ", body))


def test_no_word_of_a_page_stands_outside_the_catalogue(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(language, "catalogue", lambda name: Emptied())
    facts = f"{PLAN} {rows()[:1]} {MADE} {calibration_result()} {[*DEFENSES]} {[*ATTACKS]}"
    known = {w.lower() for w in re.findall(r"[A-Za-z]+", facts)}
    known |= {"rasura", "auc", "mse", "psnr", "rouge", "ssim", "mb", "kb", "minilm", "train", "jsonl", "public", "none"}
    known |= {"recipe", "epochs", "lira", "rmia", "members", "others", "shadow", "models", "references", "reference", "kind"}
    known |= {"membership", "service", "weights", "calibration", "loss"}  # what plans call their fields
    with written_in("de"):
        for name, made in pages(tmp_path).items():
            left = {w.lower() for w in re.findall(r"[A-Za-z]{3,}", visible(made))}
            assert left - known == set(), name


@pytest.mark.parametrize("name", LANGUAGES)
def test_a_page_says_its_language_and_is_light(name: str, tmp_path: Path) -> None:
    said = {"en": "This report is in English", "de": "Dieser Bericht ist auf Deutsch", "fr": "Ce rapport est en français"}
    with written_in(name):
        for made in pages(tmp_path).values():
            assert f'<html lang="{name}">' in made and said[name] in made and len(made.encode()) < 500_000
            assert (
                not re.search(r"""(?:src|href)=["'](?!#|notes/)|url\(|@import|https?://""", made) and "<script" not in made
            )


@pytest.mark.parametrize("name", LANGUAGES)
def test_no_line_ends_within_a_figure_with_its_sign_its_interval_or_its_number(name: str, tmp_path: Path) -> None:
    with written_in(name):
        made = pages(tmp_path)
    for one in made.values():
        assert re.search(r"\d %|n = \d|\d (to|bis|à) \d", one) is None
    assert re.search(r"\d\xa0(to|bis|à)\xa0\d+, n\xa0=\xa060", made["audit"])
    mark = "." if name == "en" else ","
    assert f">0{mark}1\xa0%<" in made["membership"], "ticks have the decimal mark of the language"


def test_what_has_no_figure_is_not_crossed_by_the_line_of_the_target(tmp_path: Path) -> None:
    tracks = re.findall(r'<svg class="track".*?</svg>', pages(tmp_path)["membership"], re.DOTALL)
    without = [track for track in tracks if "no figure</text>" in track]
    assert without and len(tracks) > len(without)
    assert [track for track in tracks if ('class="target"' in track) == (track in without)] == []


def test_no_figure_reads_none_or_all_that_is_not_and_no_interval_is_rounded_inwards(tmp_path: Path) -> None:
    some = whole(column("span", "none", [0.996] * 3))
    for r in some:
        r |= {"recovered": [{"sent": MASK, "read": MASK, "score": 0.996, "words": [[MASK, True, True]]}]}
        r["scores"][LABELS], r["blind"][LABELS] = {"per_record": [0.996]}, {"per_record": [0.004]}
    found = findings(some, PLAN)
    level = found.best["none"].level
    assert level is not None
    low, high = math.floor(100 * level.low), math.ceil(100 * level.high)
    write_notes(tmp_path, found, some, PLAN, show_text=False)
    told, note = render(some, PLAN, MADE), (tmp_path / "notes" / "1.html").read_text()
    assert f">{low}–{high} · n 3<" in told, "as in the sentence on top"
    assert f"99 %, 95 % interval {low} to {high} %" in sentences(told).replace("\xa0", " ")
    assert ">99</td>" in told and ">1</td>" in told, "labels that were named, and guessing"
    assert "ROUGE-1 99" in sentences(told)
    assert "99 % of the words, guessing 20 %" in sentences(note).replace("\xa0", " ")


def test_an_assessment_is_in_the_language_asked_for() -> None:
    titles = {"de": "Datenschutz-Folgenabschätzung", "fr": "Analyse d'impact relative à la protection des données"}
    for name, title in titles.items():
        with written_in(name):
            some = rows()
            said = markdown(assessment.assessment(findings(some), PLAN, some, MADE, ["x"]))
        assert title in said and "cannot, in all cases, be considered anonymous" in said, "what is quoted stays as it is"
        assert "Status of this text" not in said


def test_the_page_of_a_training_says_what_protection_costs(tmp_path: Path) -> None:
    said = sentences(write_report(training_folder(tmp_path)).read_text())
    assert "gaussian:0.001 makes the model less accurate." in said and "dp-sgd:1.0 the model is not told from chance" in said
    assert "fingerprint of the weights 0123456789abcdef" in said and "rasura membership" in said and 'class="band"' in said
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--language", "fr"])
    assert done.exit_code == 0 and "le modèle devient moins exact" in (tmp_path / "report.html").read_text()


def test_without_a_baseline_no_cost_is_judged(tmp_path: Path) -> None:
    folder = training_folder(tmp_path)
    for file in (folder / "none-0" / "result.json", folder / "dp-sgd-1.0-0" / "result.json"):
        file.unlink()
    said = write_report(folder).read_text()
    assert "What protection costs was not judged." in said and "less accurate" not in said
    (folder / "gaussian-0.001-0" / "result.json").unlink()
    with pytest.raises(InputError, match="no finished training"):
        write_report(folder)


def every_page(folder: Path) -> Mapping[str, str]:
    """All kinds in English, and the audit in the languages with longer words."""
    folder.mkdir()
    found = pages(folder)
    for name in OTHERS:
        with written_in(name):
            found[f"audit-{name}"] = audit_page()
    return found


def test_nothing_breaks_mid_word_on_any_page(tmp_path: Path) -> None:
    told = in_browser(every_page(tmp_path / "pages"), tmp_path, BREAKS, widths=(1280, 390))
    assert {where: found for where, found in told.items() if found["broken"] or found["wide"] > 0} == {}


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_violation_on_any_page(tmp_path: Path, dark: bool) -> None:
    told = in_browser(every_page(tmp_path / "pages"), tmp_path, axe(), widths=(1280, 390), dark=dark)
    assert {where: violations for where, (violations, _) in told.items() if violations} == {}
    assert all(passes > 15 for _, passes in told.values())


def test_lines_break_in_lists_and_paths_but_in_no_number() -> None:
    assert [part for part, _, _ in pieces("reached 90,0 of 22,713,986 by none,dp-sgd:1,0 in runs/a/b") if part.strip()] == [
        "reached", "90,0", "of", "22,713,986", "by", "none,", "dp-sgd:1,0", "in", "runs/", "a/", "b",
    ]  # fmt: skip
