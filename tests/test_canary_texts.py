"""``rasura canaries``: texts that are in a training by a coin, and what the trained model shows about them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from audit_setting import model_folder
from commands import rasura_command, refused

from rasura.accounting.one_run import one_run_bound
from rasura.core.errors import InputError
from rasura.data.columns import Columns
from rasura.data.text import Example, load_examples
from rasura.runs.canaries import Extracted, draw, exposures, measure, read_canaries
from rasura.runs.training import encoded
from rasura.testing.tiny import tiny
from rasura.victims.batching import joined
from rasura.victims.loading import load

__all__ = ["model_folder"]

pytest.importorskip("dp_accounting")


def trained(base: Path, texts: Path, out: Path, steps: int, num_labels: int = 2) -> Path:
    """A model trained without any protection on all texts of a file."""
    from rasura.data.text import load_examples

    victim = load(str(base), "classification", num_labels=num_labels, attacked=False)
    batch = joined(encoded(victim, load_examples(texts), max_length=None, truncate=False), victim.vocabulary.pad_id or 0)
    optimizer = torch.optim.Adam(victim.model.parameters(), 3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        victim.model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss.backward()
        optimizer.step()
    victim.model.save_pretrained(out)
    victim.tokenizer.save_pretrained(out)
    return out


@pytest.mark.slow
def test_a_model_that_learned_its_texts_by_heart_is_caught(tmp_path: Path, model_folder: Path) -> None:
    # Of eight labels a model seldom gives a text the right one that it never saw. Of two it does every other time, and then
    # one draw of the coins in fifty has too few right guesses.
    base, folder = tmp_path / "base", tmp_path / "canaries"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(base)
    tiny("bert", "classification", num_labels=8).save_pretrained(base)
    done = rasura_command("canaries", "draw", folder, "--model", base, "--number", 80, "--json")
    told = json.loads(done.stdout)
    assert told["canaries"] == 80 and 15 < told["included"] < 65
    task, labels, canaries = read_canaries(folder)
    assert (task, labels) == ("classification", 8) and len({one.text for one in canaries}) == 80
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert sorted(row["text"] for row in rows) == sorted(one.text for one in canaries if one.included)
    assert (folder / "canaries.json").stat().st_mode & 0o077 == 0

    out = trained(base, folder / "train.jsonl", tmp_path / "model", 500, num_labels=8)
    found = measure(folder, str(out), base=str(base), delta=1e-5, guesses=40)
    assert found.bound.right > 26 and found.bound.epsilon > 0.1
    assert found.gaussian is not None and found.gaussian.epsilon > found.bound.epsilon
    told = ("canaries", "measure", folder, "--model", out, "--guesses", 40)
    done = rasura_command(*told, "--epsilon", 0.1, "--delta", 1e-5, "--json")
    again = json.loads(done.stdout)
    assert done.returncode == 3 and again["refuted"] and again["right"] > 25
    done = rasura_command(*told, "--epsilon", 20, "--delta", 1e-5)
    assert done.returncode == 0 and "guesses right, on 80 canaries (chance: 20)" in done.stdout
    done = rasura_command(*told, "--epsilon", 0.1)
    assert done.returncode == 2 and "also pass --delta" in done.stderr


def test_a_pure_epsilon_is_measured_without_what_gaussian_noise_would_do(tmp_path: Path, model_folder: Path) -> None:
    """A delta of 0 was refused, though one bound is defined there: no finite epsilon holds for Gaussian noise."""
    base, folder = tmp_path / "base", tmp_path / "canaries"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(base)
    tiny("bert", "classification", num_labels=2).save_pretrained(base)
    draw(str(base), None, 20, folder, task="classification")
    found = measure(folder, str(base), base=None, delta=0.0)
    assert found.gaussian is None and found.to_dict()["gaussian_epsilon"] is None
    assert found.bound == one_run_bound(20, 4, found.bound.right)
    told = ("canaries", "measure", folder, "--model", base, "--delta", 0, "--epsilon", 1)
    done = rasura_command(*told)
    assert done.returncode == 0 and "at delta 0 (confidence" in done.stdout and "Gaussian" not in done.stdout
    assert json.loads(rasura_command(*told, "--json").stdout)["gaussian_epsilon"] is None


def test_texts_keep_the_classes_that_the_model_names(tmp_path: Path, model_folder: Path) -> None:
    base = tmp_path / "base"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(base)
    model = tiny("bert", "classification", num_labels=2)
    model.config.id2label, model.config.label2id = {0: "no", 1: "yes"}, {"no": 0, "yes": 1}
    model.save_pretrained(base)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"alpha w{k}", "label": ("yes", "no")[k % 2]}) + "\n" for k in range(6)))
    draw(str(base), str(data), 20, tmp_path / "drawn", task="classification")
    rows = {r["text"]: r["label"] for r in map(json.loads, (tmp_path / "drawn" / "train.jsonl").read_text().splitlines())}
    assert [rows[f"alpha w{k}"] for k in range(6)] == [1, 0] * 3


def test_names_of_labels_are_kept_for_a_later_test_file(tmp_path: Path, model_folder: Path) -> None:
    """They were written as numbers, in the order of their first rows, and the names were kept nowhere."""
    data, later = tmp_path / "texts.jsonl", tmp_path / "later.jsonl"
    kinds = ("good", "bad", "so so")
    data.write_text("".join(json.dumps({"text": f"alpha w{k}", "label": kinds[k % 3]}) + "\n" for k in range(6)))
    draw(str(model_folder), str(data), 30, tmp_path / "drawn", task="classification", num_labels=4)
    mixed = load_examples(tmp_path / "drawn" / "train.jsonl")
    assert mixed.label_names is not None and mixed.label_names[:3] == kinds and set(mixed.label_names[3:]) <= {"3"}
    assert {(f"alpha w{k}", k % 3) for k in range(6)} < {(e.text, e.label) for e in mixed}
    later.write_text("".join(json.dumps({"text": f"w{k} beta", "label": kinds[-k]}) + "\n" for k in range(3)))
    assert [e.label for e in load_examples(later, label_names=mixed.label_names)] == [0, 2, 1]


def test_exposure_is_what_ranks_say() -> None:
    """Written out: a canary's rank among the canaries that were left out, itself included, where n of them are ranked."""
    scores = np.array([5.0, 4.0, 3.0, 2.0, 2.0, 1.0])
    included = np.array([True, False, False, True, False, False])
    expected = [math.log2(5 / 1), math.log2(4 / 1), math.log2(4 / 2), math.log2(5 / 4), math.log2(4 / 3), math.log2(4 / 4)]
    assert exposures(scores, included) == pytest.approx(expected)
    assert np.isnan(exposures(scores[:2], np.array([True, True]))).all()
    rng = np.random.default_rng(0)
    guessed = exposures(rng.standard_normal(4000), rng.random(4000) < 0.5)
    assert guessed.mean() == pytest.approx(1 / math.log(2), abs=0.1)


