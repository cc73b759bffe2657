"""GHOST's selection run again: the private text reproduces its substitutes, and that tells originals apart."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from rasura.attacks.ghost.inversion import Preimages, possible
from rasura.attacks.ghost.lattice import Options, likeliest
from rasura.attacks.ghost.rerun import SHARE, TRUST, Rerun, asked_again
from rasura.core.rng import generator, integers
from rasura.ghost.models import made_for
from rasura.ghost.selection import Selector
from rasura.ghost.selection_settings import Selection
from rasura.ghost.table import ShadowSettings, token_embedding
from rasura.testing.tiny import CLS, SEP, VOCABULARY, tiny

SMALL = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None)
FIXED = VOCABULARY.special_ids
SETTLED = Selection(enough=0.0, sweeps=50)
EMBEDDING = token_embedding(tiny("bert", "classification"))


def selector(family: str = "bert", selection: Selection = SETTLED, group: int = 1) -> Selector:
    model = tiny(family, "causal" if family == "gpt2" else "classification").eval()
    shadows = ShadowSettings(**{**vars(SMALL), "group": group, "choices": 6 if group > 1 else SMALL.choices})
    return Selector(model, made_for(model, VOCABULARY, shadows), FIXED, selection)


def texts(count: int, length: int = 6) -> list[list[int]]:
    rng = generator(3, "texts")
    return [[CLS, *(20 + integers(60, (length,), rng)).tolist(), SEP] for _ in range(count)]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize(
    ("selection", "group"),
    [(SETTLED, 1), (SETTLED, 4), (Selection(enough=0.0, sweeps=50, tried=0, start="random"), 1), (Selection(sweeps=0), 1)],
)
def test_the_private_text_reproduces_every_substitute(family: str, selection: Selection, group: int) -> None:
    select = selector(family, selection, group)
    others = 0
    for text, done in zip(texts(2), select(texts(2), generator(0))):
        again = Rerun(select, done.ids)
        for place in range(1, len(text) - 1):
            if not len(select.options(text[place])):
                continue
            alike = (select.table.groups == select.table.groups[text[place]]).nonzero().flatten().tolist()
            assert again.preferred(text, place, alike) == [0] * len(alike)
            others += sum(again.preferred(text, place, [t for t in range(20, 40) if len(select.options(t))]))
    assert others > 0, "other texts do not"


def test_it_decides_between_originals_that_the_lattice_cannot_tell_apart() -> None:
    select = selector()
    decided = 0
    for text, done in zip(texts(3), select(texts(3), generator(0))):
        again = Rerun(select, done.ids)
        for place in range(1, len(text) - 1):
            # Equal chances and no language: the lattice takes the smaller id, which is not the private one.
            other = next((t for t in range(20, text[place]) if again.preferred(text, place, [t]) > [0]), None)
            if other is None or not len(select.options(text[place])):
                continue
            options = [(torch.tensor([t]), torch.ones(1)) for t in text]
            options[place] = (torch.tensor([other, text[place]]), torch.tensor([0.5, 0.5]))
            guess = likeliest(options, None, FIXED, 4, 8)
            assert guess[place] == other
            assert asked_again(guess, options, again, None, FIXED, 4, 1) == tuple(text)
            decided += 1
    assert decided >= 6


def own_score(guess: Sequence[int], options: Options, again: Rerun) -> float:
    score = 0.0
    for place, (originals, chances) in enumerate(options):
        if len(originals) > 1:
            chance = float(chances[originals.tolist().index(guess[place])])
            score += SHARE * math.log(chance) - TRUST * math.log1p(again.preferred(guess, place, [guess[place]])[0])
    return score


def test_no_guess_becomes_worse_by_the_score_of_the_attack() -> None:
    """Of texts that no selection left, in a model of strong attention: places contradict each other."""
    model = tiny("bert", "classification").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "attention" in name and weight.dim() == 2:
                weight.mul_(8)
    select = Selector(model, made_for(model, VOCABULARY, SMALL), FIXED, SETTLED)
    preimages = Preimages(select.table, EMBEDDING)
    better = 0
    for text in texts(26, length=5)[22:]:
        again = Rerun(select, text)
        options = [(ids[:3], chances[:3]) for ids, chances in possible(text, preimages, FIXED)]
        guess = likeliest(options, None, FIXED, 4, 8)
        found = asked_again(guess, options, again, None, FIXED, 4, 1)
        assert own_score(found, options, again) >= own_score(guess, options, again) - 1e-6
        better += found != guess
    assert better > 0


def test_a_long_text_is_run_in_windows() -> None:
    select = selector()
    (text,) = texts(1, length=200)
    again = Rerun(select, text)
    part = again.window
    cut = Rerun(select, text[60 : 60 + part])
    some = [t for t in range(20, 60) if len(select.options(t))]
    assert again.preferred(text, 60 + part // 2, some) == cut.preferred(text[60 : 60 + part], part // 2, some)
    assert again.preferred(text, len(text) - 2, some) == Rerun(select, text[-part:]).preferred(text[-part:], part - 2, some)
