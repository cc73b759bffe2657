"""Gradient matching takes its steps on a GPU as on a CPU. Skipped where there is none."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from span_setting import seen_by_server
from torch import Tensor

from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.guesses import Texts
from rasura.attacks.updates.gradient_matching.judging import Judge
from rasura.attacks.updates.gradient_matching.presets import dlg, grab, guided_grab, lamp_cos, lamp_l1l2, lamp_weighted, tag
from rasura.attacks.updates.gradient_matching.settings import Settings, Work
from rasura.core.interfaces import Budget
from rasura.core.rng import generator
from rasura.core.threat import THREATS, observe
from rasura.core.values import Observation
from rasura.registry import parse_defense
from rasura.testing.tiny import CLS, SEP, VOCABULARY, batch_of, tiny
from rasura.victims.step import step

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

TEXTS = [[CLS, 40, 3, 41, 9, 50, SEP], [CLS, 42, 43, 44, SEP]]
ATTACKS = (dlg, tag, lamp_cos, lamp_l1l2, lamp_weighted, grab, guided_grab)
DEFENSES = ("none", "dropout:0.1", "gaussian:0.0001", "dp-sgd:0.001/clip=0.5", "sealing:grad=0.3")


def seen_behind(defense: str, family: str = "bert", texts: int = 2, dtype: torch.dtype = torch.float32) -> Observation:
    batch = batch_of(TEXTS[:texts], "classification", [1, 0][:texts])
    truth = step(
        tiny(family, "classification").to(dtype), batch, parse_defense(defense), task="classification",
        vocabulary=VOCABULARY, rng=generator(1),
    )  # fmt: skip
    return observe(truth, THREATS["with-labels-and-lengths"])


def misfits(seen: Observation, settings: Settings, device: str) -> tuple[Tensor, ...]:
    """The distance of three candidates, its slope by their embeddings, and their distances in other orders."""
    shown = [n for n in seen.gradients if n not in seen.visible or bool(seen.visible[n].any())]
    factoriser = Factoriser(copy.deepcopy(seen.model).to(device), shown)
    work = Work(4, 2, 5, entries=0.5)
    judge = Judge(
        settings, work, seen, factoriser, factoriser.observed(seen.gradients), seen.lengths, True, generator(2), 4096
    )
    ids, free = judge.frame(torch.tensor(seen.lengths).expand(3, -1))
    ids = torch.where(free, torch.randint(30, 200, ids.shape, generator=generator(3)), ids)
    y = torch.randn(3, len(seen.lengths), judge.classes, generator=generator(4), dtype=judge.table.dtype).to(device)
    texts = Texts(judge.embedded(ids).clone().requires_grad_(True), (ids >= 0).sum(-1), y)
    masks = [m.to(judge.table.dtype) for m in judge.masks(3)]
    loss = judge.misfit(texts, True, masks)
    (slope,) = torch.autograd.grad(loss.sum(), texts.e)
    orders = torch.arange(judge.width).flip(0).expand(2, len(seen.lengths), -1)
    found = loss.detach(), slope, judge.in_orders(texts.at(slice(0, 1)), orders), judge.nearest(texts)
    return tuple(t.cpu().double() for t in found)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2", "llama"])
@pytest.mark.parametrize("make", ATTACKS[:-1])
@pytest.mark.parametrize("defense", DEFENSES)
def test_distances_and_slopes_are_the_same(family: str, make: object, defense: str) -> None:
    seen = seen_behind(defense, family, dtype=torch.float64)
    one, other = (misfits(seen, make().settings, device) for device in ("cpu", "cuda"))  # type: ignore[operator]
    exact = 1e-4 if family == "llama" else 1e-8  # its norms are in float32
    for a, b in zip(one, other):
        assert float((a - b).norm()) <= exact * float(a.norm())


@pytest.mark.parametrize("make", ATTACKS)
@pytest.mark.parametrize("defense", DEFENSES)
@pytest.mark.parametrize("texts", [1, 2])
def test_an_attack_returns_a_guess_of_the_same_kind(make: object, defense: str, texts: int) -> None:
    seen = seen_behind(defense, texts=texts)
    before = {n: g.clone() for n, g in seen.gradients.items()}
    one, other = (
        make()(seen, rng=generator(0), budget=Budget("quick", device=device))  # type: ignore[operator]
        for device in ("cpu", "cuda")
    )
    assert one.details == other.details or {one.confidence, other.confidence} == {"verified", "matched"}
    assert sorted(map(len, one.tokens)) == sorted(map(len, other.tokens))
    if other.confidence == "matched" and one.confidence == "matched":
        assert other.residual == pytest.approx(one.residual, rel=4, abs=1e-6)
    assert all(torch.equal(g, before[n]) for n, g in seen.gradients.items())
    assert all(p.device.type == "cpu" for p in seen.model.parameters())


def test_a_text_is_read_to_the_end_and_verified() -> None:
    seen = seen_by_server(tiny("bert", "classification"), batch_of(TEXTS[:1], "classification"), "classification")
    attack = replace(lamp_cos(), levels={"quick": Work(16, 3, 150, 20, 10)})
    guess = attack(seen, rng=generator(0), budget=Budget("quick", device="cuda"))
    assert guess.tokens == (tuple(TEXTS[0]),) and guess.confidence == "verified"
