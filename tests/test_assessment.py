"""The section of an impact assessment: filled with facts of the run, and silent about nothing that it does not know."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from audit_setting import TEXTS, model_folder, plan_for
from rows import GUESS, MANY, READ, column
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.errors import InputError
from rasura.report.assessment import OPEN, assessment, markdown
from rasura.report.findings import findings
from rasura.report.head import UNKNOWN, Made
from rasura.report.word import write_assessment
from rasura.runs.audit import audit

__all__ = ["model_folder"]

PLAN: dict[str, Any] = {"model": "m", "task": "classification", "attacks": ["span"], "limit": MANY, "data": "notes.jsonl"}


def text_of(rows: list[dict[str, Any]], **plan: Any) -> str:
    rows = [{**r, "data": "d"} for r in rows]
    found = {**PLAN, **plan}
    return markdown(assessment(findings(rows), found, rows, Made(), ["active attacks"])).replace("\\", "")


def test_it_states_verdicts_sources_and_what_is_not_known() -> None:
    rows = [*READ, *column("span", "dropout:0.1", [GUESS] * MANY)]
    said, found = text_of(rows), findings(rows)
    assert all(v.says in said for v in found.verdicts.values()) and found.sentence[0] in said
    for source in ("EDPB Opinion 28/2024", "EDPS TechDispatch 1/2025", "NIST SP 800-226", "NIST AI 100-2",
                   "OWASP AI Testing Guide", "ICO guidance"):  # fmt: skip
        assert source in said
    for quoted in ("cannot, in all cases, be considered anonymous",
                   "could infer sensitive information by analysing the gradients or weights shared"):  # fmt: skip
        assert f"“{quoted}”" in said
    assert "not legal advice" in said and OPEN in said and UNKNOWN in said and "Not tested: active attacks." in said
    assert "does not mean “safe”" in said and "accuracy was not measured" in said


def test_of_a_service_nothing_is_said_about_updates() -> None:
    said = text_of([*READ], kind="service")
    assert "EDPS" not in said and "operator of a model service" in said


def test_nothing_can_be_stated_of_no_records() -> None:
    with pytest.raises(InputError, match="could state nothing"):
        assessment(findings([]), PLAN, [], Made(), [])


def test_names_from_outside_cannot_change_the_document() -> None:
    rows = [{**r, "data": "d"} for r in READ]
    plan = {**PLAN, "data": "a|b\n# heading <script> *x*"}
    said = markdown(assessment(findings(rows), plan, rows, Made(), ["x"]))
    assert "\n# heading" not in said and "<script>" not in said.replace("\\<", "") and "a\\|b" in said


def test_the_command_writes_markdown_and_word_and_no_private_text(model_folder: Path, tmp_path: Path) -> None:
    list(audit(plan_for(model_folder, attacks=("blind", "span"), defenses=("none", "gaussian:0.1")), out=tmp_path))
    run, file = CliRunner(), tmp_path / "assessment.md"
    done = run.invoke(app, ["report", str(tmp_path), "--dpia", str(file)])
    assert done.exit_code == 0, done.output
    said = file.read_text()
    assert not any(word in said for t in TEXTS for word in t.split() if word[0].isupper())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert all(v["says"] in said.replace("\\", "") for v in summary["verdicts"].values())
    wrong = run.invoke(app, ["report", str(tmp_path), "--dpia", str(tmp_path / "a.pdf")])
    assert isinstance(wrong.exception, InputError) and "ends in .docx or .md" in str(wrong.exception)
    docx = pytest.importorskip("docx")
    word = tmp_path / "assessment.docx"
    assert run.invoke(app, ["report", str(tmp_path), "--dpia", str(word)]).exit_code == 0
    held = docx.Document(str(word))
    cells = {c.text for t in held.tables for row in t.rows for c in row.cells}
    assert {v["says"] for v in summary["verdicts"].values()} <= cells and len(held.paragraphs) > 15


def test_a_section_is_written_in_the_form_that_the_name_asks_for(tmp_path: Path) -> None:
    rows = [{**r, "data": "d"} for r in READ]
    sections = assessment(findings(rows), PLAN, rows, Made(), ["x"])
    assert write_assessment(tmp_path / "a.md", sections).read_text() == markdown(sections)
    assert all(asdict(s)["title"] for s in sections)
