"""Causal models read from signs: the words that follow, and one text in order (``pursuit.signed``)."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import torch
from following_setting import OTHER, TEXT, read, seen_of

from rasura.attacks.updates.best import Best
from rasura.attacks.updates.embedding_rows import EmbeddingRows
from rasura.attacks.updates.pursuit import Pursuit
from rasura.attacks.updates.pursuit.fits import are_signs
from rasura.attacks.updates.pursuit.signed import Signed
from rasura.attacks.updates.pursuit.states import frequencies_of, output_of, states_of
from rasura.core.interfaces import AttackFailed, Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Grant, Message, Observation
from rasura.data.text import Example, encode
from rasura.registry import parse_defense, parse_update
from rasura.testing.tiny import CLS
from rasura.victims.loading import load
from rasura.victims.models import key_value_cache
from rasura.victims.step import step


def signed(seen: Observation) -> Signed:
    module = output_of(seen.model)
    signs = seen.gradients[f"{module}.weight"].float().sign()
    return Signed(seen, module, signs, states_of(seen, module, frequencies_of(seen), generator(0)), "default")


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi"])
def test_a_text_gives_the_rows_what_its_gradient_has(family: str) -> None:
    """Computed word by word and, by the step, as one gradient."""
    seen = seen_of(family, "none", [TEXT])
    search = signed(seen)
    with torch.no_grad():
        rows = search._judged([tuple(TEXT)])[0].rows / (len(TEXT) - 1)
    assert torch.allclose(rows, seen.gradients[f"{search.module}.weight"][search.words].float(), atol=1e-5)


def test_states_behind_kept_prefixes_are_those_of_whole_ones() -> None:
    search = signed(seen_of("llama", "sign", [TEXT]))
    cache, longer = key_value_cache(search.model), (TEXT, [*TEXT[:2], *OTHER[2 : len(TEXT)]])
    with torch.no_grad():
        search._next(torch.tensor([TEXT[:2]]), cache)
        cache.reorder_cache(torch.tensor([0, 0]))
        for place in range(2, 5):
            states, chances, _ = search._next(torch.tensor([[text[place]] for text in longer]), cache)
            whole = search._judged([tuple(text[: place + 1]) for text in longer])
            for n, one in enumerate(whole):
                assert torch.allclose(states[n], one.states[-1], atol=1e-5)
                assert torch.allclose(chances[n], one.chances[-1], atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi", "opt"])
@pytest.mark.parametrize(("defense", "update"), [
    ("sign", "fedsgd"), ("none", "fedavg-adamw:1:0.0001"), ("none", "fedavg-adamw:3:0.0001"),
])  # fmt: skip
@pytest.mark.parametrize("framed", [False, True])
def test_one_text_is_read_from_signs_in_its_order(family: str, defense: str, update: str, framed: bool) -> None:
    """Of a decoder's update that was trained with AdamW, attacks named the words, and no order."""
    text = [CLS, *TEXT] if framed else TEXT
    found = read(seen_of(family, defense, [text], update))
    assert found.ordered and found.tokens[0][1:] == tuple(text[1:])
    whole = found.tokens[0] == tuple(text) and update != "fedsgd"
    assert found.confidence == ("verified" if whole else "matched"), "what AdamW sends of a text can be repeated"


def unannounced(seen: Observation) -> Observation:
    return replace(seen, granted={name: value for name, value in seen.granted.items() if name != Grant.MECHANISM})


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_steps_of_adamw_are_recognised_where_nobody_names_them(family: str, steps: int) -> None:
    """They were taken for a gradient, and a search of minutes named nothing."""
    seen = unannounced(seen_of(family, "none", [TEXT], f"fedavg-adamw:{steps}:0.0001"))
    found = read(seen)
    assert found.details["signs"] and found.confidence == "matched" and {*found.tokens[0]} <= {*TEXT}
    assert family == "gpt2" or found.tokens[0][1:] == tuple(TEXT[1:])
    for defense, update in (
        ("none", "fedsgd"), ("gaussian:0.1", "fedsgd"), ("none", "fedavg-sgd:4:0.01"), ("qsgd:16", "fedsgd"),
    ):  # fmt: skip
        other = unannounced(seen_of(family, defense, [TEXT], update))
        rows = next(g for n, g in other.gradients.items() if n.endswith(("lm_head.weight", "wte.weight")))
        assert not are_signs(other, rows)


