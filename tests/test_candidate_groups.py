"""Candidates that are much like each other: one of them is named, and never more than the batch holds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rasura.attacks.shared.comparing import cosine
from rasura.attacks.updates import candidates
from rasura.attacks.updates.candidates import like_earlier
from rasura.attacks.updates.text_gradients import TextGradients
from rasura.core.rng import generator
from rasura.core.updates import changed
from rasura.core.values import Task
from rasura.data.text import Example
from rasura.runs.candidates import BEYOND, IN, LIKE, CandidatesRead, answers, inputs_of, read_candidates, rows_of
from rasura.runs.reading import ReadRequest
from rasura.testing.tiny import CLS, FAMILIES, SEP, batch_of, tiny
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


@pytest.mark.slow
def test_variants_of_the_one_text_of_a_round_are_not_said_to_be_in_it(tmp_path: Path, victim: Victim) -> None:
    found = read(tmp_path, victim, [MEMBER], [*VARIANTS, MEMBER, OTHER, "The  patient" + MEMBER[11:]])
    assert all((one.p or 1) <= 0.01 for one in found.candidates[:4]), "p is that of unrelated texts"
    assert verdicts(found) == [LIKE, LIKE, LIKE, IN, "not told", IN], "the last one is the same text to the model"
    assert found.by_chance == pytest.approx(0.05), "of five different candidates"
    assert json.loads(json.dumps(found.to_dict()))["candidates"][0]["verdict"] == "much like a text that scores higher"


@pytest.mark.slow
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


# --- compared fast, and as the plain definition says

KINDS: list[tuple[str, Task]] = [*((f, "classification") for f in FAMILIES), ("gpt2", "causal"), ("llama", "causal")]
Rows = list[dict[str, Tensor]]


def rows(task: Task, *texts: Sequence[int]) -> Rows:
    return inputs_of([batch_of([list(t)], task, None if task == "causal" else [len(t) % 2]) for t in texts])


def some_hidden(model: nn.Module, name: str) -> dict[str, Tensor]:
    return {name: torch.rand(model.get_parameter(name).shape, generator=generator(1)) > 0.5}


def slowly(
    model: nn.Module, texts: Rows, others: Rows, visible: Mapping[str, Tensor] | None, signed: bool
) -> tuple[list[bool], list[list[float]]]:
    """The plain definition: every gradient as a whole; and the cosines of texts."""
    names = [n for n, _ in model.named_parameters()]
    own, beside = ([changed(model, text, names)[0] for text in some] for some in (texts, others))

    def near(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> float:
        c = cosine(one, two, visible)
        return c if signed else abs(c)

    every = [[near(a, b) for b in own] for a in own]
    alike = [any(not any(near(o, own[j]) >= every[k][j] for o in beside) for j in range(k)) for k in range(len(texts))]
    return alike, every


@pytest.mark.slow
@pytest.mark.parametrize(("family", "task"), KINDS)
def test_texts_are_compared_as_by_their_whole_gradients(family: str, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family, task).double()
    names = [n for n, _ in model.named_parameters()]
    text, other = (CLS, 3, 20, 40, 9, 9, SEP), (CLS, 31, 12, SEP)
    given = rows(task, text, other, (CLS, 3, 20, 41, 9, 9, SEP), (*text[:-1], 8, SEP), (CLS, 5, SEP), text)
    others = rows(task, *((CLS, 10 + k, 25 + k, 5 + k, 7 + k, SEP) for k in range(6)))
    for visible in (None, some_hidden(model, names[0])):
        for signed in (True, False):
            expected, every = slowly(model, given, others, visible, signed)
            for kept in (1, 2**31):
                monkeypatch.setattr(candidates, "KEPT", kept)
                assert like_earlier(model, given, others, names, visible, signed) == expected
        assert True in expected and False in expected[1:]
        made = TextGradients(model, names, visible, given[0])
        assert sum(len(made(row).sides) for row in given) > 6 * len(given), "most weights are not formed"
        for a, one in enumerate(map(made, given)):
            found = [abs(one.cosine(two)) for two in map(made, given)]
            assert found == pytest.approx(list(map(abs, every[a])), abs=1e-12)


def test_long_texts_are_kept_whole() -> None:
    model = tiny("bert", "classification", num_labels=2).double()
    names = [n for n, _ in model.named_parameters()]
    short, long = (CLS, 3, 20, SEP), (CLS, *range(3, 33), SEP)
    given = rows("classification", short, long, (CLS, 4, 20, SEP))
    made = TextGradients(model, names, None, given[0])
    one, two, three = map(made, given)
    assert len(two.sides) < len(one.sides) and {*two.sides, *two.whole} == {*one.sides, *one.whole} == set(names)
    _, every = slowly(model, given, [], None, True)
    assert [one.cosine(two), two.cosine(one), two.cosine(two), one.cosine(three)] == pytest.approx(
        [every[0][1], every[0][1], 1, every[0][2]], abs=1e-12
    )


class Reused(nn.Module):
    """A model whose loss uses a weight beside its layer."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name, self.config = model, name, model.config

    def get_input_embeddings(self) -> Any:
        return self.model.get_input_embeddings()  # type: ignore[operator]  # a Hugging Face model

    def forward(self, **inputs: Tensor) -> Any:
        out = self.model(**inputs)
        out.loss = out.loss + self.model.get_parameter(self.name).square().sum()
        return out


def test_a_weight_that_is_used_beside_its_layer_is_kept_whole() -> None:
    inner = tiny("bert", "classification", num_labels=2).double()
    name = next(n for n, _ in inner.named_parameters() if "query.weight" in n)
    model = Reused(inner, name).eval()
    names = [n for n, _ in model.named_parameters()]
    given = rows("classification", (CLS, 3, 20, SEP), (CLS, 4, 21, SEP))
    one, two = map(TextGradients(model, names, None, given[0]), given)
    assert f"model.{name}" in one.whole and len(one.sides) > 6
    assert one.cosine(two) == pytest.approx(slowly(model, given, [], None, True)[1][0][1], abs=1e-12)


def test_the_gradient_of_a_reference_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama", "causal")
    names = [n for n, _ in model.named_parameters()]
    given = rows("causal", *((CLS, 3, 20, 40, 9, 50 + k, SEP) for k in range(7)))
    others = rows("causal", *((CLS, 10 + k, 25 + k, 5 + k, SEP) for k in range(9)))
    monkeypatch.setattr(candidates, "KEPT", 2 * sum(p.numel() * p.element_size() for p in model.parameters()))
    passed: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, args, kwargs: passed.append(int(kwargs["input_ids"][0, 1])), with_kwargs=True
    )
    try:
        assert like_earlier(model, given, others, names) == [False] + [True] * 6
    finally:
        handle.remove()
    assert [passed.count(10 + k) for k in range(9)] == [1] * 9, "of two whole gradients in memory, each was computed anew"
