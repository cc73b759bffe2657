"""Tokens one by one: fits against plain references, signs read in full, and silence where there is only noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from update_setting import NOTE, sent_by

from rasura.attacks.updates.pursuit import Pursuit
from rasura.attacks.updates.pursuit.dictionary import dictionary
from rasura.attacks.updates.pursuit.fits import Signs, Squares
from rasura.attacks.updates.span.inputs import Inputs
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import WITH_LENGTHS, observe
from rasura.registry import parse_defense
from rasura.testing.tiny import CLS, SEP, VOCABULARY, WORDS, batch_of, tiny
from rasura.victims.loading import Victim, load
from rasura.victims.models import parts
from rasura.victims.step import step


@pytest.fixture(scope="module")
def minilm(minilm_path: Path) -> Victim:
    return load(minilm_path, "classification")


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "electra", "albert", "gpt2", "bloom"])
def test_products_of_a_vocabulary_are_those_of_every_input(family: str) -> None:
    """However the model makes its inputs; gains and shifts of a new model are 1 and 0."""
    torch.manual_seed(1)
    model = tiny(family, "classification").double()
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    inputs, ids = Inputs(model), torch.arange(3, WORDS)
    places = [0, 1, 5] if parts(model).position_embedding is not None else [0]
    rng = generator(3)
    some = [torch.randn(parts(model).hidden, n, generator=rng).double() for n in (2, 7)]
    found = dictionary(inputs, ids, places, 256)
    for directions in (*some, some[0]):
        for place in places:
            own = inputs.first(ids, place)
            assert torch.allclose(found.inputs(place), own, atol=1e-9)
            assert torch.allclose(found.along(directions, place), own @ directions, atol=1e-9)
            assert torch.allclose(found.sizes(place), own.square().sum(1), atol=1e-9)


def test_squares_leave_what_no_combination_of_the_inputs_explains() -> None:
    rng = generator(0)
    inputs, matrix = torch.randn(3, 12, generator=rng).double(), torch.randn(20, 12, generator=rng).double()
    best = torch.linalg.lstsq(inputs.T, matrix.T).solution
    assert torch.allclose(Squares(matrix).left(inputs), matrix - best.T @ inputs)
    assert torch.equal(Squares(matrix).left(inputs[:0]), matrix)


def test_hidden_entries_do_not_count() -> None:
    rng = generator(2)
    inputs, matrix = torch.randn(3, 40, generator=rng).double(), torch.randn(4, 40, generator=rng).double()
    shown = (torch.rand(4, 40, generator=rng) > 0.5).double()
    found = Squares(matrix * shown, shown).left(inputs)
    for row, mask, left in zip(matrix, shown.bool(), found):
        best = torch.linalg.lstsq(inputs[:, mask].T, row[mask][:, None]).solution[:, 0]
        assert torch.allclose(left[mask], row[mask] - best @ inputs[:, mask], atol=2e-3)
        assert not left[~mask].any()


def test_signs_are_fitted_like_a_logistic_regression_of_every_output() -> None:
    rng = generator(1)
    inputs = torch.randn(2, 60, generator=rng).double()
    noisy = torch.randn(5, 2, generator=rng).double() @ inputs + torch.randn(5, 60, generator=rng).double()
    signs, ridge = noisy.sign(), 0.5
    found = Signs(signs, ridge=ridge, steps=30).left(inputs)
    for row, left in zip(signs, found):
        w = torch.zeros(2, dtype=torch.double, requires_grad=True)
        optimizer = torch.optim.LBFGS([w], max_iter=500, tolerance_grad=1e-12, line_search_fn="strong_wolfe")

        def loss(row: torch.Tensor = row, w: torch.Tensor = w) -> torch.Tensor:
            return torch.nn.functional.softplus(-row * (w @ inputs)).sum() + 0.5 * ridge * w.square().sum()

        def closure(loss: object = loss, w: torch.Tensor = w) -> torch.Tensor:
            value: torch.Tensor = loss()  # type: ignore[operator]
            (w.grad,) = torch.autograd.grad(value, w)
            return value

        optimizer.step(closure)
        expected = row * torch.sigmoid(-row * (w.detach() @ inputs))
        assert torch.allclose(left, expected, atol=1e-5)


@pytest.mark.parametrize("family", ["roberta", "mpnet"])
def test_positions_that_a_model_leaves_unused_are_not_asked_for(family: str) -> None:
    model, batch = tiny(family, "classification"), batch_of([[CLS, 40, 3, 41, 9, SEP]], "classification", [1])
    noisy = parse_defense("gaussian:1e-4")
    truth = step(model, batch, noisy, task="classification", vocabulary=VOCABULARY, rng=generator(0))
    found = Pursuit()(observe(truth, WITH_LENGTHS), rng=generator(0), budget=Budget("quick"))
    assert len(found.tokens[0]) == 6 and set(found.tokens[0]) & {40, 3, 41, 9}


@pytest.mark.parametrize("defense", ["none", "sign"])
def test_places_that_hardly_change_an_input_are_no_control(defense: str) -> None:
    """In MPNet the same word at two places has nearly one input, so words of the text gain where no text reaches, too."""
    model, text = tiny("bert", "classification"), [CLS, 40, 3, 41, 9, SEP]
    with torch.no_grad():
        model.get_parameter("bert.embeddings.position_embeddings.weight").mul_(0.1)
    batch = batch_of([text], "classification", [1])
    truth = step(model, batch, parse_defense(defense), task="classification", vocabulary=VOCABULARY, rng=generator(0))
    found = Pursuit()(observe(truth, WITH_LENGTHS), rng=generator(0), budget=Budget("quick"))
    assert sorted(found.tokens[0]) == sorted(text)


@pytest.mark.slow
@pytest.mark.parametrize("update", ["fedsgd+sign", "fedavg-adamw:1"])
def test_signs_alone_give_the_text(minilm: Victim, update: str) -> None:
    guess = Pursuit()(sent_by(minilm, update), rng=generator(0), budget=Budget())
    assert minilm.vocabulary.text(guess.tokens[0]) == NOTE
    assert guess.details["signs"] is True


@pytest.mark.slow
def test_small_noise_does_not_hide_the_text_and_large_noise_ends_in_silence(minilm: Victim) -> None:
    small = sent_by(minilm, "fedsgd", "frozen-embeddings+gaussian:0.00003")
    guess = Pursuit()(small, rng=generator(0), budget=Budget("quick"))
    assert minilm.vocabulary.text(guess.tokens[0]) == NOTE
    with pytest.raises(AttackFailed, match="stands out"):
        Pursuit()(sent_by(minilm, "fedsgd", "frozen-embeddings+gaussian:0.01"), rng=generator(0), budget=Budget("quick"))


def test_it_needs_block_0_in_sight(minilm: Victim) -> None:
    with pytest.raises(NotApplicable, match="block 0"):
        Pursuit()(sent_by(minilm, "fedsgd", "frozen-blocks:1"), rng=generator(0), budget=Budget("quick"))
