"""What is said beside the texts that were read from a file: labels that depend on its sign, unknown words, open places."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn import functional
from typer.testing import CliRunner

from rasura.cli import app
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.values import UNKNOWN, Reconstruction
from rasura.runs.reading import ReadRequest, read_update
from rasura.runs.reading_notes import OUTSIDE, notes
from rasura.testing.tiny import CLS, PAD, SEP, WORDS, tiny, tokenizer_folder
from rasura.victims.loading import Victim, load
from rasura.victims.models import parts
from rasura.victims.step import capture

TEXT = "w40 the w41 w42"
UNKNOWN_NUMBER = (
    "the number of texts is not known; each line holds the words of all of them together, in no known order; "
    "a repeated word may stand once"
)
BEGINNINGS = "texts that are a beginning of this one may be in the update as well"


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory) -> Victim:
    folder = tmp_path_factory.mktemp("model")
    return load(tokenizer_folder(tiny("bert", "classification", num_labels=2), folder), "classification")


def captured(victim: Victim, path: Path, *, sign: float = 1.0, label: int = 1) -> Path:
    inputs = dict(victim.tokenizer([TEXT], return_tensors="pt"), labels=torch.tensor([label]))
    capture(victim.model, inputs, path)
    save_file({n: sign * t for n, t in load_file(path).items()}, path)
    return path


@pytest.mark.parametrize("sign", [1.0, -0.01])
def test_a_file_of_two_classes_tells_no_label_unless_somebody_says_what_it_holds(
    victim: Victim, tmp_path: Path, sign: float
) -> None:
    path = captured(victim, tmp_path / "u.safetensors", sign=sign)
    found = read_update(path, victim, ReadRequest(attack="span", batch_size=1))
    assert found.texts == (TEXT,) and found.confidence == "verified" and found.labels is None
    assert found.notes == ("the labels depend on the sign of the file; --update fedsgd says that it holds a gradient",)
    assert found.to_dict()["notes"] == list(found.notes) and found.notes[0] in found._repr_html_()
    rows = read_update(path, victim, ReadRequest(attack="embedding-rows", batch_size=1))
    assert (rows.confidence, rows.details["proof"]) == ("verified", "embedding-rows") and not rows.notes
    stated = read_update(path, victim, ReadRequest(attack="span", batch_size=1, update="fedsgd"))
    wrong = ("the labels depend on the sign of the file, and its size is not that of the update fedsgd",)
    assert (stated.labels, stated.notes) == (((1,), ()) if sign > 0 else (None, wrong)) and stated.confidence == "verified"


@pytest.mark.parametrize("attack", ["labels", "idlg"])
@pytest.mark.parametrize("sign", [1.0, -0.01])
def test_the_labels_alone_are_told_only_where_the_sign_does_not_matter(
    victim: Victim, tmp_path: Path, attack: str, sign: float
) -> None:
    path = captured(victim, tmp_path / "two.safetensors", sign=sign)
    found = read_update(path, victim, ReadRequest(attack=attack, batch_size=1))
    assert (found.labels, found.status) == (None, "failed") and "--update fedsgd" in found.reason
    three = load(tokenizer_folder(tiny("bert", "classification"), tmp_path / "model"), "classification")
    for label in range(3):
        path = captured(three, tmp_path / "three.safetensors", sign=sign, label=label)
        assert read_update(path, three, ReadRequest(attack=attack, batch_size=1)).labels == (label,)
    for size in (None, 2):  # of two texts, the class that neither has may look like the label of one
        assert read_update(path, three, ReadRequest(attack=attack, batch_size=size)).labels is None


@pytest.mark.parametrize("attack", ["labels", "idlg"])
@pytest.mark.parametrize("size", [None, 1])
def test_no_label_is_named_of_a_loss_that_is_not_cross_entropy(tmp_path: Path, attack: str, size: int | None) -> None:
    """The loss of several labels a text: its gradient does not sum to zero over them."""
    model = tiny("bert", "classification", num_labels=2)
    with torch.no_grad():
        model.get_parameter("classifier.bias").copy_(torch.tensor([0.0, -0.85]))
    one = load(tokenizer_folder(model, tmp_path / "model"), "classification")
    asked, path = ReadRequest(attack=attack, batch_size=size, update="fedsgd"), captured(one, tmp_path / "u.safetensors")
    for kind in (torch.bfloat16, torch.float16):
        save_file({n: t.to(kind) for n, t in load_file(path).items()}, tmp_path / "rounded.safetensors")
        assert read_update(tmp_path / "rounded.safetensors", one, asked).labels == (1,)
    logits = one.model(**one.tokenizer([TEXT], return_tensors="pt")).logits
    functional.binary_cross_entropy_with_logits(logits, torch.tensor([[1.0, 0.0]])).backward()
    save_file({n: p.grad for n, p in one.model.named_parameters() if p.grad is not None}, path)
    read = read_update(path, one, asked)
    assert (read.status, read.labels) == ("failed", None) and "as that of plain cross entropy does" in read.reason


def test_labels_without_a_text_are_not_nothing(victim: Victim, tmp_path: Path) -> None:
    path = captured(victim, tmp_path / "u.safetensors")
    found = read_update(path, victim, ReadRequest(attack="labels", batch_size=1, update="fedsgd"))
    assert (found.texts, found.labels, found.notes) == ((), (1,), ())
    common = ["read", str(path), "--model", victim.name, "--batch-size", "1", "--attack", "labels", "--update", "fedsgd"]
    for shown in (CliRunner().invoke(app, common).output, found._repr_html_()):
        said = "no text was recovered, but an estimate of the labels, if the loss is plain cross entropy: 1"
        assert said in " ".join(shown.split()) and "nothing" not in shown


def test_labels_that_lean_on_the_size_of_the_update_are_called_an_estimate(victim: Victim, tmp_path: Path) -> None:
    inputs = dict(victim.tokenizer([TEXT, "w50 w51", "w60 w61 w62"], padding=True, return_tensors="pt"))
    capture(victim.model, inputs | {"labels": torch.tensor([0, 0, 0])}, path := tmp_path / "u.safetensors")
    save_file({n: 0.01 * t for n, t in load_file(path).items()}, path)
    found = read_update(path, victim, ReadRequest(attack="labels", batch_size=3, update="fedsgd"))
    assert found.labels not in (None, (0, 0, 0)), "clipping hides how many texts have a label"
    said = "no text was recovered, but an estimate of the labels, if the loss is plain cross entropy"
    assert found.without_texts == f"{said}: {', '.join(map(str, found.labels))}"


@pytest.mark.parametrize(("bias", "attack"), [(4.0, "labels"), (16.0, "span")])
def test_no_label_is_called_certain_where_smoothing_may_have_turned_the_sign(
    victim: Victim, tmp_path: Path, bias: float, attack: str
) -> None:
    """The model is more certain of the true label 1 than smoothing wants, so the gradient has the sign of the label 0."""
    kept = victim.model.get_parameter("classifier.bias").detach().clone()
    inputs = dict(victim.tokenizer([TEXT], return_tensors="pt"))
    try:
        with torch.no_grad():
            victim.model.get_parameter("classifier.bias").copy_(torch.tensor([0.0, bias]))
        named = dict(victim.model.named_parameters())
        loss = functional.cross_entropy(victim.model(**inputs).logits, torch.tensor([1]), label_smoothing=0.1)
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
        save_file({n: g for n, g in zip(named, found) if g is not None}, path := tmp_path / "u.safetensors")
        for update in (None, "fedsgd"):
            read = read_update(path, victim, ReadRequest(attack=attack, batch_size=1, update=update))
            assert read.labels is None or ("an estimate of the labels" in read.without_texts and not read.details["exact"])
            assert read.texts == (() if attack == "labels" else (TEXT,))
    finally:
        with torch.no_grad():
            victim.model.get_parameter("classifier.bias").copy_(kept)


def test_the_command_says_it_too(victim: Victim, tmp_path: Path) -> None:
    path = captured(victim, tmp_path / "u.safetensors")
    asked = ["read", str(path), "--model", victim.name, "--batch-size", "1", "--attack"]
    done = CliRunner().invoke(app, [*asked, "span"])
    assert done.exit_code == 0 and "the labels depend on the sign of the file" in done.output
    assert "\nverified by span in " in done.output
    guessed = CliRunner().invoke(app, [*asked, "blind", "--lengths", "6", "--labels", "1"])
    assert guessed.exit_code == 0 and "none (a guess without a check) by blind in " in " ".join(guessed.output.split())


def test_a_place_that_stays_open_is_told(victim: Victim, tmp_path: Path) -> None:
    table = victim.model.get_parameter(parts(victim.model).word_embedding)
    kept = table.detach().clone()
    with torch.no_grad():
        table[200] = table[41]
    path = captured(victim, tmp_path / "u.safetensors")
    found = read_update(path, victim, ReadRequest(attack="span", batch_size=1, frozen_embeddings=True))
    with torch.no_grad():
        table.copy_(kept)
    assert found.texts == ("w40 the w42",) and found.confidence == "span"
    assert found.notes == ("1 of 4 tokens stay open, since the embeddings of other words are equal or nearly so",)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_file_of_a_decoder_is_read_whatever_its_sign(tmp_path: Path, family: str) -> None:
    one = load(tokenizer_folder(tiny(family, "causal"), tmp_path / "model"), "causal")
    inputs = dict(one.tokenizer([TEXT], return_tensors="pt"))
    path = tmp_path / "u.safetensors"
    capture(one.model, inputs | {"labels": inputs["input_ids"]}, path)
    sent = load_file(path)
    for sign in (1.0, -0.01):
        save_file({n: sign * t for n, t in sent.items()}, path)
        found = read_update(path, one, ReadRequest(attack="span", batch_size=1))
        assert (found.texts, found.confidence) == ((TEXT,), "verified")
    wrong = read_update(path, one, ReadRequest(attack="span", batch_size=1, update="fedsgd"))
    assert wrong.confidence != "verified", "it is no gradient, whatever is stated"


def test_fewer_texts_than_the_batch_are_told(tmp_path: Path) -> None:
    """Two equal texts of a causal model have the mean gradient of one."""
    twice = load(tokenizer_folder(tiny("gpt2", "causal"), tmp_path / "model"), "causal")
    inputs = dict(twice.tokenizer([TEXT, TEXT], return_tensors="pt"))
    path = tmp_path / "u.safetensors"
    capture(twice.model, inputs | {"labels": inputs["input_ids"]}, path)
    found = read_update(path, twice, ReadRequest(attack="span", batch_size=2))
    fewer = "1 of 2 texts; equal texts are named once, and a text of one token may leave nothing in the update"
    assert found.texts == (TEXT,) and found.notes == (fewer,)
    assert read_update(path, twice, ReadRequest(attack="span", batch_size=1)).notes == ()
    unproven = Reconstruction(((1, 40, 3, 2),), "matched")
    for request in (ReadRequest(batch_size=3), ReadRequest(lengths=(4, 5, 6))):
        said = "1 of 3 texts; equal texts are named once, and others may be missing"
        assert notes(unproven, twice, request) == (said,)
    # The update of a text beside one of a single token is that of the text alone: it proves no second copy of it.
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 1:] = 0
    labels = inputs["input_ids"].masked_fill(mask == 0, -100)
    capture(twice.model, {**inputs, "attention_mask": mask, "labels": labels}, path)
    found = read_update(path, twice, ReadRequest(attack="span", batch_size=2))
    assert (found.texts, found.confidence, found.notes) == ((TEXT,), "verified", (fewer,))


def test_a_bag_of_the_words_of_all_texts_is_called_one_and_counted_once(victim: Victim) -> None:
    bag = Reconstruction(((UNKNOWN, 41, 42),) * 4, "span", ordered=False, details={"twins": 4})
    together = "each line holds the words of all 4 stated texts together, in no known order; a repeated word may stand once"
    alike = "1 of 3 tokens stay open, since the embeddings of other words are equal or nearly so"
    assert notes(bag, victim, ReadRequest(batch_size=4)) == (together, alike)
    assert notes(bag, victim, ReadRequest(labels=[0, 1, 1, 0])) == (together, alike)
    one = Reconstruction(((41, 42),), "span", ordered=False)
    assert notes(one, victim, ReadRequest(batch_size=1)) == (
        "the words of the one stated text are in no known order; a repeated word may stand once",
    )
    assert notes(one, victim, ReadRequest()) == (UNKNOWN_NUMBER,)
    unstated = replace(one, details={"without": "batch size"})
    for size in (1, 3):  # it is not one of them, but the words of all
        assert notes(unstated, victim, ReadRequest(batch_size=size)) == (
            UNKNOWN_NUMBER, "read without what was stated (batch size), with which nothing was proven",
        )  # fmt: skip


def test_the_words_of_an_unknown_number_of_texts_are_not_called_those_of_one(victim: Victim, tmp_path: Path) -> None:
    inputs = dict(victim.tokenizer([TEXT, "w50 w51", "w60 w61 w62"], padding=True, return_tensors="pt"))
    capture(victim.model, inputs | {"labels": torch.tensor([0, 1, 0])}, path := tmp_path / "u.safetensors")
    found = read_update(path, victim, ReadRequest(attack="embedding-rows"))
    assert len(found.texts) == 1 and not found.ordered and found.notes == (UNKNOWN_NUMBER,)


@pytest.mark.parametrize("classes", [1, 3])
def test_a_model_whose_labels_are_no_classes_is_read_without_labels(tmp_path: Path, classes: int) -> None:
    model = tiny("bert", "classification", num_labels=classes)
    model.config.problem_type = "regression" if classes == 1 else "multi_label_classification"
    one = load(tokenizer_folder(model, tmp_path / "model"), "classification")
    inputs = dict(
        one.tokenizer([TEXT], return_tensors="pt"), labels=torch.tensor([[-2.0], [1.0, 0.0, 1.0]][classes > 1])[None]
    )
    path = tmp_path / "u.safetensors"
    capture(one.model, inputs, path)
    for frozen in (False, True):
        found = read_update(path, one, ReadRequest(batch_size=1, frozen_embeddings=frozen, budget=Budget("quick")))
        assert (found.texts, found.labels, found.confidence) == ((TEXT,), None, "span" if frozen else "verified")


def test_words_beyond_the_tokenizer_are_told(tmp_path: Path) -> None:
    """A client with added tokens sends words that the reader's tokenizer lacks: they were left out of a verified text."""
    model: Any = tiny("bert", "classification", num_labels=2)
    model.resize_token_embeddings(model.config.vocab_size + 3)
    one = load(tokenizer_folder(model, tmp_path / "model"), "classification")
    assert one.vocabulary.size == len(one.tokenizer) + 3
    ids = list(one.tokenizer(TEXT)["input_ids"])
    ids[2] = one.vocabulary.size - 1
    path = tmp_path / "u.safetensors"
    capture(one.model, {"input_ids": torch.tensor([ids]), "labels": torch.tensor([1])}, path)
    found = read_update(path, one, ReadRequest(attack="embedding-rows", batch_size=1))
    assert (found.texts, found.confidence) == (("w40 · w41 w42",), "verified") and found.tokens == (tuple(ids),)
    assert found.notes == ("1 of 4 tokens are words that the tokenizer does not know",)


