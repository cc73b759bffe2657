"""Embedding rows of what a training changed: decay explains the rows of words that no text holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rasura.attacks.updates.embedding_rows import EmbeddingRows
from rasura.attacks.updates.trained_rows import against, without_decay
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Observation
from rasura.registry import parse_update
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.loading import load
from rasura.victims.step import step

ROWS = [[CLS, 40, 3, 41, 9, SEP], [CLS, 50, 51, 4, SEP], [CLS, 60, 3, 61, 62, 63, SEP], [CLS, 70, 9, SEP]]


def trained(model: nn.Module, rows: list[list[int]], update: str, task: str = "classification") -> Observation:
    local, _ = parse_update(update)
    batch = batch_of(rows, task, [0, 1, 2, 0, 1, 2, 0, 1][: len(rows)])
    sent = step(model, batch, (), task=task, vocabulary=VOCABULARY, rng=generator(0, "step"), local=local)  # type: ignore[arg-type]
    return observe(sent, HONEST_SERVER)


@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
@pytest.mark.parametrize(
    "update", ["local:epochs=3/batch=2/lr=1e-4", "local:epochs=2/batch=1/optimizer=sgd/decay=0.1/lr=0.05/schedule=linear"]
)
def test_the_rows_that_decay_does_not_explain_are_the_words_of_the_round(family: str, update: str) -> None:
    seen = trained(tiny(family, "classification"), ROWS, update)
    guess = EmbeddingRows()(seen, rng=generator(0), budget=Budget())
    words = {t for row in ROWS for t in row}
    assert set(guess.tokens[0]) == words and guess.confidence == "span" and not guess.details["noisy"]


def test_one_text_comes_back_in_its_order() -> None:
    row = [CLS, 40, 3, 41, 9, 60, 61, 62, SEP]
    guess = EmbeddingRows()(
        trained(tiny("bert", "classification"), [row], "local:batch=0"), rng=generator(0), budget=Budget()
    )
    assert guess.ordered and guess.tokens == (tuple(row),)


def test_against_every_row_in_turn() -> None:
    """The slow way: a row's own decay against the one that is known to have been taken, in float64."""
    rng = generator(3)
    weights = torch.randn(50, 8, generator=rng, dtype=torch.double)
    change = 0.01 * weights
    change[[4, 7, 31]] += torch.randn(3, 8, generator=rng, dtype=torch.double)
    found = without_decay(change, weights, None)
    for k in range(50):
        moved = change[k] - 0.01 * weights[k]
        assert torch.allclose(found[k], moved if float(moved.norm()) > 1e-9 else torch.zeros(8).double(), atol=1e-12)


def test_what_decay_does_not_explain_stays_as_it_is() -> None:
    """Noise on every row, one gradient with its zeros, and words that noise nearly hides."""
    rng = generator(4)
    weights, noise = torch.randn(300, 16, generator=rng), torch.randn(300, 16, generator=rng)
    one = torch.zeros(300, 16).index_fill(0, torch.tensor([5, 9]), 1.0)
    for change in (noise, one, 0.01 * weights + noise, 1e-3 * noise + one):
        assert torch.equal(without_decay(change, weights, None), change)
    assert torch.equal(without_decay(one, weights, one > 0), one)  # nothing else is in sight


def test_words_of_a_trained_decoder_move_against_what_their_weights_predict(shared: Path) -> None:
    """Tied: every row moves. Of 512 words few are named, and these are in the texts."""
    victim = load(shared / "models" / "stories260K-hf", "causal")
    texts = ["Once upon a time there was a little dog named Tim.", "Lily went to the park and saw a big red ball."]
    rows = [[*victim.vocabulary.prefix, *victim.vocabulary.encode(text)] for text in texts]
    seen = trained(victim.model, rows, "local:epochs=4/batch=2/lr=1e-4", "causal")
    guess = EmbeddingRows()(seen, rng=generator(0), budget=Budget())
    words = {t for row in rows for t in row}
    assert guess.confidence == "matched" and not guess.ordered
    assert len(guess.tokens[0]) >= 5 and set(guess.tokens[0]) <= words


def test_a_model_that_did_not_move_says_nothing() -> None:
    weights = torch.randn(20, 4, generator=generator(5))
    assert not len(against(torch.zeros(20, 4), weights, 0.0))


def test_noise_says_nothing() -> None:
    for seed in range(3):
        weights, noise = torch.randn(2, 512, 64, generator=generator(seed))
        assert not len(against(noise, weights, 0.0))
