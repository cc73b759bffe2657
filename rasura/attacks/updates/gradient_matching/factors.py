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

from rasura.attacks.updates.gradient_matching.by_hand import Encoder, by_hand, encoders
from rasura.attacks.updates.gradient_matching.masks import Dropouts
from rasura.core.rng import generator
from rasura.core.updates import classified
from rasura.victims.models import Linear, parts

SKETCH = 16
"""Columns of the first try at a low rank."""

SAME = 1e-3
"""Relative difference up to which two gradients are the same: float32 leaves 1e-5 of those that are not all but zero."""


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
        probes = torch.randn(matrix.shape[1], rank, generator=rng, dtype=matrix.dtype).to(matrix.device)
        left = torch.linalg.qr(matrix @ probes).Q
        right = matrix.T @ left
        if float((matrix - left @ right.T).norm()) <= tolerance:
            return LowRank(left, right)
        rank *= 2
    return matrix


class _Moments(torch.autograd.Function):
    """Squared norms of ``delta^T x`` and inner products with ``left`` or ``left right^T``; differentiable once."""

    @staticmethod
    def forward(ctx: Any, delta: Tensor, x: Tensor, left: Tensor | None, right: Tensor | None) -> tuple[Tensor, Tensor]:
        by_delta, by_x = delta @ delta.mT, x @ x.mT
        square = (by_delta * by_x).sum((1, 2))
        if left is None:
            ctx.save_for_backward(delta, x, by_delta, by_x, None, None, None, None)
            return square, torch.zeros_like(square)
        along = delta @ left
        across = x if right is None else x @ right
        ctx.save_for_backward(delta, x, by_delta, by_x, along, across, left, right)
        return square, (along * across).sum((1, 2))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, square: Tensor, inner: Tensor) -> tuple[Tensor, Tensor, None, None]:
        delta, x, by_delta, by_x, along, across, left, right = ctx.saved_tensors
        twice, once = 2 * square[:, None, None], inner[:, None, None]
        if left is None:
            return (by_x * twice) @ delta, (by_delta * twice) @ x, None, None
        other = along * once if right is None else (along * once) @ right.T
        slope = torch.baddbmm((across * once) @ left.T, by_x * twice, delta)
        return slope, torch.baddbmm(other, by_delta * twice, x), None, None


@dataclass(frozen=True)
class Factor:
    """Factors of a gradient: ``delta`` ``(candidates, tokens, outputs)``, ``x`` ``(candidates, tokens, inputs)``.

    For a vector parameter (bias, LayerNorm) ``x`` is None and ``delta`` is the gradient itself, ``(candidates, width)``.
    """

    delta: Tensor
    x: Tensor | None

    def square(self) -> Tensor:
        """Squared norm of each candidate's gradient, ``(candidates,)``."""
        return self.moments(None)[0]

    def inner(self, observed: Tensor | LowRank) -> Tensor:
        """Inner product of each candidate's gradient with ``observed`` ``(outputs, inputs)``, ``(candidates,)``."""
        return self.moments(observed)[1]

    def moments(self, observed: Tensor | LowRank | None) -> tuple[Tensor, Tensor]:
        """Squared norm of each candidate's gradient and its inner product with ``observed``, both ``(candidates,)``."""
        if self.x is None:
            assert not isinstance(observed, LowRank)
            square = self.delta.square().sum(1)
            return square, torch.zeros_like(square) if observed is None else self.delta @ observed
        left, right = (observed.left, observed.right) if isinstance(observed, LowRank) else (observed, None)
        square, inner = _Moments.apply(self.delta, self.x, left, right)  # type: ignore[no-untyped-call]
        return square, inner

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


