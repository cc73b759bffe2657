"""The span attack on decoders as they are: without a start token, with words that repeat, with an unseen last token."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from span_setting import BARE, in_later_round, seen_by_server, seen_of
from torch import nn
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from rasura.attacks.updates import best
from rasura.attacks.updates.span import Span, endings, prefixes
from rasura.attacks.updates.span import predicted as predictions
from rasura.attacks.updates.span.attack import dager
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.predicted import predicted
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.local import Adapter
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import UNKNOWN, Message, Observation, Reconstruction
from rasura.data.text import Example, encode
from rasura.registry import parse_defense
from rasura.testing.tiny import CLS, DECODERS, VOCABULARY, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.models import parts
from rasura.victims.step import step

UNSTATED = 10**6
"""A window that no text reaches, stated where the true one goes by another name."""

ROTARY = ["llama", "qwen2", "gemma", "gpt-neox"]


@pytest.mark.parametrize("family", DECODERS)
def test_a_head_that_ran_once_gives_what_each_run_of_it_gives(family: str) -> None:
    dtype = torch.float32 if family == "mixtral" else torch.float64  # torch groups no products in float64
    model = tiny(family, "causal", hidden=32).to(dtype).eval()
    inputs = Inputs(model)
    tokens = torch.arange(5, 105)
    for head in (torch.empty(0, dtype=torch.long), torch.tensor([40]), torch.tensor([40, 3, 41, 40, 9, 7, 3])):
        found = inputs.following(head, tokens, inputs.parts.blocks)
        whole = torch.cat([head.expand(len(tokens), -1), tokens[:, None]], 1)
        for index, x in inputs.deep(whole, torch.ones_like(whole), inputs.parts.blocks).items():
            far = (found[index] - x[:, -1]).norm(dim=1) / x[:, -1].norm(dim=1)
            assert float(far.max()) < 10 * torch.finfo(torch.float32).eps, "softmax is float32 in some families"
    assert inputs._ways, "the head runs with every token"


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_layer_that_sees_the_last_tokens_only_gets_them(family: str) -> None:
    model = tiny(family, "causal", hidden=32).double().eval()
    model.config.sliding_window = 4
    inputs = Inputs(type(model)(model.config).double().eval())
    head, tokens = torch.tensor([40, 3, 41, 40, 9, 7, 3]), torch.arange(5, 25)
    whole = torch.cat([head.expand(len(tokens), -1), tokens[:, None]], 1)
    found = inputs.following(head, tokens, inputs.parts.blocks)
    for index, x in inputs.deep(whole, torch.ones_like(whole), inputs.parts.blocks).items():
        assert torch.allclose(found[index], x[:, -1], atol=1e-6)


@pytest.mark.parametrize(
    ("longest", "window", "stated"), [(64, 256, 256), (512, 256, 256), (512, 256, UNSTATED), (512, 8, UNSTATED)]
)
def test_tokens_abreast_are_tried_with_as_many_as_run(longest: int, window: int, stated: int) -> None:
    """GPT-Neo's layers cut a mask out of a table of the model's length, and some see the last tokens only. Two tokens
    abreast show neither."""
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=300, hidden_size=32, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]],
        window_size=window, max_position_embeddings=longest, bos_token_id=CLS, eos_token_id=CLS,
    )  # fmt: skip
    inputs = Inputs(GPTNeoForCausalLM(config).double().eval())
    inputs.model.config.window_size = stated
    head, tokens = torch.tensor([40, 3, 41, 40, 9, 7, 3, 42, 50]), torch.arange(5, 295)
    for some in (tokens[:2], tokens):
        whole = torch.cat([head.expand(len(some), -1), some[:, None]], 1)
        found = inputs.following(head, some, inputs.parts.blocks)
        for index, x in inputs.deep(whole, torch.ones_like(whole), inputs.parts.blocks).items():
            assert torch.allclose(found[index], x[:, -1], atol=1e-6)


def test_a_model_that_keeps_nothing_runs_the_head_with_every_token() -> None:
    model = tiny("gpt2", "causal", hidden=32).eval()
    inputs = Inputs(model)
    forward = model.forward

    def forgets(*args: Any, **given: Any) -> Any:
        given.pop("past_key_values", None)
        return forward(*args, **given)

    model.forward = forgets  # type: ignore[method-assign]
    head, tokens = torch.tensor([40, 3, 41]), torch.arange(5, 25)
    whole = torch.cat([head.expand(len(tokens), -1), tokens[:, None]], 1)
    found = inputs.following(head, tokens, inputs.parts.blocks)
    for index, x in inputs.deep(whole, torch.ones_like(whole), inputs.parts.blocks).items():
        assert torch.allclose(found[index], x[:, -1], atol=1e-6)


def read(family: str, task: str, rows: list[list[int]]) -> Reconstruction:
    seen = seen_of(tiny(family, task, hidden=96), batch_of(rows, task, [1, 0, 2, 1][: len(rows)]), task)
    return Span()(seen, rng=generator(0, "attack"), budget=Budget())


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("task", ["classification", "causal"])
def test_a_run_of_the_first_token_is_no_evidence_of_a_longer_text(family: str, task: str) -> None:
    text = [40, 3, 41, 9, 3, 42, 50, 51, 4]
    guess = read(family, task, [text])
    assert guess.ordered and guess.tokens == (tuple(text),) and guess.confidence == "verified"


@pytest.mark.parametrize("task", ["classification", "causal"])
def test_a_text_that_begins_with_a_repeated_word_comes_back(task: str) -> None:
    text = [40, 40, 40, 41, 9, 41, 41, 7]
    guess = read("llama", task, [text])
    assert guess.tokens == (tuple(text),) and guess.confidence == "verified"


@pytest.mark.parametrize("task", ["classification", "causal"])
def test_texts_that_share_their_beginning_come_back(task: str) -> None:
    rows = [[40, 3, 41, 9, 60, 61], [40, 3, 41, 62, 4], [3, 40, 41, 9, 60, 61, 63], [70, 70, 9, 5]]
    guess = read("llama", task, rows)
    assert sorted(guess.tokens) == sorted(map(tuple, rows)) and guess.confidence == "verified"


def test_texts_that_fit_well_go_before_longer_ones_that_hardly_fit() -> None:
    """One direction of this row space is so weak that a quarter of it is noise: by the tolerance too many texts fit."""
    rows = [[1, 40, 3, 41, 9, 3, 42, 2], [1, 50, 51, 4, 52, 2], [1, 3, 60, 61, 62, 4, 60, 9, 2], [1, 70, 9, 2]]
    guess = read("bloom", "classification", rows)
    assert sorted(guess.tokens) == sorted(map(tuple, rows)) and guess.confidence == "verified"


def test_the_last_token_is_named_by_any_one_block() -> None:
    """No output layer is in sight, and the model, which is random, does not expect the token."""
    model, rows = tiny("llama", "causal", blocks=3), [[1, 40, 3, 41, 9, 277]]
    for block in (1, 2):
        guess = Span()(
            seen_by_server(model, batch_of(rows, "causal"), "causal", keep=f"layers.{block}."),
            rng=generator(0),
            budget=Budget(),
        )
        assert guess.tokens == (tuple(rows[0]),) and guess.confidence == "verified"


@pytest.mark.parametrize("family", DECODERS)
def test_the_last_block_alone_tells_the_next_word_of_the_whole_vocabulary(family: str) -> None:
    """The slow way is a run of the model for each word (``Grower.states``)."""
    model, text = tiny(family, "causal", hidden=48, words=500), [1, 40, 3, 41, 9, 60, 41, 277]
    seen = seen_by_server(model, batch_of([text], "causal"), "causal", keep=f"{parts(model).blocks[-1].module}.")
    tells = predicted(seen, Inputs(model))
    assert tells is not None
    for n in range(1, len(text)):
        _, (outside,) = tells.outside(torch.tensor([text[:n]]))
        others = torch.cat([outside[: text[n]], outside[text[n] + 1 :]])
        assert float(outside[text[n]]) < 5e-2 * float(others.min())  # a word may lie near: float32 leaves 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_words_that_no_layer_proposes_are_tried_after_all(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the texts begins with a rare word, and nobody expects what comes next."""
    monkeypatch.setattr(prefixes, "COMMON", 1)
    for name in ("NEAREST", "LIKELIEST", "UNCLEAR"):
        monkeypatch.setattr(predictions, name, 1)
    model, rows = tiny(family, "causal", hidden=96, blocks=3), [[277, 40, 3, 41, 9, 60, 61], [5, 50, 51, 4, 52]]
    seen = seen_of(model, batch_of(rows, "causal"), "causal")
    kept = {n: g for n, g in seen.gradients.items() if f"{parts(model).blocks[-1].module}." in n}
    guess = Span()(replace(seen, message=Message(kept)), rng=generator(0), budget=Budget())
    assert sorted(guess.tokens) == sorted(map(tuple, rows)) and guess.confidence == "verified"


