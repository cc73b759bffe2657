"""The gradient of every text's own loss, from one pass over the whole batch.

A pass keeps each layer's input and the gradient at its output; the rules of Opacus turn a text's part of both into that
text's gradient (``layer_gradients``). Called directly on Hugging Face models, Opacus fails or is slow in cases that are
handled here: position ids of shape (1, length), padding rows of embeddings, parameters shared by two layers, GPT-2's
``Conv1D``, and losses that average over a text's tokens. Norms come without the gradients where a rule for them is known
(ghost clipping: Li et al. 2022, Bu et al. 2023), tied weights included.

Cases that no rule covers go through the one-by-one loop, where each text is alone and without padding; ``fault`` says why.
The first batch of a model is checked against that loop, since a layer that mixes texts or reads padding, or weights used
outside their layer, would otherwise give a wrong gradient silently.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.exact import exact, full_products, half, norm, squared, widened
from rasura.core.interfaces import InputError
from rasura.core.layers import layers_of
from rasura.core.rng import WithoutDropout
from rasura.core.updates import changed, mini_batch
from rasura.core.values import Gradients, PerExample, Weigh
from rasura.victims.layer_gradients import NoRule, checked_layers, own_gradients, own_squares, passed_through, summed
from rasura.victims.padding import check_padding
from rasura.victims.weights import first_line

TOLERANCE = 1e-3
"""Relative error of a text's gradient against the loop above which the rules are not used for a model. A hundredth of the
largest gradient counts as well: of one that is nearly zero, rounding leaves few digits."""

COMPARED = 4
"""Texts of a batch that are compared with the loop: of a padded one the shortest and the longest."""

_verdicts: weakref.WeakKeyDictionary[nn.Module, dict[Any, str | None]] = weakref.WeakKeyDictionary()


class Together:
    """The texts of one batch after a pass: every gradient, or a weighted sum without them."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Tensor], size: int) -> None:
        self.size = size
        self.names: dict[Any, str] = {p: n for n, p in model.named_parameters() if p.requires_grad}
        self.layers = layers_of(self.names.values())
        rows = {name: place for place, names in enumerate(self.layers) for name in names}
        self.places = {p: rows[name] for p, name in self.names.items()}
        self.passed, self.losses = passed_through(model, inputs, size)
        self.uses: dict[Any, int] = {}
        for one in self.passed:
            for p in one.layer.parameters(recurse=False):
                self.uses[p] = self.uses.get(p, 0) + 1

    def row(self, k: int, only: set[Any] | None = None) -> dict[Any, Tensor]:
        """The gradient of text ``k``, by parameter."""
        out: dict[Any, Tensor] = {}
        with self._exact():
            for one in self.passed:
                if only is not None and not any(p in only for p in one.layer.parameters(recurse=False)):
                    continue
                for p, g in own_gradients(one, one.taken[k : k + 1], one.back[k : k + 1]).items():
                    if p.requires_grad and (only is None or p in only):
                        out[p] = out[p] + g[0] if p in out else g[0]
        return out

    def each(self) -> Iterator[Gradients]:
        """The gradient of every text, one at a time in memory."""
        for k in range(self.size):
            yield self._named(self.row(k))

    def norms(self, by_layer: bool = False) -> Tensor:
        """The norm of every text's gradient, ``(batch,)`` float64; ``by_layer``: of its part of each layer,
        ``(layers, batch)``."""
        total = torch.zeros(len(self.layers), self.size, dtype=torch.float64, device=self.losses.device)
        shared = {p for p, count in self.uses.items() if count > 1 and p.requires_grad}
        with self._exact():
            for one in self.passed:
                for p, squares in own_squares(one).items():
                    if p.requires_grad and p not in shared:
                        total[self.places[p]] += squares
        if shared:
            # The parts of a shared weight are not orthogonal, so their sum is needed.
            for k in range(self.size):
                for p, g in self.row(k, shared).items():
                    total[self.places[p], k] += squared(g)
        return total.sqrt() if by_layer else total.sum(0).sqrt()

    def weighted(self, weigh: Weigh, by_layer: bool = False) -> Gradients:
        """The sum of all gradients, each weighted by ``weigh`` of its norm; ``by_layer``: its part of each layer by that
        part's."""
        weights = weigh(self.norms(by_layer))
        out: dict[Any, Tensor] = {}
        with self._exact():
            for one in self.passed:
                own = one.layer.parameters(recurse=False)
                places = {self.places[p] for p in own if p.requires_grad} if by_layer else {-1}
                for place in sorted(places):
                    for p, g in summed(one, weights[place] if by_layer else weights).items():
                        if p.requires_grad and place in (-1, self.places[p]):
                            out[p] = out[p] + g if p in out else g
        return self._named(out)

    def _exact(self) -> AbstractContextManager[None]:
        # A norm and a sum of rounded products bound nothing: one text more would move the sum by more than a clip.
        return exact(self.losses.device.type)

    def _named(self, found: Mapping[Any, Tensor]) -> Gradients:
        # In the order of the model's parameters, on the CPU, in their type but never in half precision.
        return {n: found[p].to(widened(p).dtype).detach().cpu() for p, n in self.names.items() if p in found}