@pytest.mark.slow
def test_a_language_model_writes_what_it_learned_by_heart(tmp_path: Path, model_folder: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "trained"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(base)
    tiny("gpt2", "causal").save_pretrained(base)
    canaries = draw(str(base), None, 40, tmp_path / "canaries", task="causal")
    before = measure(tmp_path / "canaries", str(base), base=None, delta=1e-5)
    inside = sum(one.included for one in canaries)
    assert before.extracted == Extracted(0, inside, 0, 40 - inside)

    victim = load(str(base), "causal", attacked=False)
    texts = [Example(one.text) for one in canaries if one.included]
    batch = joined(encoded(victim, texts, max_length=None, truncate=False), victim.vocabulary.pad_id or 0)
    optimizer = torch.optim.Adam(victim.model.parameters(), 3e-3)
    for _ in range(120):
        optimizer.zero_grad()
        victim.model(**batch.inputs()).loss.backward()
        optimizer.step()
    victim.model.save_pretrained(out)
    victim.tokenizer.save_pretrained(out)
    found = measure(tmp_path / "canaries", str(out), base=str(base), delta=1e-5)
    assert found.extracted is not None and found.extracted.included == inside and found.extracted.left_out == 0
    assert found.exposure == pytest.approx(math.log2(41 - inside)) and found.chance is not None and found.chance < 2.5
    # The same, written token by token.
    row = encoded(victim, texts[:1], max_length=None, truncate=False)[0].input_ids
    written = row[:, : 1 + (row.shape[1] - 1) // 2]
    while written.shape[1] < row.shape[1]:
        written = torch.cat([written, victim.model(input_ids=written).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, row)
    shown = rasura_command("canaries", "measure", tmp_path / "canaries", "--model", out).stdout
    assert "word for word" in shown and "exposure: " in shown


def test_a_model_that_saw_none_of_them_shows_nothing(tmp_path: Path, model_folder: Path) -> None:
    draw(str(model_folder), None, 60, tmp_path, task="classification")
    found = measure(tmp_path, str(model_folder), base=None, delta=1e-5)
    assert found.bound.guesses == 12 and found.bound.epsilon < 1  # chance: above 0 in less than 1 of 20 runs


def test_a_classifier_without_its_head_is_not_measured(tmp_path: Path, model_folder: Path) -> None:
    """A head drawn at random shows nothing of any training: a bound of 0 would be said of a model that nobody asked."""
    draw(str(model_folder), None, 20, tmp_path, task="classification", num_labels=5)
    with pytest.raises(InputError, match=r"holds no head of 5 classes \(classifier.bias, classifier.weight\)"):
        measure(tmp_path, str(model_folder), base=None, delta=1e-5)


@pytest.mark.slow
def test_canaries_have_the_classes_of_the_texts_and_are_measured_on_the_head_that_was_trained(
    tmp_path: Path, model_folder: Path
) -> None:
    """Texts of four classes got canaries of two, and what was trained on them was refused: "holds no head of 2 classes"."""
    base, data = tmp_path / "base", tmp_path / "notes.jsonl"
    transformers.AutoTokenizer.from_pretrained(model_folder).save_pretrained(base)
    tiny("bert", "classification").bert.save_pretrained(base)
    data.write_text("".join(json.dumps({"text": f"alpha w{k}", "label": k % 4}) + "\n" for k in range(8)))
    canaries = draw(str(base), str(data), 60, tmp_path / "out", task="classification")
    assert {one.label for one in canaries} == {0, 1, 2, 3}
    for labels in (4, 6):
        out = trained(base, tmp_path / "out" / "train.jsonl", tmp_path / f"model{labels}", 1, num_labels=labels)
        assert measure(tmp_path / "out", str(out), base=str(base), delta=1e-5).bound.guesses == 12
    data.write_text('{"text": "alpha", "label": 0}\n')
    fewer = trained(base, data, tmp_path / "fewer", 0, num_labels=2)
    with pytest.raises(InputError, match="holds no head of 4 classes"):
        measure(tmp_path / "out", str(fewer), base=None, delta=1e-5)


@pytest.mark.slow
def test_training_texts_are_mixed_in(tmp_path: Path, model_folder: Path) -> None:
    data = tmp_path / "notes.jsonl"
    data.write_text('{"text": "alpha met bravo", "label": 1}\n', encoding="utf-8")
    canaries = draw(str(model_folder), str(data), 20, tmp_path / "out", task="classification")
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {"text": "alpha met bravo", "label": 1} in rows and len(rows) == 1 + sum(one.included for one in canaries)
    with pytest.raises(InputError, match="already exists"):
        draw(str(model_folder), None, 20, tmp_path / "out", task="classification")


@pytest.mark.slow
def test_what_is_wrong_is_refused(tmp_path: Path, model_folder: Path) -> None:
    assert "expected at least 20" in refused("canaries", "draw", tmp_path, "--model", model_folder, "--number", "5")
    (tmp_path / "canaries.json").write_text('{"version": 1}', encoding="utf-8")
    assert "does not hold canaries" in refused("canaries", "measure", tmp_path, "--model", model_folder)
    draw(str(model_folder), None, 20, tmp_path / "out", task="classification")
    for words, arguments in (
        ("guesses", ("--guesses", "3")),
        ("delta", ("--delta", "1")),
        ("--epsilon", ("--epsilon", "nan")),
    ):
        assert words in refused("canaries", "measure", tmp_path / "out", "--model", model_folder, *arguments)


def test_canaries_are_not_drawn_into_texts_whose_tokens_a_protection_chose(tmp_path: Path, model_folder: Path) -> None:
    data = tmp_path / "hidden.jsonl"
    data.write_text(json.dumps({"text": "Alpha met Bravo .", "label": 0, "input_ids": [1, 5, 6, 2]}) + "\n")
    with pytest.raises(InputError, match="input_ids that a protection chose"):
        draw(str(model_folder), str(data), 20, tmp_path / "drawn", task="classification")
    assert not (tmp_path / "drawn").exists()


def test_whose_a_text_is_stays_and_each_canary_is_a_person_of_its_own(tmp_path: Path, model_folder: Path) -> None:
    """The column was dropped, so that a training that protects persons could not take the texts."""
    data, folder = tmp_path / "notes.jsonl", tmp_path / "canaries"
    data.write_text(
        "".join(json.dumps({"text": f"a note {k}", "label": k % 2, "who": f"p{k % 3}"}) + "\n" for k in range(9))
    )
    made = draw(str(model_folder), str(data), 40, folder, task="classification", columns=Columns(unit="who"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    inside = {one.text for one in made if one.included}
    assert {row["text"]: row["who"] for row in rows if row["text"] not in inside} == {
        f"a note {k}": f"p{k % 3}" for k in range(9)
    }
    theirs = [row["who"] for row in rows if row["text"] in inside]
    assert len(set(theirs)) == len(theirs) == len(inside) > 0 and all(row["who"] for row in rows)
    for unit, given, said in (
        ("who", None, "no training texts; also pass --data"),
        ("label", str(data), "unit is 'label'; expected a column of the training texts beside text, "),
    ):
        with pytest.raises(InputError, match=said):
            draw(str(model_folder), given, 40, tmp_path / "other", task="classification", columns=Columns(unit=unit))


def test_canaries_are_drawn_into_texts_of_any_columns(tmp_path: Path, model_folder: Path) -> None:
    data = tmp_path / "notes.csv"
    data.write_text("entry,kind\n" + "".join(f"a note {k},{k % 2}\n" for k in range(9)))
    columns = ("--text-column", "entry", "--label-column", "kind")
    options = ("--model", model_folder, "--data", data, "--number", 20, *columns)
    rasura_command("canaries", "draw", tmp_path / "out", *options)
    rows = [json.loads(line) for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines()]
    assert {(f"a note {k}", k % 2) for k in range(9)} < {(row["text"], row["label"]) for row in rows}
