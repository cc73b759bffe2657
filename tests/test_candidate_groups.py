"""Candidates that are much like each other: one of them is named, and never more than the batch holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rasura.attacks.updates.candidates import like_earlier
from rasura.core.updates import changed
from rasura.data.text import Example
from rasura.runs.candidates import BEYOND, IN, LIKE, CandidatesRead, answers, inputs_of, read_candidates, rows_of
from rasura.runs.reading import ReadRequest
from rasura.testing.tiny import CLS, SEP, batch_of, tiny
from rasura.victims.batching import joined
from rasura.victims.loading import Victim, load

MEMBER = "the patient owes 4250 euros since the third of march and asks for a letter"
VARIANTS = ["the patient owes 4250 euros since the fourth of march and asks for a letter", MEMBER[:40], MEMBER[25:]]
OTHER = "snow fell on the old harbour while two dogs slept beside a red boat"
THINGS = ("court", "train", "garden", "teacher", "river", "market", "doctor", "violin", "cloud", "baker")
REFERENCES = [f"a {one} near the {two} is {k} years old" for k, one in enumerate(THINGS) for two in THINGS]


@pytest.fixture(scope="module")
def victim(minilm_path: Path) -> Victim:
    return load(minilm_path, "classification")


def written(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t, "label": 1}) + "\n" for t in texts), encoding="utf-8")
    return path


def read(folder: Path, one: Victim, inside: list[str], given: list[str]) -> CandidatesRead:
    """``given`` as candidates of a round that trained the first attention on the texts ``inside``."""
    rows = rows_of(one, [Example(t, None, 1) for t in inside])
    names = [n for n, _ in one.model.named_parameters() if "layer.0.attention.self" in n]
    sent, _ = changed(one.model, joined(rows, one.vocabulary.pad_id or 0).inputs(), names)
    save_file({n: g.contiguous() for n, g in sent.items()}, str(folder / "update.safetensors"))
    request = ReadRequest(reference=written(folder / "others.jsonl", REFERENCES), update="fedsgd")
    return read_candidates(folder / "update.safetensors", written(folder / "given.jsonl", given), one, request)


def verdicts(found: CandidatesRead) -> list[str]:
    return [one.verdict for one in found.candidates]


def test_variants_of_the_one_text_of_a_round_are_not_said_to_be_in_it(tmp_path: Path, victim: Victim) -> None:
    found = read(tmp_path, victim, [MEMBER], [*VARIANTS, MEMBER, OTHER, "The  patient" + MEMBER[11:]])
    assert all((one.p or 1) <= 0.01 for one in found.candidates[:4]), "p is that of unrelated texts"
    assert verdicts(found) == [LIKE, LIKE, LIKE, IN, "not told", IN], "the last one is the same text to the model"
    assert json.loads(json.dumps(found.to_dict()))["candidates"][0]["verdict"] == "much like a text that scores higher"


def test_unlike_texts_of_a_round_are_each_named(tmp_path: Path, victim: Victim) -> None:
    assert verdicts(read(tmp_path, victim, [MEMBER, OTHER], [OTHER, VARIANTS[0], MEMBER])) == [IN, LIKE, IN]


@pytest.mark.parametrize(
    ("size", "expected"), [(None, [IN, LIKE, IN, IN]), (2, [IN, LIKE, IN, BEYOND]), (1, [IN, LIKE, BEYOND, BEYOND])]
)
def test_no_more_texts_are_named_than_the_batch_holds(size: int | None, expected: list[str]) -> None:
    assert answers([False, True, False, False], size) == expected


def test_an_agreement_that_is_no_number_counts_as_alike() -> None:
    model = tiny("bert", "classification", num_labels=2)
    rows = inputs_of([batch_of([[CLS, 3 + k, 20 + k, 40 - k, 9, SEP]], "classification", [k % 2]) for k in range(6)])
    names = [n for n, _ in model.named_parameters()]
    assert like_earlier(model, [rows[0], rows[0], rows[1]], rows[2:], names)[:2] == [False, True]
    hidden = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    assert like_earlier(model, rows[:2], rows[2:], names, hidden) == [False, True]
