"""Models with adapters: what their first round gives away, and adapters that train the word embedding."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import adapter_spaces, block_spaces, row_space, visible_blocks
from rasura.core.errors import InputError
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.word_rows import token_count, token_rows
from rasura.data.text import Example, encode
from rasura.registry import attack, parse_defense
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, VOCABULARY, batch_of, tiny, tokenizer_folder
from rasura.victims.loading import load
from rasura.victims.models import parts
from rasura.victims.step import step

peft = pytest.importorskip("peft")

TEXT = [CLS, 11, 40, 41, 3]
WORDS = [{"target_modules": ["query", "word_embeddings"]}, {"trainable_token_indices": {"word_embeddings": [11, 40]}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tokenizer_folder(tiny("bert", "classification", num_labels=2), tmp_path / "model")


def update_of(
    family: str,
    task: Any,
    saved: list[str],
    layers: str,
    defense: str = "none",
    rank: int = 2,
    text: list[int] = TEXT,
    blocks: int = 2,
) -> Any:
    config = peft.LoraConfig(r=rank, target_modules=layers.split(","), modules_to_save=saved)
    model = peft.get_peft_model(tiny(family, task, blocks=blocks), config)
    return step(
        model, batch_of([text], task, [0]), parse_defense(defense), task=task,
        vocabulary=CAUSAL_VOCABULARY if task == "causal" else VOCABULARY, rng=generator(0, "step"),
    )  # fmt: skip


@pytest.mark.parametrize(("family", "task", "saved", "layer"), [
    ("bert", "classification", ["word_embeddings"], "query"),
    ("llama", "causal", ["embed_tokens"], "q_proj"),
    ("llama", "causal", ["embed_tokens", "lm_head"], "q_proj"),
    ("gpt2", "causal", ["wte"], "c_attn"),
])  # fmt: skip
def test_a_copy_of_the_word_embedding_that_an_adapter_trains_is_read(
    family: str, task: Any, saved: list[str], layer: str
) -> None:
    """It was refused as a model without a word embedding."""
    seen = observe(update_of(family, task, saved, layer), HONEST_SERVER)
    found = parts(seen.model)
    assert found.word_embedding in seen.gradients and not found.tied
    read = set(attack("embedding-rows")(seen, rng=generator(0), budget=Budget()).tokens[0])
    assert read - {-1} >= set(TEXT if task == "classification" else TEXT[:-1]) and read - {-1} <= set(TEXT)


@pytest.mark.parametrize(("family", "task", "saved", "layer"), [
    ("bert", "classification", "word_embeddings", "query"), ("llama", "causal", "embed_tokens", "q_proj"),
])  # fmt: skip
def test_frozen_embeddings_freeze_the_copy(family: str, task: Any, saved: str, layer: str) -> None:
    sent = update_of(family, task, [saved], layer, "frozen-embeddings").message.gradients
    assert sent and not any(saved in name for name in sent)


def test_a_text_is_read_by_the_output_layer_where_adapters_show_too_little_of_it() -> None:
    """The query's adapter shows nothing of the first token. No text was accepted, and the search went on for hours."""
    seen = observe(update_of("llama", "causal", ["lm_head"], "q_proj"), HONEST_SERVER)
    found = attack("span")(seen, rng=generator(0), budget=Budget())
    assert found.tokens == (tuple(TEXT),) and found.confidence == "verified"


def test_adapters_of_queries_alone_are_said_to_tell_nothing() -> None:
    seen = observe(update_of("llama", "causal", [], "q_proj"), HONEST_SERVER)
    with pytest.raises(NotApplicable):
        attack("span")(seen, rng=generator(0), budget=Budget())


@pytest.mark.parametrize("text", [TEXT, [CLS, 40, 3, 41, 3, 60, 3]])
def test_fresh_adapters_of_values_give_a_short_text(text: list[int]) -> None:
    """Of a repeated word, block 0 has one input, and the text was cut before it."""
    seen = observe(update_of("llama", "causal", [], "q_proj,v_proj", rank=8, text=text), HONEST_SERVER)
    found = attack("span")(seen, rng=generator(0), budget=Budget())
    assert found.tokens == (tuple(text),) and found.confidence == "verified"


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_fresh_adapters_of_a_classifier_on_a_decoder_give_a_text_beside_its_head(family: str) -> None:
    """The head reads the state of one token of a text. It stood in for all other layers, and no text was found."""
    sent = update_of(family, "classification", ["score"], "q_proj,v_proj", rank=8, blocks=3)
    found = attack("span")(observe(sent, HONEST_SERVER), rng=generator(0), budget=Budget())
    assert found.tokens == (tuple(TEXT),) and found.confidence == "verified"


