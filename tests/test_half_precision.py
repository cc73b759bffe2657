"""Models in half precision, and guesses longer than a model takes: attacks run, or say in words why not."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from math import inf

import pytest
import torch

from rasura.attacks.shared.verify import check, prove
from rasura.attacks.updates.span_matching import SpanMatching
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import THREATS, observe
from rasura.core.values import Grant, Observation
from rasura.registry import ATTACKS, parse_update
from rasura.testing.tiny import CLS, VOCABULARY, batch_of, tiny
from rasura.victims.positions import longest_text
from rasura.victims.step import step

TEXT = [CLS, 40, 3, 41, 9, 60, 61]


def seen_of(
    family: str = "bert",
    update: str = "fedsgd",
    threat: str = "with-labels-and-lengths",
    dtype: torch.dtype = torch.bfloat16,
) -> Observation:
    """What a server sees of a tiny classifier whose weights have ``dtype``."""
    local, _ = parse_update(update)
    truth = step(
        tiny(family, "classification", hidden=96).to(dtype), batch_of([TEXT], "classification"), task="classification",
        vocabulary=VOCABULARY, rng=generator(0), local=local,
    )  # fmt: skip
    return observe(truth, THREATS[threat])


@pytest.mark.parametrize(
    "attack", ["best", "dlg", "embedding-rows", "guided-grab", "joint-pursuit", "pursuit", "span", "span-matching"]
)
def test_attacks_run_on_a_classifier_in_half_precision(attack: str) -> None:
    with suppress(NotApplicable, AttackFailed):
        guess = ATTACKS[attack].make()(seen_of(), rng=generator(0), budget=Budget("quick"))
        assert len(guess.tokens) == 1


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet"])
def test_a_row_space_with_more_dimensions_than_a_text_has_places_is_refused_in_words(family: str) -> None:
    """Rounding fills it. The model was asked for texts longer than it takes, and the attack crashed."""
    update = "fedsgd" if family == "mpnet" else "fedavg-sgd:2:0.01"
    seen = seen_of(family, update, "honest-server")
    with pytest.raises(AttackFailed, match="takes in 1 text: rounding or noise blurs it"):
        SpanMatching()(seen, rng=generator(0), budget=Budget("quick"))
    unknown = replace(seen, granted={k: v for k, v in seen.granted.items() if k is not Grant.BATCH_SIZE})
    with pytest.raises(AttackFailed, match="takes in 1 text: the batch holds several texts, or rounding"):
        SpanMatching()(unknown, rng=generator(0), budget=Budget("quick"))


def test_a_guess_longer_than_the_model_takes_proves_nothing() -> None:
    seen = seen_of(dtype=torch.float32)
    assert check(seen, [TEXT])[0] < 1e-3
    assert check(seen, [TEXT + [40] * 58]) == (inf, None) and prove(seen, [TEXT + [40] * 58]) is None


@pytest.mark.parametrize(("family", "places"), [("bert", 64), ("mpnet", 62)])
def test_texts_are_matched_up_to_the_places_that_a_model_has(family: str, places: int) -> None:
    """MPNet's table has rows before the first place, which were counted."""
    seen = seen_of(family, dtype=torch.float32)
    assert longest_text(seen.model) == places
    ids = torch.full((1, places), 40)
    assert seen.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.isfinite().all()
