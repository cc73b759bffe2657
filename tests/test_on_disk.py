"""Models whose weights stay on disk compute what they compute in memory, and hold little of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedTokenizerFast

from rasura.core.interfaces import InputError
from rasura.runs.reading import ReadRequest, read_update
from rasura.testing.tiny import tiny
from rasura.victims.adapters import with_fresh_adapter
from rasura.victims.loading import Victim, load
from rasura.victims.on_disk import StoredEmbedding, StoredLinear, copied, is_stored, needs_disk

WORDS = ["[PAD]", "[UNK]", *(f"w{i}" for i in range(298))]


def saved(folder: Path, dtype: torch.dtype = torch.bfloat16, *, tied: bool = False, family: str = "llama") -> Path:
    """A small decoder in half precision with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")
    tokenizer.save_pretrained(folder)
    model: Any = tiny(family, "causal", tied=tied, hidden=64)
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Victim, Victim]:
    return load(folder, "causal", on_disk=True), load(folder, "causal", on_disk=False)


def ids() -> Tensor:
    return torch.tensor([[5, 60, 7, 8, 9], [20, 7, 6, 5, 4]])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_model_on_disk_computes_what_it_computes_in_memory(
    tmp_path: Path, family: str, tied: bool, dtype: torch.dtype
) -> None:
    place = saved(tmp_path, dtype, tied=tied, family=family)
    stored, whole = load(place, "causal", on_disk=True), load(place, "causal", on_disk=False)
    assert is_stored(stored.model) and not is_stored(whole.model)
    kept = {m.weight.dtype for m in stored.model.modules() if isinstance(m, StoredLinear | StoredEmbedding)}
    assert kept <= ({dtype, torch.float32} if family == "gemma" else {dtype})  # Gemma's embedding is of its own kind
    with torch.no_grad():
        torch.testing.assert_close(stored.model(ids()).logits, whole.model(ids()).logits, rtol=1e-5, atol=1e-6)
    assert [n for n, _ in stored.model.named_parameters()] == [n for n, _ in whole.model.named_parameters()]


def test_gradients_of_adapters_are_the_same(both: tuple[Victim, Victim]) -> None:
    pytest.importorskip("peft")
    stored, whole = (with_fresh_adapter(v.model, v.task, 4, 0) for v in both)
    found: list[list[Tensor]] = []
    for model in (stored, whole):
        torch.manual_seed(0)
        own = [p for n, p in model.named_parameters() if "lora_" in n]
        with torch.no_grad():
            for p in own:
                p.normal_(0, 0.1)
        found.append(list(torch.autograd.grad(model(input_ids=ids(), labels=ids()).loss, own)))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
    tables = [both[0].model.get_input_embeddings().weight, stored.get_input_embeddings().weight]  # type: ignore[operator, union-attr]
    assert tables[0] is tables[1]  # a copy shares what is on disk


def layer(outputs: int = 24, inputs: int = 16) -> tuple[StoredLinear, Tensor]:
    torch.manual_seed(0)
    made = nn.Linear(inputs, outputs).to(torch.bfloat16)
    made.requires_grad_(False)
    made.__class__ = StoredLinear
    assert isinstance(made, StoredLinear)
    return made, made.weight.double()


