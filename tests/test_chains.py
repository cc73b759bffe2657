"""Texts grown word by word from what a decoder's last block predicts, where rounding blurs the row spaces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from span_setting import seen_of
from torch import nn
from transformers import AutoModelForCausalLM

from rasura.attacks.updates import best
from rasura.attacks.updates.span import Span
from rasura.attacks.updates.span.chains import Chain, chained, explaining, first_words
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.predicted import predicted, run
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import UNKNOWN, Grant, Message, Observation, Reconstruction
from rasura.data.text import Example, encode
from rasura.registry import parse_defense, parse_update
from rasura.testing.tiny import DECODERS, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.models import parts
from rasura.victims.positions import positions
from rasura.victims.step import step


@pytest.mark.parametrize("family", DECODERS)
def test_one_product_with_the_output_layer_gives_what_each_direction_gives(family: str) -> None:
    """The slow way pushes each direction through the output layer by itself, of one prefix."""
    model = tiny(family, "causal", hidden=32, words=500)
    model = model if family == "mixtral" else model.double()  # torch groups no products in float64
    known, prefixes = parts(model), torch.tensor([[1, 40, 3], [5, 40, 9]])
    within = f"{known.blocks[-1].module}."
    lin = [one for one in known.linears if one.module.startswith(within)][-1]
    if family == "mixtral":
        lin = next(one for one in known.linears if one.module.startswith(within) and one.module.endswith("o_proj"))
    dtype = next(model.parameters()).dtype
    slow = [run(model, lin, one[None]) for one in prefixes]
    directions = torch.randn(4, slow[0].output.shape[-1], dtype=dtype, generator=generator(0))
    fast = run(model, lin, prefixes, head=known.head)
    torch.testing.assert_close(fast.logits, torch.cat([one.logits for one in slow]))
    torch.testing.assert_close(fast.sides(directions), torch.cat([one.sides(directions) for one in slow]))


def test_texts_grow_from_what_is_predicted_alone() -> None:
    """Without any row space. A run of the first token ends nowhere, and is left out."""
    rows = [[40, 3, 41, 9, 60, 61], [5, 3, 41, 62, 4], [70, 9, 5, 277]]
    seen = seen_of(tiny("llama", "causal", hidden=96, words=500), batch_of(rows, "causal"), "causal")
    tells = predicted(seen, Inputs(seen.model))
    assert tells is not None
    found = explaining(seen, chained(tells, [3, 40, 5, 70, 41, 9], 3), 3)
    assert found is not None and sorted(found) == sorted(map(tuple, rows))
    assert explaining(seen, chained(tells, [3, 40, 70, 41, 9], 3), 3) is None, "one of the texts begins with another word"
    twice = [[40, 40, 40, 41, 9, 7]]
    seen = seen_of(tiny("llama", "causal", hidden=96, words=500), batch_of(twice, "causal"), "causal")
    tells = predicted(seen, Inputs(seen.model))
    assert tells is not None and all(tuple(twice[0]) != chain.text for chain in chained(tells, [40, 41], 1))


def test_a_text_grows_on_where_a_word_is_hardly_told_from_one_that_is_like_it() -> None:
    """As numbers are in what a training in 16 bits sends. The word that lies nearest is tried first."""
    text, model = [40, 3, 41, 9, 60, 61], tiny("llama", "causal", hidden=96, words=500)
    assert isinstance(model.lm_head, nn.Linear)
    with torch.no_grad():
        row = model.lm_head.weight
        for k in range(9):
            row[100 + k] = row[9] + 0.001 * 1.6**k * row[9].norm() / 96**0.5 * torch.randn(96, generator=generator(3))
    seen = seen_of(model, batch_of([text], "causal"), "causal")
    seen = replace(seen, message=Message({n: g.bfloat16().float() for n, g in seen.gradients.items()}))
    tells = predicted(seen, Inputs(seen.model))
    assert tells is not None
    _, (outside,) = tells.outside(torch.tensor([text[:3]]))
    assert not tells.clear(outside) and outside.topk(2, largest=False).indices.tolist() == [9, 100]
    assert explaining(seen, chained(tells, [40], 1), 1) == (tuple(text),)


@pytest.mark.slow
def test_a_text_with_a_number_comes_back_from_a_training_under_autocast(pretrained: Path) -> None:
    """The forward pass itself ran in bfloat16. Only a bag of words came back, and the search went on for minutes."""
    victim = load(pretrained / "smollm2", "causal")
    coded = victim.tokenizer(["Lena Brandt owes 4,250 euros to her landlord."], return_tensors="pt")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        victim.model(**coded, labels=coded["input_ids"]).loss.backward()
    found = {n: p.grad for n, p in victim.model.named_parameters() if p.grad is not None}
    victim.model.zero_grad()
    granted = {Grant.MODEL: victim.model, Grant.BASE_MODEL: victim.vocabulary, Grant.MECHANISM: ()}
    guess = best.Best()(Observation(Message(found), "causal", granted), rng=generator(0), budget=Budget())
    assert guess.tokens == (tuple(coded["input_ids"][0].tolist()),) and guess.confidence == "matched"
    assert "joint-pursuit" not in str(guess.details["tried"])


@pytest.mark.slow
def test_a_long_text_of_a_pretrained_decoder_comes_back_through_bfloat16(pretrained: Path) -> None:
    """Its row spaces are blurred: block 0 names the words alone."""
    text = "allows us to hope that nolan is poised to embark a major career as a commercial yet inventive filmmaker ."
    victim = load(pretrained / "smollm2", "causal")
    batch = encode([Example(text, None, 0)], victim.tokenizer, "causal", max_length=64, num_labels=2)
    local, wire = parse_update("fedsgd+bf16")
    protections, rng = (*parse_defense("frozen-embeddings"), *wire), generator(0, "step")
    truth = step(victim.model, batch, protections, task="causal", vocabulary=victim.vocabulary, rng=rng, local=local)
    guess = Span()(observe(truth, HONEST_SERVER), rng=generator(0, "attack"), budget=Budget())
    assert guess.tokens == (tuple(batch.ids(0)),) and guess.details["chained"]


@pytest.mark.slow
def test_a_text_of_a_training_wholly_in_bfloat16_comes_back(pretrained: Path) -> None:
    """Weights, passes and update. The search for the order of the words did not end in minutes, and its bag lacked the
    first one, whose query has no gradient."""
    text = "The hospital in Leipzig told Ruth that the payment of 1,940 euros to account 0147 was booked twice."
    victim = load(pretrained / "smollm2", "causal")
    trained = AutoModelForCausalLM.from_pretrained(pretrained / "smollm2", dtype=torch.bfloat16, attn_implementation="eager")
    ids = victim.tokenizer([text], return_tensors="pt")["input_ids"]
    trained(input_ids=ids, labels=ids).loss.backward()
    found = {n: p.grad.float() for n, p in trained.named_parameters() if p.grad is not None}
    granted = {Grant.MODEL: victim.model, Grant.BASE_MODEL: victim.vocabulary, Grant.MECHANISM: ()}
    guess = Span()(Observation(Message(found), "causal", granted), rng=generator(0), budget=Budget())
    assert guess.tokens == (tuple(ids[0].tolist()),) and guess.confidence == "matched" and guess.details["chained"]


def test_a_first_word_is_found_by_its_key_and_value() -> None:
    """Its query has no gradient, so the row space of the queries does not hold its input."""
    text = [277, 40, 3, 41, 9, 60, 61]
    seen = seen_of(tiny("llama", "causal", hidden=96, words=500), batch_of([text], "causal"), "causal")
    nothing = Reconstruction(((UNKNOWN,),), "matched", ordered=False)
    assert text[0] in first_words(seen, nothing)[: 2 * len(text)]


@pytest.mark.parametrize("size", [2, None])
def test_texts_that_explain_the_update_together_are_taken(size: int | None) -> None:
    """Whether or not their number is known."""
    rows = [[40, 3, 41, 9, 60, 61, 70], [5, 3, 41, 62, 4, 277]]
    seen = seen_of(tiny("gpt2", "causal", hidden=96, words=500), batch_of(rows, "causal"), "causal")
    tells = predicted(seen, Inputs(seen.model))
    assert tells is not None
    found = explaining(seen, chained(tells, [40, 5, 9], size or 1), size)
    assert found is not None and sorted(found) == sorted(map(tuple, rows))


def test_a_text_that_fills_the_context_ends_there() -> None:
    model = tiny("gpt2", "causal", hidden=96, words=500)
    most = positions(model)
    assert most is not None
    text = torch.randperm(400, generator=generator(5))[:most].add(5).tolist()
    seen = seen_of(model, batch_of([text], "causal"), "causal")
    tells = predicted(seen, Inputs(seen.model))
    assert tells is not None
    assert explaining(seen, chained(tells, text[:1], 1), 1) == (tuple(text),)


def test_fewer_texts_than_there_are_explain_nothing() -> None:
    text = [40, 3, 41, 9, 60, 61, 70]
    seen = seen_of(tiny("gpt2", "causal", hidden=96, words=500), batch_of([text], "causal"), "causal")
    assert explaining(seen, [Chain(tuple(text), (), 9.0, 9.0, len(text))], 1) == (tuple(text),)
    assert explaining(seen, [Chain(tuple(text), (), 9.0, 9.0, len(text))], 2) is None
