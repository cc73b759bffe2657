"""The layers of an image classifier: their gradients for candidate images, and what a linear layer gives away."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rasura.attacks.updates.gradient_matching.factors import Factor

FITS = 0.1
"""Largest relative error of the rank-1 fit at which a layer's input is believed."""


class ImageGradients:
    """The gradients of candidate images by the convolutions' and linear layers' parameters that were observed."""

    def __init__(self, model: nn.Module, observed: Mapping[str, Tensor]) -> None:
        self.model = model
        self.layers: dict[str, nn.Conv2d | nn.Linear] = {
            n: m for n, m in model.named_modules()
            if isinstance(m, nn.Conv2d | nn.Linear) and {f"{n}.weight", f"{n}.bias"} & set(observed)
        }  # fmt: skip
        self.names = [f"{n}.{kind}" for n in self.layers for kind in ("weight", "bias") if f"{n}.{kind}" in observed]

    def __call__(self, x: Tensor, loss: Callable[[Tensor], Tensor] | None) -> tuple[dict[str, Factor], dict[str, Tensor]]:
        """Gradients by parameter name (none without ``loss``), and every layer's input ``(candidates, ...)`` by module name.

        ``x`` is ``(candidates, batch, channels, height, width)``; ``loss`` maps logits ``(candidates, batch, classes)`` to
        losses ``(candidates,)``.
        """
        count = len(x)
        kept: dict[str, tuple[Tensor, Tensor]] = {}

        def hook(name: str) -> Any:
            def record(_: nn.Module, arguments: tuple[Any, ...], out: Tensor) -> None:
                kept[name] = (arguments[0], out)

            return record

        handles = [m.register_forward_hook(hook(n)) for n, m in self.layers.items()]
        try:
            logits = self.model(pixel_values=x.flatten(0, 1)).logits
        finally:
            for handle in handles:
                handle.remove()
        every = {n: _candidates(kept[n][0], count) for n in self.layers}
        if loss is None:
            return {}, every
        found: dict[str, Factor] = {}
        total = loss(_candidates(logits, count)).sum()
        deltas = torch.autograd.grad(total, [kept[n][1] for n in self.layers], create_graph=True)
        for (name, layer), delta in zip(self.layers.items(), deltas):
            inputs = kept[name][0]
            if isinstance(layer, nn.Conv2d):
                padding: Any = layer.padding
                columns = nn.functional.unfold(inputs, layer.kernel_size, layer.dilation, padding, layer.stride)
                d = delta.flatten(2)
                whole = _candidates(d @ columns.transpose(1, 2), count).sum(1)
                weight, bias = Factor(whole.flatten(1), None), _candidates(d.sum(2), count).sum(1)
            else:
                d = _candidates(delta, count)
                weight, bias = Factor(d, _candidates(inputs, count)), d.sum(1)
            found |= {f"{name}.weight": weight, f"{name}.bias": Factor(bias, None)}
        return {n: found[n] for n in self.names}, every


def _candidates(rows: Tensor, count: int) -> Tensor:
    return rows.reshape(count, -1, *rows.shape[1:])


@dataclass(frozen=True)
class LayerInput:
    """What the input of a linear layer must be, ``(inputs,)``; ``known`` (bool): where; ``scaled``: its size is known."""

    value: Tensor
    known: Tensor
    scaled: bool


def layer_input(weight: Tensor, bias: Tensor, visible: tuple[Tensor, Tensor], *, sweeps: int = 500) -> LayerInput | None:
    """The input of a linear layer from its gradients ``(outputs, inputs)``, ``(outputs,)`` at batch size 1.

    With the bias as one more input that is 1, the gradient is of rank one: alternating least squares over the visible
    entries. None where rank one does not fit (more than one image, or noise), and where all that shows of the input is zero:
    a candidate has no relative error to that.
    """
    whole = torch.cat([weight, bias[:, None]], 1).double()
    mask = torch.cat([visible[0], visible[1][:, None]], 1).double()
    if not bool(whole.any()):
        return None
    x, before = torch.ones(whole.shape[1], dtype=torch.double), torch.zeros(whole.shape[1], dtype=torch.double)
    for _ in range(sweeps):
        delta = (whole @ x) / (mask @ x.square()).clamp_min(1e-300)
        delta = delta / delta.norm()
        x = (whole.T @ delta) / (mask.T @ delta.square()).clamp_min(1e-300)
        if float((x - before).norm()) < 1e-7 * float(x.norm()):
            break
        before = x
    if float(((torch.outer(delta, x) - whole) * mask).norm()) > FITS * float(whole.norm()):
        return None
    known = mask.T @ delta.square() > 1e-12 * delta.square().sum()
    if not bool(x[:-1][known[:-1]].any()):
        return None
    scaled = bool(known[-1]) and abs(float(x[-1])) > 1e-6 * float(x.abs().max())
    value = x[:-1] / (x[-1] if scaled else x[:-1].abs().max())
    return LayerInput(value.float(), known[:-1], scaled)
