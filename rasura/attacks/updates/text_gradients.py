"""Gradients of single texts, kept small enough to compare many texts with each other.

The gradient of a layer's weight is a product of two narrow matrices, with a row for each token: the gradients at the layer's
outputs, and its inputs. Inner products of two texts' gradients follow from Gram matrices (``gradient_matching.factors``).
Which weights are used by such layers alone is tried on a text; the gradients of all others are kept whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rasura.attacks.shared.comparing import inner_product
from rasura.core.updates import changed, trained
from rasura.victims.models import parts

SMALLER = 4
"""How many times fewer entries two narrow matrices must have than their product. Long texts are faster compared whole."""

SAME = 1e-3
"""Relative difference up to which a gradient is that of the narrow matrices: float32 leaves 1e-5."""

Sides = tuple[Tensor, Tensor]
"""Matrices ``(tokens, rows)`` and ``(tokens, columns)`` in float64 whose product is a gradient. In place of the first, an
embedding has its ids ``(tokens,)``."""


@dataclass(frozen=True)
class TextGradient:
    """One text's gradient over visible entries. ``whole``: tensors by parameter, flat where entries are hidden. ``sides``:
    by weight, the matrices of each use of it. ``square``: its squared norm."""

    whole: Mapping[str, Tensor]
    sides: Mapping[str, Sequence[Sides]]
    square: float = math.nan

    @property
    def bytes(self) -> int:
        """Memory that it takes."""
        held = [*self.whole.values(), *(side for uses in self.sides.values() for use in uses for side in use)]
        return sum(t.numel() * t.element_size() for t in held)

    def inner(self, other: TextGradient) -> float:
        """The inner product with the gradient of another text."""
        found = sum(inner_product(g.flatten(), other.whole[n].flatten()) for n, g in self.whole.items() if n in other.whole)
        found += sum(_narrow(uses, other.sides[n]) for n, uses in self.sides.items() if n in other.sides)
        for one, two in ((self, other), (other, self)):
            found += sum(_mixed(uses, two.whole[n]) for n, uses in one.sides.items() if n in two.whole)
        return found

    def cosine(self, other: TextGradient) -> float:
        """The cosine with the gradient of another text; NaN if either is zero or not finite."""
        size = self.square * other.square
        return self.inner(other) / math.sqrt(size) if 0 < size < math.inf else math.nan


class TextGradients:
    """Computes the gradients of texts by the parameters ``names`` of ``model``, over the entries in ``visible``.

    ``tried``: the text on which it is tried which weights are used by layers alone.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        visible: Mapping[str, Tensor] | None,
        tried: Mapping[str, Tensor],
    ) -> None:
        self.model, self.names, self.visible = model, list(names), visible or {}
        turned = {lin.module for lin in parts(model).linears if lin.transposed}
        shown = set(names) - set(self.visible)
        wanted = {id(p): n for n, p in model.named_parameters() if n in shown}
        self.layers: dict[str, list[tuple[nn.Module, bool]]] = {}
        for where, module in model.named_modules():
            name = wanted.get(id(getattr(module, "weight", None)))
            if name is not None and (isinstance(module, nn.Linear | nn.Embedding) or where in turned):
                self.layers.setdefault(name, []).append((module, where in turned))
        if self.layers:
            alone, _ = changed(model, tried, list(self.layers))
            found, _ = self._passed(tried)
            self.layers = {n: some for n, some in self.layers.items() if n in alone and _is_product(found[n], alone[n])}

    def __call__(self, text: Mapping[str, Tensor]) -> TextGradient:
        """The gradient of ``text``, as keyword arguments of the model. Tensors are on the CPU."""
        sides, whole = self._passed(text)
        for name in list(sides):
            weight = self.model.get_parameter(name)
            if SMALLER * sum(a.numel() + b.numel() for a, b in sides[name]) > weight.numel():
                whole[name] = _product(sides.pop(name), weight.shape).to(weight.dtype)
        whole = {n: g[self.visible[n]] if n in self.visible else g for n, g in whole.items()}
        found = TextGradient(whole, sides)
        return TextGradient(whole, sides, found.inner(found))

    def _passed(self, text: Mapping[str, Tensor]) -> tuple[dict[str, list[Sides]], dict[str, Tensor]]:
        """The matrices of every use of a weight by its layers, and the gradients of all other parameters."""
        named = set(self.names) - set(self.layers)
        others = {n: p for n, p in self.model.named_parameters() if n in named}
        weights = [self.model.get_parameter(n) for n in self.layers]
        with trained([*others.values(), *weights]), _watched(self.layers) as seen, torch.enable_grad():
            loss = self.model(**text).loss
            found = torch.autograd.grad(loss, [*(out for *_, out in seen), *others.values()], allow_unused=True)
        sides: dict[str, list[Sides]] = {name: [] for name in self.layers}
        for (name, module, turned, taken, _), back in zip(seen, found):
            if back is None:
                continue
            taken, back = taken.detach().cpu(), back.detach().cpu().double().flatten(0, -2)
            if isinstance(module, nn.Embedding):
                ids = taken.flatten()
                real = torch.ones_like(ids, dtype=torch.bool) if module.padding_idx is None else ids != module.padding_idx
                sides[name].append((ids[real], back[real]))
            else:
                taken = taken.double().flatten(0, -2)
                sides[name].append((taken, back) if turned else (back, taken))
        rest = zip(others, found[len(seen) :])
        return sides, {n: g.detach().cpu() for n, g in rest if g is not None}


_Use = tuple[str, nn.Module, bool, Tensor, Tensor]
"""Name of a weight, its layer, whether it is transposed, the layer's input and its output."""


@contextmanager
def _watched(layers: Mapping[str, Sequence[tuple[nn.Module, bool]]]) -> Iterator[list[_Use]]:
    """Inside the block, every use of one of the ``layers``, by their weights."""
    seen: list[_Use] = []

    def hook(name: str, turned: bool) -> Any:
        def record(module: nn.Module, taken: tuple[Any, ...], out: Tensor) -> None:
            if taken and isinstance(out, Tensor) and out.requires_grad and out.dim() > 1:
                seen.append((name, module, turned, taken[0], out))

        return record

    handles = [m.register_forward_hook(hook(n, turned)) for n, some in layers.items() for m, turned in some]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _product(uses: Sequence[Sides], shape: torch.Size) -> Tensor:
    """The gradient ``(rows, columns)`` that the sides make."""
    out = torch.zeros(shape, dtype=torch.float64)
    for a, b in uses:
        out = out.index_add_(0, a, b) if a.dim() == 1 else out.addmm_(a.T, b)
    return out


def _is_product(uses: Sequence[Sides], gradient: Tensor) -> bool:
    """Whether the sides make this ``gradient``."""
    if not uses:
        return False
    return float((_product(uses, gradient.shape) - gradient).norm()) <= SAME * float(gradient.norm())


def _across(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b.T`` of two first sides: matrices, or ids, which stand for rows of the unit matrix."""
    if a.dim() == b.dim() == 1:
        return (a[:, None] == b).double()
    if a.dim() == 1:
        return b[:, a].T
    return a[:, b] if b.dim() == 1 else a @ b.T


def _narrow(uses: Sequence[Sides], others: Sequence[Sides]) -> float:
    return sum(float((_across(a, c) * (b @ d.T)).sum()) for a, b in uses for c, d in others)


def _mixed(uses: Sequence[Sides], whole: Tensor) -> float:
    return sum(float(((whole[a] if a.dim() == 1 else a @ whole.double()) * b).sum()) for a, b in uses)
