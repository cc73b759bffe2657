"""Words of a causal model's texts from the noisy gradient of its output layer, and none from noise alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from following_setting import OTHER, TEXT, read, seen_of
from torch import Tensor

from rasura.attacks.updates.pursuit import Pursuit
from rasura.attacks.updates.pursuit.following import Rows, words_of
from rasura.attacks.updates.pursuit.ordering import Ordering, Prefix
from rasura.attacks.updates.pursuit.states import States, frequencies_of, output_of, states_of
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Observation
from rasura.data.text import Example, encode
from rasura.registry import parse_defense
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS
from rasura.victims.loading import load
from rasura.victims.models import layer_inputs
from rasura.victims.step import step


def law(width: int = 48, kept: int = 5) -> States:
    rng = generator(4)
    directions = torch.linalg.qr(torch.randn(width, kept, generator=rng)).Q.T
    return States(torch.randn(width, generator=rng), directions, torch.rand(kept, generator=rng) + 0.5, 0.1)


def drawn(states: States, count: int, seed: int) -> Tensor:
    """States of that law, ``(count, width)``."""
    rng = generator(seed, "states")
    within = torch.randn(count, len(states.variances), generator=rng) * states.variances.sqrt()
    beside = torch.randn(count, len(states.mean), generator=rng) * states.rest**0.5
    beside -= beside @ states.directions.T @ states.directions
    return states.mean + within @ states.directions + beside


def test_likelihoods_are_those_of_the_whole_covariance() -> None:
    states, noise = law(), 0.3
    rows = torch.randn(7, 48, generator=generator(1))
    whole = torch.diag(torch.full((48,), states.rest))
    whole += states.directions.T @ torch.diag(states.variances - states.rest) @ states.directions
    found, slow = [], []
    for size in (0.0, 0.2, 1.0, -0.7):
        covariance = size**2 * whole.double() + noise**2 * torch.eye(48, dtype=torch.float64)
        normal = torch.distributions.MultivariateNormal(size * states.mean.double(), covariance)
        found.append(Rows(rows, states, noise).log_likelihood(size))
        slow.append(normal.log_prob(rows.double()))
    for one, other in zip(found[1:], slow[1:]):  # up to the same constant
        assert torch.allclose(one - found[0], other - slow[0], atol=1e-3)


def test_words_that_follow_are_named_and_those_that_were_expected_in_vain_are_not() -> None:
    states, noise = law(), 0.2
    rows = torch.randn(400, 48, generator=generator(2)) * noise
    rows[:12] += 0.6 * drawn(states, 12, 0)
    rows[12:30] -= torch.rand(18, 1, generator=generator(3)) * 0.6 * drawn(states, 18, 1)
    named = words_of(Rows(rows, states, noise), torch.full((400,), 1 / 400))
    assert named.tolist() == list(range(12))


def test_noise_alone_names_nothing() -> None:
    states = law()
    for seed in range(40):
        rows = torch.randn(1000, 48, generator=generator(seed, "noise"))
        assert not len(words_of(Rows(rows, states, 1.0), torch.full((1000,), 1e-3)))


@pytest.mark.parametrize("family", ["llama", "qwen2", "opt", "gpt2", "bloom", "gemma"])
def test_most_words_are_read_in_noise_and_none_that_no_text_holds(family: str) -> None:
    """No attack read anything of a causal model's update in noise: a word of eight came by chance."""
    found = read(seen_of(family, "gaussian:0.0001", [TEXT]))
    named = set(found.tokens[0]) - CAUSAL_VOCABULARY.special_ids
    assert len(named & set(TEXT)) >= 5 and named <= set(TEXT) and found.confidence == "matched"


def test_texts_of_a_batch_have_the_same_bag() -> None:
    found = read(seen_of("llama", "laplace:0.0001", [TEXT, OTHER]))
    assert found.tokens[0] == found.tokens[1] and set(found.tokens[0]) <= {*TEXT, *OTHER}
    assert len(set(found.tokens[0]) & set(OTHER)) >= 3


@pytest.mark.parametrize("seed", range(5))
def test_in_much_noise_it_fails_in_words(seed: int) -> None:
    with pytest.raises(AttackFailed, match="no word stands out from the noise"):
        read(seen_of("llama", "gaussian:10", [TEXT], seed=seed))


