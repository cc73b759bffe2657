"""The gradient of every text's own loss, from one pass over the whole batch.

A pass keeps what goes into each layer and what comes back to its output; the rules of Opacus turn a text's share of both
into that text's gradient. Called by hand on Hugging Face models, Opacus fails or is slow where this is right: position ids
of shape (1, length), padding rows of embeddings, parameters that two layers share, GPT-2's ``Conv1D``, losses that average
over a text's tokens. Norms come without the gradients where a rule for them is known (ghost clipping: Li et al. 2022, Bu et
al. 2023), tied weights included.

What no rule covers goes through the one-by-one loop, which is always right; ``fault`` says why. The first batch of a model
is checked against that loop, since a layer that mixes texts, or weights that are used outside their layer, would otherwise
give a wrong gradient without a word.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from rasura.core.interfaces import InputError
from rasura.core.updates import changed
from rasura.core.values import Gradients, PerExample, Weigh

TOLERANCE = 1e-3
"""Relative error of a text's gradient against the loop, beyond which a model's rules are not used."""

_POSITION_WISE = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, Conv1D)
"""Layers that treat every position alike: the sum over texts is then the gradient of one long text."""

_verdicts: weakref.WeakKeyDictionary[nn.Module, dict[Any, str | None]] = weakref.WeakKeyDictionary()


class NoRule(Exception):
    """Why a model's texts cannot be taken together: names the layer, and the remedy."""


@dataclass(frozen=True)
class Passed:
    """What a layer took, ``(batch, ...)``, and what came back to its output."""

    name: str
    layer: nn.Module
    taken: Tensor
    back: Tensor


def _rules() -> tuple[Mapping[Any, Any], Mapping[Any, Any], Callable[..., dict[Any, Tensor]]]:
    """Opacus' rules for gradients and for norms by layer type, and the one for any other layer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from opacus.grad_sample import GradSampleModule
            from opacus.grad_sample.functorch import ft_compute_per_sample_gradient
            from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
    except ImportError:
        raise NoRule("Opacus is not installed; pip install 'rasura[dp]' takes texts together") from None
    return GradSampleModule.GRAD_SAMPLERS, GradSampleModuleFastGradientClipping.NORM_SAMPLERS, ft_compute_per_sample_gradient


def _gradients(passed: Passed, taken: Tensor, back: Tensor) -> dict[Any, Tensor]:
    """Every text's gradient ``(texts, *shape)`` by parameter of the layer."""
    rules, _, other = _rules()
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
        return other(layer, [taken], back)
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise NoRule(f"layer {passed.name} ({type(layer).__name__}) has no rule ({why}); freeze it") from None
    finally:
        vars(layer).pop("ft_compute_sample_grad", None)


def _squares(passed: Passed) -> dict[Any, Tensor]:
    """Every text's squared norm ``(texts,)`` by parameter of the layer."""
    kind: Any = nn.Linear if isinstance(passed.layer, Conv1D) else type(passed.layer)
    norms = _rules()[1]
    if kind is nn.Embedding or (kind is nn.Linear and passed.back.dim() in (2, 3)):
        return {p: n.double().square() for p, n in norms[kind](passed.layer, [passed.taken], passed.back).items()}
    return {p: g.flatten(1).double().square().sum(1) for p, g in _gradients(passed, passed.taken, passed.back).items()}


