"""The gradient of each text in each layer, from one forward and backward pass over the whole batch, by the rules of
Opacus."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rasura.core.exact import half, squared, widened
from rasura.core.interfaces import InputError
from rasura.victims.weights import first_line


class NoRule(Exception):
    """Raised where a model's texts cannot be processed together. It names the layer and the remedy."""


_LINEAR = (nn.Linear, Conv1D)

_POSITION_WISE = (*_LINEAR, nn.Embedding, nn.LayerNorm, nn.RMSNorm)
"""Layers that treat all positions alike; norms do so where they are of one dimension."""


_Use = tuple[str, nn.Module, Tensor, Tensor, int]
"""Name and layer, its input and output, and the output's version."""


@dataclass(frozen=True)
class Passed:
    """The input of a layer, ``(batch, ...)``, and the gradient at its output, both in float32 at least."""

    name: str
    layer: nn.Module
    taken: Tensor
    back: Tensor


def _rules() -> tuple[Mapping[Any, Any], Callable[..., dict[Any, Tensor]]]:
    """Opacus' rules for gradients by layer type, and the rule for any other layer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from opacus.grad_sample import GradSampleModule
            from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
    except ImportError:
        raise NoRule("Opacus is not installed; run pip install 'rasura[dp]' to process texts together") from None
    return GradSampleModule.GRAD_SAMPLERS, ft_compute_per_sample_gradient


def own_gradients(passed: Passed, taken: Tensor, back: Tensor) -> dict[Any, Tensor]:
    """The gradient of every text, ``(texts, *shape)``, by parameter of the layer."""
    rules, other = _rules()
    layer = passed.layer
    if isinstance(layer, Conv1D):
        found = rules[nn.Linear](layer, [taken], back)
        return {p: g.transpose(1, 2) if p is layer.weight else g for p, g in found.items()}
    # Opacus' rule for layer normalisation takes it that there is a bias; ModernBERT has none.
    biased = not isinstance(layer, nn.LayerNorm) or layer.bias is not None
    if type(layer) in rules and biased:
        out: dict[Any, Tensor] = rules[type(layer)](layer, [taken], back)
        return out
    try:
        if not any(half(p) for p in layer.parameters()):
            return other(layer, [taken], back)
        # The rule would round each gradient to what the weights are stored in.
        wide = copy.deepcopy(layer).float()
        found = other(wide, [taken], back)
        return {p: found[w] for p, w in zip(layer.parameters(), wide.parameters(), strict=True)}
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NoRule(f"layer {passed.name} ({type(layer).__name__}) has no rule ({why}); freeze it") from None
    finally:
        vars(layer).pop("ft_compute_sample_grad", None)


def own_squares(passed: Passed) -> dict[Any, Tensor]:
    """The squared norm of every text's gradient, ``(texts,)`` float64, by parameter of the layer.

    Of a linear layer and an embedding the gradients are not formed where that costs more (mixed ghost clipping: Bu et al.
    2022, sec. 4).
    """
    layer, taken, back = passed.layer, passed.taken, passed.back
    if type(layer) is nn.Embedding:
        return {layer.weight: _row_squares(taken, back, layer.num_embeddings)}
    if type(layer) in _LINEAR and back.dim() in (2, 3):
        taken, back = (x.reshape(len(x), -1, x.shape[-1]) for x in (taken, back))
        out: dict[Any, Tensor] = {layer.weight: _product_squares(taken, back)}
        if layer.bias is not None:
            out[layer.bias] = back.sum(1).double().square().sum(1)
        return out
    return {p: g.flatten(1).double().square().sum(1) for p, g in own_gradients(passed, taken, back).items()}


def _product_squares(taken: Tensor, back: Tensor) -> Tensor:
    """The squared norm of every ``back[k].T @ taken[k]``: of texts that are short for the layer, the inner product of the
    two Gram matrices. These are in float64: in float32 they underflow, and lose small norms in large products."""
    length = taken.shape[1]
    price = 1 if taken.device.type == "cpu" else 64  # of float64, on most GPUs
    if price * length * (taken.shape[2] + back.shape[2]) < taken.shape[2] * back.shape[2]:
        taken, back = taken.double(), back.double()
        grams = (taken @ taken.transpose(1, 2)) * (back @ back.transpose(1, 2))
        # Rounding alone makes it negative.
        return grams.sum((1, 2)).clamp_min(0)
    return torch.stack([squared(b.T @ t) for t, b in zip(taken, back)])


def _row_squares(ids: Tensor, back: Tensor, size: int) -> Tensor:
    """The same of an embedding of ``size`` rows, whose gradient adds up where a text has an id twice."""
    texts = torch.arange(len(ids), device=ids.device).repeat_interleave(ids[0].numel())
    used, places = torch.unique(texts * size + ids.reshape(-1), return_inverse=True)
    rows = back.new_zeros(len(used), back.shape[-1]).index_add_(0, places, back.reshape(-1, back.shape[-1]))
    zeros = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    return zeros.index_add_(0, used // size, rows.double().square().sum(1))


def _over_positions(layer: nn.Module) -> bool:
    """Whether a layer normalises several positions together, by weights of their own."""
    return isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) and len(layer.normalized_shape) > 1


def summed(passed: Passed, weights: Tensor) -> dict[Any, Tensor]:
    """The sum of every text's gradient times its entry of ``weights`` ``(texts,)``, by parameter of the layer.

    For layers that treat all positions alike it is the gradient of one long text.
    """
    layer, taken, back = passed.layer, passed.taken, passed.back
    if type(layer) not in _POSITION_WISE or _over_positions(layer):
        scaled = back * weights.to(back).view(-1, *[1] * (back.dim() - 1))
        return {p: g.sum(0) for p, g in own_gradients(passed, taken, scaled).items()}
    each = weights.to(back).repeat_interleave(back[0, ..., 0].numel())
    back = back.reshape(-1, back.shape[-1])
    if type(layer) is nn.Embedding:
        zeros = torch.zeros_like(layer.weight, dtype=back.dtype)
        return {layer.weight: zeros.index_add_(0, taken.reshape(-1), back * each[:, None])}
    taken = taken.reshape(-1, taken.shape[-1])
    if type(layer) not in _LINEAR:
        found = own_gradients(passed, taken[None], (back * each[:, None])[None])
        return {p: g[0] for p, g in found.items()}
    # The narrower of the two is scaled.
    first, second = (taken, back * each[:, None]) if back.shape[1] <= taken.shape[1] else (taken * each[:, None], back)
    weight = first.T @ second if isinstance(layer, Conv1D) else second.T @ first
    return {layer.weight: weight} | ({} if layer.bias is None else {layer.bias: each @ back})


def checked_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with trainable parameters of their own. Raises ``NoRule``, and ``InputError`` where texts have no separate
    gradient."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise InputError(f"layer {name} (batch norm) mixes the texts of a batch, so no text has a gradient "
                "of its own; replace it with GroupNorm, or put it in eval mode")  # fmt: skip
    layers = [(n, m) for n, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    for name, layer in layers:
        if isinstance(layer, nn.MultiheadAttention):
            raise NoRule(
                f"layer {name} (MultiheadAttention) uses its weights outside of layers; use a separate Linear layer for each"
            )
        if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
            raise NoRule(f"layer {name} (Embedding) has max_norm, scale_grad_by_freq or sparse set; unset them")
    return layers


def own_losses(model_output: Any, labels: Tensor) -> Tensor:
    """The loss of every text by itself ``(batch,)``, as the model computes it for a batch of one. Raises ``NoRule`` where
    the model's own loss is not the cross-entropy over classes or over the next tokens of each text."""
    logits = model_output.logits
    if logits.dim() == 3 and labels.dim() == 2:
        targets = labels[:, 1:]
        each = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, ignore_index=-100, reduction="none")
        counts = (targets != -100).sum(1)
        # A text of one token predicts nothing: no loss, no gradient.
        losses = each.sum(1) / counts.clamp_min(1)
        whole = (losses * counts).sum() / counts.sum().clamp_min(1)
    elif logits.dim() == 2 and labels.dim() == 1 and not labels.is_floating_point():
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        whole = losses.mean()
    else:
        raise NoRule(f"logits {tuple(logits.shape)} and labels {tuple(labels.shape)} are neither classes nor next tokens")
    told, own = float(model_output.loss.detach()), float(whole.detach())
    finite = math.isfinite(told) or math.isfinite(own)  # two losses that are no numbers are refused with their gradients
    # A mean in half precision has two digits.
    if finite and not abs(own - told) <= (0.05 if half(logits) else 0.01) * abs(told) + 1e-4:
        raise NoRule(f"the model's loss {told:.4g} is not the mean cross-entropy {own:.4g}; no rule covers it")
    return losses


