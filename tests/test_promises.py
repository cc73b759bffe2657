"""Several trainings on the same texts: the worst guarantee stands for all, no warning is lost, and losses add up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pages_setting import training_folder

from rasura.cli.train import tabled
from rasura.core.rounding import above
from rasura.report.language import written_in
from rasura.report.promises import alone, promises
from rasura.report.training import render_training, trainings

DEFENSE = "dp-sgd:1.0"


def visible(page: str) -> str:
    """The words of a page, without marks that keep some on one line."""
    return " ".join(re.sub(r"<[^>]+>", "", page).split())


def privacy(epsilon: float, releases: int, **more: Any) -> dict[str, Any]:
    said = f"({above(epsilon)}, 1e-05)-differential privacy for each text; counted, after {releases} releases"
    return {"statement": said, "epsilon": epsilon, "delta": 1e-5, "steps": releases, **more}


def of(*stated: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"defense": DEFENSE, "seed": k, "privacy": p} for k, p in enumerate(stated)]


REFUTED = "canaries refute it: at least 9 was measured"
FOUR = (privacy(6.02, 6), privacy(7.128, 8, warnings=[REFUTED, "delta is large"]),
        privacy(6.02, 6), privacy(6.5, 7, warnings=["delta is large"]))  # fmt: skip


def folder_of(folder: Path) -> Path:
    """Trainings without protection and, from four seeds, behind one."""
    training_folder(folder)
    place = folder / "dp-sgd-1.0-0"
    first = json.loads((place / "result.json").read_text())
    for seed, stated in enumerate(FOUR):
        other = folder / f"dp-sgd-1.0-{seed}"
        other.mkdir(exist_ok=True)
        made = {**first, "seed": seed, "privacy": stated, "epochs": stated["steps"], "tested_on": "holdout"}
        (other / "result.json").write_text(json.dumps(made))
    return folder


def test_the_worst_of_several_trainings_is_stated_and_no_warning_is_lost() -> None:
    for some in (FOUR, FOUR[::-1]):
        lines = promises(of(*some))
        assert lines[0] == f"the worst of 4 trainings: {FOUR[1]['statement']}"
        assert lines[1] == "together, the 4 models give (25.67, 4e-05)-differential privacy (basic composition)"
        assert sorted(lines[2:]) == ["seed 1, 3: delta is large", f"seed 1: {REFUTED}"] or some is not FOUR
        assert len(lines) == 4 and any(REFUTED in line for line in lines)


def test_a_training_without_a_guarantee_is_worse_than_any_epsilon() -> None:
    none = {"statement": "no formal guarantee: sigma 0.0001 is too small for a guarantee"}
    assert promises(of(privacy(1e6, 9), none)) == [f"the worst of 2 trainings: {none['statement']}"]
    seeded = [{"statement": f"no guarantee; otherwise {e}", "otherwise": [e, 1e-5]} for e in (3.0, 4.0)]
    assert promises(of(*seeded)) == ["the worst of 2 trainings: no guarantee; otherwise 4.0"]
    assert promises(of(none, none)) == [none["statement"]]


def test_one_training_is_stated_as_it_is() -> None:
    assert promises(of(privacy(2.0, 3, warnings=["w"]))) == [privacy(2.0, 3)["statement"], "w"]
    assert alone(of(privacy(2.0, 3))) == "" and alone(of({"statement": "none"}, {"statement": "none"})) == ""
    assert alone(of(privacy(2.0, 3), {"statement": "none"})).startswith("2 models were trained on the same texts")


@pytest.mark.parametrize("language", ["en", "de", "fr"])
def test_the_page_states_the_worst_and_what_all_models_give_together(tmp_path: Path, language: str) -> None:
    with written_in(language):
        page = visible(render_training(folder_of(tmp_path)))
    assert "after 8 releases" in page and "after 6 releases" not in page and REFUTED in page
    if language == "en":
        assert "6 models were trained on the same texts. The guarantee of a training is for its model alone." in page
        assert "the worst of 4 trainings" in page and "(25.67, 4e-05)" in page and "6–8 epochs" in page


def test_the_command_states_the_worst_and_what_all_models_give_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, results = trainings(folder_of(tmp_path))
    tabled([{"tested_on": "holdout", **r} for r in results], tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{DEFENSE}: the worst of 4 trainings: (7.128" in said and "(6.02" not in said
    assert f"seed 1: {REFUTED}" in said and "together, the 4 models give (25.67, 4e-05)" in said
    assert "6 models were trained on the same texts" in said