def test_a_layer_is_differentiated_as_often_as_one_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rasura.victims.on_disk.PART", 5 * 16)  # several parts, the last one shorter
    own, weight = layer()
    x = torch.randn(3, 16, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(own(x), x @ weight.T + own.bias.double())
    assert torch.autograd.gradcheck(own, x) and torch.autograd.gradgradcheck(own, x)
    slopes = torch.randn(4, 3, 24, dtype=torch.double)
    (batched,) = torch.autograd.grad(own(x), x, slopes, is_grads_batched=True)
    torch.testing.assert_close(batched, slopes @ weight)
    own.weight.requires_grad_(True)
    (asked,) = torch.autograd.grad(own(x).sum(), own.weight)
    torch.testing.assert_close(asked.double(), x.sum(0).expand(24, -1).detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_the_graph_does_not_hold_wide_weights() -> None:
    """By what was allocated and not given back: the process' size tells of others' memory, too."""
    layers = []
    for _ in range(10):
        made = nn.Linear(1536, 1536, bias=False, dtype=torch.bfloat16)
        made.requires_grad_(False)
        made.__class__ = StoredLinear
        layers.append(made)
    x = torch.randn(1, 4, 1536, requires_grad=True)

    def held(layer: Callable[[nn.Linear, Tensor], Tensor]) -> float:
        y = x
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as counted:
            for one in layers * 6:
                y = layer(one, y)
        y.sum().backward()
        return sum(e.self_cpu_memory_usage for e in counted.events()) / 2**20

    assert held(lambda one, y: nn.functional.linear(y, one.weight.float())) > 540
    assert held(lambda one, y: one(y)) < 5
    assert x.grad is not None


def test_an_update_is_read_alike(tmp_path: Path, folder: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=8)
    client = peft.get_peft_model(base, config).eval()
    torch.manual_seed(0)
    own = {n: p for n, p in client.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in own.values():
            p.normal_(0, 0.1)
    client.save_pretrained(tmp_path / "adapter")
    text = torch.tensor([[17, 60, 7, 81, 90, 33]])
    slopes = torch.autograd.grad(client(input_ids=text, labels=text).loss, list(own.values()))
    save_file({n.replace(".default.", "."): g.contiguous() for n, g in zip(own, slopes)}, tmp_path / "u.safetensors")
    found = []
    for on_disk in (True, False):
        victim = load(folder, "causal", on_disk=on_disk, adapter=tmp_path / "adapter")
        read = read_update(tmp_path / "u.safetensors", victim, ReadRequest("span", batch_size=1))
        found.append((read.status, read.texts, read.tokens, read.confidence))
    assert found[0] == found[1] and found[0][0] == "ok"


def shards(place: Path, change: dict[str, Tensor | None]) -> None:
    """The weights in ``place`` with some changed, or left out where None."""
    weights = {**load_file(place / "model.safetensors"), **change}
    save_file({n: t for n, t in weights.items() if t is not None}, place / "model.safetensors", metadata={"format": "pt"})


QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({QUERY: torch.full((64, 64), float("nan"), dtype=torch.bfloat16)}, "NaN or infinity"),
        ({"model.embed_tokens.weight": torch.full((300, 64), float("inf"), dtype=torch.bfloat16)}, "NaN or infinity"),
        ({QUERY: None}, "lacks 1 of the model's weights"),
        ({QUERY: torch.zeros(64, 32, dtype=torch.bfloat16)}, r"is \(64, 32\); config.json says \(64, 64\)"),
        ({QUERY.replace(".1.", ".2."): torch.zeros(64, 64)}, "blocks that config.json does not describe"),
        ({QUERY.replace("q_proj", "gate"): torch.zeros(64, 64)}, "blocks that config.json does not describe"),
        ({QUERY.replace("weight", "bias"): torch.ones(64)}, "blocks that config.json does not describe"),
    ],
)
def test_weights_that_are_wrong_are_refused_on_disk_as_in_memory(
    tmp_path: Path, change: dict[str, Tensor | None], says: str
) -> None:
    shards(saved(tmp_path), change)
    for on_disk in (True, False):
        with pytest.raises(InputError, match=says):
            load(tmp_path, "causal", on_disk=on_disk)


def change_config(place: Path, **new: Any) -> None:
    path = place / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **new}))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma"])
def test_a_config_with_fewer_layers_is_refused_on_disk_as_in_memory(tmp_path: Path, family: str) -> None:
    change_config(saved(tmp_path, family=family), **{"n_layer" if family == "gpt2" else "num_hidden_layers": 1})
    for on_disk in (True, False):
        with pytest.raises(InputError, match=r"blocks that config\.json does not describe"):
            load(tmp_path, "causal", on_disk=on_disk)