def test_the_head_of_a_classifier_alone_is_said_to_tell_nothing() -> None:
    seen = observe(update_of("llama", "classification", ["score"], "q_proj"), HONEST_SERVER)
    kept = replace(seen.message, gradients={n: g for n, g in seen.gradients.items() if "score" in n})
    with pytest.raises(NotApplicable):
        attack("span")(replace(seen, message=kept), rng=generator(0), budget=Budget())


@pytest.mark.parametrize(("family", "layers"), [("gpt2", "c_attn"), ("opt", "q_proj,v_proj")])
def test_fresh_adapters_give_a_text_where_positions_are_embedded(family: str, layers: str) -> None:
    """The run up to block 0 keeps no keys. Their number was taken for the place, and no second word was accepted."""
    seen = observe(update_of(family, "causal", [], layers, rank=8), HONEST_SERVER)
    found = attack("span")(seen, rng=generator(0), budget=Budget())
    assert found.tokens == (tuple(TEXT),) and found.confidence == "verified"


def test_fresh_adapters_of_fewer_dimensions_than_tokens_say_so() -> None:
    seen = observe(
        update_of("llama", "causal", [], "q_proj,v_proj", rank=4, text=[CLS, 40, 3, 41, 9, 60, 61]), HONEST_SERVER
    )
    with pytest.raises(AttackFailed, match="no row space: either the batch holds 4 tokens or more"):
        attack("span")(seen, rng=generator(0), budget=Budget())


def in_second_round(family: str, task: Any, first: list[int], second: list[int]) -> Any:
    """The step with ``second`` of adapters of rank 12 after one with ``first``."""
    layers = {"gpt2": ["c_attn"], "bert": ["query", "value"]}.get(family, ["q_proj", "v_proj"])
    model = peft.get_peft_model(tiny(family, task, blocks=3), peft.LoraConfig(r=12, target_modules=layers))
    words = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    sent = step(model, batch_of([first], task, [0]), task=task, vocabulary=words, rng=generator(0, "step"))
    with torch.no_grad():
        for name, gradient in sent.message.gradients.items():
            model.get_parameter(name).sub_(gradient)
    return step(model, batch_of([second], task, [0]), task=task, vocabulary=words, rng=generator(0, "step"))


SHORT = [CLS, 33, 34, 35]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "bert"])
def test_adapters_after_a_first_round_with_a_shorter_text_give_a_text(family: str) -> None:
    """B has as many directions as the first text had tokens. The first matrix's gradient shows no more, and the second's was
    not looked at."""
    task, text = "classification" if family == "bert" else "causal", [CLS, 40, 3, 41, 9, 60, 61, 70]
    found = attack("span")(
        observe(in_second_round(family, task, SHORT, text), HONEST_SERVER), rng=generator(0), budget=Budget()
    )
    assert found.tokens == (tuple(text),) and found.confidence == "verified"


def test_combinations_of_more_inputs_than_adapters_show_are_no_row_space() -> None:
    """They were taken for the inputs, and their number for the length of the text."""
    text = [CLS, 40, 3, 41, 9, 60, 61, 70, 44, 52, 53, 54, 57, 58]
    seen = observe(in_second_round("llama", "causal", SHORT, text), HONEST_SERVER)
    assert block_spaces(seen, visible_blocks(seen)) == {}
    with pytest.raises(AttackFailed, match="the gradients show no row space: either the batch holds"):
        attack("span")(seen, rng=generator(0), budget=Budget())


ENCODER = ["query,value", "query", "value", "query,key,value"]


@pytest.mark.parametrize("layers", ENCODER)
def test_fresh_adapters_of_an_encoder_give_a_text_shorter_than_their_rank(layers: str) -> None:
    seen = observe(update_of("bert", "classification", [], layers, rank=8), HONEST_SERVER)
    found = attack("span")(seen, rng=generator(0), budget=Budget())
    assert found.tokens == (tuple(TEXT),) and found.confidence == "verified"


def test_fresh_adapters_of_a_real_encoder_give_a_batch() -> None:
    """Of words that both texts have, every place of one is in the row space with the places of the other."""
    read_and_prove("minilm", ["query", "value"], "The invoice was sent to Maria.", "It was Maria who paid the invoice.")


@pytest.mark.parametrize(("rank", "defense"), [(5, "none"), (8, "dropout:0.1")])
def test_fresh_adapters_of_an_encoder_that_tell_nothing_are_said_to(rank: int, defense: str) -> None:
    seen = observe(update_of("bert", "classification", [], "query,value", defense, rank=rank), HONEST_SERVER)
    with pytest.raises(NotApplicable, match="fewer tokens than their rank, and none under dropout"):
        attack("span")(seen, rng=generator(0), budget=Budget())