@pytest.mark.parametrize(
    ("family", "keep", "block"),
    [("llama", ".mlp.", 0), ("llama", "layers.1.mlp.down", 1), ("gpt2", ".mlp.", 0), ("llama", "o_proj", 0)],
)
def test_other_layers_stand_in_for_hidden_attention(family: str, keep: str, block: int) -> None:
    model, rows = tiny(family, "causal", hidden=96), [[40, 40, 3, 41, 9, 277], [5, 50, 51, 4, 52]]
    whole = seen_of(model, batch_of(rows, "causal"), "causal")
    seen = replace(whole, message=Message({n: g for n, g in whole.gradients.items() if keep in n}))
    guess = Span()(seen, rng=generator(0), budget=Budget())
    assert sorted(guess.tokens) == sorted(map(tuple, rows)) and guess.confidence == "verified"
    assert str(guess.details["blocks"])[0] == str(block)
    with pytest.raises(NotApplicable):
        dager()(seen, rng=generator(0), budget=Budget())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "protection"), [
    ("smollm2", "frozen-embeddings+frozen-blocks:29"), ("smollm2", "frozen-embeddings+sealing:attn"),
    ("gemma3", "frozen-embeddings+frozen-blocks:17"),
])  # fmt: skip
def test_a_pretrained_decoder_is_read_by_its_last_block_and_without_attention(
    name: str, protection: str, pretrained: Path
) -> None:
    victim = load(pretrained / name, "causal")
    batch = encode([Example("The film is slow .", None, 0)], victim.tokenizer, "causal", max_length=64, num_labels=2)
    defense = parse_defense(protection)
    truth = step(victim.model, batch, defense, task="causal", vocabulary=victim.vocabulary, rng=generator(0, "step"))
    guess = Span()(observe(truth, HONEST_SERVER), rng=generator(0, "attack"), budget=Budget())
    assert guess.tokens == (tuple(batch.ids(0)),) and guess.confidence == "verified"


