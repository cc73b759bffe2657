"""Inverting GHOST: preimages against the table, the lattice against all texts, and the whole way from a gradient."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import nn

from rasura import registry
from rasura.attacks.ghost.generation import restored, trained
from rasura.attacks.ghost.inversion import Preimages, Strategy, announced_ghost, inverted
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.rng import generator
from rasura.core.threat import HONEST_SERVER, observe
from rasura.core.values import Grant, Observation
from rasura.ghost.defense import ghost
from rasura.ghost.models import made_for
from rasura.ghost.selection import Selector
from rasura.ghost.selection_settings import DEFAULT, Selection
from rasura.ghost.table import ShadowSettings, ShadowTable, token_embedding
from rasura.priors.trigram import Trigram
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.step import step

SMALL = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None)
EMBEDDING = token_embedding(tiny("bert", "classification"))
TEXT = [CLS, 40, 41, 9, 50, 61, SEP]


@pytest.fixture(scope="module")
def table() -> ShadowTable:
    return made_for(tiny("bert", "classification"), VOCABULARY, SMALL)


def test_preimages_are_the_table_turned_round(table: ShadowTable) -> None:
    preimages = Preimages(table, EMBEDDING)
    back = {s: dict(zip(*(x.tolist() for x in preimages.of(s)))) for s in range(len(table))}
    for token in range(len(table)):
        own = table.of(token)
        chances = [back[s][token] for s in own.tolist()]
        assert not len(own) or sum(chances) == pytest.approx(1)
        nearest = (EMBEDDING[own] - EMBEDDING[token]).norm(dim=1).argsort().tolist()
        assert sorted(chances, reverse=True) == [chances[k] for k in nearest], "the nearer the likelier"
    assert sum(map(len, back.values())) == len(table.ids)


@pytest.mark.parametrize("strategy", ["sampling", "maximum", "median", "mean", "lattice"])
def test_every_strategy_names_possible_originals_and_leaves_fixed_tokens(strategy: Strategy, table: ShadowTable) -> None:
    model = tiny("bert", "classification")
    (done,) = Selector(model, table, VOCABULARY.special_ids)([TEXT], generator(0))
    out = inverted(
        done.ids, Preimages(table, EMBEDDING), strategy, embedding=EMBEDDING, fixed=VOCABULARY.special_ids, prior=None,
        rng=generator(0), beam=4, tried=8,
    )  # fmt: skip
    assert len(out) == len(TEXT) and out[0] == CLS and out[-1] == SEP
    assert all(new in table.of(old).tolist() for old, new in zip(out[1:-1], done.ids[1:-1]))


def test_the_strategies_by_similarity_are_those_of_the_paper(table: ShadowTable) -> None:
    scale = torch.linspace(0.2, 5.0, len(EMBEDDING))[:, None]  # rows of unequal norm: their mean is not that of directions
    embedding, preimages = EMBEDDING * scale, Preimages(table, EMBEDDING)
    text = [t for t in range(20, 80) if len(preimages.of(t)[0]) > 2]

    def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(a, b, dim=0))

    for strategy in ("maximum", "median", "mean"):
        found = inverted(
            text, preimages, strategy, embedding=embedding, fixed=frozenset(), prior=None, rng=generator(0), beam=1, tried=1
        )
        for token, named in zip(text, found):
            own = preimages.of(token)[0].tolist()
            middle = torch.stack([embedding[i] for i in own]).mean(0)
            near = sorted(own, key=lambda i: cosine(embedding[i], middle if strategy == "mean" else embedding[token]))
            assert named == (near[len(near) // 2] if strategy == "median" else near[-1])


def test_the_lattice_finds_the_likeliest_of_all_texts(table: ShadowTable) -> None:
    prior = Trigram(VOCABULARY, ["w40 w41 w50", "w40 the w61", "w70 w71 w40 w41"])
    preimages = Preimages(table, EMBEDDING)
    text = next(s for s in itertools.combinations(range(20, 80), 3) if all(3 <= len(preimages.of(t)[0]) <= 12 for t in s))
    options = [list(zip(*(x.tolist() for x in preimages.of(t)))) for t in text]

    def chance(ids: Sequence[tuple[int, float]]) -> float:
        return sum(math.log(c) for _, c in ids) + prior.log_probability([t for t, _ in ids])

    best = max(itertools.product(*options), key=chance)
    found = inverted(
        (CLS, *text, SEP), preimages, "lattice", embedding=torch.empty(0), fixed=VOCABULARY.special_ids, prior=prior,
        rng=generator(0), beam=2000, tried=100,
    )  # fmt: skip
    chances = [dict(zip(*(x.tolist() for x in preimages.of(t)))) for t in text]
    assert chance([(t, c[t]) for t, c in zip(found[1:-1], chances)]) == pytest.approx(chance(best))


def behind_ghost(
    protected: bool = True, model: nn.Module | None = None, reference: tuple[str, ...] = (), selection: Selection = DEFAULT
) -> Observation:
    defense = (ghost(shadows=SMALL, selection=selection),) if protected else ()
    model = model or tiny("bert", "classification")
    batch = batch_of([TEXT], "classification", [1])
    sent = step(model, batch, defense, task="classification", vocabulary=VOCABULARY, rng=generator(0, "step"))
    granted = HONEST_SERVER.grants | ({Grant.REFERENCE_TEXT} if reference else set())
    return observe(sent, replace(HONEST_SERVER, grants=granted), reference_text=reference)


def test_from_a_gradient_to_originals_and_no_claim_beyond_matched(table: ShadowTable) -> None:
    seen = behind_ghost()
    assert announced_ghost(seen) == SMALL
    substitutes = registry.attack("best")(seen, rng=generator(0), budget=Budget("quick"))
    assert substitutes.confidence == "verified" and substitutes.tokens != (tuple(TEXT),)
    guess = registry.attack("ghost-lattice")(seen, rng=generator(0), budget=Budget("quick"))
    assert guess.confidence == "matched" and guess.details["substitutes"] == "verified"
    (found,), (read,) = guess.tokens, substitutes.tokens
    assert all(new in table.of(old).tolist() for old, new in zip(found[1:-1], read[1:-1]))


def test_the_selection_is_run_again_with_the_settings_that_were_announced() -> None:
    def read(selection: Selection, level: Literal["quick", "default"]) -> tuple[int, ...]:
        guess = registry.attack("ghost-lattice")(behind_ghost(selection=selection), rng=generator(0), budget=Budget(level))
        assert guess.confidence == "matched" and guess.details["substitutes"] == "verified"
        return guess.tokens[0]

    def hits(text: Sequence[int]) -> int:
        return sum(a == b for a, b in zip(text, TEXT))

    for selection in (Selection(), Selection(sweeps=0)):
        assert hits(read(selection, "default")) > hits(read(selection, "quick"))
    drawn = Selection(sweeps=0, start="random")
    assert read(drawn, "default") == read(drawn, "quick"), "what was drawn cannot be run again"


@pytest.mark.slow
def test_a_trained_model_learns_what_substitutes_stand_for(table: ShadowTable) -> None:
    model = tiny("bert", "classification")
    words = [f"w{i}" for i in range(20, 32)]
    texts = [" ".join(words[(k + j) % len(words)] for j in range(5)) for k in range(24)]
    restorer = trained(model, table, VOCABULARY, texts, epochs=100, seed=0)
    originals = [[CLS, *VOCABULARY.encode(t), SEP] for t in texts[:6]]
    hidden = Selector(model, table, VOCABULARY.special_ids)(originals, generator(1))
    preimages = Preimages(table, EMBEDDING)
    read = [restored(h.ids, restorer, preimages, VOCABULARY.special_ids) for h in hidden]
    hits = [a == b for old, new in zip(originals, read) for a, b in zip(old[1:-1], new[1:-1])]
    assert sum(hits) > 0.8 * len(hits)
    assert all(len(new) == len(old) and (new[0], new[-1]) == (CLS, SEP) for old, new in zip(originals, read))
    # Free of the preimages, it names whatever it has learned, and no special token.
    free = [restored(h.ids, restorer, preimages, VOCABULARY.special_ids, free=True) for h in hidden]
    hits = [a == b for old, new in zip(originals, free) for a, b in zip(old[1:-1], new[1:-1])]
    assert sum(hits) > 0.8 * len(hits)
    assert all((new[0], new[-1]) == (CLS, SEP) and not {*new[1:-1]} & VOCABULARY.special_ids for new in free)


def test_without_ghost_there_is_nothing_to_invert() -> None:
    with pytest.raises(NotApplicable, match="no protection by ghost"):
        registry.attack("ghost-mean")(behind_ghost(protected=False), rng=generator(0), budget=Budget("quick"))


def test_a_model_that_learned_is_not_kept_for_other_weights_behind_the_same_embedding() -> None:
    """Fine-tuned models often share the embedding: what was read of one hung on which was attacked before it."""

    def learned(seed: int) -> bool:
        model = tiny("bert", "classification")
        later = tiny("bert", "classification", seed=seed).state_dict()
        model.load_state_dict({n: p if "word_embeddings" in n else later[n] for n, p in model.state_dict().items()})
        seen = behind_ghost(model=model, reference=tuple(f"w{k} w{k + 3} w40" for k in range(20, 24)))
        guess = registry.attack("ghost-generation")(seen, rng=generator(0), budget=Budget("quick"))
        return "learning_seconds" in guess.details

    assert [learned(seed) for seed in (7, 8, 7)] == [True, True, False]
