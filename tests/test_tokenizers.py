"""What is known of a tokenizer, and how its ids become the text that was sent."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rasura.core.vocabulary import readable, unknown_ids
from rasura.data.text import Example, encode
from rasura.metrics.text import rouge
from rasura.victims.tokenizers import vocabulary

WORDS = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3, "a": 4, "pay": 5, "roll": 6}


def made(**special: str) -> Any:
    """A tokenizer with a few words, and ``<file>``, which is special and yet no token of its frame."""
    backend = Tokenizer(WordLevel(WORDS, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    backend.add_special_tokens([AddedToken("<file>", special=True)])
    usual = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=20, **{**usual, **special})


def test_tokens_that_a_text_holds_are_shown_though_they_are_called_special() -> None:
    tokenizer = made()
    known = vocabulary(tokenizer, 8)
    assert 7 not in tokenizer.all_special_ids and known.special_ids == frozenset({0, 1, 2, 3})
    assert known.control_ids == frozenset({7}) and known.marks == frozenset({0, 1, 2, 3, 7})
    batch = encode([Example("pay <file> roll", label=0)], tokenizer, "classification", max_length=20, num_labels=2)
    assert batch.ids(0) == (1, 5, 7, 6, 2) and known.text(batch.ids(0)) == "pay <file> roll" == batch.seen[0]
    assert rouge("rouge1").score(batch.seen[0], known.text(batch.ids(0))) == 1.0


def test_unknown_words_are_seen_as_such() -> None:
    known = vocabulary(made(), 8)
    assert known.unknown_ids == frozenset({3}) and known.text([1, 4, 3, 3, 5, 2]) == "a · · pay"
    batch = encode([Example("a 🧬 pay", label=0)], made(), "classification", max_length=20, num_labels=2)
    assert batch.seen == ("a · pay",)


@pytest.mark.parametrize("name", ["pad_token", "eos_token", "bos_token", "sep_token"])
def test_a_token_that_also_frames_texts_stands_for_no_word(name: str) -> None:
    assert not unknown_ids(made(**{name: "[UNK]"}))


def test_what_is_readable_is_decoded_in_one_piece_where_nothing_is_unknown() -> None:
    pieces: list[list[int]] = []

    def decode(ids: Any) -> str:
        pieces.append(list(ids))
        return "-".join(map(str, ids))

    assert readable([1, 5, 6, 2], decode, {1, 2}, {3}) == "5-6" and pieces == [[5, 6]]
    assert readable([3, 5, 3], decode, {1, 2}, {3}) == "· 5 ·" and readable([], decode, {1}, {3}) == ""
