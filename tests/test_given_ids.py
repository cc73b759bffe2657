"""A column of tokens in a data file: used as a protection wrote it, never in place of the text."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from audit_setting import TEXTS, model_folder

from rasura.core.batches import Batch
from rasura.core.interfaces import InputError
from rasura.data.sizes import text_sizes
from rasura.data.text import encode, load_examples
from rasura.victims.loading import Victim, load

__all__ = ["model_folder"]


@pytest.fixture(scope="module")
def victim(model_folder: Path) -> Victim:
    return load(model_folder, "classification")


def encoded(folder: Path, victim: Victim, ids: list[list[int]], more: Any = None, truncate: bool = False) -> Batch:
    rows = [{"text": t, "label": 0, "input_ids": i, **(more or {})} for t, i in zip(TEXTS, ids)]
    path = folder / "notes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    longest = 5 if truncate else 64
    found = load_examples(path)
    batch = encode(found, victim.tokenizer, "classification", max_length=longest, num_labels=2, truncate=truncate)
    assert [n for n, _ in text_sizes(found, victim.tokenizer, longest)] == list(batch.lengths)
    return batch


def own(victim: Victim) -> list[list[int]]:
    return [victim.tokenizer(text)["input_ids"] for text in TEXTS]


def test_padded_ids_are_refused(tmp_path: Path, victim: Victim) -> None:
    """The padding counted as text, since nothing reads the file's attention mask."""
    for padded in ([*own(victim)[0], 0], [0, *own(victim)[0]], [*own(victim)[0], *[0] * 20]):
        with pytest.raises(
            InputError, match=r"row 1: input_ids are padded \(token 0\).* remove the column|line 1: input_ids"
        ):
            encoded(tmp_path, victim, [padded])


@pytest.mark.parametrize("kind", ["other", "cut", "without its frame", "nothing"])
def test_the_text_is_tokenized_in_place_of_other_tokens_and_a_line_says_so(
    tmp_path: Path, victim: Victim, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    made = {
        "other": lambda ids: [ids[0], *(i + 40 for i in ids[1:-1]), ids[-1]], "cut": lambda ids: [*ids[:2], ids[-1]],
        "without its frame": lambda ids: ids[1:-1], "nothing": lambda ids: [],
    }[kind]  # fmt: skip
    with caplog.at_level(logging.WARNING, logger="rasura.data"):
        batch = encoded(tmp_path, victim, [made(ids) for ids in own(victim)])
    assert [list(batch.ids(k)) for k in range(len(TEXTS))] == own(victim)
    (line,) = [r.getMessage() for r in caplog.records]
    assert "the column input_ids holds other tokens" in line and "the text is tokenized" in line and TEXTS[0] not in line


def test_the_tokenizer_s_own_tokens_are_those_of_the_text_however_it_is_cut(
    tmp_path: Path, victim: Victim, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="rasura.data"):
        assert [list(encoded(tmp_path, victim, own(victim)).ids(k)) for k in range(len(TEXTS))] == own(victim)
        cut = encoded(tmp_path, victim, own(victim), truncate=True)
    assert not caplog.records
    assert list(cut.ids(0)) == [*own(victim)[0][:4], own(victim)[0][-1]]


def test_other_tokens_with_the_same_text_are_used(tmp_path: Path, victim: Victim) -> None:
    """As in a file of ``rasura protect``, whose text is what its tokens decode to."""
    shown = victim.vocabulary.text([1, 40, 41, 2])
    path = tmp_path / "hidden.jsonl"
    split = [1, *(i for c in shown.split() for i in victim.vocabulary.encode(c)), 2]
    path.write_text(json.dumps({"text": shown.upper().lower(), "label": 0, "input_ids": split}) + "\n")
    batch = encode(load_examples(path), victim.tokenizer, "classification", max_length=64, num_labels=2)
    assert list(batch.ids(0)) == split
