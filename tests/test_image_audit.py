"""Images in an audit: resumption, what a report shows, plans, the command, real images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit_setting import comparable
from commands import refused
from image_setting import decibels, read
from study_setting import study_folder
from typer.testing import CliRunner

from rasura import registry
from rasura.cli import app
from rasura.core.interfaces import Budget, InputError
from rasura.core.rng import generator
from rasura.core.run_store import RunStore
from rasura.core.values import NO_TEXT
from rasura.data.images import encode_images, load_images
from rasura.report.findings import findings
from rasura.report.page import write_report
from rasura.runs.audit import Audit, audit
from rasura.runs.plans import Plan
from rasura.studies.courses import course_section, courses
from rasura.studies.files import load_study
from rasura.victims.step import step
from rasura.victims.vision import lenet


def plan_for(**more: Any) -> Plan:
    fields: dict[str, Any] = {
        "task": "vision", "attacks": ("blind", "inverting-gradients"), "defenses": ("none", "pruning:0.9"),
        "metrics": ("mse", "psnr", "ssim", "lpips"), "limit": 1, "budget": "quick",
    }  # fmt: skip
    return Plan(**{**fields, **more})


@pytest.mark.slow
def test_an_audit_of_images_resumes_and_masks(tmp_path: Path) -> None:
    whole = list(audit(plan_for(), out=tmp_path / "whole"))
    assert len(whole) == 2 * 2 and {r.status for r in whole} == {"ok"} and {r.model for r in whole} == {"lenet"}
    assert all(set(r.scores) >= {"mse", "psnr", "ssim"} and r.blind["ssim"]["n"] == 1 for r in whole)
    assert all(row["sent"] == row["read"] == "" for r in whole for row in r.recovered), "masked"
    stopped = audit(plan_for(), out=tmp_path / "parts")
    for _ in range(2):
        next(stopped)
    stopped.close()  # type: ignore[attr-defined]  # a generator
    assert len(list(audit(plan_for(), out=tmp_path / "parts"))) == 4 - 2
    assert comparable(tmp_path / "parts") == comparable(tmp_path / "whole")
    store = RunStore(tmp_path / "whole")
    found = findings(list(store), store.plan)
    store.close()
    assert found.metric == "ssim" and "of the structure (SSIM)" in found.sentence[0] and len(found.figures) == 4
    page = write_report(tmp_path / "whole").read_text()
    assert 'class="masked"' in page and "data:image" not in page and "<dd>" in page


@pytest.mark.slow
def test_a_report_shows_images_only_where_both_asked_for_it(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    list(audit(plan_for(show_text=True, defenses=("none",)), out=tmp_path))
    assert "data:image" not in write_report(tmp_path).read_text()
    page = write_report(tmp_path, show_text=True).read_text()
    assert page.count("data:image/png;base64,") == 2 and "personal data" in page


def test_a_report_of_one_metric_has_a_dash_for_the_others(tmp_path: Path) -> None:
    list(audit(plan_for(metrics=("mse",), attacks=("blind",), defenses=("none",)), out=tmp_path))
    page = write_report(tmp_path).read_text(encoding="utf-8")
    row = page.split('<th scope="row">blind</th><td class="c">none</td>')[1].split("</tr>")[0]
    assert row.count("–") == 2 and row.endswith('<td class="c">1</td>')


def test_a_plan_of_images_takes_images_defaults_and_refuses_texts() -> None:
    plan = Plan(task="vision").checked()
    assert plan.model == "lenet" and plan.attacks == registry.for_task(registry.ATTACKS, "vision") and plan.checked() == plan
    assert json.dumps(plan.canonical())
    for wrong, message in (
        ({"attacks": ("span",)}, "attack span is for texts"),
        ({"metrics": ("rouge1",)}, "unknown metric"),
        ({"texts": ("a",)}, "takes images"),
        ({"model": "minilmm"}, "neither a known image model"),
    ):
        with pytest.raises(InputError, match=message):
            Audit(Plan(task="vision", **wrong))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is for images; pass --task vision"):
        Plan(attacks=("inverting-gradients",)).checked()
    with pytest.raises(InputError, match="attack labels is for classifiers of texts; on causal: blind, "):
        Plan(task="causal", attacks=("labels",)).checked()


def test_the_command_refuses_bad_folders_in_one_line(tmp_path: Path) -> None:
    assert "holds no image" in refused("audit", tmp_path, "--task", "vision", "--out", tmp_path / "x")
    assert "for images, use rasura audit" in refused("read", tmp_path / "u", "--model", "lenet", "--task", "vision")


@pytest.mark.slow
def test_real_images_are_read(shared: Path) -> None:
    pytest.importorskip("PIL")
    folder = shared / "data" / "images" / "cifar100"
    examples = load_images(folder, limit=20)
    assert len(examples) == 20 and all(e.pixels.shape == (3, 32, 32) and 0 <= e.label < 100 for e in examples)
    batch = encode_images(examples[:1], size=32, num_labels=100)
    truth = step(lenet(100), batch, (), task="vision", vocabulary=NO_TEXT, rng=generator(0, "step"))
    guess = read("feature-matching", truth, budget=Budget())
    assert guess.labels == (examples[0].label,)
    assert decibels(guess, truth) > decibels(read("blind", truth), truth) + 8


COURSE = """
title = "Losses"
source = "A paper"
differs = ["everything"]
course = true
metrics = ["mse"]