@pytest.mark.parametrize(("last", "settled"), [(277, True), (60, False)])
def test_best_ends_with_a_text_that_differs_from_the_update_by_rounding_alone(last: int, settled: bool) -> None:
    text = [40, 3, 41, 9, 60, 61, 70, 277]
    seen = seen_of(tiny("llama", "causal", hidden=96, words=500), batch_of([text], "causal"), "causal")
    rounded = Message({n: g.bfloat16().float() for n, g in seen.gradients.items()})
    guess = Reconstruction(((*text[:-1], last),), "matched", ordered=True)
    assert best._settled(guess, replace(seen, message=rounded), "span") == settled
    assert not best._settled(replace(guess, ordered=False), replace(seen, message=rounded), "span")
    assert best._settled(replace(guess, details={"chained": True}), replace(seen, message=rounded), "span")


def test_the_output_layer_alone_gives_the_text() -> None:
    rows = [[1, 40, 3, 41, 9, 60, 61], [1, 5, 3, 41, 62, 4]]
    seen = seen_by_server(tiny("llama", "causal", hidden=48), batch_of(rows, "causal"), "causal", keep="lm_head")
    guess = Span()(seen, rng=generator(0), budget=Budget())
    assert sorted(guess.tokens) == sorted(map(tuple, rows)) and guess.confidence == "verified"


