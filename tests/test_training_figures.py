"""What may be said of a training's figures: nothing where nothing was measured, and less where its texts chose the epoch."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from audit_setting import model_folder
from commands import rasura_command
from tokenizers import Tokenizer, models, pre_tokenizers
from training_setting import RECIPE, fine_tuning, notes

from rasura.cli.train import tabled
from rasura.core.interfaces import InputError
from rasura.metrics.learned import accuracy_interval, learned
from rasura.metrics.utility import causal, classification
from rasura.report.calibration import cost, doubt
from rasura.report.learning import unlearned
from rasura.report.training import LESS, NOT_LESS, UNKNOWN, UNMEASURED, render_training, sides, trainings, verdict
from rasura.runs.calibration import Calibration
from rasura.runs.calibration_plan import CalibrationPlan
from rasura.runs.plans import Plan
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.studies.metric_values import spread_text
from rasura.studies.tables import _chance
from rasura.testing.tiny import tiny
from rasura.victims.recipe import Recipe

__all__ = ["model_folder"]


def result(accuracy: float | None, compared: int | None = None, n: int = 100, **more: Any) -> dict[str, Any]:
    """A training that was judged on the test texts, or on the held-out texts that ``compared`` epochs."""
    chosen = {"tested_on": "test"} if compared is None else {"tested_on": "holdout", "epochs_compared": compared}
    return {
        "defense": "none", "seed": 0, "n_test": n, "test": "7e57", "majority": 0.5, "before": {"accuracy": 0.5},
        "after": {"accuracy": accuracy}, **chosen, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def causal_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose tokenizer adds nothing, so that one word is one token."""
    folder = tmp_path_factory.mktemp("causal")
    words = {word: k for k, word in enumerate(["<pad>", "<unk>", *(f"w{k}" for k in range(290))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(
        folder
    )
    tiny("gpt2", "causal").save_pretrained(folder)
    return folder


# --- texts that chose the epoch


def test_the_best_of_several_epochs_has_an_interval_for_all_of_them() -> None:
    """Coin flips: the accuracy is .5 in truth, and the best of 20 epochs is stated."""
    n, epochs, rng = 200, 20, np.random.default_rng(0)
    best = rng.binomial(n, 0.5, (400, epochs)).max(1) / n
    found = {compared: [accuracy_interval(result(float(a), compared, n)) for a in best] for compared in (1, epochs)}
    missed = {k: np.mean([some is None or not some[0] <= 0.5 <= some[1] for some in v]) for k, v in found.items()}
    assert missed[1] > 0.3 and missed[epochs] <= 0.05
    fooled = np.mean([learned(result(float(a), epochs, n)) is True for a in best])
    assert fooled <= 0.05


def test_one_epoch_alone_and_test_texts_keep_their_interval() -> None:
    plain = accuracy_interval(result(0.8))
    assert plain == accuracy_interval(result(0.8, 1)) == pytest.approx((0.7082, 0.8733), abs=1e-4)
    wide = accuracy_interval(result(0.8, 20))
    assert plain is not None and wide is not None and wide[0] < plain[0] and wide[1] > plain[1]


def test_several_seeds_that_chose_on_the_same_texts_are_wider_together() -> None:
    alone, together = (sides([result(0.8, 20, seed=k) for k in range(count)])[0].level for count in (1, 3))
    assert alone is not None and together is not None and together[1] < alone[1] and together[2] > alone[2]
    alone, together = (sides([result(0.8, seed=k) for k in range(count)])[0].level for count in (1, 3))
    assert alone is not None and together == pytest.approx(alone)


def test_a_result_that_does_not_say_what_was_compared_has_no_interval() -> None:
    old = result(0.9, 5)
    del old["epochs_compared"]
    unknown = result(0.9)
    del unknown["tested_on"]
    for one in (old, unknown):
        assert accuracy_interval(one) is None and learned(one) is None
        (side,) = sides([one])
        word, says = verdict(side, side)
        assert word == UNKNOWN and "no interval" in says and "95 %" not in says


def test_costs_allow_for_the_choice_on_both_sides() -> None:
    def judged(compared: int) -> tuple[str, str]:
        baseline, behind = sides([result(0.9, compared, 400), result(0.8, compared, 400, defense="sign")])
        return verdict(behind, baseline)

    (word, says), (other, allows) = judged(1), judged(50)
    assert word == LESS and "It costs 2.8 to 17.1 points" in says
    assert other == NOT_LESS and "A cost of up to 21.6 points is not ruled out" in allows


@pytest.mark.parametrize(
    ("recipe", "tested", "compared"),
    [
        (Recipe(epochs=9, patience=2), False, 9),  # where it stops depends on the texts, so any of nine could have been kept
        (Recipe(epochs=9, patience=2, keep="last"), False, 9),
        (Recipe(epochs=9, patience=9, keep="last"), False, 1),
        (Recipe(epochs=1), False, 1),
        (Recipe(epochs=9), True, 1),
    ],
)
def test_a_result_says_how_many_epochs_were_compared_on_its_texts(
    tmp_path: Path, model_folder: Path, recipe: Recipe, tested: bool, compared: int
) -> None:
    test = str(notes(tmp_path, "test.jsonl", 6, 20)) if tested else None
    plan = TrainPlan(str(notes(tmp_path)), test, str(model_folder), holdout=0.4, recipe=recipe)
    (one,) = Training(plan, tmp_path / "run").run()
    assert one["epochs_compared"] == compared


def test_the_command_and_the_page_say_that_the_texts_chose_the_epoch(
    tmp_path: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for keep in ("best", "last"):
        recipe = Recipe(epochs=2, patience=2, keep=keep)  # type: ignore[arg-type]
        folder = tmp_path / keep
        training = Training(TrainPlan(str(notes(tmp_path)), model=str(model_folder), recipe=recipe), folder)
        tabled(list(training.run()), folder)
        page, said = render_training(folder), " ".join(capsys.readouterr().out.split())
        for text in (page, said):
            assert ("chose the epoch" in text and "optimistic" in text) == (keep == "best"), keep


# --- nothing was measured


def test_no_token_has_no_loss_and_logits_that_are_no_numbers_have_no_figures() -> None:
    assert all(math.isnan(v) for v in causal(0.0, 0).values())
    for wrong in (math.nan, math.inf, -math.inf):
        found = classification(torch.tensor([[2.0, 0.0], [0.0, wrong]]), [0, 1])
        assert set(found) == {"accuracy", "f1", "mcc", "loss"} and all(math.isnan(v) for v in found.values())


@pytest.mark.parametrize("wrong", [None, math.nan])
def test_what_was_not_measured_is_said_and_never_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: float | None
) -> None:
    diverged = result(wrong, defense="sign", after={"accuracy": wrong, "loss": wrong})
    kept = result(0.9, after={"accuracy": 0.278, "loss": wrong})  # as an earlier version wrote it
    for one in (diverged, kept, {"defense": "sign", "seed": 0, "before": {"loss": 1.0}, "after": {"loss": wrong}}):
        assert learned(one) is None and accuracy_interval(one) is None and unlearned([one]) == []
    found = sides([result(0.9), diverged])
    word, says = verdict(found[1], found[0])
    assert word == UNMEASURED and "95 %" not in says and "nan" not in says.lower()
    assert verdict(found[0], found[1])[0] == UNKNOWN, "no baseline was measured"


def test_a_folder_with_an_unmeasured_training_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from pages_setting import training_folder

    folder = training_folder(tmp_path)
    file = folder / "gaussian-0.001-0" / "result.json"
    made = json.loads(file.read_text())
    file.write_text(json.dumps({**made, "after": dict.fromkeys(made["after"])}))
    page = render_training(folder)
    tabled([dict(r) for r in trainings(folder)[1]], folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "Under gaussian:0.001 nothing was measured." in page and "gaussian:0.001, seed 0: not measured" in said
    assert "less accurate" not in page and "nan" not in said


def test_a_table_of_a_study_says_what_was_not_measured_and_what_chose_the_epoch() -> None:
    assert spread_text([0.5, 0.7], "accuracy") == "60.0 [50.0, 70.0]"
    assert spread_text([0.5, None], "accuracy") == spread_text([math.nan], "accuracy") == "not measured"
    test, held = result(0.5), result(0.5, 20)
    assert _chance(["accuracy"], [test]) == ", where 95 % of chance is ±10.2 of accuracy"
    every = _chance(["accuracy"], [result(1.0, n=20)])
    assert every == ", where 95 % of chance is ±16.8 of accuracy", "twenty that are all right are not right for certain"
    assert _chance(["accuracy"], [test, held]) == ", which also chose the epoch, so that figures are optimistic"
    assert _chance(["accuracy"], [result(None)]) == _chance(["loss"], [test]) == ""


def test_a_calibration_states_no_cost_that_was_not_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = {"none": result(0.9), "gaussian:1": result(None, defense="gaussian:1")}

    class Trained:
        run = made.values

    search = object.__new__(Calibration)
    search.wanted = CalibrationPlan(Plan(data="notes.jsonl"), utility="accuracy")
    search.families = [SimpleNamespace(text="gaussian", rest="none")]  # type: ignore[list-item]
    monkeypatch.setattr(search, "_training", lambda defenses: Trained)
    part: dict[str, Any] = {"family": "gaussian", "setting": "gaussian:1"}
    search._utility([part])
    assert "not a number" in part["utility"]["reason"] and "cost" not in part["utility"]


@pytest.mark.parametrize(("without", "behind", "metric", "says"), [
    (0.9, 0.7, "accuracy", ""),
    (0.9, 0.88, "accuracy", "Whether it costs any accuracy is not told from chance."),
    (0.9, 0.7, "f1", "Whether it costs any f1 is not told from chance."),
    (0.5, 0.5, "accuracy", "No training is told from chance: this compares nothing. Train on more texts, for longer, "
     "or at another learning rate."),
    (0.9, 0.5, "accuracy", "gaussian:1, seed 0: not told from chance (n = 400, accuracy 0.45 to 0.55; the most "
     "frequent class alone gives 0.50)."),
])  # fmt: skip
def test_a_calibration_says_where_a_cost_is_not_told_from_chance(
    monkeypatch: pytest.MonkeyPatch, without: float, behind: float, metric: str, says: str
) -> None:
    """A cost of nothing, where neither model learned anything, is none that a user may count on."""
    more: dict[str, Any] = {"n_train": 9, "epochs": 3, "epochs_compared": 1, "before": {"accuracy": 0.5, "f1": 0.5}}
    made = {
        defense: result(value, n=400, **more, defense=defense, after={"accuracy": value, "f1": value})
        for defense, value in (("none", without), ("gaussian:1", behind))
    }

    class Trained:
        run = made.values

    search = object.__new__(Calibration)
    search.wanted = CalibrationPlan(Plan(data="notes.jsonl"), utility=metric)
    search.families = [SimpleNamespace(text="gaussian", rest="none")]  # type: ignore[list-item]
    monkeypatch.setattr(search, "_training", lambda defenses: Trained)
    part: dict[str, Any] = {"family": "gaussian", "setting": "gaussian:1"}
    search._utility([part])
    assert doubt(part) == says and cost(part).endswith(says or "trained on)")
    del part["utility"]["trained"]
    assert "not told from chance" in doubt(part), "a result of an earlier version does not say"


def test_an_epoch_whose_figures_are_no_numbers_is_refused(tmp_path: Path) -> None:
    for figures in ({"accuracy": 0.5, "loss": math.nan}, {"accuracy": math.nan}, {"accuracy": 0.5, "loss": math.inf}):
        run = fine_tuning(tmp_path / str(figures), recipe=RECIPE)
        run.evaluate = lambda model, told=figures: told  # type: ignore[misc]
        with pytest.raises(InputError, match=r"held-out texts.*epoch 1; lower the learning rate"):
            run.run()
        assert run.history.epoch == 0 and not list(run.folder.glob("*.safetensors"))


@pytest.mark.parametrize("size", [4, 64])  # the next step sees it, or the texts that are held out
def test_a_training_that_diverges_ends_without_a_model(tmp_path: Path, model_folder: Path, size: int) -> None:
    recipe = Recipe(epochs=1, batch_size=size, learning_rate=1e30, optimizer="sgd")
    training = Training(TrainPlan(str(notes(tmp_path)), model=str(model_folder), recipe=recipe), tmp_path / "run")
    with pytest.raises(InputError, match=r"in epoch 1; lower the learning rate \(1e\+30\)"):
        list(training.run())
    assert not list((tmp_path / "run").rglob("*.safetensors")) and not list((tmp_path / "run").rglob("result.json"))


def test_figures_on_test_texts_that_are_no_numbers_are_none(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = TrainPlan(
        str(notes(tmp_path)), str(notes(tmp_path, "test.jsonl", 6, 20)), str(model_folder), recipe=Recipe(epochs=1)
    )
    training = Training(plan, tmp_path / "run")
    real = training._figures

    def figures(model: torch.nn.Module, rows: Any) -> dict[str, float]:
        return {k: math.nan if rows is training.test else v for k, v in real(model, rows).items()}

    monkeypatch.setattr(training, "_figures", figures)
    results = list(training.run())
    assert set(results[0]["after"].values()) == set(results[0]["before"].values()) == {None}
    json.dumps(results, allow_nan=False)
    assert list(training.run()) == results


def test_texts_without_a_token_to_predict_are_refused(tmp_path: Path, causal_folder: Path) -> None:
    long, short = tmp_path / "long.jsonl", tmp_path / "short.jsonl"
    long.write_text("".join(json.dumps({"text": f"w{k} w{k + 1} w5"}) + "\n" for k in range(8)))
    short.write_text("".join(json.dumps({"text": f"w{k}"}) + "\n" for k in range(8)))
    plan = TrainPlan(str(long), str(short), str(causal_folder), "causal", recipe=Recipe(epochs=1))
    with pytest.raises(InputError, match=r"short\.jsonl: no text has a token to predict"):
        Training(plan, tmp_path / "run")
    with pytest.raises(InputError, match=r"held out.*no text has a token to predict"):
        Training(replace(plan, data=str(short), test=str(long)), tmp_path / "run")
    (one,) = Training(replace(plan, test=str(long)), tmp_path / "other").run()
    assert one["after"]["loss"] > 0


# --- texts that a model is judged on


def test_repeated_texts_and_those_that_are_trained_on_do_not_count(tmp_path: Path, model_folder: Path) -> None:
    data, test = notes(tmp_path), notes(tmp_path, "test.jsonl", 6, 20)
    rows = test.read_text().splitlines()
    test.write_text("\n".join([*rows * 3, *data.read_text().splitlines()]) + "\n")
    plan = TrainPlan(str(data), str(test), str(model_folder), recipe=Recipe(epochs=1))
    training = Training(plan, tmp_path / "run")
    (result,) = training.run()
    alone = tmp_path / "alone.jsonl"
    held = [json.loads(row)["text"] for row in data.read_text().splitlines()]
    trained = {text for row in training.rows for text in row.texts}
    labels = {text: k % 2 for k, text in enumerate(held)}
    left = [json.dumps({"text": text, "label": labels[text]}) for text in held if text not in trained]
    alone.write_text("\n".join([*rows, *left]) + "\n")
    (once,) = Training(replace(plan, test=str(alone)), tmp_path / "once").run()
    assert result["n_test"] == once["n_test"] == 7 and result["after"] == once["after"]
    assert (result["n_left_out"], once["n_left_out"]) == (2 * 6 + 11, 0)
    words = ["train", data, "--test", test, "--model", model_folder, "--epochs", "1", "--out", tmp_path / "run"]
    done = rasura_command(*words)
    told = "23 more are left out: repeated, or trained on"
    assert f"evaluated on 7 texts of the test ({told})" in " ".join(done.stdout.split()), done.stdout + done.stderr
    assert told in (tmp_path / "run" / "report.html").read_text()
    alone.write_text("".join(json.dumps({"text": text, "label": labels[text]}) + "\n" for text in trained))
    with pytest.raises(InputError, match="every text is also among those to train on"):
        Training(replace(plan, test=str(alone)), tmp_path / "other")