[plan]
task = "vision"
attacks = ["inverting-gradients"]
defenses = ["none", "sealing:grad=0.5"]
threats = ["honest-server"]
budget = "quick"
limit = 2
"""


@pytest.mark.slow
def test_a_study_shows_how_the_loss_falls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study_folder(tmp_path, COURSE)
    monkeypatch.chdir(tmp_path)
    ran = CliRunner().invoke(app, ["study", "one"], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    store = RunStore(tmp_path / "runs" / "studies" / "one")
    records = list(store)
    store.close()
    study = load_study("one", tmp_path / "studies")
    assert isinstance(study.plan, Plan)
    found = courses(study.plan, records)
    assert list(found) == [("inverting-gradients", d) for d in study.plan.defenses]
    for course in found.values():
        points = course.points
        assert course.count == 2 and list(points) == sorted(points) and (min(points), max(points)) == (1, 120)
        means = [mean for mean, _, _ in points.values()]
        assert means == sorted(means, reverse=True), "the least loss so far"
        assert all(low <= mean <= high for mean, low, high in points.values())
    rows = [
        line for line in (tmp_path / "studies" / "RESULTS.md").read_text().splitlines() if line.startswith("| inverting")
    ]
    for row, course in zip(rows, found.values(), strict=True):
        assert row.count(" to ") == 6 and f"{course.points[120][0]:.2g} (" in row and "| 0 / 0 / 0 of 2 |" in row
    details = {"losses_at": "1 40", "losses": "0.5 0.25"}
    shorter = {"attack": "feature-matching", "defense": "none", "status": "ok", "details": details}
    both = replace(study.plan, attacks=(*study.plan.attacks, "feature-matching"))
    gave_up = [{**shorter, "defense": both.defenses[1], "status": "failed", "details": {}}] * 3
    unlike = courses(both, [shorter, *gave_up, *records])
    own = unlike["feature-matching", "none"]
    assert own.points == {1: (0.5, 0.5, 0.5), 40: (0.25, 0.25, 0.25)} and own.count == 1, "its own steps"
    text = course_section(study, both, unlike)
    row = next(line for line in text.splitlines() if line.startswith("| feature-matching"))
    assert row.count(" to ") == 1 and "–" in row, "a dash where this search was not asked"
    rows = [line for line in text.splitlines() if line.startswith(f"| feature-matching | {both.defenses[1]} | 1 | 0 |")]
    assert len(rows) == 1 and "3 / 0 / 0 of 3" in rows[0] and " to " not in rows[0], "what gave up is said"
    for wrong in (COURSE.replace("true", "1"), COURSE.replace('task = "vision"\n', "")):
        (tmp_path / "studies" / "one.toml").write_text(wrong)
        with pytest.raises(InputError, match=r"course is .* beside an audit of images"):
            load_study("one", tmp_path / "studies")
