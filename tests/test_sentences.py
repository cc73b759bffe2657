"""Encoders: whole texts found among the tokens of each place, by a layer that has seen the context."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from span_setting import TEXTS, seen_by_server, seen_of_minilm

from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import block_spaces, visible_blocks
from rasura.attacks.updates.span.sentences import Checker, Choices, Finder, checker, rearranged
from rasura.attacks.updates.span.tokens import Row
from rasura.core.rng import generator
from rasura.core.values import Vocabulary
from rasura.testing.tiny import CLS, SEP, batch_of, tiny
from rasura.victims.loading import load

Setting = tuple[Checker, Choices, list[tuple[int, ...]], Vocabulary]


@pytest.fixture
def three(minilm_path: Path) -> Setting:
    """What tells three texts of MiniLM apart, all of their tokens at every place, and their ids."""
    texts = ["mary is here now", "he lost it , again", "we saw her leave early today"]
    seen, ids = seen_of_minilm(minilm_path, texts, [0, 1, 1], "fedsgd")
    score = checker(seen, {}, Inputs(seen.model))
    assert score is not None
    anywhere = {n: [(t, 0) for t in dict.fromkeys(t for row in ids for t in row)] for n in range(max(map(len, ids)))}
    return score, anywhere, ids, seen.vocabulary


def test_texts_are_searched_for_where_every_place_has_a_token() -> None:
    model, batch = tiny("bert", "classification"), batch_of([TEXTS[1]], "classification")
    seen, inputs = seen_by_server(model, batch, "classification"), Inputs(model)
    score = checker(seen, {}, inputs)
    assert score is not None
    full = {n: [(token, 0), (60 + n, 0)] for n, token in enumerate(TEXTS[1])}

    def finder(allowed: dict[int, list[tuple[int, int]]], lengths: tuple[int, ...] | None) -> Finder:
        return Finder(allowed, score, prefix=(CLS,), suffix=(SEP,), lengths=lengths, rng=generator(0), likely=allowed)

    found, _ = finder(full, (6,))([], 1, 4)
    assert found == [tuple((token, 0) for token in TEXTS[1])]
    holed = {n: options for n, options in full.items() if n != 3}
    assert finder(holed, (6,)).lengths == finder(holed, None).lengths == []
    assert finder(holed, (3, 6)).lengths == [3]
    for lengths in ((6,), None):
        start = [Row(n, token, 0, torch.zeros(64), 0.0) for n, token in enumerate(TEXTS[1]) if n != 3]
        assert finder(holed, lengths)([start], 1, 4) == ([], []), "there is nothing to draw a text from"


def test_a_token_that_is_not_likely_is_tried_where_a_text_does_not_fit(three: Setting) -> None:
    score, anywhere, ids, frame = three
    missing = {(2, ids[0][2]), (4, ids[1][4])}
    likely = {n: [(row[n], 0) for row in ids if n < len(row) and (n, row[n]) not in missing] for n in anywhere}
    find = Finder(anywhere, score, prefix=frame.prefix, suffix=frame.suffix, lengths=None, rng=generator(0), likely=likely)
    found, _ = find([], 3, 24)
    assert sorted(found) == sorted(tuple((t, 0) for t in row) for row in ids)


def test_a_layer_that_tells_fewer_inputs_apart_than_the_first_one_judges_no_text(minilm_path: Path) -> None:
    """32 texts of 150 words hold more tokens than MiniLM has dimensions, and a gap among its singular values is none."""
    victim = load(minilm_path, "classification")
    rows = torch.randint(2000, 2150, (32, 16), generator=generator(3))
    rows[:, 0], rows[:, -1] = victim.vocabulary.prefix[0], victim.vocabulary.suffix[-1]
    seen = seen_by_server(victim.model, batch_of(rows.tolist(), "classification", [0, 1] * 16), "classification")
    inputs = Inputs(seen.model)
    spaces = block_spaces(seen, visible_blocks(seen)[:1])
    mistaken = checker(seen, {}, inputs)
    assert mistaken is not None and mistaken.space.rank < spaces[0].rank / 2
    assert checker(seen, spaces, inputs) is None


def test_a_short_text_is_no_better_than_one_with_a_single_wrong_word(three: Setting) -> None:
    """Of a trained model the frame alone lies nearer to the row space than a text that is nearly right."""
    score, anywhere, ids, frame = three
    anywhere[0] = [(ids[0][0], 0)]
    find = Finder(
        anywhere, score, prefix=frame.prefix, suffix=frame.suffix, lengths=None, rng=generator(0), likely=anywhere
    )  # fmt: skip
    assert min(find.lengths) == 3, "a text of no word is none"

    def row(place: int, token: int) -> Row:
        return Row(place, token, 0, torch.zeros(0), 0.0)

    wrong = [[row(n, ids[k - 1][2] if n == 2 else t) for n, t in enumerate(text)] for k, text in enumerate(ids)]
    found, _ = find(wrong, 3, 0)
    assert sorted(found) == sorted(tuple((t, 0) for t in row) for row in ids)


def test_rearranged_moves_and_swaps_between_its_bounds() -> None:
    assert set(rearranged("abcd", 1, 3)) == {("a", "c", "b", "d")}
    runs = set(rearranged("abcd", 0, 4, longest=2))
    assert ("c", "d", "a", "b") in runs and ("d", "b", "c", "a") in runs and tuple("abcd") not in runs
    assert all(sorted(order) == list("abcd") for order in runs)
    assert rearranged("ab", 1, 1) == []
