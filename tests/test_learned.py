"""What is said of trainings that did not learn: chance, too few texts, one class, and a loss that rose. No model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages_setting import training_folder
from rows import sentences

from rasura.metrics.learned import learned
from rasura.report.language import LANGUAGES, written_in
from rasura.report.learning import unlearned
from rasura.report.training import render_training


def result(accuracy: float, majority: float | None, n: int = 100, **more: Any) -> dict[str, Any]:
    chance = {} if majority is None else {"majority": majority}
    told = {"defense": "none", "seed": 0, "n_test": n, "tested_on": "test", "after": {"accuracy": accuracy}}
    return {**told, **chance, **more}


def test_a_training_that_learned_nothing_is_said() -> None:
    assert [learned(result(*r)) for r in ((0.9, 0.5), (0.55, 0.5), (0.9, 0.9), (0.9, None))] == [True, False, False, None]
    assert learned(result(0.9, 0.5, n=4)) is False, "four texts cannot show it"
    assert learned({"before": {"loss": 2.0}, "after": {"loss": 2.5}}) is False
    (said,) = unlearned([result(0.5, 0.5), result(0.4, 0.5)])
    assert said.startswith("No training is told from chance: this compares nothing.") and "for longer" in said
    (said,) = unlearned([result(0.9, 0.5), result(0.5, 0.5, defense="sign")])
    assert said == (
        "sign, seed 0: not told from chance (n = 100, accuracy 0.40 to 0.60; the most frequent class alone gives 0.50)"
    )
    assert unlearned([result(0.9, 0.5)]) == unlearned([result(0.9, None)]) == []


def test_texts_that_cannot_show_what_was_learned_are_not_called_chance() -> None:
    for few in (result(1.0, 0.5, n=4), result(0.5, 0.5, n=4), result(0.58, 0.5)):
        (said,) = unlearned([few, result(0.5, 0.5, n=few["n_test"])])
        assert f"with {few['n_test']} texts to judge on" in said and "Judge on more texts" in said and "Train" not in said
    (said,) = unlearned([result(1.0, 1.0, n=4)])
    assert "the texts that judge have one class" in said and "this compares nothing" in said and "longer" not in said
    old = result(0.9, None)
    assert unlearned([old, result(1.0, 1.0, n=4)]) == [
        "none, seed 0: not told from chance: the 4 texts that judge it have one class, on which accuracy, F1 and MCC say "
        "nothing"
    ]


def test_a_loss_that_rose_is_said_and_calls_for_no_longer_training() -> None:
    def trained(before: float, after: float, **more: Any) -> dict[str, Any]:
        return {"defense": "none", "seed": 0, "before": {"loss": before}, "after": {"loss": after}, **more}

    rose, same, fell = trained(1.267, 1.584, defense="sign"), trained(1.0, 1.0), trained(2.0, 1.0)
    (said,) = unlearned([rose, rose])
    assert "made the model worse" in said and "compares nothing" in said and "longer" not in said and "chance" not in said
    (said,) = unlearned([rose, same])
    assert said.startswith("The loss fell in no training: this compares nothing.") and "longer" not in said
    assert unlearned([fell, rose, same]) == [
        "sign, seed 0: the loss rose from 1.267 to 1.584: the training made the model worse",
        "none, seed 0: the loss did not fall",
    ]


def page_of(folder: Path, more: dict[str, Any], language: str = "en") -> str:
    """The page of three trainings that end alike."""
    training_folder(folder)
    for file in folder.glob("*/result.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), **more}))
    with written_in(language):
        return sentences(render_training(folder))


def test_the_command_of_the_page_attacks_the_model_as_it_was_trained(tmp_path: Path) -> None:
    told = json.loads((training_folder(tmp_path) / "plan.json").read_text())
    told["plan"] |= {"text_column": "Notiz", "pair_column": "none", "label_column": None}
    (tmp_path / "plan.json").write_text(json.dumps(told))
    page = sentences(render_training(tmp_path))
    where = f"{tmp_path}/gaussian-0.001-0/model --text-column Notiz --pair-column none --members train.jsonl"
    assert f"rasura membership {where} --rows {tmp_path}/rows.json --defense gaussian:0.001" in page


def test_the_page_says_why_nothing_was_learned_and_what_to_do(tmp_path: Path) -> None:
    always: dict[str, Any] = {"after": {"accuracy": 1.0}, "n_test": 4}
    few, alike = page_of(tmp_path, always), page_of(tmp_path, {**always, "majority": 1.0})
    assert "with 4 texts to judge on" in few and "Judge on more texts" in few and "one class" not in few
    assert "The texts that judge it have one class." in alike and "Judge on texts of every class" in alike
    worse = {"task": "causal", "before": {"loss": 1.267}, "after": {"loss": 1.584}}
    rose = page_of(tmp_path, worse)
    assert "made the model worse" in rose and "Train at a lower learning rate, or on more texts." in rose
    assert "In at least one training it did not fall." in rose and "rasura membership" not in rose
    for said in (few, alike, rose):
        assert "this compares nothing" in said and "longer" not in said
    for language in LANGUAGES:
        assert page_of(tmp_path, worse, language) and page_of(tmp_path, {**always, "majority": 1.0}, language)
