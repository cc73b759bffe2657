"""The task of a command: what was asked for, or what the model's folder states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from audit_setting import TEXTS, causal_folder, model_folder
from safetensors.torch import save_file
from study_setting import study_folder
from typer.testing import CliRunner

from rasura.cli import app
from rasura.cli.shared import task_named
from rasura.core.errors import InputError
from rasura.core.run_store import RunStore
from rasura.report.commands import command
from rasura.runs.audit import audit
from rasura.runs.calibration_plan import CalibrationPlan
from rasura.runs.plans import Plan
from rasura.runs.service_plan import ServicePlan
from rasura.runs.train_plan import TrainPlan
from rasura.studies.files import load_study, prepared
from rasura.victims.loading import load
from rasura.victims.weights import task_in_memory, task_of

__all__ = ["causal_folder", "model_folder"]


def told(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_the_folder_states_the_task(causal_folder: Path, model_folder: Path) -> None:
    assert [task_of(m) for m in (causal_folder, model_folder, "minilm", "smollm2")] == [
        "causal", "classification", "classification", "causal",
    ]  # fmt: skip
    assert task_named(None, str(causal_folder)) == "causal" and task_of("lenet") == task_of("cnn") == "vision"
    assert task_named("classification", str(causal_folder)) == task_named(None, str(causal_folder), 3) == "classification"
    assert task_named(None, None) == "classification" and task_named("vision", None) == "vision"
    with pytest.raises(InputError, match="does not exist"):
        task_named(None, "./no-such-folder")


@pytest.mark.parametrize(
    ("name", "stated"),
    [("config", {"architectures": [f"Bert{kind}"]}) for kind in ("ForTokenClassification", "ForQuestionAnswering")]
    + [("config", {"architectures": ["T5ForConditionalGeneration"]}), ("adapter_config", {"task_type": "TOKEN_CLS"})],
)
def test_a_model_of_another_task_is_not_taken_for_a_classifier_unasked(
    name: str, stated: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / f"{name}.json").write_text(json.dumps(stated))
    with pytest.raises(InputError, match=r"another task .*--task classification"):
        task_named(None, str(tmp_path))
    assert task_named("classification", str(tmp_path)) == "classification"


def test_an_adapter_without_a_task_has_that_of_its_class_or_base(
    causal_folder: Path, model_folder: Path, tmp_path: Path
) -> None:
    """PEFT's default states none: adapters of decoders were taken for classifiers with a head that was drawn at random."""

    def task(**stated: object) -> str:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"task_type": None, **stated}))
        return task_of(tmp_path)

    assert task(auto_mapping={"base_model_class": "LlamaForCausalLM"}, base_model_name_or_path="gone") == "causal"
    assert task(auto_mapping={"base_model_class": "BertForSequenceClassification"}) == "classification"
    for folder, found in ((causal_folder, "causal"), (model_folder, "classification")):
        assert task(base_model_name_or_path=str(folder)) == found
    with pytest.raises(InputError, match="another task"):
        task(auto_mapping={"base_model_class": "T5ForConditionalGeneration"})
    for nothing in ({}, {"base_model_name_or_path": str(tmp_path)}):
        with pytest.raises(InputError, match="pass --task"):
            task(**nothing)


