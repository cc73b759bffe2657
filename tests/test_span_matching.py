"""Span matching on tiny models: whichever blocks are visible."""

from __future__ import annotations

import pytest
import torch
from test_span import TEXTS, seen_by_server
from tiny import CLS, SEP, batch_of, tiny

from rasura.attacks.span.rows import block_spaces, visible_blocks
from rasura.attacks.span_matching import SpanMatching
from rasura.attacks.span_matching.discrete import improve, rearrangements
from rasura.attacks.span_matching.objective import Objective
from rasura.interfaces import AttackFailed, Budget, NotApplicable
from rasura.rng import generator
from rasura.values import Message, Observation

SHORT = [CLS, 40, 3, 41, 9, SEP]


def test_last_block_alone_gives_the_text_verified() -> None:
    model = tiny("bert", "classification", blocks=3)
    seen = seen_by_server(model, batch_of([SHORT], "classification"), "classification", keep="layer.2.")
    guess = SpanMatching()(seen, rng=generator(0), budget=Budget())
    assert guess.tokens == (tuple(SHORT),)
    assert guess.confidence == "verified"


def test_the_objective_is_at_the_floor_for_the_truth_alone() -> None:
    model = tiny("bert", "classification", blocks=3)
    batch = batch_of(TEXTS[:2], "classification")
    seen = seen_by_server(model, batch, "classification")
    objective = Objective(seen.model, block_spaces(seen, visible_blocks(seen)), batch.attention_mask[None])
    wrong = batch.input_ids.clone()
    wrong[0, 2] = 77
    scores = objective.ids(torch.stack([batch.input_ids, wrong, batch.input_ids.flip(0)[:, : batch.input_ids.shape[1]]]))
    assert scores[0] < 1e-9 and scores[1] > 1e-4
    table = seen.model.get_input_embeddings().weight  # type: ignore[operator,union-attr]
    assert objective.embeddings(table[batch.input_ids][None], 0.0)[0] < 1e-5


def test_discrete_pass_mends_a_swap_and_a_wrong_token() -> None:
    model = tiny("bert", "classification", blocks=3)
    batch = batch_of([SHORT], "classification")
    seen = seen_by_server(model, batch, "classification", keep="layer.2.")
    objective = Objective(seen.model, block_spaces(seen, visible_blocks(seen)), batch.attention_mask[None])
    start = torch.tensor([[CLS, 41, 3, 40, 77, SEP]])
    free = [(0, i) for i in range(1, 5)]
    text, residual = improve(
        objective, start, torch.tensor([3, 9, 40, 41]), free, floor=1e-9, rng=generator(0), sweeps=8
    )
    assert text.tolist() == [SHORT] and residual < 1e-9


def test_rearrangements_keep_the_tokens() -> None:
    current = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 9, 2, 0]])
    free = [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    out = rearrangements(current, (0, 1), free)
    assert len(out) > 0
    assert all(sorted(x.flatten().tolist()) == sorted(current.flatten().tolist()) for x in out)
    assert all(torch.equal(x[:, 0], current[:, 0]) for x in out)


def test_says_when_it_cannot_be_tried_or_sees_nothing() -> None:
    batch = batch_of([SHORT], "classification")
    seen = seen_by_server(tiny("bert", "classification"), batch, "classification", keep="classifier")
    with pytest.raises(NotApplicable):
        SpanMatching()(seen, rng=generator(0), budget=Budget("quick"))
    seen = seen_by_server(tiny("bert", "classification"), batch, "classification")
    noisy = {n: torch.randn(g.shape, generator=generator(1)) for n, g in seen.gradients.items()}
    with pytest.raises(AttackFailed, match="no visible layer shows a row space"):
        SpanMatching()(Observation(Message(noisy), seen.task, seen.granted), rng=generator(0), budget=Budget("quick"))