@contextmanager
def _watched(layers: Sequence[tuple[str, nn.Module]], size: int) -> Iterator[tuple[list[_Use], list[str]]]:
    """Inside the block, every use of one of the ``layers``, and the names of those whose input was given a row for each
    text."""
    seen: list[_Use] = []
    spread_out: list[str] = []

    def spread(name: str) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...] | None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
            first = arguments[0] if arguments else None
            if isinstance(first, Tensor) and first.dim() and first.shape[0] == 1 and size > 1:
                # Position ids (1, length): with a row for every text, what comes back is not summed over the texts yet.
                spread_out.append(name)
                return (first.expand(size, *first.shape[1:]), *arguments[1:])
            return None

        return hook

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if len(arguments) != 1 or not isinstance(arguments[0], Tensor) or not isinstance(output, Tensor):
                raise NoRule(f"layer {name} ({type(module).__name__}) does not map one tensor to one tensor; freeze it")
            if arguments[0].shape[0] != size or output.shape[0] != size:
                raise NoRule(
                    f"layer {name} ({type(module).__name__}) has {output.shape[0]} rows for {size} texts; freeze it"
                )
            if not output.requires_grad:
                raise NoRule(f"layer {name} ran without autograd; turn gradient checkpointing off")
            seen.append((name, module, arguments[0].detach().contiguous(), output, output._version))

        return hook

    hooks: list[Any] = []
    try:
        for name, layer in layers:
            hooks += [layer.register_forward_pre_hook(spread(name)), layer.register_forward_hook(keep(name))]
        yield seen, spread_out
    finally:
        for one in hooks:
            one.remove()


