"""Texts that a classifier does not read whole: what is verified, and what is said of their ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from confidence_setting import seen_of
from torch import nn

from rasura.attacks.shared.verify import check, prove
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Grant, Reconstruction
from rasura.registry import with_open_ends
from rasura.runs.reading import ReadRequest, read_update
from rasura.runs.reading_notes import notes
from rasura.testing.tiny import CLS, PAD, SEP, VOCABULARY, WORDS, batch_of, tiny, tokenizer_folder
from rasura.victims.loading import load
from rasura.victims.step import capture, step

LONG = [40, 3, 41, 9, 42, 43, 44, 45, 46, 47, 48, 49, SEP]
"""Two layers that see four tokens each read the last seven of a text."""


def last_tokens_only() -> nn.Module:
    """A decoder whose head reads a text's last seven tokens."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=WORDS, pad_token_id=PAD, num_labels=3, attn_implementation="eager", hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=128, head_dim=16, num_key_value_heads=2, sliding_window=4,
        bos_token_id=CLS, eos_token_id=SEP,
    )  # fmt: skip
    model: nn.Module = transformers.MistralForSequenceClassification(config).eval()
    return model


def first_tokens_only() -> nn.Module:
    """An encoder whose head reads a text's first five tokens."""
    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=WORDS, pad_token_id=PAD, num_labels=3, attn_implementation="eager", hidden_size=64, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=128, local_attention=4, classifier_pooling="cls", cls_token_id=CLS,
        sep_token_id=SEP, bos_token_id=CLS, eos_token_id=SEP, layer_types=["sliding_attention"] * 2,
    )  # fmt: skip
    model: nn.Module = transformers.ModernBertForSequenceClassification(config).eval()
    return model


def test_a_text_that_may_begin_earlier_is_not_verified() -> None:
    seen = seen_of(last_tokens_only(), [LONG])
    for guess in (LONG, LONG[-7:], [200, *LONG[-7:]]):
        assert check(seen, [guess])[0] < 1e-4 and prove(seen, [guess]) is None
    stated = {**seen.granted, Grant.LENGTHS: (7,)}
    assert prove(replace(seen, granted=stated, claimed=frozenset({Grant.LENGTHS})), [LONG[-7:]]) is None
    assert check(seen, [LONG[-6:]])[0] > 1e-2, "the seventh word is read"
    short = seen_of(last_tokens_only(), [LONG[-5:]])
    assert prove(short, [LONG[-5:]]) is not None, "the window holds it, and one more word"
    both = seen_of(last_tokens_only(), [LONG[-5:], LONG])
    assert check(both, [LONG[-5:], LONG[-7:]])[0] < 1e-4 and prove(both, [LONG[-5:], LONG[-7:]]) is None


def test_a_text_that_may_end_later_is_not_verified() -> None:
    text = [CLS, *LONG]
    seen = seen_of(first_tokens_only(), [text])
    assert check(seen, [text[:5]])[0] < 1e-4 and prove(seen, [text[:5]]) is None
    short = seen_of(first_tokens_only(), [text[:4]])
    assert prove(short, [text[:4]]) is not None


def test_a_text_of_two_segments_that_a_model_reads_whole_is_verified() -> None:
    types, ids = [0, 0, 0, 1, 1, 1], torch.tensor([[CLS, 40, SEP, 41, 42, SEP]])
    model = tiny("roformer", "classification")  # no position table: a word more is tried on both sides
    batch = replace(batch_of(ids.tolist(), "classification", [1]), token_type_ids=torch.tensor([types]))
    sent = step(model, batch, task="classification", vocabulary=VOCABULARY, rng=generator(0, "step"))
    assert prove(observe(sent, HONEST_SERVER), ids.tolist(), [types]) is not None


def test_a_reading_says_where_a_text_may_go_on(tmp_path: Path) -> None:
    for model, guess, side in [
        (last_tokens_only(), LONG[-7:], "begin earlier"),
        (first_tokens_only(), [CLS, *LONG[:4]], "end later"),
    ]:
        seen = seen_of(model, [[CLS, *LONG]])
        victim = load(tokenizer_folder(model, tmp_path / side), "classification")
        found = with_open_ends(Reconstruction((tuple(guess),), "matched"), seen, SEP)
        line = f"the text may {side}: one more word there leaves nothing in the update"
        assert line in notes(found, victim, ReadRequest(batch_size=1))
        for other in (Reconstruction(((CLS, 99, 98, SEP),), "matched"), replace(found, ordered=False, details={})):
            assert with_open_ends(other, seen, SEP).details == {}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_end_that_a_decoder_takes_for_padding_stays_open(tmp_path: Path, family: str) -> None:
    """The classifier reads the last token that is not padding, and pads with the token for a text's end."""
    model: Any = tiny(family, "classification")
    folder = tokenizer_folder(model, tmp_path / "model")
    model.config.pad_token_id = SEP
    model.config.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = "[SEP]"
    tokenizer.save_pretrained(folder)
    victim = load(folder, "classification")
    assert victim.vocabulary.pad_id == victim.tokenizer.eos_token_id == SEP
    ids = torch.tensor([[40, 3, 41, 9, 42, SEP]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([1])}
    capture(victim.model, inputs, tmp_path / "u.safetensors")
    found = read_update(tmp_path / "u.safetensors", victim, ReadRequest("span", batch_size=1, update="fedsgd"))
    assert found.texts == ("w40 the w41 . w42",) and (found.confidence, found.labels) == ("verified", (1,))
    assert found.notes == ("whether a text ends in [SEP] stays open: the model takes it for padding there",)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_labels_are_found_of_a_text_that_ends_in_the_token_that_pads(family: str) -> None:
    text = [40, 3, 41, 9, 42]
    seen = seen_of(tiny(family, "classification"), [text])
    assert check(seen, [[*text, PAD]]) == (pytest.approx(0, abs=1e-5), (1,))
