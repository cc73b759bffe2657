"""Finding a model's parts by structure, loading, and the one private step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.core.threat import adversary_copy
from rasura.testing.tiny import ENCODERS, FAMILIES, PAD, VOCABULARY, batch_for, tiny
from rasura.victims.loading import load
from rasura.victims.models import is_eager, parts, register
from rasura.victims.positions import position_ids
from rasura.victims.step import capture, step
from rasura.victims.tokenizers import vocabulary

SMALL = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("task", ["classification", "causal"])
def test_parts_by_structure(family: str, task: str) -> None:
    if family in ENCODERS and task == "causal":
        pytest.skip("the tiny encoders are classifiers")
    model = tiny(family, task)
    found = parts(model)
    assert len(found.blocks) == 2 and found.hidden == 64
    assert found.causal == (family not in ENCODERS)
    assert len(found.blocks[0].qkv) == (1 if family == "gpt2" else 3)
    names = dict(model.named_parameters())
    assert found.word_embedding in names and set(found.embedding_names) <= set(names)
    assert (found.position_embedding is None) == (family == "llama")
    assert {lin.weight for b in found.blocks for lin in b.qkv} <= set(names)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (transformers.GemmaConfig, {"head_dim": 8, "num_key_value_heads": 2}),
        (transformers.Qwen2Config, {"num_key_value_heads": 2}),
        (transformers.Qwen3Config, {"head_dim": 8, "num_key_value_heads": 2}),
        (transformers.GPTNeoXConfig, {}),
        (transformers.ElectraConfig, {"embedding_size": 16}),
    ],
)
def test_parts_of_other_families(config: type, options: dict[str, int]) -> None:
    built = config(**SMALL, **options, pad_token_id=PAD)
    model = transformers.AutoModelForSequenceClassification.from_config(built, attn_implementation="eager")
    found = parts(model)
    assert len(found.blocks) == 2 and found.hidden == 32 and found.head is not None


def test_lora_models_keep_their_parts() -> None:
    peft = pytest.importorskip("peft")
    model = tiny("bert", "classification")
    lora = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=4))
    found = parts(lora)
    modules = [lin.module for lin in found.blocks[0].qkv]
    assert any("lora_A" in m for m in modules) and not any("lora_B" in m for m in modules)
    sent = step(lora, batch_for("classification"), task="classification", vocabulary=VOCABULARY, rng=generator(0))
    assert any("lora_B" in n for n in sent.message.gradients)
    assert not any("embeddings" in n for n in sent.message.gradients)


def test_what_cannot_be_found_is_named_and_an_adapter_helps() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"looked for get_input_embeddings"):
        parts(model)
    known = tiny("bert", "classification")
    model.config = type("Config", (), {"model_type": "of-my-own"})()
    register("of-my-own", lambda _: parts(known))
    assert parts(model) is parts(known)


def test_roberta_counts_positions_from_its_padding() -> None:
    found = position_ids(tiny("roberta", "classification"), 3)
    assert found is not None and found.tolist() == [PAD + 1, PAD + 2, PAD + 3]
    assert position_ids(tiny("llama", "causal"), 3) is None


@pytest.mark.parametrize("family", FAMILIES)
def test_step_without_defense_is_autograd(family: str) -> None:
    model, batch = tiny(family, "classification"), batch_for("classification", rows=3)
    sent = step(model, batch, task="classification", vocabulary=VOCABULARY, rng=generator(0))
    model.zero_grad()
    loss = model(**batch.inputs()).loss
    loss.backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(sent.message.gradients) == set(expected)
    assert all(torch.allclose(sent.message.gradients[n], g, atol=1e-6) for n, g in expected.items())
    assert sent.loss == pytest.approx(float(loss.detach()), abs=1e-6)


def test_the_adversary_has_its_own_model_on_the_same_weights() -> None:
    model = tiny("bert", "classification")
    copy = adversary_copy(model)
    assert not any(p.requires_grad for p in copy.parameters()) and all(p.requires_grad for p in model.parameters())
    a, b = (next(m.parameters()) for m in (model, copy))
    assert a.data_ptr() == b.data_ptr(), "weights are shared, not doubled"
    model.train()
    assert not copy.training
    assert is_eager(copy)


def test_capture_writes_the_update(tmp_path: Path) -> None:
    model, batch = tiny("gpt2", "causal"), batch_for("causal")
    path = tmp_path / "update.safetensors"
    capture(model, batch.inputs(), path)
    assert path.stat().st_mode & 0o777 == 0o600, "who can read it can read the text"
    sent = step(model, batch, task="causal", vocabulary=VOCABULARY, rng=generator(0))
    written = load_file(path)
    assert set(written) == set(sent.message.gradients)
    assert all(torch.equal(written[n], g) for n, g in sent.message.gradients.items())
    with pytest.raises(InputError, match="no labels"):
        capture(model, {"input_ids": batch.input_ids}, path)


# --- loading


def save_model(folder: Path) -> None:
    tiny("bert", "classification").save_pretrained(folder)


def save_tokenizer(folder: Path, words: int) -> None:
    folder.mkdir(exist_ok=True)
    names = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *(f"w{i}" for i in range(words - 5))]
    (folder / "vocab.txt").write_text("\n".join(names))
    transformers.BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


def test_load_a_folder(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path, 300)
    victim = load(tmp_path, "classification", num_labels=3)
    assert victim.num_labels == 3 and victim.max_length == 64 and is_eager(victim.model)
    assert victim.vocabulary.prefix == (1,) and victim.vocabulary.suffix == (2,)
    assert not victim.model.training


def test_a_fresh_head_is_drawn_from_the_seed(tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path, 300)
    a, b, c = (
        load(tmp_path, "classification", num_labels=5, seed=s).model.get_parameter("classifier.weight") for s in (1, 1, 2)
    )
    assert torch.equal(a, b) and not torch.equal(a, c)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: None, "does not exist"),
        (lambda p: p.mkdir(), "holds no config.json"),
        (lambda p: save_model(p), "holds no tokenizer"),
        (lambda p: (save_model(p), save_tokenizer(p, 400)), "400 tokens, but the model's embedding has only 300"),
        (lambda p: (save_model(p), (p / "model.safetensors").unlink()), "holds no weights"),
        (
            lambda p: (save_model(p), (p / "model.safetensors").rename(p / "pytorch_model.bin")),
            r"save_pretrained writes them so. Only rasura read takes pickled ones, with --allow-pickle \(",
        ),
        (lambda p: p.write_text("x"), "is a file"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path: Path, make: object, message: str) -> None:
    folder = tmp_path / "model"
    make(folder)  # type: ignore[operator]
    with pytest.raises(InputError, match=message) as caught:
        load(folder, "classification")
    assert "\n" not in str(caught.value)


def test_vocabulary_text_leaves_out_what_is_no_text(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, 50)
    known = vocabulary(transformers.AutoTokenizer.from_pretrained(tmp_path), 60)
    assert known.text([1, 5, -1, 6, 2, 999]) == "w0 w1"
    assert known.text([1, 5, 59, 6, 2]) == "w0 · w1", "a word of a larger tokenizer: a row that this one has no token for"
    assert set(range(50, 60)) <= known.unused_ids