def passed_through(
    model: nn.Module, inputs: Mapping[str, Tensor], size: int, run: Callable[..., Any] | None = None
) -> tuple[list[Passed], Tensor, set[nn.Module]]:
    """One forward and backward pass: the input and the output gradient of every trainable layer, the losses ``(batch,)``,
    and the layers that were called. ``run`` is called in place of the ``model``, whose layers it goes through."""
    with _watched(checked_layers(model), size) as (seen, spread_out), torch.enable_grad():
        try:
            out = (run or model)(**inputs)
        except RuntimeError as error:
            if not spread_out:
                raise
            # DeBERTa repeats its relative positions for every text itself.
            raise NoRule(f"layer {spread_out[0]} has one input for all texts, and the model takes no other "
                f"({first_line(error)}); freeze it") from None  # fmt: skip
        losses = own_losses(out, inputs["labels"])
    for name, module, _, output, version in seen:
        if output._version != version:
            raise NoRule(f"the output of layer {name} ({type(module).__name__}) is changed in place; use inplace=False")
    backs = torch.autograd.grad(losses.sum(), [output for *_, output, _ in seen], allow_unused=True)
    found = []
    for (name, module, taken, _, _), back in zip(seen, backs):
        if back is None:
            continue
        back = widened(back)
        taken = taken.to(back.dtype) if taken.is_floating_point() else taken
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            back = back * (taken != module.padding_idx)[..., None]
        found.append(Passed(name, module, taken, back))
    return found, losses.detach(), {module for _, module, *_ in seen}
