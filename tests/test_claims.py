"""What is stated of an update may be wrong: the portfolio proves what it can without it, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from rasura.core.interfaces import Budget
from rasura.runs.reading import ReadRequest, ReadResult, read_update
from rasura.testing.tiny import tiny, tokenizer_folder
from rasura.victims.loading import Victim, load
from rasura.victims.models import parts
from rasura.victims.step import capture

TEXTS = ["w40 the w41 w42", "w50 w51 w52 w53 w54"]
STATED = "read without what was stated ({}), with which nothing was proven"


@pytest.fixture(scope="module", params=["bert", "llama"])
def victim(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Victim:
    task: Literal["classification", "causal"] = "classification" if request.param == "bert" else "causal"
    folder = tokenizer_folder(tiny(request.param, task), tmp_path_factory.mktemp("model"))
    return load(folder, task)


@pytest.fixture(scope="module")
def update(victim: Victim, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gradient of two texts, without that of the embeddings."""
    path = tmp_path_factory.mktemp("update") / "u.safetensors"
    inputs = dict(victim.tokenizer(TEXTS, return_tensors="pt", padding=True))
    causal = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    capture(victim.model, {**inputs, "labels": causal if victim.task == "causal" else torch.tensor([0, 1])}, path)
    hidden = parts(victim.model).embedding_names
    save_file({n: t for n, t in load_file(path).items() if n not in hidden}, path)
    return path


def read(path: Path, victim: Victim, **known: object) -> ReadResult:
    return read_update(path, victim, ReadRequest(budget=Budget("quick"), **known))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"batch_size": 1}, "the stated batch size is 1; the update proves 2 texts"),
        ({"lengths": (4, 5)}, "the stated lengths are 4 and 5; the update proves {} and {}"),
        ({"batch_size": 1, "update": "fedsgd"}, "the stated batch size is 1; the update proves 2 texts"),
    ],
)
def test_wrong_statements_hide_no_text_and_are_named(
    victim: Victim, update: Path, known: dict[str, object], line: str
) -> None:
    found = read(update, victim, **known)
    assert sorted(found.texts) == sorted(TEXTS) and found.confidence == "verified" and found.attack == "span"
    lengths = sorted(len(text) for text in victim.tokenizer(TEXTS)["input_ids"])
    assert line.format(*lengths) in found.notes


@pytest.mark.parametrize("victim", ["bert"], indirect=True)
def test_wrong_labels_are_named(victim: Victim, update: Path) -> None:
    found = read(update, victim, labels=(1, 1))
    assert sorted(found.texts) == sorted(TEXTS) and found.confidence == "verified" and sorted(found.labels or ()) == [0, 1]
    assert found.notes == (STATED.format("labels, batch size"), "the stated labels are 1 and 1; the update proves 0 and 1")


@pytest.mark.parametrize("victim", ["bert"], indirect=True)
def test_a_wrong_dropout_hides_no_proof(victim: Victim, update: Path) -> None:
    found = read(update, victim, batch_size=2, dropout=0.1)
    assert sorted(found.texts) == sorted(TEXTS) and found.confidence == "verified"
    assert STATED.format("batch size, dropout") in found.notes


def test_right_statements_are_used_and_nothing_is_said_of_them(victim: Victim, update: Path) -> None:
    lengths = tuple(len(text) for text in victim.tokenizer(TEXTS)["input_ids"])
    found = read(update, victim, batch_size=2, lengths=lengths)
    assert sorted(found.texts) == sorted(TEXTS) and found.confidence == "verified"
    assert "without" not in found.details and not any("stated" in note for note in found.notes)


def test_a_third_text_that_is_none_is_not_made_up(victim: Victim, tmp_path: Path) -> None:
    texts = ["w40 the w41 w42 w43 w44 w45 w46", "w50 w51 w52 w53 w54 w55 w56 w57"]
    inputs = dict(victim.tokenizer(texts, return_tensors="pt"))
    labels = inputs["input_ids"] if victim.task == "causal" else torch.tensor([0, 1])
    capture(victim.model, {**inputs, "labels": labels}, tmp_path / "u.safetensors")
    found = read(tmp_path / "u.safetensors", victim, batch_size=3, update="fedsgd")
    assert sorted(found.texts) == sorted(texts) and found.confidence == "verified"
    assert any(note.startswith("2 of 3 texts; ") for note in found.notes)


@pytest.mark.parametrize("victim", ["llama"], indirect=True)
def test_a_wrong_sign_hides_no_text_of_a_decoder(victim: Victim, update: Path, tmp_path: Path) -> None:
    save_file({n: -t for n, t in load_file(update).items()}, tmp_path / "u.safetensors")
    found = read(tmp_path / "u.safetensors", victim, batch_size=2, update="fedsgd")
    assert sorted(found.texts) == sorted(TEXTS) and found.confidence == "verified"
    assert STATED.format("batch size, sign") in found.notes


def test_an_attack_that_was_chosen_takes_what_is_stated(victim: Victim, update: Path) -> None:
    found = read(update, victim, batch_size=1, attack="span")
    assert found.confidence != "verified" and "without" not in found.details