@pytest.mark.parametrize("keep", ["embed_tokens", "norm"])
def test_what_no_layer_of_a_block_shows_is_not_applicable(keep: str) -> None:
    seen = seen_by_server(tiny("llama", "causal", hidden=48), batch_of([[1, 40, 3, 41, 9]], "causal"), "causal", keep=keep)
    with pytest.raises(NotApplicable, match="no whole query, key or value gradient is visible"):
        Span()(seen, rng=generator(0), budget=Budget())


@pytest.mark.parametrize("keep", ["k_proj", "v_proj"])
def test_layers_that_other_positions_see_predict_nothing(keep: str) -> None:
    seen = seen_by_server(tiny("llama", "causal", hidden=48), batch_of([[1, 40, 3, 41, 9]], "causal"), "causal", keep=keep)
    assert predicted(seen, Inputs(seen.model)) is None


def seen_of_adapted(rank: int, text: list[int]) -> Observation:
    model = in_later_round(tiny("llama", "causal", hidden=96, blocks=3, words=2000), "causal", Adapter(rank))
    truth = step(model, batch_of([text], "causal"), (), task="causal", vocabulary=BARE, rng=generator(0, "step"))
    return observe(truth, HONEST_SERVER)


@pytest.mark.parametrize("last", [277, 1999, 41])
def test_the_last_token_is_named_by_adapters_of_small_rank(last: int) -> None:
    """Eight dimensions tell one word of 2,000."""
    text = [40, 3, 41, 9, 60, 61, 70, last]
    guess = Span()(seen_of_adapted(8, text), rng=generator(0), budget=Budget())
    assert guess.tokens == (tuple(text),) and guess.confidence == "verified"


@pytest.mark.parametrize("module", ["lora_A.default", "base_layer"])
def test_the_last_token_against_every_word_tried(module: str) -> None:
    """The slow way: the loss' gradient by the layer's output, for every word of the vocabulary in turn."""
    text = [40, 3, 41, 9, 60, 61, 70, 277]
    model = seen_of_adapted(8, text).model.double()
    lin = next(x for x in reversed(parts(model).linears) if f"v_proj.{module}" in x.module)
    kept: list[torch.Tensor] = []
    handle = model.get_submodule(lin.module).register_forward_hook(lambda _m, _i, out: kept.append(out.requires_grad_()))
    logits = model(input_ids=torch.tensor([text[:-1]])).logits[0, -1]
    handle.remove()
    every = [
        torch.autograd.grad(nn.functional.cross_entropy(logits, torch.tensor(word)), kept[0], retain_graph=True)[0][0, -1]
        for word in range(len(logits))
    ]
    noise = 1e-3 * torch.randn(every[0].shape, generator=generator(2), dtype=torch.double)
    seen = every[277] + noise * every[277].norm() / noise.norm() * 1e-3
    cosines = nn.functional.cosine_similarity(torch.stack(every), seen, dim=1)
    named = endings._named(model, lin, text[:-1], seen)
    best = [int(k) for k in cosines.topk(endings.OPTIONS).indices if cosines[k] > endings.ALIKE]
    assert named[1] == best and best[0] == 277