def _checked(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers with parameters of their own to train. Raises ``NoRule``; ``InputError`` where texts have no gradient."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise InputError(f"layer {name} (batch norm) mixes the texts of a batch: none has a gradient of its own; "
                             "replace it with a GroupNorm, or put it in eval mode")  # fmt: skip
    layers = [(n, m) for n, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
    for name, layer in layers:
        if isinstance(layer, nn.MultiheadAttention):
            raise NoRule(f"layer {name} (MultiheadAttention) uses its weights outside of layers; use an own Linear for each")
        if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
            raise NoRule(f"layer {name} (Embedding) has max_norm, scale_grad_by_freq or sparse set; unset them")
    return layers


def own_losses(model_output: Any, labels: Tensor) -> Tensor:
    """The loss of every text by itself ``(batch,)``, as the model has it on a batch of one. Raises ``NoRule`` where the
    model's own loss is another than cross-entropy over classes, or over the next tokens of each text."""
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
    told = float(model_output.loss.detach())
    if not abs(float(whole.detach()) - told) <= 0.01 * abs(told) + 1e-4:
        raise NoRule(f"the model's loss is {told:.4g}, the mean cross-entropy {float(whole.detach()):.4g}: another loss")
    return losses


def passed_through(model: nn.Module, inputs: Mapping[str, Tensor], size: int) -> tuple[list[Passed], Tensor]:
    """One pass forward and back: what every trainable layer took and got back, and the losses ``(batch,)``."""
    layers = _checked(model)
    seen: list[tuple[str, nn.Module, Tensor, Tensor, int]] = []
    hooks = []

    def widened(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        first = arguments[0] if arguments else None
        if isinstance(first, Tensor) and first.dim() and first.shape[0] == 1 and size > 1:
            # Position ids (1, length): with a row for every text, what comes back is not summed over the texts yet.
            return (first.expand(size, *first.shape[1:]), *arguments[1:])
        return None

    def keep(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if len(arguments) != 1 or not isinstance(arguments[0], Tensor) or not isinstance(output, Tensor):
                raise NoRule(f"layer {name} ({type(module).__name__}) takes or gives other than one tensor; freeze it")
            if arguments[0].shape[0] != size or output.shape[0] != size:
                raise NoRule(
                    f"layer {name} ({type(module).__name__}) sees {output.shape[0]} rows for {size} texts; freeze it"
                )
            if not output.requires_grad:
                raise NoRule(f"layer {name} ran without autograd; switch gradient checkpointing off")
            seen.append((name, module, arguments[0].detach().contiguous(), output, output._version))

        return hook

    try:
        for name, layer in layers:
            hooks += [layer.register_forward_pre_hook(widened), layer.register_forward_hook(keep(name))]
        with torch.enable_grad():
            out = model(**inputs)
            losses = own_losses(out, inputs["labels"])
    finally:
        for hook in hooks:
            hook.remove()
    for name, module, _, output, version in seen:
        if output._version != version:
            raise NoRule(f"the output of layer {name} ({type(module).__name__}) is changed in place; use inplace=False")
    backs = torch.autograd.grad(losses.sum(), [output for *_, output, _ in seen], allow_unused=True)
    found = []
    for (name, module, taken, _, _), back in zip(seen, backs):
        if back is None:
            continue
        back = back.float() if back.dtype in (torch.float16, torch.bfloat16) else back
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            back = back * (taken != module.padding_idx)[..., None]
        found.append(Passed(name, module, taken, back))
    return found, losses.detach()


class Together:
    """The texts of one batch after a pass: every gradient, or a weighted sum without them."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], size: int) -> None:
        self.size = size
        self.names: dict[Any, str] = {p: n for n, p in model.named_parameters() if p.requires_grad}
        self.passed, self.losses = passed_through(model, inputs, size)
        self.uses: dict[Any, int] = {}
        for one in self.passed:
            for p in one.layer.parameters(recurse=False):
                self.uses[p] = self.uses.get(p, 0) + 1

    def row(self, k: int, only: set[Any] | None = None) -> dict[Any, Tensor]:
        """The gradient of text ``k``, by parameter."""
        out: dict[Any, Tensor] = {}
        for one in self.passed:
            if only is not None and not any(p in only for p in one.layer.parameters(recurse=False)):
                continue
            for p, g in _gradients(one, one.taken[k : k + 1], one.back[k : k + 1]).items():
                if p.requires_grad and (only is None or p in only):
                    out[p] = out[p] + g[0] if p in out else g[0]
        return out

    def each(self) -> Iterator[Gradients]:
        """The gradient of every text, one after the other: one at a time is in memory."""
        for k in range(self.size):
            yield self._named(self.row(k))

    def norms(self) -> Tensor:
        """The norm of every text's gradient, ``(batch,)`` float64."""
        total = torch.zeros(self.size, dtype=torch.float64, device=self.losses.device)
        shared = {p for p, count in self.uses.items() if count > 1 and p.requires_grad}
        for one in self.passed:
            for p, squares in _squares(one).items():
                if p.requires_grad and p not in shared:
                    total += squares
        if shared:
            # The parts of a shared weight are not orthogonal, so their sum is needed.
            total += torch.stack([torch.stack([g.double().square().sum() for g in self.row(k, shared).values()]).sum()
                                  for k in range(self.size)])  # fmt: skip
        return total.sqrt()

    def weighted(self, weigh: Weigh) -> Gradients:
        """The sum of all gradients, each times what ``weigh`` makes of its norm."""
        weights = weigh(self.norms())
        out: dict[Any, Tensor] = {}
        for one in self.passed:
            back = one.back * weights.to(one.back).view(-1, *[1] * (one.back.dim() - 1))
            taken = one.taken
            if type(one.layer) in _POSITION_WISE:
                keep = 0 if isinstance(one.layer, nn.Embedding) else 1
                taken = taken.reshape(1, -1, *taken.shape[taken.dim() - keep :])
                back = back.reshape(1, -1, back.shape[-1])
            for p, g in _gradients(one, taken, back).items():
                if p.requires_grad:
                    g = g[0] if len(g) == 1 else g.sum(0)
                    out[p] = out[p] + g if p in out else g
        return self._named(out)

    def _named(self, found: Mapping[Any, Tensor]) -> Gradients:
        # As autograd has them: in the order of the model's parameters, in their type, on the CPU.
        return {n: found[p].to(p.dtype).detach().cpu() for p, n in self.names.items() if p in found}


def fault(model: nn.Module, inputs: Mapping[str, Tensor], size: int) -> str | None:
    """Why the texts of such a batch must go one by one, naming the layer and the remedy; None where they need not.

    Found once for each set of trained parameters, on the first two texts, with dropout off.
    """
    trained = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    device = next(model.parameters()).device.type
    half = torch.is_autocast_enabled(device)
    key = (trained, size > 1, half)
    known = _verdicts.setdefault(model, {})
    if key not in known:
        modes = [(m, m.training) for m in model.modules()]
        try:
            _checked(model)
            model.eval()
            some = {k: v[:2] for k, v in inputs.items()}
            together = Together(model, some, min(size, 2))
            alone, _ = changed(model, {k: v[:1] for k, v in inputs.items()}, sorted(trained))
            known[key] = _difference(next(iter(together.each())), alone, 0.05 if half else TOLERANCE)
        except NoRule as reason:
            known[key] = str(reason)
        finally:
            for module, training in modes:
                module.training = training
    return known[key]


def _difference(found: Gradients, expected: Gradients, tolerance: float) -> str | None:
    whole = sum(float(g.double().square().sum()) for g in expected.values()) ** 0.5
    for name, gradient in expected.items():
        got = found.get(name)
        error = float((gradient.double() - (0 if got is None else got.double())).norm())
        if not error <= tolerance * whole:
            return f"{name} is used outside its own layer, or its layer mixes texts; freeze it"
    return None


def as_one(update: Gradients) -> PerExample:
    """``update`` as a batch of one text: what is aggregated protects all that went into it together."""

    def weighted(weigh: Weigh) -> Gradients:
        norm = torch.stack([g.double().square().sum() for g in update.values()]).sum().sqrt()
        weight = float(weigh(norm.reshape(1)))
        return {n: weight * g for n, g in update.items()}

    return PerExample(lambda: update, lambda: iter([update]), 1, weighted)


def per_example(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    size: int,
    *,
    mean: Callable[[], Gradients],
    told: Callable[[float], None],
    expected: float | None = None,
) -> PerExample:
    """The gradients of a batch of ``size`` texts: together where the rules hold, else one by one; losses to ``told``.

    Every trained parameter has a gradient in them, of zeros where the loss does not use it.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = list(trained)
    ready: list[Together] = []

    def whole(found: Gradients) -> Gradients:
        # A parameter without a gradient has one of zeros: which ones a text uses may tell of it, and all get their noise.
        return {n: found[n] if n in found else torch.zeros_like(p, device="cpu") for n, p in trained.items()}

    def together() -> Together | None:
        if size and not ready and fault(model, inputs, size) is None:
            ready.append(Together(model, inputs, size))
            for loss in ready[0].losses.tolist():
                told(loss)
        return ready[0] if ready else None

    def each() -> Iterator[Gradients]:
        fast = together()
        if fast is not None:
            yield from map(whole, fast.each())
            return
        for row in range(size):
            found, loss = changed(model, {k: v[row : row + 1] for k, v in inputs.items()}, names)
            told(loss)
            yield whole(found)

    def weighted(weigh: Weigh) -> Gradients:
        fast = together()
        if fast is not None:
            return whole(fast.weighted(weigh))
        out: dict[str, Tensor] = {}
        for found in each():
            norm = sum(g.double().square().sum() for g in found.values())
            weight = float(weigh(torch.as_tensor(norm).sqrt().reshape(1)))
            for n, g in found.items():
                out[n] = out[n] + weight * g if n in out else weight * g
        return whole(out)

    return PerExample(mean, each, size, weighted, expected)
