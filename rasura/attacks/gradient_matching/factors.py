"""Gradients as factors: a linear layer's weight gradient is ``sum_t delta_t x_t^T``, and is never formed.

Two hooks a layer and one ``autograd.grad`` by the layers' outputs give the factors of K candidates at once, as K rows of an
ordinary batch (K*B rows, summed by candidate, for B texts). Norms and inner products with the observed gradient then follow
from Gram matrices: ``||G_k||^2 = sum((delta_k delta_k^T) * (x_k x_k^T))``, ``<G_k, G*> = sum((delta_k G*) * x_k)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rasura.interfaces import NotApplicable
from rasura.values import Gradients, Task
from rasura.victims.models import Linear, parts


@dataclass(frozen=True)
class Factor:
    """Factors of a gradient: ``delta`` ``(candidates, tokens, outputs)``, ``x`` ``(candidates, tokens, inputs)``.

    For a vector parameter (bias, norm) ``x`` is None and ``delta`` is the gradient itself, ``(candidates, width)``.
    """

    delta: Tensor
    x: Tensor | None

    def square(self) -> Tensor:
        """Squared norm of each candidate's gradient, ``(candidates,)``."""
        if self.x is None:
            return self.delta.square().sum(1)
        gram = self.delta @ self.delta.transpose(1, 2)
        return (gram * (self.x @ self.x.transpose(1, 2))).sum((1, 2))

    def inner(self, observed: Tensor) -> Tensor:
        """Inner product of each candidate's gradient with ``observed`` ``(outputs, inputs)``, ``(candidates,)``."""
        if self.x is None:
            return self.delta @ observed
        return ((self.delta @ observed) * self.x).sum((1, 2))

    def scaled(self, scale: Tensor) -> Factor:
        """The factors of ``scale[k]`` times candidate k's gradient; ``scale`` is ``(candidates,)``."""
        return Factor(self.delta * scale.reshape(-1, *[1] * (self.delta.dim() - 1)), self.x)


@dataclass(frozen=True)
class Layer:
    """A module whose parameters are matched. ``linear`` is None for a norm."""

    module: str
    weight: str | None
    bias: str | None
    linear: Linear | None


def _is_norm(module: nn.Module) -> bool:
    """LayerNorm, or an RMSNorm of whatever family: each has a class of its own."""
    return isinstance(module, nn.LayerNorm) or "RMSNorm" in type(module).__name__


def _normalised(module: nn.Module, x: Tensor) -> Tensor:
    """``x`` as the norm ``module`` scales it, before its weight: the weight's gradient is ``sum(delta * this)``."""
    if isinstance(module, nn.LayerNorm):
        return nn.functional.layer_norm(x, x.shape[-1:], eps=module.eps)
    # Llama calls it variance_epsilon, Gemma and torch eps; torch's None means the precision's own.
    eps: float | None = getattr(module, "variance_epsilon", getattr(module, "eps", None))  # type: ignore[assignment]
    return nn.functional.rms_norm(x, x.shape[-1:], eps=eps)


def layers(model: nn.Module, names: Sequence[str]) -> list[Layer]:
    """The linear layers and norms of ``model`` that have parameters among ``names``; embeddings are left out."""
    found = parts(model)
    wanted = set(names) - set(found.embedding_names)
    if found.tied:  # the output layer is the word embedding
        wanted.discard(found.word_embedding)
    linears = {lin.module: lin for lin in found.linears}
    out = []
    for name, module in model.named_modules():
        lin = linears.get(name)
        if lin is None and not _is_norm(module):
            continue
        weight = f"{name}.weight" if f"{name}.weight" in wanted else None
        bias = f"{name}.bias" if f"{name}.bias" in wanted else None
        if weight or bias:
            out.append(Layer(name, weight, bias, lin))
    return out


class _Stop(Exception):
    pass


