"""Models whose own code breaks where Rasura runs it: refused in words, or read around what breaks."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from confidence_setting import seen_of

from rasura.attacks.shared.verify import check, prove
from rasura.cli import main
from rasura.cli.read import _alone
from rasura.core.errors import InputError
from rasura.core.interfaces import Budget
from rasura.core.word_rows import input_layer, output_layer, token_count
from rasura.runs.reading import ReadRequest, read_update
from rasura.testing.tiny import CLS, PAD, SEP, WORDS, tiny, tokenizer_folder
from rasura.victims.loading import Victim, load
from rasura.victims.positions import takes_embeddings
from rasura.victims.step import capture

TEXTS = ["w40 the w41 w19 the w42", "w50 w51 of w52"]


def classifier(config: Any) -> Any:
    """A classifier of ``config`` with weights as wide apart as trained ones."""
    torch.manual_seed(0)
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0 if p.dim() > 1 else 1.0)
    return model


def config_of(family: str) -> Any:
    common: dict[str, Any] = {"vocab_size": WORDS, "pad_token_id": PAD, "num_labels": 2}
    width: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if family == "canine":
        return transformers.CanineConfig(**common, **width)
    if family == "longformer":
        frame = {"bos_token_id": CLS, "eos_token_id": SEP, "sep_token_id": SEP}
        return transformers.LongformerConfig(**common, **width, **frame, attention_window=[8, 8])
    if family == "nystromformer":  # it takes texts of multiples of its segments alone
        return transformers.NystromformerConfig(**common, **width, segment_means_seq_len=64, num_landmarks=32)
    if family == "flaubert":  # a bug of its own
        return transformers.FlaubertConfig(**common, emb_dim=64, n_layers=2, n_heads=4, pre_norm=True)
    assert family == "mbart"
    return transformers.MBartConfig(
        **common, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=64, bos_token_id=CLS, eos_token_id=SEP,
        decoder_start_token_id=SEP, forced_eos_token_id=SEP,
    )  # fmt: skip


def test_a_model_that_does_not_say_what_it_looks_up_is_refused_by_all(tmp_path: Path) -> None:
    model = classifier(config_of("canine"))
    assert input_layer(model) is None and output_layer(model) is None
    with pytest.raises(InputError, match="the size of its word embedding is not found"):
        token_count(model)
    with pytest.raises(InputError, match="word embedding is not found"):
        load(tokenizer_folder(model, tmp_path), "classification")


@pytest.mark.parametrize("family", ["nystromformer", "flaubert"])
def test_a_model_that_breaks_on_a_short_text_is_refused_at_load(family: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(classifier(config_of(family)), tmp_path)
    with pytest.raises(InputError, match=r"cannot be run on a text of \d+ tokens: ") as said:
        load(folder, "classification")
    assert "\n" not in str(said.value)


def test_a_model_that_pads_texts_by_itself_is_refused_with_this_reason(tmp_path: Path) -> None:
    folder = tokenizer_folder(classifier(config_of("longformer")), tmp_path)
    with pytest.raises(InputError, match="it pads a text of 10 tokens by itself and looks up 16"):
        load(folder, "classification")


def test_a_decoder_whose_loss_shifts_no_labels_is_refused_with_this_reason(tmp_path: Path) -> None:
    """A causal text's last token would be taken for one that nothing is predicted from."""
    model: Any = transformers.AutoModelForCausalLM.from_config(config_of("mbart"), attn_implementation="eager")
    folder = tokenizer_folder(model.eval(), tmp_path)
    with pytest.raises(InputError, match="its loss compares the logits at a place with the token there, and not with the"):
        load(folder, "causal")


@pytest.mark.parametrize("size", [1, 2])
def test_mbart_is_read_which_cannot_run_padding_alone(size: int, tmp_path: Path) -> None:
    victim = load(tokenizer_folder(classifier(config_of("mbart")), tmp_path), "classification")
    inputs = dict(victim.tokenizer(TEXTS[:size], return_tensors="pt", padding=True))
    capture(victim.model, inputs | {"labels": torch.tensor([1, 0][:size])}, tmp_path / "u.safetensors")
    found = read_update(tmp_path / "u.safetensors", victim, ReadRequest("span", size, frozen_embeddings=True))
    assert found.confidence == "verified" and sorted(found.texts) == TEXTS[:size]
    assert not takes_embeddings(victim.model)
    request = ReadRequest("pursuit", size, frozen_embeddings=True, budget=Budget("quick"))
    assert read_update(tmp_path / "u.safetensors", victim, request).status in ("ok", "failed")


@pytest.mark.parametrize("family", ["t5", "mbart"])
def test_texts_that_a_classifier_does_not_take_fit_no_update(family: str) -> None:
    model = tiny("t5", "classification") if family == "t5" else classifier(config_of(family))
    texts = [[CLS, 40, 3, 41, SEP], [CLS, 50, 51, SEP]]
    seen = seen_of(model, texts)
    assert check(seen, texts)[0] < 1e-5
    for guess in ([texts[0][:-1], texts[1]], [text[:-1] for text in texts], [texts[0], [*texts[1], SEP]]):
        assert check(seen, guess) == (math.inf, None) and prove(seen, guess) is None


def test_reading_one_update_that_breaks_ends_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message of another library may quote a text, and is left out."""
    folder = tokenizer_folder(tiny("bert", "classification", num_labels=2), tmp_path / "model")
    victim, path = load(folder, "classification"), tmp_path / "u.safetensors"
    inputs = dict(victim.tokenizer(TEXTS[:1], return_tensors="pt"))
    capture(victim.model, inputs | {"labels": torch.tensor([1])}, path)

    def decode(_: object) -> str:
        raise RuntimeError("w40 the w41")

    broken = replace(victim, vocabulary=replace(victim.vocabulary, decode=decode))
    with pytest.raises(InputError, match="reading crashed: RuntimeError in decode"):
        _alone(path, broken, ReadRequest())

    def loaded(*_: object, **__: object) -> Victim:
        return broken

    monkeypatch.setattr("rasura.victims.loading.load", loaded)
    monkeypatch.setattr(sys, "argv", ["rasura", "read", str(path), "--model", str(folder), "--task", "classification"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 2 and "reading crashed: RuntimeError in decode" in said and "w41" not in said
    assert "Traceback" not in said
