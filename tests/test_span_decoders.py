"""The span attack on decoders as they are: without a start token, with words that repeat, with an unseen last token."""

from __future__ import annotations

from pathlib import Path

import pytest
from span_setting import seen_by_server
from torch import nn

from rasura.attacks.updates.span import Span
from rasura.core.batches import Batch
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Observation, Reconstruction, Vocabulary
from rasura.data.text import Example, encode
from rasura.registry import parse_defense
from rasura.testing.tiny import PAD, VOCABULARY, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.step import step

BARE = Vocabulary(VOCABULARY.size, VOCABULARY.decode, VOCABULARY.encode, (), (), PAD, frozenset({PAD}))
"""A vocabulary without start and end tokens, as SmolLM2's and Qwen's."""

ROTARY = ["llama", "qwen2", "gemma", "gpt-neox"]


def seen_of(model: nn.Module, batch: Batch, task: str) -> Observation:
    """What the honest server sees of one step on ``batch`` with frozen embeddings, where the task is causal."""
    defense = parse_defense("frozen-embeddings") if task == "causal" else ()
    truth = step(model, batch, defense, task=task, vocabulary=BARE, rng=generator(0, "step"))  # type: ignore[arg-type]
    return observe(truth, HONEST_SERVER)


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