@pytest.mark.parametrize("stated", [["BertModel"], ["BertForMaskedLM"], ["ElectraForPreTraining"]])
def test_a_body_is_that_of_a_classifier(stated: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": stated}))
    assert task_of(tmp_path) == "classification"


def test_a_command_of_a_report_says_the_task_where_the_model_is_not_the_usual_one() -> None:
    for model, task, said in (
        ("minilm", "classification", False), ("gpt2", "classification", True), ("gpt2", "causal", True),
    ):  # fmt: skip
        assert ("--task" in command("audit", {"model": model, "task": task, "data": "notes.jsonl"})) == said


def test_a_causal_update_is_read_as_one(causal_folder: Path, tmp_path: Path) -> None:
    victim = load(causal_folder, "causal")
    ids = torch.tensor([victim.tokenizer(TEXTS[0])["input_ids"]])
    loss: Any = victim.model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = {name: p.grad for name, p in victim.model.named_parameters() if p.grad is not None}
    save_file(grads, tmp_path / "u.safetensors")
    common = ["read", tmp_path / "u.safetensors", "--model", causal_folder, "--batch-size", 1, "--attack", "span", "--json"]
    found, asked = (json.loads(told(*common, *more)) for more in ([], ["--task", "causal"]))
    assert found["texts"] == asked["texts"] and found["confidence"] == asked["confidence"] == "verified"


@pytest.mark.slow
def test_an_audit_takes_the_task_of_the_folder_unless_it_is_told_another(causal_folder: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.jsonl"
    notes.write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in TEXTS[:2]))
    config = tmp_path / "plan.toml"
    config.write_text('task = "classification"\n')
    for more, task in (([], "causal"), (["--num-labels", 2], "classification"), (["--config", config], "classification")):
        out = tmp_path / f"run{len(more)}{task}{'--config' in more}"
        told("audit", notes, "--model", causal_folder, "--attack", "span", "--defense", "none", "--limit", 1, "--budget",
             "quick", "--out", out, *more)  # fmt: skip
        page = (out / "report.html").read_text()
        assert f"--task {task}" in page or f"<dd>{task}</dd>" in page, more


def test_plans_in_python_take_the_task_of_the_folder(causal_folder: Path, model_folder: Path) -> None:
    """A decoder was audited as a classifier with a head that was drawn at random."""
    causal, classifier = str(causal_folder), str(model_folder)
    assert [Plan(model=m).checked().task for m in (causal, classifier, "minilm")] == [
        "causal", "classification", "classification",
    ]  # fmt: skip
    assert Plan(model=causal, task="classification").checked().task == "classification"
    assert Plan(model=causal, num_labels=2).checked().task == "classification"
    assert Plan().with_given({"model": causal}).checked().task == "causal"
    assert TrainPlan("notes.jsonl", model=causal).checked().task == "causal"
    assert ServicePlan("a.jsonl", "b.jsonl", model=causal).checked().task == "causal"
    assert CalibrationPlan(Plan(model=causal, defenses=("gaussian",))).checked().plan.task == "causal"


def test_an_audit_in_python_takes_the_task_of_the_folder_and_of_the_class(causal_folder: Path, tmp_path: Path) -> None:
    victim = load(causal_folder, "causal")
    given: dict[str, Any] = {"data": TEXTS[:1], "attacks": ["span"], "defenses": ["none"]}
    for name, model in (("folder", str(causal_folder)), ("memory", victim.model)):
        tokenizer = None if name == "folder" else victim.tokenizer
        run = audit(out=tmp_path / name, model=model, tokenizer=tokenizer, **given)
        assert next(run).status == "ok"
        store = RunStore(tmp_path / name)
        try:
            assert store.plan["task"] == "causal"
        finally:
            store.close()


def test_a_study_without_a_task_is_of_classifiers_whatever_its_model(causal_folder: Path, tmp_path: Path) -> None:
    body = 'title = "One"\nsource = "mine"\nmetrics = ["rouge1"]\n[plan]\nattacks = ["span"]\ndefenses = ["none"]\n'
    study = load_study("one", study_folder(tmp_path, body))
    plan = prepared(study, model=str(causal_folder))
    assert isinstance(plan, Plan) and plan.task == "classification"


def test_a_folder_that_names_no_architectures_is_asked_about(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match=r"names no architectures.*pass --task"):
        task_of(tmp_path)
    assert task_named("causal", str(tmp_path)) == "causal"


def test_the_class_of_a_model_in_memory_is_its_task_also_behind_an_adapter(causal_folder: Path, model_folder: Path) -> None:
    peft = pytest.importorskip("peft")
    decoder, classifier = load(causal_folder, "causal").model, load(model_folder, "classification").model
    assert task_in_memory(decoder) == "causal" and task_in_memory(classifier) == "classification"
    adapted = peft.get_peft_model(decoder, peft.LoraConfig(r=2, target_modules="all-linear"))
    assert type(adapted).__name__ == "PeftModel" and task_in_memory(adapted) == "causal"