def test_what_fresh_adapters_rule_out_holds_every_input_of_the_text() -> None:
    seen = observe(update_of("bert", "classification", [], "query,value", rank=8), HONEST_SERVER)
    space = adapter_spaces(seen, most=1)[0]
    own = (
        Inputs(seen.model).deep(torch.tensor([TEXT]), torch.ones(1, len(TEXT)), parts(seen.model).blocks[:1])[0][0].double()
    )
    assert space.rank == len(TEXT) and bool((space.residual(own) <= space.tolerance(own)).all())
    others = torch.randn(99, own.shape[1], generator=generator(1), dtype=torch.float64)
    assert float(space.residual(others).min()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layers"), [("mpnet", ["q", "v"]), ("distilbert", ["q_lin", "v_lin"])])
def test_fresh_adapters_of_larger_encoders_give_a_text(pretrained: Path, name: str, layers: list[str]) -> None:
    read_and_prove(str(pretrained / name), layers, "The invoice was sent to Maria.")


def read_and_prove(model: str, layers: list[str], *texts: str) -> None:
    victim = load(model, "classification")
    config = peft.LoraConfig(task_type="SEQ_CLS", r=16 * len(texts), target_modules=layers)
    examples = [Example(text, label=n % 2) for n, text in enumerate(texts)]
    batch = encode(examples, victim.tokenizer, "classification", max_length=64, num_labels=2)
    made, rng = peft.get_peft_model(victim.model, config), generator(0, "step")
    truth = step(made, batch, task="classification", vocabulary=victim.vocabulary, rng=rng)
    found = attack("span")(observe(truth, HONEST_SERVER), rng=generator(0), budget=Budget())
    assert sorted(found.tokens) == sorted(tuple(batch.ids(n)) for n in range(len(texts)))
    assert found.confidence == "verified"


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "saved"), [(16, []), (8, ["lm_head"])])
def test_fresh_adapters_of_a_real_decoder_give_a_text(pretrained: Path, rank: int, saved: list[str]) -> None:
    victim = load(pretrained / "smollm2", "causal")
    config = peft.LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], modules_to_save=saved)
    batch = encode([Example("The invoice was sent to Maria.")], victim.tokenizer, "causal", max_length=64, num_labels=2)
    model, rng = peft.get_peft_model(victim.model, config), generator(0, "step")
    truth = step(model, batch, task="causal", vocabulary=victim.vocabulary, rng=rng)
    found = attack("span")(observe(truth, HONEST_SERVER), rng=generator(0), budget=Budget())
    assert found.tokens == (tuple(batch.ids(0)),) and found.confidence == "verified"


@pytest.mark.parametrize("count", [8, 16, 32])
def test_a_few_singular_values_have_no_end_by_chance(count: int) -> None:
    for seed in range(300):
        values = 10 ** (-4 * torch.rand(count, generator=generator(seed), dtype=torch.float64)).sort(descending=True).values
        assert row_space([values.diag()]) is None


def test_all_embeddings_beside_a_copy_are_known_as_such() -> None:
    found = parts(peft.get_peft_model(tiny("bert", "classification"), peft.LoraConfig(
        r=2, target_modules=["query"], modules_to_save=["word_embeddings"],
    )))  # fmt: skip
    assert {n.split(".embeddings.")[1].split(".")[0] for n in found.embedding_names} >= {
        "word_embeddings", "position_embeddings", "LayerNorm",
    }  # fmt: skip


@pytest.mark.parametrize("options", [*WORDS, {"modules_to_save": ["word_embeddings"]}])
def test_an_adapter_of_the_word_embedding_is_asked_and_attacked_only_as_a_whole(
    folder: Path, tmp_path: Path, options: Any
) -> None:
    base = load(folder, "classification").model
    base.config._name_or_path = str(folder)
    made = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", r=2, **{"target_modules": ["query"], **options}))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "lora_embedding_A" in name or "tokens_delta" in name:
                weight.normal_()
    made.save_pretrained(tmp_path / "adapter")
    victim = load(tmp_path / "adapter", "classification", attacked=False)
    assert victim.vocabulary.size == token_count(victim.model) == 300
    ids = torch.tensor([[11, 40, 41]])
    asked = victim.model.get_input_embeddings()(ids)
    assert torch.allclose(token_rows(victim.model)[ids], asked, atol=1e-5), "with the adapter's part"
    plain = load(folder, "classification").model.get_input_embeddings()(ids)
    whole = "modules_to_save" in options
    assert torch.equal(asked, plain) == whole
    with nullcontext() if whole else pytest.raises(InputError, match="the word embedding, is inside an adapter"):
        assert load(tmp_path / "adapter", "classification").model
