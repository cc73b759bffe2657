"""The texts of a batch together: their gradients, norms and weighted sums from one pass (``layer_gradients``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.exact import exact, squared, widened
from rasura.core.layers import layers_of
from rasura.core.values import Gradients, Weigh
from rasura.victims.layer_gradients import own_gradients, own_squares, passed_through, summed


class Together:
    """The texts of one batch after a pass: every gradient, or a weighted sum without them.

    ``called``: names of the trained parameters whose layer was called. Others have no gradient here, whatever uses them.
    """

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Tensor], size: int, run: Callable[..., Any] | None = None
    ) -> None:
        self.size = size
        self.names: dict[Any, str] = {p: n for n, p in model.named_parameters() if p.requires_grad}
        self.layers = layers_of(self.names.values())
        rows = {name: place for place, names in enumerate(self.layers) for name in names}
        self.places = {p: rows[name] for p, name in self.names.items()}
        self.passed, self.losses, layers = passed_through(model, inputs, size, run)
        self.called = {self.names[p] for one in layers for p in one.parameters(recurse=False) if p.requires_grad}
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
