"""The gradient of every text's own loss, from one pass over the whole batch.

A pass keeps each layer's input and the gradient at its output; the rules of Opacus turn a text's part of both into that
text's gradient (``layer_gradients``). Called directly on Hugging Face models, Opacus fails or is slow in cases that are
handled here: position ids of shape (1, length), padding rows of embeddings, parameters shared by two layers, GPT-2's
``Conv1D``, and losses that average over a text's tokens. Norms come without the gradients where a rule for them is known
(ghost clipping: Li et al. 2022, Bu et al. 2023), tied weights included.

Cases that no rule covers go through the one-by-one loop, where each text is alone and without padding; ``fault`` says why.
A model is checked against that loop before its first batch, since a layer that mixes texts or reads padding, or weights used
outside their layer, would otherwise give a wrong gradient silently. Rounding that is as large counts alike: one text more
would move the gradients of others by it. Which way it goes is one decision for all its batches.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.exact import exact, norm, widened
from rasura.core.interfaces import InputError
from rasura.core.layers import layers_of
from rasura.core.rng import WithoutDropout
from rasura.core.updates import changed, mini_batch
from rasura.core.values import Gradients, PerExample, Weigh
from rasura.victims.layer_gradients import NoRule, checked_layers
from rasura.victims.padding import check_padding, own_padding, padding_id
from rasura.victims.together import Together
from rasura.victims.trial_texts import check_taken, in_float32, left_padded, same, trial_batches
from rasura.victims.weights import first_line

_verdicts: weakref.WeakKeyDictionary[nn.Module, dict[Any, dict[Any, str | None]]] = weakref.WeakKeyDictionary()


def fault(model: nn.Module, inputs: Mapping[str, Tensor]) -> str | None:
    """Why the texts of a model must be processed one by one, with the layer and the remedy; None where they need not.

    Found once for each set of trained parameters and each mode of the modules, from the model and the names of ``inputs``
    alone: were it found from a batch, one text would decide on the gradients of all others. Made-up texts together are
    compared with each of them alone and without padding, in the mode of training, with dropout off and in float32. Padding
    before a text is tried when it first appears; once a kind of batch needs the loop, all kinds go through it.
    Raises ``InputError`` where a text has no gradient of its own, and for a batch without a loss, which decides nothing.
    """
    names = tuple(n for n, p in model.named_parameters() if p.requires_grad)
    known = _verdicts.setdefault(model, {}).setdefault((names, tuple(m.training for m in model.modules())), {})
    kinds = ((n, v.dim(), v.is_floating_point()) for n, v in inputs.items() if n != "attention_mask")
    key = (left_padded(inputs), padding_id(model), *sorted(kinds))
    if key not in known:
        device = next(model.parameters()).device.type
        with torch.random.fork_rng(devices=[]), WithoutDropout(), exact(device):
            try:
                checked_layers(model)
                known[key] = _tried(model, inputs)
            except NoRule as reason:
                known[key] = str(reason)
    return next((why for why in known.values() if why is not None), None)


def _tried(model: nn.Module, inputs: Mapping[str, Tensor]) -> str | None:
    """Where the gradient of a made-up text differs from what it is alone, or which parameter was not tried."""
    run, trained = in_float32(model)
    left = dict.fromkeys(trained)
    try:
        for made, size in trial_batches(model, run, inputs):
            together = Together(model, made, size, run)
            why = _compared(together, made, run, trained)
            if why is not None:
                return why
            for name in together.called:
                left.pop(name, None)
    except (InputError, NoRule):
        raise
    except Exception as error:
        check_taken(run, inputs)
        return f"the model takes no made-up texts, on which the layers are checked ({first_line(error)})"
    for name in left:  # real texts may use it, as words that were added, whose gradient would be zeros
        return f"no made-up text calls a layer with {name}, so its gradient is not checked; freeze it if no text uses it"
    return None


def _compared(
    together: Together, made: Mapping[str, Tensor], run: Callable[..., Any], trained: Mapping[str, Tensor]
) -> str | None:
    largest = float(together.norms().nan_to_num(0, 0).max())
    for k, found in enumerate(together.each()):
        try:
            with torch.enable_grad():
                loss = run(**mini_batch(made, torch.tensor([k]))).loss
                alone = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        except ValueError as error:
            raise InputError(f"a text alone cannot go through the model ({first_line(error)}), so no text has a gradient of "
                "its own; replace the layer that needs several texts, or put it in eval mode") from None  # fmt: skip
        for name, gradient in zip(trained, alone):
            if not same(found.get(name), gradient, largest):
                return (f"the gradient of {name} differs{_by(found.get(name), gradient)} from that of the text alone. It is "
                    "used outside its layer, its layer mixes texts or reads padding, or rounding is that large in this "
                    "model; freeze it, unless it is rounding")  # fmt: skip
    return None


def _by(found: Tensor | None, alone: Tensor | None) -> str:
    """How far a gradient is from that of the text alone, where both are there."""
    if found is None or alone is None or not bool(alone.any()):
        return ""
    return f" by {100 * float(norm([found - alone.detach().cpu()]) / norm([alone])):.2g} %"


def as_one(update: Gradients) -> PerExample:
    """``update`` as a batch of one text: the aggregation then protects everything in it together."""
    update = {n: widened(g) for n, g in update.items()}

    def weighted(weigh: Weigh, by_layer: bool = False) -> Gradients:
        layers = layers_of(update) if by_layer else [list(update)]
        norms = torch.stack([norm(update[n] for n in names) for names in layers])
        weights = weigh(norms[:, None] if by_layer else norms).reshape(-1).tolist()
        found = {n: weight * update[n] for names, weight in zip(layers, weights) for n in names}
        return {n: found[n] for n in update}

    return PerExample(lambda: update, lambda: iter([update]), 1, weighted)


def by_owner(examples: PerExample, counts: Sequence[int]) -> PerExample:
    """``examples`` as one example for each person: ``counts`` consecutive texts each, whose gradients are averaged.

    What is clipped and weighted then is all that a person contributes. Texts go one by one through memory.
    """

    def each() -> Iterator[Gradients]:
        rows = examples.each()
        for count in counts:
            total: dict[str, Tensor] = {}
            for _ in range(count):
                for name, g in next(rows).items():
                    total[name] = total[name] + g / count if name in total else g / count
            yield total

    def weighted(weigh: Weigh, by_layer: bool = False) -> Gradients:
        if not counts:
            return examples.weighted(weigh, by_layer)
        out: dict[str, Tensor] = {}
        for found in each():
            one = as_one(found).weighted(weigh, by_layer)
            out = {name: out[name] + g if name in out else g for name, g in one.items()}
        return out

    return PerExample(examples.mean, each, len(counts), weighted, examples.expected)


def in_parts(
    model: nn.Module, inputs: Mapping[str, Tensor], size: int, most: int, *, mean: Callable[[], Gradients],
    told: Callable[[float], None], expected: float | None = None,
) -> PerExample:  # fmt: skip
    """As ``per_example``, with at most ``most`` texts in memory at once: a batch of any size costs the memory of a part."""
    starts = range(0, max(size, 1), most)

    def parts() -> Iterator[PerExample]:
        for start in starts:
            some = {k: v[start : start + most] for k, v in inputs.items()}
            yield per_example(model, some, min(most, size - start), mean=mean, told=told)

    def weighted(weigh: Weigh, by_layer: bool = False) -> Gradients:
        out: dict[str, Tensor] = {}
        for part in parts():
            for name, g in part.weighted(weigh, by_layer).items():
                out[name] = out[name] + g if name in out else g
        return out

    return PerExample(mean, lambda: (found for part in parts() for found in part.each()), size, weighted, expected)


def per_example(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    size: int,
    *,
    mean: Callable[[], Gradients],
    told: Callable[[float], None],
    expected: float | None = None,
) -> PerExample:
    """The gradients of a batch of ``size`` texts: together where the rules hold, else one by one. ``told`` gets the losses.

    Every trained parameter has a gradient; it is zero where the loss does not use the parameter. Gradients, norms and sums
    are in float32 at least, whatever the weights are stored in and the passes are computed in.
    """
    inputs = own_padding(model, inputs)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    ready: list[Together] = []

    def whole(found: Gradients) -> Gradients:
        # A parameter without a gradient has one of zeros: which ones a text uses may tell of it, and all get their noise.
        return {n: widened(found[n] if n in found else torch.zeros_like(p, device="cpu")) for n, p in trained.items()}

    def together() -> Together | None:
        check_padding(model, inputs)
        if size and not ready and fault(model, inputs) is None:
            try:
                ready.append(Together(model, inputs, size))
            except NoRule as reason:
                # To turn to the loop now would let one text change the gradients of all others.
                raise InputError(f"the made-up texts went together, and those of this batch do not: {reason}") from None
            for loss in ready[0].losses.tolist():
                told(loss)
        return ready[0] if ready else None

    def each() -> Iterator[Gradients]:
        fast = together()
        if fast is not None:
            yield from map(whole, fast.each())
            return
        for row in range(size):
            found, loss = changed(model, mini_batch(inputs, torch.tensor([row])), list(trained))
            # No number, with a gradient of zeros: a text that predicts nothing, whose loss is 0 in a batch as well.
            told(0.0 if math.isnan(loss) and not any(bool(g.any()) for g in found.values()) else loss)
            yield whole(found)

    def weighted(weigh: Weigh, by_layer: bool = False) -> Gradients:
        fast = together()
        if fast is not None:
            return whole(fast.weighted(weigh, by_layer))
        out: dict[str, Tensor] = {}
        for found in each():
            for n, g in as_one(found).weighted(weigh, by_layer).items():
                out[n] = out[n] + g if n in out else g
        return whole(out)

    return PerExample(mean, each, size, weighted, expected)