@torch.no_grad()
def _same(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> bool:
    """Whether two pairs of inputs and slopes ``(..., width)`` make the same gradient."""
    a, b = (d.flatten(0, -2).T @ x.flatten(0, -2) for x, d in (one, other))
    return float((a - b).norm()) <= SAME * float(a.norm())


class Factoriser:
    """Computes the factors of the loss gradient of candidates, for the parameters ``names`` of ``model``.

    By derivatives that are written out (``by_hand``) where the model allows it and no dropout is in play, else by hooks and
    autograd. The weights are those that the model had when this was made.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.model = model
        self.layers = layers(model, names)
        passed = self._of_each_text()
        self.layers = [layer for layer in self.layers if layer.module in passed]
        self.encoder = self._encoder()

    @property
    def names(self) -> list[str]:
        """The parameters that are matched."""
        return [n for layer in self.layers for n in (layer.weight, layer.bias) if n is not None]

    def observed(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What ``found`` holds of the matched parameters (gradients, or masks of what is visible), as the factors see it.

        ``(outputs, inputs)``, whatever the layer's own layout, and where the model is.
        """
        device = next(self.model.parameters()).device
        turned = {layer.weight for layer in self.layers if layer.linear is not None and layer.linear.transposed}
        return {n: (found[n].T if n in turned else found[n]).to(device) for n in self.names if n in found}

    def __call__(self, e: Tensor, mask: Tensor, loss: Callable[[Tensor], Tensor], *, graph: bool) -> Mapping[str, Factor]:
        """Factors by parameter name of candidates ``e`` ``(candidates, batch, length, hidden)``.

        ``mask`` is ``(batch, length)``, for each candidate or for all. ``loss`` maps logits ``(candidates, batch, classes)``
        to losses ``(candidates,)``. ``graph``: keep the graph, for a gradient by ``e``.
        """
        count, batch, length, _ = e.shape
        texts, rows = e.flatten(0, 1), mask.expand(count, batch, length).reshape(-1, length)

        def losses(logits: Tensor) -> Tensor:
            return loss(logits.reshape(count, batch, -1))

        if self.encoder is None or self.model.training or Dropouts.entered:
            found = self._by_hooks(texts, rows, losses, graph)
        else:
            whole = any(layer.module == self.encoder.names.first for layer in self.layers)
            found = by_hand(self.encoder, texts, rows, losses, graph=graph, whole=whole)
        out: dict[str, Factor] = {}
        for layer in self.layers:
            if layer.module not in found:
                continue
            x, d = (t.reshape(count, -1, t.shape[-1]) for t in found[layer.module])
            if layer.weight is not None:
                out[layer.weight] = Factor(d, x) if layer.linear is not None else Factor((d * x).sum(1), None)
            if layer.bias is not None:
                out[layer.bias] = Factor(d.sum(1), None)
        return out

    def _by_hooks(
        self, e: Tensor, mask: Tensor, loss: Callable[[Tensor], Tensor], graph: bool
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """By module: its inputs, of a norm the normalised ones, and the slopes of ``loss`` by its outputs, ``(texts, places,
        width)``. The blocks of ALBERT are one module, so a text passes it several times: all of its places."""
        logits, calls = self._called(e, mask)
        outputs = [y for _, _, y in calls]
        slopes = torch.autograd.grad(loss(logits).sum(), outputs, create_graph=graph, allow_unused=True)
        found: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for (layer, x, y), slope in zip(calls, slopes):
            if layer.linear is None:
                eps: float = self.model.get_submodule(layer.module).eps  # type: ignore[assignment]  # a LayerNorm
                x = nn.functional.layer_norm(x, x.shape[-1:], eps=eps)
            slope = torch.zeros_like(y) if slope is None else slope
            x, slope = (t.reshape(len(e), -1, t.shape[-1]) for t in (x, slope))
            found.setdefault(layer.module, []).append((x, slope))
        return {
            name: (torch.cat([x for x, _ in some], 1), torch.cat([d for _, d in some], 1)) for name, some in found.items()
        }

    def _called(self, e: Tensor, mask: Tensor) -> tuple[Tensor, list[tuple[Layer, Tensor, Tensor]]]:
        """The logits, and every call of a layer with its input and its output."""
        calls: list[tuple[Layer, Tensor, Tensor]] = []

        def hook(layer: Layer) -> Any:
            return lambda _, args, out: calls.append((layer, args[0], out))

        handles = [self.model.get_submodule(s.module).register_forward_hook(hook(s)) for s in self.layers]
        try:
            return classified(self.model, e, mask), calls
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def _of_each_text(self) -> set[str]:
        """The modules that every text passes by itself. DeBERTa's layers also take its relative positions, which are one
        input for all texts: no candidate has slopes of its own there."""
        texts, length = 7, 5
        weight = self.model.get_parameter(parts(self.model).word_embedding)
        mask = torch.ones(texts, length, dtype=torch.long, device=weight.device)
        calls = self._called(weight.new_zeros(texts, length, weight.shape[1]), mask)[1]
        shared = {layer.module for layer, x, _ in calls if len(x) not in (texts, texts * length)}
        return {layer.module for layer, _, _ in calls} - shared

    def _encoder(self) -> Encoder | None:
        """The model's weights for ``by_hand``, where both ways give the same gradients of two short texts."""
        found, length = list(encoders(self.model, {layer.module for layer in self.layers})), 6
        if not found:
            return None
        weight = self.model.get_parameter(parts(self.model).word_embedding)
        e = float(weight.detach().std()) * torch.randn(2, length, weight.shape[1], generator=generator(0)).to(weight)
        mask = torch.tensor([[1] * length, [1] * (length - 2) + [0] * 2], device=weight.device)

        def loss(logits: Tensor) -> Tensor:
            return logits.square().sum(-1) + logits[:, 0]

        slow = self._by_hooks(e.requires_grad_(True), mask, loss, False)
        for encoder in found:
            fast = by_hand(encoder, e, mask, loss, graph=False)
            if all(_same(pair, fast[module]) for module, pair in slow.items()):
                return encoder
        return None