def test_rows_that_are_little_but_decay_name_nothing() -> None:
    """Three such rows were named as words of a text (AdamW's steps on SmolLM2-135M)."""
    seen = seen_of("llama", "sign", [TEXT])
    name = f"{output_of(seen.model)}.weight"
    rows = seen.gradients[name].clone()
    rows[[50, 51]] = -1e-3 * rows.sum(0).sign()
    found = read(replace(seen, message=Message({**seen.gradients, name: rows})))
    assert {*found.tokens[0]} == {*TEXT}


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_an_update_that_is_turned_around_tells_the_same(family: str) -> None:
    seen = seen_of(family, "sign", [TEXT])
    turned = {n: -g for n, g in seen.gradients.items()}
    assert read(replace(seen, message=Message(turned))).tokens == read(seen).tokens


def test_several_texts_have_one_bag_without_a_strange_word() -> None:
    found = read(seen_of("llama", "sign", [TEXT, OTHER]))
    named = set(found.tokens[0])
    assert not found.ordered and found.tokens[0] == found.tokens[1] and named <= {*TEXT, *OTHER}
    assert len(named & set(TEXT)) >= 3 and len(named & set(OTHER)) >= 3


def test_signs_of_noise_name_nothing() -> None:
    seen = seen_of("llama", "sign", [TEXT])
    for seed in range(20):
        noise = {n: torch.randn(g.shape, generator=generator(seed)).sign() for n, g in seen.gradients.items()}
        with pytest.raises(AttackFailed, match="do not agree, as in noise"):
            read(replace(seen, message=Message(noise)))


def test_no_word_is_named_where_every_row_has_the_same_signs() -> None:
    seen = seen_of("llama", "sign", [TEXT])
    same = {n: torch.ones_like(g) for n, g in seen.gradients.items()}
    with pytest.raises(AttackFailed, match="no row"):
        read(replace(seen, message=Message(same)))


@pytest.mark.parametrize("texts", [[TEXT], [TEXT, OTHER]])
def test_the_portfolio_searches_no_further(texts: list[list[int]]) -> None:
    """It went on for twenty minutes (SmolLM2-135M) to attacks that cannot read signs."""
    for defense, update in (("sign", "fedsgd"), ("none", "fedavg-adamw:3:0.0001")):
        found = Best()(seen_of("llama", defense, texts, update), rng=generator(0), budget=Budget("quick"))
        assert "span-matching" not in str(found.details["tried"]) and {*found.tokens[0]} <= {*chain(*texts)}
        assert found.ordered == (len(texts) == 1)


def test_signs_of_a_tied_embedding_are_no_gradient() -> None:
    """``embedding-rows`` named 72 wrong words of 97 (four sentences on SmolLM2-135M)."""
    seen = seen_of("gpt2", "sign", [TEXT, OTHER])
    with suppress(AttackFailed):
        found = EmbeddingRows()(seen, rng=generator(0), budget=Budget())
        assert {*found.tokens[0]} <= {*TEXT, *OTHER}


@pytest.mark.slow
@pytest.mark.parametrize(("defense", "update"), [("sign", "fedsgd"), ("none", "fedavg-adamw:4")])
def test_texts_of_a_real_decoder_are_read_from_signs(pretrained: Path, defense: str, update: str) -> None:
    victim = load(pretrained / "smollm2", "causal")
    local, wire = parse_update(update)
    for seed, text in enumerate(("The patient was given 14 units of insulin .", "it 's slow -- very , very slow .")):
        batch = encode([Example(text)], victim.tokenizer, "causal", max_length=64, num_labels=2)
        truth = step(
            victim.model, batch, (*parse_defense(defense), *wire), task="causal", vocabulary=victim.vocabulary,
            rng=generator(seed, "step"), local=local,
        )  # fmt: skip
        found = Pursuit()(observe(truth, HONEST_SERVER), rng=generator(0), budget=Budget())
        assert found.tokens[0][1:] == batch.ids(0)[1:]
        assert found.confidence == ("matched" if update == "fedsgd" else "verified")
