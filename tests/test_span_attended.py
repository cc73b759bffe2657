"""The order of a decoder's texts under dropout of attention weights: read from the state behind the attention of block 0."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.attended import NEAR, attended, nearest
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import UNKNOWN, Observation, Reconstruction, Vocabulary
from rasura.data.text import Example, encode
from rasura.registry import parse_defense
from rasura.testing.tiny import PAD, VOCABULARY, batch_of, tiny
from rasura.victims.first_attention import first_attention
from rasura.victims.loading import load
from rasura.victims.models import evaluating, layer_inputs
from rasura.victims.step import step

BARE = Vocabulary(VOCABULARY.size, VOCABULARY.decode, VOCABULARY.encode, (), (), PAD, frozenset({PAD}))
"""A vocabulary without start and end tokens."""

PLAIN = ["llama", "mistral", "qwen2", "gemma"]
"""Families whose attention is added to the residual as it is."""

OTHERS = ["gpt2", "gpt-neox", "bloom", "falcon", "opt"]
"""Families with positions in the embedding, values without a layer of their own, or another norm."""


def client(model: nn.Module, texts: list[list[int]], protection: str) -> Observation:
    """What the server sees of one step on ``texts``, with ``protection``."""
    sent = step(
        model, batch_of(texts, "causal"), parse_defense(protection), task="causal", vocabulary=BARE,
        rng=generator(0, "step"),
    )  # fmt: skip
    return observe(sent, HONEST_SERVER)


def read(seen: Observation) -> Reconstruction:
    return Span()(seen, rng=generator(0, "attack"), budget=Budget())


@pytest.mark.parametrize("family", [*PLAIN, "qwen3", "gemma3"])
def test_the_state_behind_attention_is_the_sum_that_it_is_said_to_be(family: str) -> None:
    model = tiny(family, "causal", hidden=32).double()
    block = first_attention(model)
    assert block is not None
    ids = torch.tensor([[40, 3, 41, 40, 9]])
    with evaluating(model):
        shown = layer_inputs(model, [block.linears[0].module], input_ids=ids, attention_mask=torch.ones_like(ids))
    added = torch.einsum("hs,sho->o", block.weights(ids)[0], block.shares(ids[0]))
    x, z = block.embedded(ids[0])[-1], shown[block.linears[0].module][0, -1]
    span = torch.stack([block.gain * x, block.gain * added], 1)
    factors = torch.linalg.lstsq(span, z[:, None]).solution
    assert torch.allclose(span @ factors, z[:, None], rtol=1e-4, atol=1e-5 * float(z.abs().max()))
    if family in PLAIN:
        assert torch.allclose(factors[0], factors[1], rtol=1e-4), "x and what attention adds have the same factor"


@pytest.mark.parametrize("family", OTHERS)
def test_another_form_of_attention_is_left_alone(family: str) -> None:
    assert first_attention(tiny(family, "causal")) is None


def test_attention_that_gives_no_weights_is_left_alone() -> None:
    model = tiny("llama", "causal")
    model.config._attn_implementation = "sdpa"
    assert first_attention(model) is None


@pytest.mark.parametrize("rate", [0.1, 0.2])
@pytest.mark.parametrize("family", PLAIN)
def test_texts_come_back_in_order_under_dropout_of_attention(family: str, rate: float) -> None:
    texts = [[40, 3, 41, 9, 3, 42, 50], [51, 4, 52, 3, 51, 44]]
    seen = client(tiny(family, "causal", hidden=160), texts, f"frozen-embeddings+dropout:{rate}")
    guess = read(seen)
    assert guess.ordered
    assert sorted(guess.tokens) == sorted((*text[:-1], UNKNOWN) for text in texts), "the last token has no gradient"
    assert guess.confidence != "verified", "nothing can be recomputed under dropout"


def test_a_word_that_stands_twice_running() -> None:
    model = tiny("llama", "causal", hidden=160)
    one = [[40, 3, 3, 41, 40, 40, 9, 60]]
    assert read(client(model, one, "frozen-embeddings+dropout:0.2")).tokens == ((*one[0][:-1], UNKNOWN),)


def test_dropout_that_nobody_announced_hides_no_order() -> None:
    text = [40, 3, 41, 9, 3, 42, 50]
    seen = client(tiny("llama", "causal", hidden=160), [text], "frozen-embeddings+dropout:0.2")
    silent = replace(seen, granted={k: v for k, v in seen.granted.items() if k.name != "MECHANISM"})
    guess = read(silent)
    assert guess.tokens == ((*text[:-1], UNKNOWN),) and guess.ordered and guess.confidence != "verified"


def test_texts_too_long_for_the_system_stay_a_bag() -> None:
    text = list(range(10, 34))
    seen = client(tiny("llama", "causal", hidden=64), [text], "frozen-embeddings+dropout:0.1")
    assert attended(seen, text[:-1], size=1) is None
    guess = read(seen)
    assert not guess.ordered and set(guess.tokens[0]) == set(text[:-1])


def test_a_missing_or_a_foreign_word_is_not_put_in_order() -> None:
    text = [40, 3, 41, 9, 3, 42, 50]
    seen = client(tiny("llama", "causal", hidden=160), [text], "frozen-embeddings+dropout:0.1")
    found = attended(seen, [40, 3, 41, 9, 42], size=1)
    assert found is not None and found.whole and found.active and found.texts == (tuple(text[:-1]),)
    assert attended(seen, [40, 3, 41, 9, 42, 77], size=1) is None, "a word that no text has is left over"
    short = attended(seen, [40, 3], size=1)
    assert short is None or not short.whole, "texts that leave a part of the row space unexplained are not whole"


def test_layers_behind_attention_out_of_sight_leave_a_bag() -> None:
    text = [40, 3, 41, 9, 3, 42, 50]
    seen = client(tiny("llama", "causal", hidden=160), [text], "frozen-embeddings+dropout:0.1")
    kept = {n: g for n, g in seen.message.gradients.items() if ".mlp." not in n}
    assert attended(replace(seen, message=replace(seen.message, gradients=kept)), text[:-1], size=1) is None


@pytest.mark.parametrize("noise", [0.01, 0.1])
def test_noise_gives_no_other_order(noise: float) -> None:
    text = [40, 3, 41, 9, 3, 42, 50]
    seen = client(tiny("llama", "causal", hidden=160), [text], "frozen-embeddings+dropout:0.1")
    rng = torch.Generator().manual_seed(0)
    noisy = {n: g + noise * g.std() * torch.randn(g.shape, generator=rng) for n, g in seen.message.gradients.items()}
    found = attended(replace(seen, message=replace(seen.message, gradients=noisy)), text[:-1], size=1)
    assert found is None or not found.whole or found.texts == (tuple(text[:-1]),)


def planted(unknown: int, gone: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of which dropout removed some, hidden among states of the same token: ``w``, ``null``, ``goal``, the truth."""
    rng = torch.Generator().manual_seed(unknown)
    goal = torch.rand(60, generator=rng, dtype=torch.double) + 0.05
    truth = goal * (torch.rand(60, generator=rng) > gone)
    null = torch.linalg.qr(torch.randn(60, unknown, generator=rng, dtype=torch.double)).Q
    return truth + null @ torch.randn(unknown, generator=rng, dtype=torch.double), null, goal, truth


