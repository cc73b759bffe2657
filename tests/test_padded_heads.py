"""A decoder's head reads the last token before the padding: a text's logits do not depend on the texts beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rasura.data.text import Example
from rasura.runs.training import encoded
from rasura.testing.tiny import DECODERS, tiny, tokenizer_folder
from rasura.victims.loading import Victim, in_memory, load
from rasura.victims.outputs import answers

TEXTS = [Example("w40 w41", label=0), Example("w50 the w51 of w52 and w53 w54", label=1)]


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    found = json.loads(path.read_text())
    edit(found)
    path.write_text(json.dumps(found))


def no_pad_token(folder: Path) -> None:
    """The tokenizer then pads with its end token, 2, and the config says 0."""
    change(folder / "tokenizer_config.json", lambda found: found.pop("pad_token"))


def other_pad_token(folder: Path) -> None:
    change(folder / "config.json", lambda found: found.update(pad_token_id=7))


def nothing_to_pad_with(folder: Path) -> None:
    other_pad_token(folder)
    change(folder / "tokenizer_config.json", lambda found: [found.pop(k) for k in ("pad_token", "eos_token")])


def same_alone_and_padded(victim: Victim) -> None:
    rows, pad = encoded(victim, TEXTS, max_length=None, truncate=False), victim.vocabulary.pad_id or 0
    assert rows[0].input_ids.shape[1] < rows[1].input_ids.shape[1]
    together, alone = answers(victim.model, rows, pad), [answers(victim.model, [row], pad) for row in rows]
    torch.testing.assert_close(together.losses, torch.cat([one.losses for one in alone]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [f for f in DECODERS if f != "qwen2"])  # Qwen2's tokenizer adds a token of its own
@pytest.mark.parametrize("edit", [no_pad_token, other_pad_token, nothing_to_pad_with])
def test_a_text_has_the_same_loss_alone_and_beside_a_longer_one(
    tmp_path: Path, family: str, edit: Callable[[Path], None]
) -> None:
    folder = tokenizer_folder(tiny(family, "classification"), tmp_path)
    edit(folder)
    same_alone_and_padded(load(folder, "classification", attacked=False))


def test_a_model_in_memory_does_too_and_stays_as_it_was(tmp_path: Path) -> None:
    folder = tokenizer_folder(tiny("llama", "classification"), tmp_path)
    no_pad_token(folder)
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    same_alone_and_padded(in_memory(model, tokenizer, "classification", attacked=False))
    assert (model.config.pad_token_id, tokenizer.pad_token_id) == (0, None)