SCALE = "model.layers.0.layer_scalar"


@pytest.fixture
def with_buffers(tmp_path: Path) -> Path:
    """A decoder whose layers are scaled by buffers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "gemma4_text", vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=16, global_head_dim=16, num_global_key_value_heads=4, intermediate_size=128, max_position_embeddings=64,
        hidden_size_per_layer_input=0, layer_types=["full_attention"] * 2, pad_token_id=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.25)
    saved(tmp_path)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_buffers_are_those_of_the_file(with_buffers: Path) -> None:
    """They were those of a new model: another model was attacked."""
    stored, whole = (load(with_buffers, "causal", on_disk=on_disk, attacked=False).model for on_disk in (True, False))
    assert is_stored(stored) and stored.get_buffer(SCALE).tolist() == [0.25]
    for name, buffer in whole.named_buffers():
        assert torch.equal(stored.get_buffer(name), buffer) and stored.get_buffer(name).dtype is buffer.dtype
    with torch.no_grad():
        torch.testing.assert_close(stored(ids()).logits, whole(ids()).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("value", "says"), [(None, f"lacks 1 of the .*{SCALE}"), (torch.ones(2), f"{SCALE} is .2,.; config")]
)
def test_a_buffer_that_is_missing_or_of_another_shape_is_refused(
    with_buffers: Path, value: Tensor | None, says: str
) -> None:
    shards(with_buffers, {SCALE: value})
    for on_disk in (True, False):
        with pytest.raises(InputError, match=says):
            load(with_buffers, "causal", on_disk=on_disk, attacked=False)


def test_other_weights_in_the_folder_are_not_read(tmp_path: Path) -> None:
    place = saved(tmp_path)
    weights = load_file(place / "model.safetensors")
    wrong = {n: torch.zeros_like(t) for n, t in weights.items()}
    save_file(wrong, place / "old_checkpoint.safetensors", metadata={"format": "pt"})
    save_file(wrong, place / "shard.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(weights, "shard.safetensors")}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    for on_disk in (True, False):
        model = load(place, "causal", on_disk=on_disk).model
        assert torch.equal(model.get_parameter(QUERY).float(), weights[QUERY].float())


def test_weights_under_another_name_are_not_the_models(tmp_path: Path) -> None:
    place = saved(tmp_path)
    (place / "model.safetensors").rename(place / "old_checkpoint.safetensors")
    for on_disk in (True, False):
        with pytest.raises(InputError, match=r"model\.safetensors"):
            load(place, "causal", on_disk=on_disk)


def test_a_config_that_names_its_weights_file_is_refused_on_disk(tmp_path: Path) -> None:
    change_config(saved(tmp_path), transformers_weights="other.safetensors")
    with pytest.raises(InputError, match="transformers_weights"):
        load(tmp_path, "causal", on_disk=True)


def test_shards_are_found_by_their_index(tmp_path: Path) -> None:
    place = saved(tmp_path)
    weights = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    files = {n: f"model-{k % 2}.safetensors" for k, n in enumerate(sorted(weights))}
    for file in set(files.values()):
        save_file({n: t for n, t in weights.items() if files[n] == file}, place / file, metadata={"format": "pt"})
    (place / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert is_stored(load(place, "causal", on_disk=True).model)
    (place / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError):
        load(place, "causal", on_disk=True)


def test_only_what_does_not_fit_stays_on_disk(folder: Path) -> None:
    assert not needs_disk(10**6) and needs_disk(10**15)
    assert not is_stored(load(folder, "causal").model)
    model = nn.Sequential(nn.Linear(2, 2))
    other = copied(model)
    assert not torch.equal(next(other.parameters()), next(model.parameters()) + 1)