@pytest.mark.parametrize(("unknown", "gone"), [(1, 0.1), (3, 0.3), (8, 0.2)])
def test_the_state_of_a_place_is_found_among_those_of_the_same_token(unknown: int, gone: float) -> None:
    w, null, goal, truth = planted(unknown, gone)
    found, scale, agreement = nearest(w, null, goal, scaled=False)
    assert torch.allclose(found, truth, atol=NEAR * float(goal.min())) and scale == 1.0 and agreement > 0.4
    wrong = goal[torch.randperm(60, generator=torch.Generator().manual_seed(1))]
    assert nearest(w, null, wrong, scaled=False)[2] < 0.2, "another place's weights agree by chance only"
    assert nearest(w[:5], null[:5], goal[:5], scaled=True)[2] <= 0.5 or unknown == 1


def test_a_scale_is_found_with_the_weights() -> None:
    w, null, goal, truth = planted(2, 0.2)
    found, scale, _ = nearest(3 * w, null, goal, scaled=True)
    assert scale == pytest.approx(3.0) and torch.allclose(found, 3 * truth)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "rate"), [("smollm2", 1, 0.5), ("smollm2", 4, 0.1), ("gemma3", 1, 0.1)])
def test_pretrained_decoders_under_dropout(pretrained: Path, name: str, size: int, rate: float) -> None:
    texts = ["She paid the rent on Friday, and then she left.", "She asked Mr. Berg about his knee, twice.",
             "Six of the ten letters came back unopened.", "My account number is 4711, not 4712."]  # fmt: skip
    victim = load(pretrained / name, "causal")
    examples = [Example(text, None, None) for text in texts[:size]]
    batch = encode(examples, victim.tokenizer, "causal", max_length=64, num_labels=2)
    sent = step(
        victim.model, batch, parse_defense(f"frozen-embeddings+dropout:{rate}"), task="causal",
        vocabulary=victim.vocabulary, rng=generator(0, "step"),
    )  # fmt: skip
    guess = read(observe(sent, HONEST_SERVER))
    assert guess.ordered and guess.confidence == "span"
    assert sorted(guess.tokens) == sorted((*batch.ids(k)[:-1], UNKNOWN) for k in range(size))