@pytest.mark.parametrize("attack", ["embedding-rows", "span"])
def test_special_tokens_that_a_text_holds_are_told(victim: Victim, tmp_path: Path, attack: str) -> None:
    """They are part of what is verified, and the text shows none of them."""
    inputs = dict(victim.tokenizer([f"{TEXT} [SEP] w43 [SEP] w44"], return_tensors="pt"), labels=torch.tensor([1]))
    capture(victim.model, inputs, tmp_path / "u.safetensors")
    found = read_update(tmp_path / "u.safetensors", victim, ReadRequest(attack=attack, batch_size=1, update="fedsgd"))
    assert (found.texts, found.confidence) == ((f"{TEXT} w43 w44",), "verified")
    assert found.notes == ("special tokens inside the texts, which do not show them: 2 ([SEP])",)


@pytest.mark.parametrize("attack", ["best", "span", "embedding-rows"])
@pytest.mark.parametrize("size", [None, 1])
def test_a_beginning_that_may_be_a_text_of_its_own_is_told_by_every_attack(
    victim: Victim, tmp_path: Path, attack: str, size: int | None
) -> None:
    """Without an end token, the words of the beginning stand at the same places. Span gave the one text without a word."""
    both = victim.tokenizer([TEXT, "w40 the w41"], add_special_tokens=False, padding=True, return_tensors="pt")
    capture(victim.model, dict(both, labels=torch.tensor([1, 0])), tmp_path / "u.safetensors")
    found = read_update(tmp_path / "u.safetensors", victim, ReadRequest(attack, size, budget=Budget("quick")))
    assert (found.texts, found.confidence) == ((TEXT,), "span") and BEGINNINGS in found.notes


