"""Derivatives of post-norm encoders that are written out, against hooks and autograd in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from rasura.attacks.updates.gradient_matching.factors import Factoriser
from rasura.attacks.updates.gradient_matching.masks import Masked, shapes
from rasura.attacks.updates.gradient_matching.objective import soft_cross_entropy
from rasura.core.rng import generator
from rasura.testing.tiny import tiny

MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


def _shaken(model: nn.Module) -> nn.Module:
    """``model`` in float64 with biases and norms that are not 0 and 1."""
    rng = generator(6)
    for p in model.double().requires_grad_(False).parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=rng, dtype=p.dtype))
    return model


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("whole", [True, False])
def test_derivatives_by_hand_equal_autograds(family: str, whole: bool) -> None:
    model = _shaken(tiny(family, "classification", hidden=16))
    first = next(n for n, m in model.named_modules() if isinstance(m, nn.LayerNorm))
    quick = Factoriser(model, [n for n, _ in model.named_parameters() if whole or not n.startswith(first)])
    slow = Factoriser(model, quick.names)
    slow.encoder = None
    assert quick.encoder is not None
    rng = generator(7)
    draw = partial(torch.randn, generator=rng, dtype=torch.double)
    leaves = [draw(3, 2, 6, 16).requires_grad_(True), draw(3, 2, 3).requires_grad_(True)]
    ways = [
        way(leaves[0], MASK, lambda z: soft_cross_entropy(z, leaves[1].softmax(-1)), graph=True) for way in (quick, slow)
    ]
    weights = {n: draw(f.explicit().shape) for n, f in ways[1].items()}
    totals = []
    for found in ways:
        own = {n: f.explicit() for n, f in found.items()}
        totals.append(torch.stack([(weights[n] * g + g.square()).sum() for n, g in own.items()]).sum())
    for n, f in ways[0].items():
        assert torch.allclose(f.explicit(), ways[1][n].explicit(), rtol=1e-10, atol=1e-14), n
    for a, b in zip(torch.autograd.grad(totals[0], leaves), torch.autograd.grad(totals[1], leaves)):
        assert float((a - b).norm() / b.norm()) < 1e-12


@pytest.mark.parametrize("texts", [1, 2])
def test_slopes_by_biases_alone_are_autograds(texts: int) -> None:
    """A weight whose signal is below the noise counts nothing, and a bias gives one slope to all tokens of a text. So
    autograd hands on a tensor whose entries share their memory, which cannot be written."""
    model = _shaken(tiny("bert", "classification", hidden=16))
    names = [n for n, _ in model.named_parameters() if ".layer." in n or n.startswith("classifier")]
    (bias,) = (n for n in names if "layer.0" in n and n.endswith("query.bias"))
    e = torch.randn(1, texts, 6, 16, generator=generator(7), dtype=torch.double).requires_grad_(True)
    slopes: list[torch.Tensor] = []
    for by_hand in (True, False):
        factoriser = Factoriser(model, names)
        factoriser.encoder = factoriser.encoder if by_hand else None
        found = factoriser(e, MASK[:texts], lambda z: z.square().sum((1, 2)), graph=True)
        slopes += torch.autograd.grad(found[bias].explicit().sum(), e)
    assert float((slopes[0] - slopes[1]).norm() / slopes[1].norm()) < 1e-12


def test_by_hand_is_left_where_a_model_works_otherwise_or_drops() -> None:
    every = {family: tiny(family, "classification", hidden=16) for family in ("bert", "gpt2", "electra", "mpnet")}
    known = {family: Factoriser(m, [n for n, _ in m.named_parameters()]).encoder for family, m in every.items()}
    assert [family for family, encoder in known.items() if encoder is not None] == ["bert"]
    other = tiny("bert", "classification", hidden=16)
    other.bert.encoder.layer[0].intermediate.intermediate_act_fn = nn.Tanh()  # type: ignore[union-attr, index]
    assert Factoriser(other, [n for n, _ in other.named_parameters()]).encoder is None
    model = every["bert"].requires_grad_(False)
    factoriser = Factoriser(model, [n for n, _ in model.named_parameters()])
    e, mask = torch.randn(1, 1, 4, 16, generator=generator(0)).requires_grad_(True), torch.ones(1, 4, dtype=torch.long)
    plain = factoriser(e, mask, lambda z: z.square().sum((1, 2)), graph=False)
    with Masked([torch.full((1, *shape), 0.5) for shape in shapes(model, 1, 4)], 0.1):
        dropped = factoriser(e, mask, lambda z: z.square().sum((1, 2)), graph=False)
    near = [n for n, f in plain.items() if torch.allclose(f.square(), dropped[n].square(), rtol=1e-2, atol=0)]
    assert not any(n.endswith("query.weight") for n in near)
