"""How far the gradient of a decoder's prefix agrees with an update, and how an update moves the next token's probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rasura.core.values import Observation
from rasura.core.word_rows import output_layer
from rasura.victims.models import ADAPTER, Linear, parts

STEP = 0.02
"""How far the weights move along the update, in units where a text's gradient has length 1: the probabilities still move in
proportion, and float32 tells them."""

LOGITS = 4
"""Tensors of the size of a batch's logits that a comparison holds at once."""


def read_layers(seen: Observation) -> dict[Linear, Tensor]:
    """The linear layers inside blocks by which a prefix is judged: what is visible and not zero of each, as ``(outputs,
    inputs)`` of length 1.

    Of adapters, the second matrices alone where any is visible: what texts have in common hides less of them than of the
    first (on SmolLM2-135M, other texts agree by .02 with their differences, and by .1 with those of the first).
    """
    known = parts(seen.model)
    inside = [lin for lin in known.linears if any(lin.module.startswith(f"{b.module}.") for b in known.blocks)]
    shown = {
        lin: g.T if lin.transposed else g for lin in inside if (g := seen.whole(lin.weight)) is not None and bool(g.any())
    }
    second = {lin: g for lin, g in shown.items() if ADAPTER[1] in lin.weight}
    return {lin: g.float() / g.float().norm() for lin, g in (second or shown).items()}


class Agreement:
    """Compares prefixes with the update in the ``layers`` of ``read_layers``."""

    def __init__(self, model: nn.Module, layers: Mapping[Linear, Tensor], memory_mb: int) -> None:
        self.model, self.layers, self.memory = model, layers, memory_mb * 2**20
        table = getattr(output_layer(model), "weight", None)
        assert isinstance(table, Tensor)
        self.table = table.detach().float()
        self.lengths = self.table.square().sum(1)
        self.moved: dict[str, Tensor] = {}

    def calibrate(self, ids: Tensor) -> None:
        """Set the step of ``expected`` by the gradients of ``ids`` ``(texts, length)``: every layer counts the same."""
        with self._running(ids[:, :-1]) as (logits, inputs, outputs):
            sizes = self._compared(self._back(logits, outputs, ids[:, 1:], last=True), inputs)[1].mean(0).sqrt()
        whole = float((1 / sizes.clamp_min(1e-12)).square().sum().sqrt())
        for (lin, direction), size in zip(self.layers.items(), sizes.tolist()):
            step = (STEP / whole / max(size, 1e-12)) * (direction.T if lin.transposed else direction)
            weight = self.model.get_parameter(lin.weight).detach()
            self.moved[lin.weight] = weight - step.to(weight)

    @torch.no_grad()
    def expected(self, prefixes: Tensor) -> tuple[Tensor, Tensor]:
        """The log probabilities ``(prefixes, vocabulary)`` of the token after each of ``prefixes`` ``(n, length)``; and how
        far the update raises each, relative to the length of its gradient, in standard deviations.

        A token's gradient is that of the last hidden state along ``mean of the output rows - its own row``, whose length
        stands for that of the gradient.
        """
        given = {"input_ids": prefixes, "attention_mask": torch.ones_like(prefixes)}
        before = self.model(**given).logits[:, -1].float().log_softmax(-1)
        after = functional_call(self.model, self.moved, (), given).logits[:, -1].float().log_softmax(-1)
        mean = before.exp() @ self.table
        apart = self.lengths[None] - 2 * mean @ self.table.T + mean.square().sum(1, keepdim=True)
        raised = (after - before) / apart.clamp_min(1e-6).sqrt()
        return before, (raised - raised.mean(1, keepdim=True)) / raised.std(1, keepdim=True).clamp_min(1e-30)

    def followed(self, prefixes: Tensor, tokens: Tensor) -> Tensor:
        """The cosine of the update and the gradient of each of ``prefixes`` ``(n, length)`` with each of its ``tokens``
        ``(n, k)`` behind it, mean over the layers: ``(n, k)``."""
        most = max(1, int(self.memory / (LOGITS * prefixes.shape[1] * self.table.shape[0] * self.table.itemsize)))
        return torch.cat([self._followed(*some) for some in zip(torch.split(prefixes, most), torch.split(tokens, most))])

    def whole(self, texts: Tensor) -> Tensor:
        """The same of whole texts ``(n, length)``: ``(n,)``."""
        return self.followed(texts[:, :-1], texts[:, -1:])[:, 0]

    def _followed(self, prefixes: Tensor, tokens: Tensor) -> Tensor:
        found = []
        with self._running(prefixes) as (logits, inputs, outputs):
            for k in range(tokens.shape[1]):
                targets = torch.cat([prefixes[:, 1:], tokens[:, k : k + 1]], 1)
                back = self._back(logits, outputs, targets, last=k == tokens.shape[1] - 1)
                inner, squares = self._compared(back, inputs)
                found.append((inner / squares.clamp_min(1e-30).sqrt()).mean(1))
        return torch.stack(found, 1)

    @contextmanager
    def _running(self, ids: Tensor) -> Iterator[tuple[Tensor, list[Tensor], list[Tensor]]]:
        """The logits of ``ids``, and the inputs and outputs of the layers, with a graph from logits to outputs."""
        found: dict[str, tuple[Tensor, Tensor]] = {}

        def keep(module: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
                found[module] = args[0].detach(), out

            return hook

        embedding = self.model.get_submodule(parts(self.model).word_embedding.rpartition(".")[0])
        hooks = [embedding.register_forward_hook(lambda _, __, out: out.detach().requires_grad_(True))]
        hooks += [self.model.get_submodule(lin.module).register_forward_hook(keep(lin.module)) for lin in self.layers]
        try:
            with torch.enable_grad():
                logits = self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        finally:
            for hook in hooks:
                hook.remove()
        yield logits, [found[lin.module][0] for lin in self.layers], [found[lin.module][1] for lin in self.layers]

    @staticmethod
    def _back(logits: Tensor, outputs: Sequence[Tensor], targets: Tensor, *, last: bool) -> tuple[Tensor, ...]:
        """The gradients of the loss of ``targets`` in ``outputs``."""
        errors = logits.detach().softmax(-1)
        errors.scatter_add_(2, targets[:, :, None], torch.full_like(errors[:, :, :1], -1.0))
        return torch.autograd.grad(logits, list(outputs), grad_outputs=errors, retain_graph=not last)

    def _compared(self, back: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The inner products of the update and each text's gradients, and their squared lengths: ``(texts, layers)``."""
        inner, squares = [], []
        for direction, delta, x in zip(self.layers.values(), back, inputs):
            delta, x = delta.to(direction), x.to(direction)
            inner.append((delta * (x @ direction.T)).sum((1, 2)))
            squares.append(((delta @ delta.transpose(1, 2)) * (x @ x.transpose(1, 2))).sum((1, 2)))
        return torch.stack(inner, 1), torch.stack(squares, 1)