@pytest.mark.parametrize(("last", "noise", "clear"), [(277, 0.0, True), (277, 1.0, False), (41, 0.0, False)])
def test_the_output_layer_names_the_only_token_that_the_loss_pulls_up(last: int, noise: float, clear: bool) -> None:
    """Tied, the rows of the text's own words say nothing; nor does noise as large as the gradient."""
    text = [40, 3, 41, 9, last]
    seen = seen_by_server(tiny("gpt2", "causal"), batch_of([text], "causal"), "causal")
    assert parts(seen.model).tied
    name = parts(seen.model).word_embedding
    gradient = seen.gradients[name]
    loud = gradient + noise * gradient.abs().max() * torch.randn(gradient.shape, generator=generator(3))
    seen = replace(seen, message=replace(seen.message, gradients={**seen.gradients, name: loud}))
    found = endings._from_output_layer(seen, [tuple(text[:-1])], Inputs(seen.model))
    assert found is not None and (found[0][0] == last) == clear and (found[0][0] == UNKNOWN) == (not clear)
    assert noise or last in found[0], "it is tried"


def test_a_last_token_that_is_not_clear_is_left_open() -> None:
    """Between two words' directions lies that of neither."""
    text = [40, 3, 41, 9, 60, 61, 70, 277]
    seen = seen_of_adapted(8, text)
    other = seen_of_adapted(8, [*text[:-1], 300]).gradients
    mixed = {n: (g + other[n]) / 2 if "layers.2." in n else g for n, g in seen.gradients.items()}
    guess = Span()(replace(seen, message=replace(seen.message, gradients=mixed)), rng=generator(0), budget=Budget())
    assert guess.confidence != "verified" and guess.tokens == ((*text[:-1], UNKNOWN),)


@pytest.mark.slow
def test_texts_padded_on_the_left_are_not_given_up_for_words_like_the_padding() -> None:
    """The last place of the padding predicts the first word, so nothing of the rest explains it. The words that were never
    trained resemble each other: by leverage all of them stood out, and this longer bag took the place of the right texts."""
    model = tiny("llama", "causal", hidden=32)
    table = model.get_parameter(parts(model).word_embedding)
    with torch.no_grad():
        noise = torch.randn(30, table.shape[1], generator=generator(3)) / table.shape[1] ** 0.5
        table[101:131] = table[100] + 0.15 * table[100].norm() * noise
    batch = batch_of([[CLS, 20, 21, 25, 22, 26, 27], [CLS, 23, 24, 28]], "causal")

    def left(tensor: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.stack([tensor[0], torch.cat([tensor.new_full((3,), fill), tensor[1, :4]])])

    ids, labels = left(batch.input_ids, 100), left(batch.labels, -100)
    batch = replace(batch, input_ids=ids, attention_mask=left(batch.attention_mask, 0), labels=labels)
    truth = step(model, batch, (), task="causal", vocabulary=VOCABULARY, rng=generator(0, "step"))
    guess = Span()(observe(truth, HONEST_SERVER), rng=generator(0), budget=Budget("quick"))
    assert guess.ordered and [text[:4] for text in guess.tokens] == [(CLS, 20, 21, 25), (CLS, 23, 24, 28)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize(
    "texts",
    [
        ["Each candidate who has interest in semantics will be admitted to the department."],
        ["no no no , he said", "Each candidate will be admitted .", "Each student left early ."],
    ],
)
def test_a_pretrained_decoder_is_read_exactly(name: str, texts: list[str], pretrained: Path) -> None:
    victim = load(pretrained / name, "causal")
    batch = encode([Example(text, None, 0) for text in texts], victim.tokenizer, "causal", max_length=64, num_labels=2)
    defense = parse_defense("frozen-embeddings")
    truth = step(victim.model, batch, defense, task="causal", vocabulary=victim.vocabulary, rng=generator(0, "step"))
    guess = Span()(observe(truth, HONEST_SERVER), rng=generator(0, "attack"), budget=Budget())
    assert sorted(guess.tokens) == sorted(tuple(batch.ids(k)) for k in range(len(batch)))
    assert guess.confidence == "verified"
