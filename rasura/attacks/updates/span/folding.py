"""How models make block 0's inputs, so that those of a vocabulary at many places follow from one product.

In most models the input of word v at a place is ``norm(E[v] + offset)``: E the word embedding, the offset what position and
segment add. The norm is a LayerNorm, an RMS norm or none, with a linear layer behind it where embeddings are narrower than
the model (ALBERT, ELECTRA). The form is read off the model by what it answers, not by its names, and compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rasura.victims.models import layer_inputs, parts
from rasura.victims.positions import filler, first_inputs, positions, segment_types

ALIKE = 1e-5
"""Largest relative error of an input by the form: float32 leaves 1e-7 to 1e-6."""

SAMPLE = 48
"""Words at which the form is compared with the model."""

LARGE, SMALL = 1e3, 1e-3
"""Sizes of the vectors that a norm is asked about: ``eps`` means nothing beside the large one, and much beside the small."""


@dataclass(frozen=True)
class Norm:
    """``gain * (u - mean(u)) / sqrt(var(u) + eps) + shift``, then ``behind`` ``(hidden, width)``, each where it is there.

    Without the mean if not ``centred`` (RMS norm), without the division if ``eps`` is None. ``gain`` ``(width,)``, ``shift``
    ``(hidden,)``, which ``behind`` does not act on.
    """

    gain: Tensor
    shift: Tensor
    eps: float | None
    centred: bool
    behind: Tensor | None = None

    def of_scaled(self, scale: float) -> Norm:
        """The norm of ``scale * u`` as one of ``u``."""
        if self.eps is None:
            return replace(self, gain=scale * self.gain)
        return replace(self, gain=math.copysign(1, scale) * self.gain, eps=self.eps / scale**2)

    def middle(self, u: Tensor) -> Tensor:
        """``u`` ``(..., width)`` without its mean, where the norm takes that away."""
        return u - u.mean(-1, keepdim=True) if self.centred else u

    def stretched(self, u: Tensor) -> Tensor:
        """The linear part: ``(..., width)`` to ``(..., hidden)``."""
        u = u * self.gain
        return u if self.behind is None else u @ self.behind.T

    def inverse(self, square: Tensor) -> Tensor:
        """What the linear part is divided by, as a factor, for vectors whose ``middle`` has these squared norms."""
        return torch.ones_like(square) if self.eps is None else (square / len(self.gain) + self.eps).rsqrt()

    def __call__(self, u: Tensor) -> Tensor:
        """``(..., width)`` to ``(..., hidden)``."""
        u = self.middle(u)
        return self.stretched(u) * self.inverse(u.square().sum(-1, keepdim=True)) + self.shift


@dataclass(frozen=True)
class Form:
    """``norm(table[v] + offset)`` for word v at a place. ``scale`` times the sum goes into ``module`` of ``model``."""

    model: nn.Module
    table: Tensor
    norm: Norm
    module: str
    scale: float

    def offsets(self, places: int, segment: int) -> Tensor:
        """What each of the first ``places`` adds to a word's embedding, ``(places, width)``."""
        word = filler(self.model)
        return _sums(self.model, self.module, torch.full((1, places), word), segment)[0] / self.scale - self.table[word]


def form(model: nn.Module) -> Form | None:
    """How ``model`` makes block 0's inputs; None where it makes them in another way (BLOOM: two norms in a row)."""
    table = model.get_parameter(parts(model).word_embedding).detach()
    words = torch.cat([torch.arange(8), torch.linspace(8, len(table) - 1, SAMPLE).long()]).clamp_max(len(table) - 1)
    module, norm = _norm_before_block_0(model, table)
    two = words[-2:]
    sums = _sums(model, module, two[:, None], 0)[:, 0].double()
    if sums.shape[-1] != table.shape[1]:
        return None
    step = (table[two[1]] - table[two[0]]).double()
    scale = float((sums[1] - sums[0]) @ step / step.square().sum())
    found = Form(model, table, norm.of_scaled(scale), module, scale)
    last = min(3, (positions(model) or 1) - 1)
    for place, segment in {(0, 0), (last, segment_types(model) - 1)}:
        own = first_inputs(model, words, place, segment)
        made = found.norm(table[words] + found.offsets(place + 1, segment)[place])
        if made.shape != own.shape or not bool(((made - own).norm(dim=1) <= ALIKE * own.norm(dim=1)).all()):
            return None
    return found


@torch.no_grad()
def _sums(model: nn.Module, module: str, ids: Tensor, segment: int) -> Tensor:
    """What goes into ``module`` for the texts ``ids`` ``(k, length)``: ``(k, length, width)``."""
    extra = {"token_type_ids": torch.full_like(ids, segment)} if segment_types(model) > 1 else {}
    return layer_inputs(model, [module], input_ids=ids, attention_mask=torch.ones_like(ids), **extra)[module]


def _norm_before_block_0(model: nn.Module, table: Tensor) -> tuple[str, Norm]:
    """The norm that block 0's input comes from, and the name of the module that it begins with; where there is none, a norm
    that does nothing and the name of block 0's first layer."""
    first = parts(model).blocks[0].qkv[0].module
    ran: list[tuple[str, Tensor, Tensor]] = []

    def keep(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], dict[str, object], object], None]:
        def record(_: nn.Module, args: tuple[Tensor, ...], named: dict[str, object], out: object) -> None:
            if len(args) == 1 and not named and args[0].is_floating_point() and isinstance(out, Tensor):
                ran.append((name, args[0], out))

        return record

    leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
    handles = [m.register_forward_hook(keep(n), with_kwargs=True) for n, m in leaves]
    try:
        end = _sums(model, first, torch.full((1, 3), filler(model)), 0)
    finally:
        for handle in handles:
            handle.remove()

    def source(x: Tensor) -> str | None:
        """The first module that gave ``x``."""
        return next((name for name, _, out in ran if out.shape == x.shape and torch.equal(out, x)), None)

    name, behind, bias = source(end), None, None
    if name is not None and isinstance(layer := model.get_submodule(name), nn.Linear):
        behind, bias = layer.weight.detach(), layer.bias
        first, end = name, next(x for n, x, _ in ran if n == name)
        name = source(end)
    if name is None:
        norm = Norm(table.new_ones(end.shape[-1]), table.new_zeros(end.shape[-1]), None, False)
    else:
        first, norm = name, _asked(model.get_submodule(name), table.new_ones(end.shape[-1]))
    if behind is None:
        return first, norm
    shift = norm.shift @ behind.T + (0 if bias is None else bias.detach())
    return first, Norm(norm.gain, shift, norm.eps, norm.centred, behind)


@torch.no_grad()
def _asked(module: nn.Module, ones: Tensor) -> Norm:
    """The norm that ``module`` is, if it is one, by what it answers; ``ones`` ``(width,)``."""
    signs = ones.clone()
    signs[1::2] = -1

    def answer(u: Tensor) -> Tensor:
        found: Tensor = module(u.view(1, 1, -1))
        return found.flatten()

    shift = answer(0 * ones)
    gain = (answer(LARGE * signs) - shift) * signs
    if torch.allclose(answer(2 * LARGE * signs) - shift, 2 * gain * signs, rtol=1e-3):
        return Norm(gain / LARGE, shift, None, False)
    centred = float((answer(LARGE * ones) - shift).norm()) < 0.5 * float(gain.norm())
    share = float((answer(SMALL * signs) - shift).double().norm() / gain.double().norm())
    return Norm(gain, shift, SMALL**2 * max(share**-2 - 1, 0.0), centred)