class Factoriser:
    """Computes the factors of the loss gradient of candidates, for the parameters ``names`` of ``model``.

    ``model`` should not want parameter gradients (``requires_grad`` False): they would be tracked for nothing.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], task: Task = "classification") -> None:
        self.model = model
        self.layers = layers(model, names)
        found = parts(model)
        # Given embeddings instead of ids, Hugging Face's decoder classifiers cannot see padding and score the last column.
        self._scored_by = found.head.module if found.causal and found.head and task == "classification" else None

    @property
    def names(self) -> list[str]:
        """The parameters that are matched."""
        return [n for layer in self.layers for n in (layer.weight, layer.bias) if n is not None]

    def turned(self, entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The matched ones of ``entries`` as the factors see them: ``(outputs, inputs)`` whatever the layer's layout."""
        back = {layer.weight for layer in self.layers if layer.linear is not None and layer.linear.transposed}
        return {n: (entries[n].T if n in back else entries[n]).contiguous() for n in self.names if n in entries}

    def observed(self, gradients: Gradients) -> dict[str, Tensor]:
        """``turned`` for observed gradients, on the model's device and in its precision."""
        like = next(self.model.parameters())
        return {n: g.to(like) for n, g in self.turned(gradients).items()}

    def __call__(self, e: Tensor, mask: Tensor, loss: Callable[[Tensor], Tensor], *, graph: bool) -> dict[str, Factor]:
        """Factors by parameter name of candidates ``e`` ``(candidates, batch, length, hidden)``.

        ``mask`` is ``(batch, length)``, padding on the right; ``loss`` maps logits ``(candidates, batch, ...)`` to losses
        ``(candidates,)``. ``graph``: keep the graph, for a gradient by ``e``.
        """
        count, batch = e.shape[:2]
        if not e.requires_grad:
            e = e.detach().requires_grad_(True)
        calls: dict[str, list[tuple[Tensor, Tensor]]] = {}
        with torch.enable_grad():
            logits = self._forward(e.flatten(0, 1), mask.repeat(count, 1), calls)
            total = loss(logits.unflatten(0, (count, batch))).sum()
            outputs = [y for pairs in calls.values() for _, y in pairs]
            found = torch.autograd.grad(total, outputs, create_graph=graph, allow_unused=True)
        deltas = iter(torch.zeros_like(y) if d is None else d for y, d in zip(outputs, found))
        out: dict[str, Factor] = {}
        for layer in self.layers:
            if layer.module not in calls:
                continue
            xs, ds = [], []
            for x, _ in calls[layer.module]:
                if len(x) != count * batch:
                    raise NotApplicable(f"{layer.module} does not keep the texts of a batch apart; candidates would mix")
                # (candidates, batch * length, width): a sum over tokens is a sum over the candidate's texts, too.
                xs.append((x if graph else x.detach()).reshape(count, -1, x.shape[-1]))
                delta = next(deltas)
                ds.append(delta.reshape(count, -1, delta.shape[-1]))
            # A module that is called several times (shared blocks) sums its calls, as if they were more tokens.
            x, d = (xs[0], ds[0]) if len(xs) == 1 else (torch.cat(xs, 1), torch.cat(ds, 1))
            if layer.weight is not None and layer.linear is not None:
                out[layer.weight] = Factor(d, x)
            elif layer.weight is not None:
                out[layer.weight] = Factor((d * _normalised(self.model.get_submodule(layer.module), x)).sum(1), None)
            if layer.bias is not None:
                out[layer.bias] = Factor(d.sum(1), None)
        return out

    def _forward(self, rows: Tensor, mask: Tensor, calls: dict[str, list[tuple[Tensor, Tensor]]]) -> Tensor:
        """Logits of ``rows`` ``(rows, length, hidden)``; fills ``calls`` with the inputs and outputs of the layers."""
        scores: list[Tensor] = []

        def recorder(name: str) -> Any:
            def record(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
                calls.setdefault(name, []).append((args[0], out))

            return record

        def stop(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            scores.append(out)
            raise _Stop

        handles = [self.model.get_submodule(s.module).register_forward_hook(recorder(s.module)) for s in self.layers]
        if self._scored_by is not None:
            handles.append(self.model.get_submodule(self._scored_by).register_forward_hook(stop))
        try:
            with suppress(_Stop):
                logits: Tensor = self.model(inputs_embeds=rows, attention_mask=mask).logits
                return logits
        finally:
            for handle in handles:
                handle.remove()
        (score,) = scores
        return score[torch.arange(len(score), device=score.device), mask.sum(1) - 1] if score.dim() == 3 else score
