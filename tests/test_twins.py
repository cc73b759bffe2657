"""Words whose embeddings are equal: what is said of a text that holds one, where the update does not tell it from others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from rasura.attacks.shared.decoys import decoys
from rasura.attacks.shared.twins import MOST, nearest, twins
from rasura.attacks.shared.untwinned import untwinned
from rasura.attacks.shared.verify import check, in_span, prove
from rasura.attacks.updates.best import _settled
from rasura.attacks.updates.joint_pursuit import JointPursuit
from rasura.attacks.updates.span import Span
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import UNKNOWN, Message, Observation
from rasura.testing.tiny import CAUSAL_VOCABULARY, CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.models import parts
from rasura.victims.step import step

TEXT = [CLS, 40, 3, 41, 9, 42, SEP]
QUICK = Budget("quick")


def with_twins(family: str, task: str, *groups: tuple[int, ...], by: float = 0.0, tied: bool | None = None) -> nn.Module:
    """A tiny model in which the embeddings of each of ``groups`` are equal but for the fraction ``by``."""
    model = tiny(family, task, tied=tied)
    table = model.get_parameter(parts(model).word_embedding)
    with torch.no_grad():
        table.mul_(10 if task == "causal" else 30)  # words that differ; at 30 a tied output layer foresees each word again
        for first, *others in groups:
            for other in others:
                off = torch.randn(table.shape[1], generator=generator(other))
                table[other] = table[first] + by * table[first].norm() * off / off.norm()
    return model


def seen_of(model: nn.Module, rows: list[list[int]], task: str = "classification", *, frozen: bool = True) -> Observation:
    vocabulary = CAUSAL_VOCABULARY if task == "causal" else VOCABULARY
    batch = batch_of(rows, task, [k % 3 for k in range(1, len(rows) + 1)])
    sent = step(model, batch, task=task, vocabulary=vocabulary, rng=generator(0, "step"))  # type: ignore[arg-type]
    seen = observe(sent, HONEST_SERVER)
    hidden = parts(model).embedding_names if frozen else ()
    return replace(seen, message=Message({n: g for n, g in seen.gradients.items() if n not in hidden}))


def exchanged(text: list[int], old: int, new: int) -> list[int]:
    return [new if t == old else t for t in text]


def test_the_nearest_words_against_every_pair() -> None:
    table = torch.randn(60, 5, generator=generator(0))
    among = torch.tensor([i for i in range(60) if i % 3])
    ids, far = nearest(table, [4, 6, 59], among, 4)
    for word, some, distances in zip((4, 6, 59), ids.tolist(), far.tolist()):
        slow = sorted((float((table[i] - table[word]).norm()), i) for i in among.tolist() if i != word)[:4]
        assert some == [i for _, i in slow] and distances == pytest.approx([d for d, _ in slow], rel=1e-4)
    assert nearest(table, [4], torch.tensor([4, 7]), 4)[0].tolist()[0][0] == 7


@pytest.mark.parametrize(("family", "task"), [("bert", "classification"), ("llama", "classification"), ("gpt2", "causal")])
@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_text_with_a_twin_is_never_proven_where_the_embedding_is_hidden(family: str, task: str, place: int) -> None:
    text = TEXT if task != "causal" else TEXT[:-1]
    word = text[place]
    seen = seen_of(with_twins(family, task, (word, 200, 201)), [text], task)
    for guess in (text, exchanged(text, word, 200), exchanged(text, word, 201)):
        assert check(seen, [guess])[0] < 1e-4 and prove(seen, [guess]) is None
    other = with_twins(family, task, (99, 200, 201))
    assert prove(seen_of(other, [text], task), [text]) is not None, "words that the text does not hold"


def test_a_special_token_and_an_unused_one() -> None:
    model = with_twins("bert", "classification", (40, SEP), (41, 250))
    seen = seen_of(model, [TEXT])
    assert twins(seen, [TEXT]) == {(0, 1): [SEP], (0, 3): [250]} and prove(seen, [TEXT]) is None
    unused = replace(VOCABULARY, unused_ids=frozenset({250}))
    bare = replace(seen, granted={g: unused if v is VOCABULARY else v for g, v in seen.granted.items()})
    assert twins(bare, [TEXT]) == {(0, 1): [SEP]}, "no text holds an unused token"


def test_rows_of_the_embedding_tell_twins_apart() -> None:
    seen = seen_of(with_twins("bert", "classification", (41, 200, 201)), [TEXT], frozen=False)
    assert not twins(seen, [TEXT])
    proof = prove(seen, [TEXT])
    assert proof is not None and prove(seen, [exchanged(TEXT, 41, 200)]) is None
    name = parts(seen.model).word_embedding
    mask = torch.ones_like(seen.gradients[name], dtype=torch.bool)
    mask[200] = False
    part = replace(seen, message=Message({**seen.gradients, name: seen.gradients[name] * mask}, {name: mask}))
    assert twins(part, [TEXT]) == {(0, 3): [200]}
    tied = seen_of(with_twins("gpt2", "causal", (41, 200), tied=True), [TEXT[:-1]], "causal", frozen=False)
    assert twins(tied, [TEXT[:-1]]) == {(0, 3): [200]} and prove(tied, [TEXT[:-1]]) is not None, (
        "the update tells them apart"
    )


def test_twins_that_are_nearly_equal_are_decoys_and_others_are_not() -> None:
    for by, found in ((0.01, True), (0.06, False)):
        seen = seen_of(with_twins("bert", "classification", (41, 200), by=by), [TEXT])
        assert bool(twins(seen, [TEXT])) == found
    many = seen_of(with_twins("bert", "classification", (41, *range(200, 220))), [TEXT])
    assert len(twins(many, [TEXT])[0, 3]) == MOST


def test_the_last_token_of_a_causal_text_has_twins_by_the_output_layer() -> None:
    model = tiny("gpt2", "causal", tied=False)
    head = parts(model).head
    assert head is not None
    with torch.no_grad():
        model.get_parameter(head.weight)[200] = model.get_parameter(head.weight)[42]
    text = TEXT[:-1]
    seen = seen_of(model, [text], "causal")
    assert twins(seen, [text]) == {(0, 5): [200]}
    part = replace(seen, message=Message({n: g for n, g in seen.gradients.items() if n != head.weight}))
    assert check(part, [[*text[:-1], 200]])[0] < 1e-4 and prove(part, [[*text[:-1], 200]]) is None


@pytest.mark.parametrize("count", [1, 6])
def test_every_place_is_in_some_decoy(count: int) -> None:
    rows = [[CLS, 40 + k, 60 + k, 80 + k, SEP] for k in range(count)]
    seen = seen_of(tiny("bert", "classification"), rows)
    batch = batch_of(rows, "classification")
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "labels": batch.labels}
    made = list(decoys(seen, tuple(map(tuple, rows)), inputs=inputs, weakest=[0], rng=generator(0)))
    assert any(all(d[r][n] != rows[r][n] for r in range(count) for n in (1, 2, 3)) for d in made[:-1])


def test_span_leaves_the_places_of_twins_open() -> None:
    seen = seen_of(with_twins("bert", "classification", (41, 200, 201)), [TEXT])
    guess = Span()(seen, rng=generator(0), budget=QUICK)
    assert guess.tokens == (tuple(exchanged(TEXT, 41, UNKNOWN)),) and guess.confidence == "span"
    assert guess.details["twins"] == 1 and _settled(guess, seen, "span")
    said = in_span(((CLS, 41, SEP),), seen, believed=True)
    assert said.confidence == "matched" and said.tokens == ((CLS, 41, SEP),), "nothing else is left of it"
    bag = in_span(((40, 41),), seen, believed=True, ordered=False)
    assert bag.tokens == ((40, UNKNOWN),) and bag.confidence == "span"


@pytest.mark.parametrize("task", ["classification", "causal"])
def test_a_decoder_with_many_twins_is_read_but_for_them(task: str) -> None:
    text = [CLS, 41, 60, 41, 61, 42, 62, 41, 63, 42, 64]
    model = with_twins("llama", task, (41, 200, 201, 202, 203), (42, 210, 211, 212, 213))
    seen = seen_of(model, [text], task)
    guess = Span()(seen, rng=generator(0), budget=QUICK)
    if task == "causal" and guess.confidence == "verified":
        # The labels tell them apart by the output layer. Rounding, another on each machine, decides whether it is found.
        assert guess.tokens == (tuple(text),) and check(seen, [exchanged(text, 41, 200)])[0] > 0.1
        return
    left = exchanged(exchanged(text, 41, UNKNOWN), 42, UNKNOWN)
    assert guess.tokens[0][: len(left) - 1] == tuple(left[:-1]) and guess.confidence == "span"


@pytest.mark.parametrize(("task", "tied"), [("causal", True), ("causal", False), ("classification", False)])
def test_twins_that_the_whole_update_tells_apart_are_proven(task: str, tied: bool) -> None:
    """Words that a user adds begin as the mean of all others, all but equal. With a tied output layer no row is empty."""
    text = [CLS, 200, 40, 201, 60, 202, 61]
    seen = seen_of(with_twins("llama", task, (200, 201, 202, 203), by=1e-3, tied=tied), [text], task, frozen=False)
    guess = Span()(seen, rng=generator(0), budget=QUICK)
    assert guess.confidence == "verified" and guess.tokens == (tuple(text),)


def test_twins_in_several_texts_are_told_place_by_place() -> None:
    rows = ((CLS, 200, 40, 201, 60, 202, 61), (CLS, 62, 202, 63, 200, 64))
    model = with_twins("llama", "causal", (200, 201, 202, 203), by=1e-3, tied=True)
    seen = seen_of(model, [list(row) for row in rows], "causal", frozen=False)
    assert untwinned(seen, tuple(tuple(200 if 200 < t < 204 else t for t in text) for text in rows)) == rows


def test_no_word_with_a_twin_is_claimed_by_joint_pursuit() -> None:
    seen = seen_of(with_twins("bert", "classification", (41, 200)), [TEXT])
    guess = JointPursuit()(seen, rng=generator(0), budget=QUICK)
    assert guess.confidence != "verified"
    if guess.confidence == "span":
        assert not {41, 200} & {t for text in guess.tokens for t in text}