@pytest.mark.parametrize(
    ("defense", "update", "why"),
    [("frozen-embeddings", "fedsgd", "not visible as a whole"), ("sealing:random=0.5", "fedsgd", "not visible as a whole")],
)
def test_what_shows_no_output_layer_is_not_applicable(defense: str, update: str, why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        read(seen_of("gpt2", defense, [TEXT], update))


def test_an_update_that_is_zero_or_no_number_fails() -> None:
    seen = seen_of("gpt2", "none", [TEXT])
    for value, why in ((0.0, "is zero"), (float("nan"), "NaN")):
        for gradient in seen.gradients.values():
            gradient.fill_(value)
        with pytest.raises(AttackFailed, match=why):
            read(seen)


def test_the_law_of_a_model_is_that_of_its_states() -> None:
    seen = seen_of("llama", "none", [TEXT])
    states = states_of(seen, output_of(seen.model), frequencies_of(seen), generator(0))
    assert torch.allclose(states.directions @ states.directions.T, torch.eye(len(states.variances)), atol=1e-4)
    assert bool((states.variances >= 0).all()) and states.rest >= 0 and states.size >= float(states.mean.norm())


@pytest.mark.slow
@pytest.mark.parametrize(("defense", "share"), [("gaussian:0.001", 0.75), ("gaussian:0.01", 0.5), ("dp-sgd:0.01", 0.5)])
def test_words_of_a_real_decoder_are_read_in_noise(pretrained: Path, defense: str, share: float) -> None:
    victim = load(pretrained / "smollm2", "causal")
    texts = ("The patient was given 14 units of insulin .", "Please call Lena about her results before Friday .")
    for seed, text in enumerate(texts):
        batch = encode([Example(text)], victim.tokenizer, "causal", max_length=64, num_labels=2)
        truth = step(
            victim.model, batch, parse_defense(defense), task="causal", vocabulary=victim.vocabulary,
            rng=generator(seed, "step"),
        )  # fmt: skip
        seen, words = observe(truth, HONEST_SERVER), set(batch.ids(0))
        found = set(Pursuit()(seen, rng=generator(0), budget=Budget("quick")).tokens[0])
        assert found <= words and len(found) >= share * len(words)


# --- order


def ordering_of(seen: Observation, words: list[int], noise: float) -> Ordering:
    module = output_of(seen.model)
    rows = seen.gradients[f"{module}.weight"].float()
    flat = torch.full((len(rows),), 1 / len(rows))
    return Ordering(seen, module, rows, words, states_of(seen, module, flat, generator(0)), noise, flat)


def test_a_prefix_explains_what_the_sum_of_its_parts_does() -> None:
    seen = seen_of("llama", "gaussian:0.001", [TEXT])
    search = ordering_of(seen, TEXT[1:], 0.001)
    beam = [Prefix((TEXT[0],), 1)]
    for place, word in enumerate(TEXT[1:]):
        beam = [one for one in search.longer(beam, 99, 99) if one.tokens[-1] == word]
        with torch.no_grad():
            inputs = torch.tensor([TEXT[: place + 1]])
            states = layer_inputs(seen.model, [search.module], input_ids=inputs)[search.module][0]
            chances = seen.model(input_ids=inputs).logits[0].softmax(-1)  # type: ignore[operator]
        chances[torch.arange(place + 1), torch.tensor(TEXT[1 : place + 2])] -= 1
        whole = chances.T @ states
        assert beam[0].inner == pytest.approx(float((whole * search.rows).sum()), rel=1e-3)
        assert beam[0].square == pytest.approx(float(whole.square().sum()), rel=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi"])
@pytest.mark.parametrize("noise", ["1e-5", "1e-3"])
@pytest.mark.parametrize("framed", [False, True])
def test_one_text_is_read_in_its_order(family: str, noise: str, framed: bool) -> None:
    text = [CLS, *TEXT] if framed else TEXT
    found = read(seen_of(family, f"gaussian:{noise}", [text]))
    assert found.ordered and found.tokens[0][1:] == tuple(text[1:])


def test_a_quick_budget_and_several_texts_have_no_order() -> None:
    assert not Pursuit()(seen_of("llama", "none", [TEXT]), rng=generator(0), budget=Budget("quick")).ordered
    assert not read(seen_of("llama", "none", [TEXT, OTHER])).ordered


def test_no_order_is_told_where_most_words_have_no_place() -> None:
    seen = seen_of("llama", "gaussian:0.001", [TEXT])
    strangers = [t for t in range(50, 58) if t not in TEXT]
    assert ordering_of(seen, strangers, 0.001)() is None
