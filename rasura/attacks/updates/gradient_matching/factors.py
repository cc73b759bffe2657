"""Gradients as factors: a linear layer's weight gradient is ``sum_t delta_t x_t^T``, and is never formed.

Two hooks a layer and one ``autograd.grad`` by the layers' outputs give the factors of K candidates at once, as K rows of an
ordinary batch (K*B rows, summed by candidate, for B texts). Norms and inner products with the observed gradient then follow
from Gram matrices: ``||G_k||^2 = sum((delta_k delta_k^T) * (x_k x_k^T))``, ``<G_k, G*> = sum((delta_k G*) * x_k)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.rng import generator
from rasura.core.updates import classified
from rasura.victims.models import Linear, parts

SKETCH = 16
"""Columns of the first try at a low rank."""


@dataclass(frozen=True)
class LowRank:
    """The matrix ``left @ right.T``: ``left`` ``(outputs, rank)``, ``right`` ``(inputs, rank)``."""

    left: Tensor
    right: Tensor


def shortened(matrix: Tensor) -> Tensor | LowRank:
    """``matrix`` as a product of low rank where one equals it to rounding and is cheaper to multiply by; else as it is.

    A linear layer's gradient has at most one dimension for each token, unless noise was added. Its range is that of its
    product with random columns (Halko, Martinsson and Tropp 2011, Algorithm 4.1), twice as many until nothing is left.
    """
    rng, rank = generator(0), SKETCH
    tolerance = 10 * torch.finfo(matrix.dtype).eps * float(matrix.norm())
    while 2 * rank * sum(matrix.shape) <= matrix.numel():
        probes = torch.randn(matrix.shape[1], rank, generator=rng, dtype=matrix.dtype)
        left = torch.linalg.qr(matrix @ probes).Q
        right = matrix.T @ left
        if float((matrix - left @ right.T).norm()) <= tolerance:
            return LowRank(left, right)
        rank *= 2
    return matrix


@dataclass(frozen=True)
class Factor:
    """Factors of a gradient: ``delta`` ``(candidates, tokens, outputs)``, ``x`` ``(candidates, tokens, inputs)``.

    For a vector parameter (bias, LayerNorm) ``x`` is None and ``delta`` is the gradient itself, ``(candidates, width)``.
    """

    delta: Tensor
    x: Tensor | None

    def square(self) -> Tensor:
        """Squared norm of each candidate's gradient, ``(candidates,)``."""
        if self.x is None:
            return self.delta.square().sum(1)
        gram = self.delta @ self.delta.transpose(1, 2)
        return (gram * (self.x @ self.x.transpose(1, 2))).sum((1, 2))

    def inner(self, observed: Tensor | LowRank) -> Tensor:
        """Inner product of each candidate's gradient with ``observed`` ``(outputs, inputs)``, ``(candidates,)``."""
        if isinstance(observed, LowRank):
            assert self.x is not None
            return ((self.delta @ observed.left) * (self.x @ observed.right)).sum((1, 2))
        if self.x is None:
            return self.delta @ observed
        return ((self.delta @ observed) * self.x).sum((1, 2))

    def explicit(self) -> Tensor:
        """The gradients themselves, ``(candidates, outputs, inputs)``: for objectives that need entries (L1, masks)."""
        return self.delta if self.x is None else self.delta.transpose(1, 2) @ self.x


@dataclass(frozen=True)
class Layer:
    """A module whose parameters are matched. ``linear`` is None for a LayerNorm."""

    module: str
    weight: str | None
    bias: str | None
    linear: Linear | None


def layers(model: nn.Module, names: Sequence[str]) -> list[Layer]:
    """The linear and LayerNorm modules of ``model`` that have parameters among ``names``; embeddings are left out."""
    wanted = set(names)
    linears = {lin.module: lin for lin in parts(model).linears}
    out = []
    for name, module in model.named_modules():
        lin = linears.get(name)
        if lin is None and not isinstance(module, nn.LayerNorm):
            continue
        weight = f"{name}.weight" if f"{name}.weight" in wanted else None
        bias = f"{name}.bias" if f"{name}.bias" in wanted else None
        if weight or bias:
            out.append(Layer(name, weight, bias, lin))
    return out


class Factoriser:
    """Computes the factors of the loss gradient of candidates, for the parameters ``names`` of ``model``."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model = model
        self.layers = layers(model, names)

    @property
    def names(self) -> list[str]:
        """The parameters that are matched."""
        return [n for layer in self.layers for n in (layer.weight, layer.bias) if n is not None]

    def observed(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What ``found`` holds of the matched parameters (gradients, or masks of what is visible), as the factors see it.

        ``(outputs, inputs)``, whatever the layer's own layout.
        """
        turned = {layer.weight for layer in self.layers if layer.linear is not None and layer.linear.transposed}
        return {n: found[n].T if n in turned else found[n] for n in self.names if n in found}

    def __call__(self, e: Tensor, mask: Tensor, loss: Callable[[Tensor], Tensor], *, graph: bool) -> Mapping[str, Factor]:
        """Factors by parameter name of candidates ``e`` ``(candidates, batch, length, hidden)``.

        ``mask`` is ``(batch, length)``, for each candidate or for all. ``loss`` maps logits ``(candidates, batch, classes)``
        to losses ``(candidates,)``. ``graph``: keep the graph, for a gradient by ``e``.
        """
        count, batch, length, _ = e.shape
        kept: dict[str, tuple[Tensor, Tensor]] = {}

        def hook(name: str) -> Any:
            def record(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
                kept[name] = (args[0], out)

            return record

        handles = [self.model.get_submodule(s.module).register_forward_hook(hook(s.module)) for s in self.layers]
        try:
            rows = mask.expand(count, batch, length).reshape(-1, length)
            logits = classified(self.model, e.reshape(count * batch, length, -1), rows)
        finally:
            for handle in handles:
                handle.remove()
        total = loss(logits.reshape(count, batch, -1)).sum()
        used = [s for s in self.layers if s.module in kept]
        deltas = torch.autograd.grad(total, [kept[s.module][1] for s in used], create_graph=graph, allow_unused=True)
        out: dict[str, Factor] = {}
        for layer, delta in zip(used, deltas):
            x, y = kept[layer.module]
            d = torch.zeros_like(y) if delta is None else delta
            d, x = d.reshape(count, -1, d.shape[-1]), x.reshape(count, -1, x.shape[-1])
            if layer.weight is not None:
                if layer.linear is not None:
                    out[layer.weight] = Factor(d, x)
                else:
                    module = self.model.get_submodule(layer.module)
                    eps: float = module.eps  # type: ignore[assignment]  # a LayerNorm
                    out[layer.weight] = Factor((d * nn.functional.layer_norm(x, x.shape[-1:], eps=eps)).sum(1), None)
            if layer.bias is not None:
                out[layer.bias] = Factor(d.sum(1), None)
        return out
