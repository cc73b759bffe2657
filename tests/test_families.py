"""The model families: each is read as it should be, or refused when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from rasura.attacks.updates.embedding_rows import EmbeddingRows
from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.sentences import checker
from rasura.core.batches import Batch
from rasura.core.interfaces import Budget, InputError
from rasura.core.rng import generator
from rasura.core.threat import adversary_copy
from rasura.core.values import Grant, Observation
from rasura.testing.tiny import (
    ALL,
    CLS,
    DECODERS,
    PAD,
    SEP,
    UNORDERED,
    UNSUPPORTED,
    VOCABULARY,
    batch_of,
    tiny,
    tokenizer_folder,
)
from rasura.victims import plugins
from rasura.victims.loading import Victim, load
from rasura.victims.models import QKV_NAMES, layer_inputs, parts
from rasura.victims.positions import first_inputs, position_ids, position_rows
from rasura.victims.step import step
from rasura.victims.structure import verify_parts

TEXT = "the w40 w41 and w42 . w60"
READ = [f for f in ALL if f not in UNSUPPORTED]
LOADED = [f for f in READ if f != "qwen2"]  # whose tokenizer transformers takes for its own, whatever the folder holds
TASKS = [(f, "classification") for f in LOADED] + [(f, "causal") for f in DECODERS if f in LOADED]


def observed(victim: Victim) -> tuple[tuple[int, ...], Observation]:
    """The ids of ``TEXT``, and what the server sees of one step on it behind no protection."""
    ids = torch.tensor([victim.tokenizer(TEXT)["input_ids"]])
    labels = ids if victim.task == "causal" else torch.tensor([1])
    batch = Batch(ids, torch.ones_like(ids), labels, (TEXT,), (TEXT,), special_ids=victim.vocabulary.special_ids)
    sent = step(victim.model, batch, task=victim.task, vocabulary=victim.vocabulary, rng=generator(0))
    granted = {Grant.MODEL: adversary_copy(victim.model), Grant.BASE_MODEL: victim.vocabulary, Grant.BATCH_SIZE: 1}
    return tuple(ids[0].tolist()), Observation(sent.message, victim.task, granted)


@pytest.mark.parametrize(("family", "task"), TASKS)
def test_a_family_that_loads_is_read_exactly(family: str, task: str, tmp_path: Path) -> None:
    victim = load(tokenizer_folder(tiny(family, task, num_labels=2), tmp_path), task)  # type: ignore[arg-type]
    text, seen = observed(victim)
    guess = Span()(seen, rng=generator(0), budget=Budget("quick"))
    if family in UNORDERED and guess.confidence != "verified":  # random attention hardly tells places apart
        assert not guess.ordered and [sorted(t) for t in guess.tokens] == [sorted(text)]
    else:
        assert guess.tokens == (text,)
        assert victim.vocabulary.text(guess.tokens[0]) == TEXT


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_a_family_whose_parts_are_not_found_is_refused_at_load(family: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tiny(family, "classification", num_labels=2), tmp_path)
    with pytest.raises(InputError, match=r"looked for|layer among") as caught:
        load(folder, "classification")
    assert "\n" not in str(caught.value) and all(name in str(caught.value) for name in sorted(QKV_NAMES))


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_a_model_that_is_only_trained_or_asked_needs_no_parts(family: str, tmp_path: Path) -> None:
    folder = tokenizer_folder(tiny(family, "classification", num_labels=2), tmp_path)
    assert load(folder, "classification", attacked=False).num_labels == 2


def test_every_family_has_its_place_in_one_list() -> None:
    assert len(ALL) == len(set(ALL)) == 29
    assert set(UNSUPPORTED) | set(UNORDERED) | set(DECODERS) <= set(ALL)


@pytest.mark.parametrize("shape", [{}, {"word_embed_proj_dim": 32}, {"do_layer_norm_before": False}])
def test_opt_with_and_without_projection_is_read_at_its_offset(shape: dict[str, object]) -> None:
    options: dict[str, object] = {"word_embed_proj_dim": 64, **shape}
    config = transformers.OPTConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, ffn_dim=128, pad_token_id=PAD,
        max_position_embeddings=64, bos_token_id=CLS, eos_token_id=SEP, num_labels=2, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    rows, ids = position_rows(model, 3), position_ids(model, 3)
    assert rows is not None and ids is not None
    assert rows.tolist() == [2, 3, 4] and ids.tolist() == [0, 1, 2]
    batch = Batch(
        torch.tensor([[CLS, 3, 40, 41, 9, SEP]]), torch.ones(1, 6, dtype=torch.long), torch.tensor([1]), ("",), ("",),
        special_ids=VOCABULARY.special_ids,
    )  # fmt: skip
    sent = step(model, batch, task="classification", vocabulary=VOCABULARY, rng=generator(0))
    granted = {Grant.MODEL: adversary_copy(model), Grant.BASE_MODEL: VOCABULARY, Grant.BATCH_SIZE: 1}
    seen = Observation(sent.message, "classification", granted)
    text = (CLS, 3, 40, 41, 9, SEP)
    assert Span()(seen, rng=generator(0), budget=Budget("quick")).tokens == (text,)
    words = EmbeddingRows()(seen, rng=generator(0), budget=Budget("quick"))
    # Rows of words that are projected before places are added to them cannot be laid beside the places' rows.
    ordered = options["word_embed_proj_dim"] == 64
    assert words.ordered == ordered and words.tokens == (text if ordered else tuple(sorted(text)),)


@pytest.mark.parametrize("family", [f for f in READ if f != "mpnet"])
def test_a_token_alone_gives_the_input_that_it_gives_in_its_text(family: str) -> None:
    model = tiny(family, "classification")
    ids = torch.tensor([[CLS, 70, 3, 70, 41, SEP]])
    module = parts(model).blocks[0].qkv[0].module
    with torch.no_grad():
        whole = layer_inputs(model, [module], input_ids=ids, attention_mask=torch.ones_like(ids))[module][0]
    for place in range(ids.shape[1]):
        assert torch.allclose(first_inputs(model, ids[0, place : place + 1], place)[0], whole[place], atol=1e-5)


# --- structure that lies: each model has parts with the right names, and one of them does something else


def mixing(model: nn.Module) -> None:
    model.bert.embeddings.LayerNorm.register_forward_hook(lambda m, a, out: out + 0.5 * out.roll(1, 1))


def another_input(model: nn.Module) -> None:
    model.get_submodule("bert.encoder.layer.1").attention.self.value.register_forward_pre_hook(lambda m, a: (a[0].flip(1),))


def not_a_number(model: nn.Module) -> None:
    model.bert.embeddings.LayerNorm.register_forward_hook(lambda m, a, out: out * float("nan"))


def all_alike(model: nn.Module) -> None:
    model.bert.embeddings.LayerNorm.register_forward_hook(lambda m, a, out: torch.ones_like(out))


def unused_head(model: nn.Module) -> None:
    model.unused = nn.Linear(64, 64)


def shuffled_positions(model: nn.Module) -> None:
    table = model.bert.embeddings.position_embeddings
    table.register_forward_pre_hook(lambda m, a: (a[0] * 3 % 64,))


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (mixing, "does not depend on the token there"),
        (another_input, "read different inputs"),
        (not_a_number, "NaN"),
        (all_alike, "the same input"),
        (unused_head, "found as the output layer, but it does not run"),
        (shuffled_positions, "neighbouring rows"),
    ],
)
def test_parts_that_do_something_else_are_refused(break_it: object, said: str) -> None:
    model = tiny("bert", "classification")
    verify_parts(model, VOCABULARY)
    model = tiny("bert", "classification")
    break_it(model)  # type: ignore[operator]
    with pytest.raises(InputError, match=said) as caught:
        verify_parts(model, VOCABULARY)
    assert "\n" not in str(caught.value)


def test_layers_that_read_the_table_of_distances_too_are_not_read() -> None:
    """As DeBERTa is published, its keys and queries are shared. Their row space would hold more than the tokens."""
    model = tiny("deberta-v3", "classification", num_labels=2)
    assert [lin.module.split(".")[-1] for b in verify_parts(model, VOCABULARY).blocks for lin in b.qkv] == ["value_proj"] * 2
    batch = batch_of([[CLS, 40, 3, 41, 9, 42, SEP]], "classification", [1])
    sent = step(model, batch, task="classification", vocabulary=VOCABULARY, rng=generator(0))
    seen = Observation(sent.message, "classification", {Grant.MODEL: adversary_copy(model), Grant.BASE_MODEL: VOCABULARY})
    behind = checker(seen, {}, Inputs(seen.model))
    assert behind is not None and "attention" not in behind.layer


def test_an_attention_layer_that_runs_twice_is_refused() -> None:
    model = tiny("bert", "classification")
    attention = model.get_submodule("bert.encoder.layer.0.attention.self")

    def once_more(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        module.query(args[0])

    attention.register_forward_pre_hook(once_more)
    with pytest.raises(InputError, match="runs 2 times where its block runs 1"):
        verify_parts(model, VOCABULARY)


def test_positions_that_a_padding_id_moves_are_refused() -> None:
    """MPNet takes id 1 for padding whatever its config says: a text whose first token has that id is one place off."""
    model = tiny("mpnet", "classification")
    with pytest.raises(InputError, match="at position 0"):
        verify_parts(model, VOCABULARY)


@pytest.mark.parametrize(
    ("head", "task", "said"),
    [
        ("TokenClassification", "classification", "answers for each token"),
        ("MaskedLM", "classification", "answers for each token"),
        ("MaskedLM", "causal", "sees the tokens that a causal language model has to predict"),
        ("LMHeadModel", "causal", "sees the tokens that a causal language model has to predict"),
        ("QuestionAnswering", "classification", "gives no logits"),
    ],
)
def test_a_model_of_another_task_is_refused(head: str, task: Any, said: str) -> None:
    """A step of its loss on labels of this task would be none of its training."""
    kind = f"Bert{head}" if head.endswith("Model") else f"BertFor{head}"
    model = getattr(transformers, kind)(tiny("bert", "classification", num_labels=2, blocks=1).config).eval()
    with pytest.raises(InputError, match=said):
        verify_parts(model, VOCABULARY, task)


def test_a_one_block_decoder_is_known_to_see_only_the_past() -> None:
    assert parts(tiny("opt", "classification", blocks=1)).causal
    assert not parts(tiny("bert", "classification", blocks=1)).causal


def test_an_installed_package_may_bring_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brought.py").write_text(
        "from dataclasses import replace\n"
        "from rasura.core.specs import ModelSpec\n"
        "from rasura.testing.tiny import tiny\n"
        "from rasura.victims.models import parts\n"
        "make = lambda model: replace(parts(tiny('bert', 'classification')), hidden=7)\n"
        "SPEC = ModelSpec(name='brought', about='a test', source='none', make=make)\n",
        encoding="utf-8",
    )
    about = tmp_path / "brought-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[rasura.models]\nbrought = brought:SPEC\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._specs.cache_clear()
    try:
        model = tiny("bert", "classification")
        model.config.model_type = "brought"
        assert parts(model).hidden == 7
    finally:
        plugins._specs.cache_clear()
