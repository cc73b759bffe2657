"""Texts from real files, and what is said of bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import transformers

from rasura.core.interfaces import InputError
from rasura.data.columns import Columns
from rasura.data.text import Example, data_hash, demo_examples, encode, groups, load_examples

ROWS = [{"text": "one two", "label": 1}, {"text": "three, four", "label": 0}]
EXPECTED = [Example("one two", None, 1), Example("three, four", None, 0)]


def test_three_formats_give_the_same_examples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    (tmp_path / "a.csv").write_text('text,label\none two,1\n"three, four",0\n')
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        assert load_examples(tmp_path / name) == EXPECTED
    assert load_examples(tmp_path / "a.csv", limit=1) == EXPECTED[:1]
    assert data_hash(EXPECTED) != data_hash(EXPECTED[::-1])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "does not exist"),
        ("a.jsonl", "", "is empty"),
        ("a.jsonl", '{"words": "x"}', r"row 1: no column text \(found: words\)"),
        ("a.jsonl", '{"text": "x"}\n{"text": "  "}', "row 2: the text is empty"),
        ("a.jsonl", '{"text": "x"}\n{oops', "line 2: not valid JSON"),
        ("a.jsonl", "[1]", "found list; expected one object"),
        ("a.jsonl", '{"text": "x", "label": "good"}\n{"text": "y", "label": 1}', "row 2: the label is a number"),
        ("a.csv", "text,label\nx,1.5\n", "row 1: label 1.5 is not a whole number"),
        ("a.csv", "text,label\nx,0\ny,nan\n", "row 2: the label is NaN"),
        ("a.csv", "text,label\nx,0\ny,1e300\n", "row 2: the label is a number above 9999"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1' + "0" * 5000 + "}",
            "line 1: JSON is nested too deeply or has a number that is too long",
        ),
        ("a.jsonl", "[" * 100_000, "line 1: JSON is nested too deeply"),
        ("a.jsonl", '{"text": "x", "label": [1]}', "row 1: the label is a list"),
        ("a.jsonl", '{"text": "a \\ud800"}', "row 1: the text contains half a character"),
        ("a.jsonl", '{"text": "x", "input_ids": [1e999]}', "row 1: input_ids are not whole numbers"),
        ("a.csv", 'text;label\n"one;0\n', "row 1 .line 2.: a quote is not closed"),
        ("a.csv", "text,label\none, two,0\n", "row 1 .line 2.: 3 cells, but the header has 2"),
        ("a.csv", "id,text,label\n1,one\ntwo,0\n", "row 1 .line 2.: 2 cells, but the header has 3.*; quote .* a line break"),
        ("a.csv", "text,text\na,b\n", "two columns are named text"),
        ("a.csv", "review,comment\na,b\n", "text may be column comment, review; choose with --text-column"),
        (
            "a.jsonl",
            '{"text": "a", "class": "x"}\n{"text": "b", "class": "y", "label": 1}',
            "label may be column class, label; ch",
        ),
        (
            "a.jsonl",
            '{"text": "a", "class": 0}\n{"text": "b", "target": 1}',
            "label may be column class, target; choose with",
        ),
        ("a.jsonl", '{"review": "a"}\n{"review": "b", "text": "c"}', "text may be column review, text; choose with --text"),
        (
            "a.jsonl",
            '{"sentence": "a"}\n{"sentence": "b", "question": "c"}',
            "text may be column question, sentence; choose",
        ),
        ("a.csv", "a\0b\n", "zero bytes"),
        ("a.csv", "text,label\n", "holds no rows"),
        ("a.parquet", "no parquet", "cannot be read as Parquet"),
        ("a.xls", "x", "unknown file type .xls"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        load_examples(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_later_column_changes_nothing_where_the_choice_is_clear(tmp_path: Path) -> None:
    rows = tmp_path / "a.jsonl"
    rows.write_text('{"text": "a", "label": 1}\n{"text": "b", "label": 0, "class": "x", "review": "c"}')
    assert [(e.text, e.label) for e in load_examples(rows)] == [("a", 1), ("b", 0)]
    rows.write_text('{"text": "a", "class": 1}\n{"text": "b", "class": 0, "label": 3}')
    chosen = load_examples(rows, columns=Columns(label="class"))
    assert [(e.text, e.label) for e in chosen] == [("a", 1), ("b", 0)]
    assert [e.label for e in load_examples(rows, columns=Columns(label="none"))] == [None, None]


def test_a_data_set_id_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="neither a file nor a data set"):
        load_examples("nobody/nothing")


def test_demo_notes() -> None:
    notes = demo_examples()
    assert len(notes) == 32 and {e.label for e in notes} == {0, 1}
    assert len({e.text for e in notes}) == 32


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tok")
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "one", "two", "three", "four", ","]
    (folder / "vocab.txt").write_text("\n".join(words))
    return transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt"))


def test_encode_pads_and_keeps_what_the_model_sees(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    batch = encode(EXPECTED, tokenizer, "classification", max_length=16, num_labels=2)
    assert batch.lengths == (4, 5) and batch.labels.tolist() == [1, 0]
    assert batch.seen == ("one two", "three, four") and batch.ids(0) == (1, 5, 6, 2)
    causal = encode(EXPECTED, tokenizer, "causal", max_length=16, num_labels=0)
    assert causal.labels[0].tolist() == [1, 5, 6, 2, -100]


def test_pairs_keep_their_segments(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    batch = encode([Example("one", "two three", 0)], tokenizer, "classification", max_length=16, num_labels=2)
    assert batch.token_type_ids is not None and batch.token_type_ids.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert batch.texts == ("one two three",)


def test_of_a_text_that_is_cut_only_what_is_in_the_update_counts(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    texts = [
        Example("one two " * 8 + "Brandt 4250", None, 0),
        Example("one two", None, 0),
        Example("one " * 9, "two " * 9, 0),
    ]
    batch = encode(texts, tokenizer, "classification", max_length=12, num_labels=2, truncate=True)
    assert batch.texts[1] == "one two" and "Brandt" not in batch.texts[0] and texts[0].text.startswith(batch.texts[0])
    kept = [len(t.split()) for t in batch.texts]
    assert kept == [9, 2, 9], "12 tokens, of which three stand around the words of a pair"


def test_encode_refuses_what_the_model_cannot_take(tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    long = [Example("one " * 30, None, 0)]
    with pytest.raises(InputError, match="has 32 tokens, but at most 16 are allowed; pass --truncate"):
        encode(long, tokenizer, "classification", max_length=16, num_labels=2)
    assert encode(long, tokenizer, "classification", max_length=16, num_labels=2, truncate=True).lengths == (16,)
    with pytest.raises(InputError, match=r"label 1 is outside the head's 0 .. 0"):
        encode(EXPECTED, tokenizer, "classification", max_length=16, num_labels=1)
    with pytest.raises(InputError, match="has no label"):
        encode([Example("one")], tokenizer, "classification", max_length=16, num_labels=2)


def test_groups_are_whole() -> None:
    assert [len(g) for g in groups(demo_examples(), 5)] == [5] * 6
    assert [len(g) for g in groups(EXPECTED, 5)] == [2]