def fault(model: nn.Module, inputs: Mapping[str, Tensor], size: int) -> str | None:
    """Why the texts of such a batch must be processed one by one, with the layer and the remedy; None where they need not.

    Found once for each set of trained parameters and each mode of the modules, and again when padding first appears. Some
    texts together are compared with each of them alone and without padding, in the mode of training, with dropout off.
    Raises ``InputError`` where a text has no gradient of its own.
    """
    names = sorted(n for n, p in model.named_parameters() if p.requires_grad)
    rounded = torch.is_autocast_enabled(next(model.parameters()).device.type) or any(half(p) for p in model.parameters())
    mask = inputs.get("attention_mask")
    padded = mask is not None and mask.dim() == 2 and not bool(mask.all())
    key = (tuple(names), size > 1, rounded, padded, tuple(m.training for m in model.modules()))
    known = _verdicts.setdefault(model, {})
    if key not in known:
        try:
            checked_layers(model)
            order = torch.arange(size) if mask is None or not padded else mask.sum(1).argsort().cpu()
            rows = torch.cat([order[: COMPARED // 2], order[COMPARED // 2 :][-COMPARED // 2 :]])
            with torch.random.fork_rng(devices=[]), WithoutDropout(), full_products():
                compared, found = _compared(model, inputs, rows, names, 0.05 if rounded else TOLERANCE)
        except NoRule as reason:
            compared, found = True, str(reason)
        if not compared:
            return found
        known[key] = found
    return known[key]


def _compared(
    model: nn.Module, inputs: Mapping[str, Tensor], rows: Tensor, names: Sequence[str], tolerance: float
) -> tuple[bool, str | None]:
    """Whether any text at ``rows`` could be compared, and where its gradient differs from what it is alone."""
    together = Together(model, {k: v[rows.to(v.device)] for k, v in inputs.items()}, len(rows))
    try:
        alone = [changed(model, mini_batch(inputs, row[None]), names)[0] for row in rows]
    except ValueError as error:
        raise InputError(f"a text alone cannot go through the model ({first_line(error)}), so no text has a gradient of its "
            "own; replace the layer that needs several texts, or put it in eval mode") from None  # fmt: skip
    lengths = [float(norm(one.values())) for one in alone]
    largest = max((n for n in lengths if math.isfinite(n)), default=None)
    if largest is None:
        return False, "no text of the batch has a finite gradient"
    for found, expected, length in zip(together.each(), alone, lengths):
        why = _difference(found, expected, tolerance * (length + largest / 100)) if math.isfinite(length) else None
        if why is not None:
            return True, why
    return True, None


def _difference(found: Gradients, expected: Gradients, most: float) -> str | None:
    for name, gradient in expected.items():
        got = found.get(name)
        error = float((gradient.double() - (0 if got is None else got.double())).norm())
        if not error <= most:
            return f"{name} is used outside its layer, or its layer mixes texts or reads padding; freeze it"
    return None


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
    """The gradients of a batch of ``size`` texts: together where the rules hold, otherwise one by one. Losses are appended
    to ``told``.

    Every trained parameter has a gradient; it is zero where the loss does not use the parameter. Gradients, norms and sums
    are in float32 at least, whatever the weights are stored in and the passes are computed in.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    names = list(trained)
    ready: list[Together] = []

    def whole(found: Gradients) -> Gradients:
        # A parameter without a gradient has one of zeros: which ones a text uses may tell of it, and all get their noise.
        return {n: widened(found[n] if n in found else torch.zeros_like(p, device="cpu")) for n, p in trained.items()}

    def together() -> Together | None:
        check_padding(model, inputs)
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
            found, loss = changed(model, mini_batch(inputs, torch.tensor([row])), names)
            told(loss)
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
