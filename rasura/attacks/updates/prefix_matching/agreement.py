"""How far the gradient of a decoder's prefix agrees with an update, and how an update moves the next token's probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rasura.attacks.updates.span.rows import visible_gradients
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
    shown = {lin: g for lin in inside for g in visible_gradients(seen, [lin]) if bool(g.any())}
    second = {lin: g for lin, g in shown.items() if ADAPTER[1] in lin.weight}
    return {lin: g.float() / g.float().norm() for lin, g in (second or shown).items()}


class Agreement:
    """Compares prefixes with the update in the ``layers`` of ``read_layers``. The gradients of ``ids`` ``(texts, length)``
    tell the step along the update in which every layer counts the same."""

    def __init__(self, model: nn.Module, layers: Mapping[Linear, Tensor], ids: Tensor, memory_mb: int) -> None:
        self.model, self.layers, self.memory = model, layers, memory_mb * 2**20
        table = getattr(output_layer(model), "weight", None)
        assert isinstance(table, Tensor)
        self.table = table.detach().float()
        self.lengths = self.table.square().sum(1)
        sizes = next(self._compared(ids[:, :-1], ids[:, -1:]))[1].mean(0).sqrt().clamp_min(1e-12)
        steps = STEP / float((1 / sizes).square().sum().sqrt()) / sizes
        self.moved: dict[str, Tensor] = {}
        for (lin, direction), step in zip(self.layers.items(), steps.tolist()):
            weight = self.model.get_parameter(lin.weight).detach()
            self.moved[lin.weight] = weight - (step * (direction.T if lin.transposed else direction)).to(weight)

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
        found = []
        for some in zip(torch.split(prefixes, most), torch.split(tokens, most)):
            cosines = [inner / squares.clamp_min(1e-30).sqrt() for inner, squares in self._compared(*some)]
            found.append(torch.stack([one.mean(1) for one in cosines], 1))
        return torch.cat(found)

    def whole(self, texts: Tensor) -> Tensor:
        """The same of whole texts ``(n, length)``: ``(n,)``."""
        return self.followed(texts[:, :-1], texts[:, -1:])[:, 0]

    def _compared(self, prefixes: Tensor, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """For each column of ``tokens`` ``(n, k)`` behind ``prefixes`` ``(n, length)``: the inner products of the update
        and each text's gradients, and their squared lengths: ``(n, layers)``."""
        logits, inputs, outputs = self._run(prefixes)
        errors = logits.detach().softmax(-1)
        errors[:, :-1].scatter_add_(2, prefixes[:, 1:, None], torch.full_like(errors[:, :-1, :1], -1.0))
        last = errors[:, -1].clone()
        for k in range(tokens.shape[1]):
            errors[:, -1] = last.scatter_add(1, tokens[:, k : k + 1], torch.full_like(last[:, :1], -1.0))
            back = torch.autograd.grad(logits, outputs, grad_outputs=errors, retain_graph=k < tokens.shape[1] - 1)
            inner, squares = [], []
            for direction, delta, x in zip(self.layers.values(), back, inputs):
                delta, x = delta.to(direction), x.to(direction)
                inner.append((delta * (x @ direction.T)).sum((1, 2)))
                squares.append(((delta @ delta.transpose(1, 2)) * (x @ x.transpose(1, 2))).sum((1, 2)))
            yield torch.stack(inner, 1), torch.stack(squares, 1)

    def _run(self, ids: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
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
            for one in hooks:
                one.remove()
        return logits, [found[lin.module][0] for lin in self.layers], [found[lin.module][1] for lin in self.layers]
