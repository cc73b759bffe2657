"""What a client of the model service shows: answers to files and texts, and the last piece of a continuation."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from commands import rasura_command, refused
from safetensors.torch import load_file, save_file
from service_setting import ALICE, TEXTS, Setting, setting, token_file

from rasura.core.rng import generator
from rasura.server.client import Client
from rasura.service_protections.obfuslm.folder import obfuscate_model
from rasura.service_protections.obfuslm.settings import ObfuscationSettings
from rasura.testing.tiny import tiny, tokenizer_folder

__all__ = ["setting"]


@pytest.mark.parametrize("suffix", [".CSV", ".tsv", ".json", ".Parquet"])
def test_a_file_that_is_not_there_is_not_classified_by_its_name(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RASURA_TOKEN", ALICE)
    name = f"{tmp_path}/missing{suffix}"
    assert f"{name} does not exist or is not a file" in refused("client", "classify", "notes", name, "--key", "any.key")
    several = refused("client", "classify", "notes", "a fine film", name, "--key", "any.key")
    assert f"{name} names a file, and 2 arguments were given; pass texts, or one file alone" in several
    (tmp_path / "notes.txt").write_text("a fine film")
    assert "unknown file type .txt" in refused("client", "classify", "notes", tmp_path / "notes.txt", "--key", "any.key")


def test_files_of_every_suffix_are_read_and_no_label_is_certain(setting: Setting, tmp_path: Path) -> None:
    sure = shutil.copytree(setting.folder / "bert", tmp_path / "sure")
    weights = load_file(sure / "model.safetensors")
    weights |= {"classifier.weight": torch.zeros(3, 32), "classifier.bias": torch.tensor([0.0, 8.5, 0.0])}
    save_file(weights, sure / "model.safetensors", {"format": "pt"})
    common = ["--url", setting.server.url, "--token-file", str(token_file(tmp_path / "token", ALICE))]
    ask = ["client", "classify", "sure", "--key", str(setting.folder / "bert.key"), *common]
    with setting.client() as client:
        client.upload(sure, "sure")
        assert 0.9995 < client.classify("sure", ["w20"])[0].probabilities[1] < 1
    for name, content in (("notes.CSV", "text\nw20 w21\nw22\n"), ("notes.tsv", "text\tlabel\nw20 w21\t0\nw22\t1\n")):
        (tmp_path / name).write_text(content)
        done = rasura_command(*ask, tmp_path / name)
        assert done.stdout.splitlines() == ["1  0.999  w20 w21", "1  0.999  w22"], done.stderr
    # A logit far above the others leaves nothing for them in float64.
    save_file(weights | {"classifier.bias": torch.tensor([0.0, 99.0, 0.0])}, sure / "model.safetensors", {"format": "pt"})
    with setting.client() as client:
        client.delete("sure")
        client.upload(sure, "sure")
    assert rasura_command(*ask, "w20 w21").stdout == "1  0.999  w20 w21\n"


def test_a_continuation_that_ends_within_a_character_is_shown_to_its_end(setting: Setting, tmp_path: Path) -> None:
    plain = tokenizer_folder(tiny("llama", "causal", blocks=2, hidden=32), tmp_path / "plain")
    words = (plain / "tokenizer.json").read_text()
    # What a tokenizer of bytes decodes an incomplete character to.
    (plain / "tokenizer.json").write_text(re.sub(r'"(w\d+)"', '"\\1\ufffd"', words))
    obfuscate_model(plain, tmp_path / "cut", tmp_path / "cut.key", ObfuscationSettings(k=4), rng=generator(1, "cut"))
    prompt = " ".join(f"{word}\ufffd" for word in TEXTS[0].split() if word.startswith("w"))
    with Client(setting.server.url, ALICE, key=tmp_path / "cut.key") as client:
        client.upload(tmp_path / "cut", "cut")
        found = "".join(client.generate("cut", prompt, new_tokens=5))
    assert found.count("\ufffd") >= 4 and len(found.split()) == 5 and found.endswith("\ufffd")
