"""What a client of the model service shows: answers to files and texts, and the last piece of a continuation."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import rasura_command, refused
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from service_setting import ALICE, TEXTS, Setting, ask, container, setting, token_file

from rasura.core.errors import InputError
from rasura.core.rng import generator
from rasura.data.text import Example
from rasura.server.client import Client, _requests
from rasura.server.container import CONTENT_TYPE
from rasura.server.data import as_row
from rasura.server.inference import Decoding, Prompt
from rasura.server.limits import Limits, Refused
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


@pytest.mark.slow
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


def damaged(setting: Setting, place: Path, tensor: str, row: int | slice) -> Path:
    """The llama with a ``row`` of ``tensor`` that is not a number."""
    folder = shutil.copytree(setting.folder / "llama", place)
    weights = load_file(folder / "model.safetensors")
    weights[next(name for name in weights if tensor in name)][row] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_continuation_of_a_model_that_gives_no_number_is_refused(setting: Setting, tmp_path: Path) -> None:
    with setting.client(key="llama") as client:
        client.upload(damaged(setting, tmp_path / "nan", "norm", slice(None)), "nan")
        for temperature in (0.0, 1.0):
            with pytest.raises(InputError, match=r"\(409\): the model's answer is not a finite number"):
                next(client.generate("nan", TEXTS[0], new_tokens=8, temperature=temperature))
        assert ask(setting, "POST", "/v1/models/nan/generate", json={"input": [1, 5], "new_tokens": 1}).status_code == 409


def test_a_continuation_that_is_cut_off_says_so_in_its_last_line(setting: Setting, tmp_path: Path) -> None:
    for k in range(5, 60):  # a beginning that is not at its end with the first token
        start = {"input": [1, k, 9], "new_tokens": 3}
        lines = [json.loads(n) for n in ask(setting, "POST", "/v1/models/stories/generate", json=start).text.splitlines()]
        if len(lines) == 4:
            break
    first = lines[0]["id"]
    assert first not in (1, k, 9) and lines[-1] == {"end": True} and len(lines) == 4
    with setting.client(key="llama") as client:
        client.upload(damaged(setting, tmp_path / "cut", "embed_tokens", first), "second")
        found = ask(setting, "POST", "/v1/models/second/generate", json=start)
        told = [json.loads(line) for line in found.text.splitlines()]
        assert found.status_code == 200 and told[0] == {"id": first} and len(told) == 2
        assert "not a finite number" in told[1]["error"]
        stream = client._server.stream("/v1/models/second/generate", start)
        assert next(stream) == first
        with pytest.raises(InputError, match="ended the text early: the model's answer is not a finite number"):
            next(stream)


@pytest.mark.parametrize("top_k", [0, 5])
@pytest.mark.parametrize("temperature", [1e-9, 1e-40, 5e-324])
def test_every_positive_temperature_is_one(temperature: float, top_k: int) -> None:
    model = tiny("llama", "causal", hidden=32)
    prompts = [Prompt([5, 9, 40], 6), Prompt([5, 9, 40], 6, temperature, top_k, seed=3), Prompt([7], 6)]
    together, alone = Decoding(model, prompts, 0), Decoding(model, prompts[2:], 0)
    for _ in range(6):
        best, cold, other = together.step()
        assert best == cold and other == alone.step()[0]


def test_a_prompt_without_finite_scores_ends_alone() -> None:
    model: Any = tiny("llama", "causal", hidden=32)
    whole = Decoding(model, [Prompt([5, 9, 40], 6)], 0).step()
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    first, second = Decoding(model, [Prompt([7], 6), Prompt([5, 9, 40], 6)], 0).step()
    assert isinstance(first, Refused) and first.status == 409 and [second] == whole


def test_ids_of_an_old_key_are_refused_by_a_new_model_of_the_name(setting: Setting, tmp_path: Path) -> None:
    for name in ("old", "new"):
        obfuscate_model(
            setting.folder / "bert-plain", tmp_path / name, tmp_path / f"{name}.key", ObfuscationSettings(k=4),
            num_labels=3, rng=generator(1, name),
        )  # fmt: skip
    url, texts = setting.server.url, [Example("w20 w21 the w22", None, k) for k in range(3)]
    with Client(url, ALICE, key=tmp_path / "old.key") as old, Client(url, ALICE, key=tmp_path / "new.key") as new:
        old.upload(tmp_path / "old", "replaced")
        assert len(old.classify("replaced", ["w20 w21"])) == 1
        pair = old.model("replaced")["pair"]
        new.delete("replaced")
        new.upload(tmp_path / "new", "replaced")
        with pytest.raises(InputError, match=r"\(409\): the model of this name is another one than these ids are for"):
            old.classify("replaced", ["w20 w21"])
        for call in (lambda: old.classify("replaced", ["w20 w21"]), lambda: old.train("replaced", texts, "trained")):
            with pytest.raises(InputError, match="the key belongs to the obfuscated model"):
                call()
        assert len(new.classify("replaced", ["w20 w21"])) == 1
        new.delete("replaced")
    for path, body in (("notes/classify", {"inputs": [[1, 5]]}), ("stories/generate", {"input": [1, 5], "new_tokens": 1})):
        assert ask(setting, "POST", f"/v1/models/{path}", json={**body, "pair": pair}).status_code == 409
        assert ask(setting, "POST", f"/v1/models/{path}", json=body).status_code == 200
    job = container({"output": "trained", "pair": pair}, {"data.safetensors": b"\0" * 20})
    answer = ask(setting, "POST", "/v1/models/notes/jobs", content=job, headers={"Content-Type": CONTENT_TYPE})
    assert answer.status_code == 409 and "another one than these ids are for" in answer.text


def test_many_texts_are_answered_in_their_order(setting: Setting) -> None:
    with setting.client() as client:
        found = client.classify("notes", TEXTS * 22)
        for k, answer in enumerate(client.classify("notes", TEXTS)):
            for again in found[k :: len(TEXTS)]:
                assert again.probabilities == pytest.approx(answer.probabilities, abs=1e-5)
    assert len(found) == 264


@given(st.lists(st.tuples(st.integers(1, 9000), st.sampled_from([1, 77, 10**6])), max_size=300), st.booleans())
def test_a_request_holds_what_a_server_takes(texts: list[tuple[int, int]], pairs: bool) -> None:
    rows = [as_row(torch.full((n,), i), 0, torch.ones(n, dtype=torch.long) if pairs else None) for n, i in texts]
    parts = list(_requests(rows))
    assert [row for some in parts for row in some] == rows and all(parts)

    def size(some: list[Any]) -> int:
        body = {"pair": "0" * 64, "inputs": [row.input_ids[0].tolist() for row in some]}
        if pairs:
            body["types"] = [row.token_type_ids[0].tolist() for row in some]
        return len(json.dumps(body))

    for some, then in zip(parts, [*parts[1:], []]):
        assert len(some) <= Limits.inputs and (size(some) <= Limits.body_bytes or len(some) == 1)
        assert not then or len(some) == Limits.inputs or size([*some, then[0]]) > 0.99 * Limits.body_bytes


def test_a_text_alone_among_pairs_is_answered_as_by_itself_and_pairs_keep_their_second_text(
    setting: Setting, tmp_path: Path
) -> None:
    from transformers import BertTokenizerFast

    plain, key = tmp_path / "plain", tmp_path / "pairs.key"
    tiny("bert", "classification", hidden=32).save_pretrained(str(plain))  # type: ignore[operator]
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"w{k}" for k in range(5, 300))]
    BertTokenizerFast(vocab={w: k for k, w in enumerate(words)}, model_max_length=64).save_pretrained(str(plain))
    obfuscate_model(plain, tmp_path / "sent", key, ObfuscationSettings(k=4), num_labels=3, rng=generator(1, "pairs"))
    texts, seconds = TEXTS[:4], ["", TEXTS[5], "", TEXTS[7]]
    with Client(setting.server.url, ALICE, key=key) as client:
        client.upload(tmp_path / "sent", "pairs")
        alone = client.classify("pairs", texts)
        pairs = [client.classify("pairs", [a], [b])[0] for a, b in zip(texts, seconds)]
        mixed = client.classify("pairs", texts, seconds)
        # Of more than one part to encode, the last without a pair: one request may hold rows of both.
        examples = [Example(TEXTS[0], TEXTS[1] if k < 256 else None, 0) for k in range(260)]
        rows = client._rows("pairs", client.model("pairs"), examples, False)
        client.delete("pairs")
    for k, found in enumerate(mixed):
        expected = pairs[k] if seconds[k] else alone[k]
        assert found.probabilities == pytest.approx(expected.probabilities, abs=2e-6)
    assert mixed[1].probabilities != pytest.approx(alone[1].probabilities, abs=2e-6)
    types = [[] if row.token_type_ids is None else row.token_type_ids[0].tolist() for row in rows]
    assert all(any(t) for t in types[:256]) and not any(map(any, types[256:]))
    assert [len(t) for t in types] == [row.input_ids.shape[1] for row in rows]