def test_places_that_stay_open_are_told(tmp_path: Path) -> None:
    """The last token of a causal text has no row: the text was shown as if it ended before it."""
    model = tiny("gpt2", "causal")
    one = load(tokenizer_folder(model, tmp_path / "model"), "causal")
    inputs = {"input_ids": torch.tensor([one.tokenizer(TEXT)["input_ids"][:-1]])}
    path = tmp_path / "u.safetensors"
    capture(one.model, inputs | {"labels": inputs["input_ids"]}, path)
    found = read_update(path, one, ReadRequest(attack="embedding-rows", batch_size=1))
    assert (found.texts, found.confidence) == (("w40 the w41",), "span") and found.tokens[0][-1] is None
    assert found.notes == (BEGINNINGS, "places that stay open, which the texts do not show: 1")
    # The portfolio ended there, where span proves the whole text.
    found = read_update(path, one, ReadRequest(budget=Budget("quick")))
    assert (found.texts, found.confidence, found.notes) == (("w40 the w41 w42",), "verified", ())


@pytest.mark.parametrize(("share", "ordered"), [(0.02, True), (0.05, False)])
def test_words_of_an_update_by_other_weights_say_what_is_missing(tmp_path: Path, share: float, ordered: bool) -> None:
    """A client's model that was trained on: no input lies in the row space, and some words stand out near it. Nearly
    the whole text can be read in order, or its words alone."""
    folder = tokenizer_folder(tiny("bert", "classification", hidden=128, num_labels=2), tmp_path / "model")
    held, theirs = load(folder, "classification"), load(folder, "classification")
    noise = generator(0)
    with torch.no_grad():
        for p in theirs.model.parameters():
            p.add_(share * float(p.std(correction=0)) * torch.randn(p.shape, generator=noise))
    words = [11, 40, 41, 42, 43, 44, 45]
    inputs = dict(theirs.tokenizer([theirs.vocabulary.text(words)], return_tensors="pt"), labels=torch.tensor([1]))
    capture(theirs.model, inputs, tmp_path / "u.safetensors")
    found = read_update(tmp_path / "u.safetensors", held, ReadRequest(attack="span", frozen_embeddings=True))
    assert found.confidence == "matched" and found.ordered == ordered
    if ordered:
        assert found.texts == (theirs.vocabulary.text(words[:-1]),)
        assert found.notes == ("other words that stand out in the update, which the texts do not show: 1",)
    else:
        assert set(found.tokens[0]) == set(words) and OUTSIDE in found.notes


def test_words_whose_inputs_lie_in_the_row_space_are_not_said_to_lie_outside(tmp_path: Path) -> None:
    """A layer that sees the last four words names all words of two texts, and does not tell the texts apart."""
    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(
        vocab_size=WORDS, pad_token_id=PAD, num_labels=2, bos_token_id=CLS, eos_token_id=SEP, hidden_size=64, num_layers=2,
        attention_types=[[["global", "local"], 1]], num_heads=4, max_position_embeddings=64, window_size=4,
    )  # fmt: skip
    model = transformers.GPTNeoForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0 if p.dim() > 1 else 1.0)
    held = load(tokenizer_folder(model, tmp_path / "model"), "classification")
    inputs = dict(held.tokenizer(["w40 the w41 w19 the w42 .", "w50 w51 of w52"], return_tensors="pt", padding=True))
    capture(held.model, inputs | {"labels": torch.tensor([1, 0])}, tmp_path / "u.safetensors")
    found = read_update(tmp_path / "u.safetensors", held, ReadRequest("span", 2, frozen_embeddings=True))
    assert found.details.get("by_leverage") and set(found.tokens[0]) == {3, 4, 9, 19, 40, 41, 42, 50, 51, 52}
    assert OUTSIDE not in found.notes
