"""How far the gradient of a decoder's prefix agrees with an update, and how an update moves the next token's probability."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from rasura.attacks.updates.span.rows import visible_gradients
from rasura.core.values import Observation
from rasura.core.word_rows import output_layer
from rasura.victims.models import ADAPTER, Linear, parts

STEP = 0.02
"""How far the weights move along the update, in units where a text's gradient has length 1: the probabilities still move in
proportion, and float32 tells them."""

UPPER = 4
"""The last blocks, which choose the candidates that all blocks judge: behind a right prefix of SmolLM2-135M they tell the
next token as often as all 30, and a gradient that goes back through few blocks costs little. Of whole prefixes they prefer
those in which strong words come too early."""

ABREAST = 32
"""Tokens behind the same prefixes whose gradients go back at once."""

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


@dataclass(frozen=True)
class Ran:
    """What the model makes of ``prefixes`` ``(n, length)``.

    ``logs`` ``(n, length, vocabulary)``: log probabilities of the next token at each place; ``mean``: the mean row of the
    output layer by them; ``hidden``: the last hidden states, with a graph from the ``outputs`` of the ``layers``, of these
    ``inputs``.
    """

    layers: Mapping[Linear, Tensor]
    prefixes: Tensor
    logs: Tensor
    mean: Tensor
    hidden: Tensor
    inputs: list[Tensor]
    outputs: list[Tensor]


class Agreement:
    """Compares prefixes with the update in the ``layers`` of ``read_layers``: those of ``every`` block, or of the last
    ``upper`` ones that have any. The gradients of ``ids`` ``(texts, length)`` tell the step along the update in which every
    layer counts the same."""

    def __init__(
        self, model: nn.Module, layers: Mapping[Linear, Tensor], ids: Tensor, memory_mb: int, upper: int = UPPER
    ) -> None:
        self.model, self.memory = model, memory_mb * 2**20
        layer = output_layer(model)
        table = getattr(layer, "weight", None)
        assert layer is not None and isinstance(table, Tensor)
        self.output, self.table = layer, table.detach().float()
        self.lengths = self.table.square().sum(1)
        last = tuple(f"{block}." for block in self._blocks(layers)[-upper:])
        self.every, self.layers = layers, {lin: g for lin, g in layers.items() if lin.module.startswith(last)}
        self.drawn: list[int] = ids[:, -1].tolist()
        self.moved = self._moved(layers, ids)

    def _blocks(self, layers: Mapping[Linear, Tensor]) -> list[str]:
        """The blocks that have any of ``layers``, in order."""
        every = (block.module for block in parts(self.model).blocks)
        return [block for block in every if any(lin.module.startswith(f"{block}.") for lin in layers)]

    def _moved(self, layers: Mapping[Linear, Tensor], ids: Tensor) -> dict[str, Tensor]:
        """The weights of all ``layers``, a small step along the update."""
        ran = self._run(ids[:, :-1], layers)
        _, squares = self._compared(ran, self._errors(ran, ids[:, -1]))
        sizes = squares.mean(0).sqrt().clamp_min(1e-12)
        steps = STEP / float((1 / sizes).square().sum().sqrt()) / sizes
        out = {}
        for (lin, direction), step in zip(layers.items(), steps.tolist()):
            weight = self.model.get_parameter(lin.weight).detach()
            out[lin.weight] = weight - (step * (direction.T if lin.transposed else direction)).to(weight)
        return out

    def run(self, prefixes: Tensor) -> Ran:
        """Run the model on ``prefixes``, with a graph through the blocks that are compared."""
        return self._run(prefixes, self.layers)

    def _run(self, prefixes: Tensor, layers: Mapping[Linear, Tensor]) -> Ran:
        found: dict[str, tuple[Tensor, Tensor]] = {}
        last: list[Tensor] = []

        def keep(module: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
            def hook(_: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
                found[module] = args[0].detach(), out

            return hook

        def begin(_: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            x = args[0] if args else given["hidden_states"]
            x = x.detach().requires_grad_(True)
            return ((x, *args[1:]), given) if args else (args, {**given, "hidden_states": x})

        def end(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
            last.append(args[0])
            return (args[0].detach(),)

        hooks = [self.model.get_submodule(self._blocks(layers)[0]).register_forward_pre_hook(begin, with_kwargs=True)]
        hooks += [self.output.register_forward_pre_hook(end)]
        hooks += [self.model.get_submodule(lin.module).register_forward_hook(keep(lin.module)) for lin in layers]
        try:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                logits = self.model(input_ids=prefixes, attention_mask=torch.ones_like(prefixes)).logits
        finally:
            for one in hooks:
                one.remove()
        inputs, outputs = zip(*(found[lin.module] for lin in layers))
        logs = logits.detach().float().log_softmax(-1)
        return Ran(layers, prefixes, logs, logs.exp() @ self.table, last[0], list(inputs), list(outputs))

    @torch.no_grad()
    def raised(self, ran: Ran, places: slice) -> Tensor:
        """How far the update raises each token behind ``places`` of the prefixes, relative to the length of its gradient, in
        standard deviations: ``(n, places, vocabulary)``.

        A token's gradient is that of the hidden state along ``mean of the output rows - its own row``, whose length stands
        for that of the gradient.
        """
        given = {"input_ids": ran.prefixes, "attention_mask": torch.ones_like(ran.prefixes)}
        after = functional_call(self.model, self.moved, (), given).logits[:, places].float().log_softmax(-1)
        raised = (after - ran.logs[:, places]) / self._apart(ran.mean[:, places]).clamp_min(1e-6).sqrt()
        out: Tensor = (raised - raised.mean(-1, keepdim=True)) / raised.std(-1, keepdim=True).clamp_min(1e-30)
        return out

    def _apart(self, mean: Tensor) -> Tensor:
        """Squared distances of the output layer's rows from those of ``mean`` ``(..., hidden)``: ``(..., vocabulary)``."""
        return self.lengths - 2 * mean @ self.table.T + mean.square().sum(-1, keepdim=True)

    def foreseen(self, ran: Ran) -> Tensor:
        """About what ``followed`` gives of every token of the vocabulary: ``(n, vocabulary)``.

        A gradient is linear in the error of the last place, so that two slopes a layer give its inner products with the
        update and with the rest of the prefix's gradient. The length of what the token alone adds is that of a few tokens.
        """
        mean = ran.mean[:, -1]
        fixed = self._errors(ran, ran.prefixes[:, -1])
        fixed[:, -1] = 0.0
        apart = self._apart(mean).clamp_min(1e-6)
        errors = torch.zeros(len(self.drawn), *ran.mean.shape).to(ran.mean)
        errors[:, :, -1] = mean - self.table[self.drawn][:, None]
        alone = (self._compared(ran, errors)[1] / apart[:, self.drawn].T[..., None]).mean(0)
        probe = torch.zeros_like(ran.hidden, requires_grad=True)
        linear = torch.autograd.grad(ran.hidden, ran.outputs, grad_outputs=probe, create_graph=True)
        before = torch.autograd.grad(ran.hidden, ran.outputs, grad_outputs=fixed.to(ran.hidden), retain_graph=True)
        agrees = torch.zeros_like(apart)
        for direction, delta, held, x, own in zip(ran.layers.values(), linear, before, ran.inputs, alone.T):
            delta, x = delta.to(direction), x.to(direction)
            along = torch.autograd.grad((delta * (x @ direction.T)).sum(), probe, retain_graph=True)[0].float()
            crossed = x @ (x.transpose(1, 2) @ held.to(direction))
            across = torch.autograd.grad((delta * crossed).sum(), probe, retain_graph=True)[0].float()
            rest = [(s * fixed).sum((1, 2))[:, None] for s in (along, across)]
            new = [(s[:, -1] * mean).sum(1, keepdim=True) - s[:, -1] @ self.table.T for s in (along, across)]
            squares = rest[1] + 2 * new[1] + own[:, None] * apart
            agrees += (rest[0] + new[0]) / squares.clamp_min(1e-30).sqrt()
        return agrees / len(ran.layers)

    def at_once(self, texts: Tensor) -> Sequence[Tensor]:
        """``texts`` ``(n, length)`` in as few parts as the memory lets run at once."""
        held = LOGITS * texts.shape[1] * self.table.shape[0] * self.table.itemsize
        return torch.split(texts, max(1, int(self.memory / held)))

    def followed(self, ran: Ran, tokens: Tensor) -> Tensor:
        """The cosine of the update and the gradient of each of the prefixes with each of its ``tokens`` ``(n, k)`` behind
        it, mean over the layers: ``(n, k)``."""
        errors = torch.stack([self._errors(ran, some) for some in tokens.T])
        return torch.cat([self._cosine(ran, some) for some in torch.split(errors, ABREAST)]).T

    def whole(self, texts: Tensor, *, every: bool = False) -> tuple[Tensor, Tensor]:
        """The same of whole texts ``(n, length)``, and the log probability of all tokens but the first: ``(n,)`` each.
        ``every``: by the layers of all blocks."""
        agrees, expected = [], []
        for some in self.at_once(texts):
            ran = self._run(some[:, :-1], self.every if every else self.layers)
            agrees.append(self._cosine(ran, self._errors(ran, some[:, -1])))
            expected.append(ran.logs.gather(2, some[:, 1:, None]).sum((1, 2)))
        return torch.cat(agrees), torch.cat(expected)

    def begun(self, ran: Ran) -> Iterator[float]:
        """How far each beginning of the one text of ``ran`` agrees that has two tokens or more."""
        errors = self._errors(ran, ran.prefixes[:, -1])
        for length in range(1, errors.shape[1]):
            yield float(self._cosine(ran, torch.cat([errors[:, :length], torch.zeros_like(errors[:, length:])], 1)))

    def _errors(self, ran: Ran, tokens: Tensor) -> Tensor:
        """The gradient of the loss of the prefixes with ``tokens`` ``(n,)`` behind them, in the last hidden states."""
        following = torch.cat([ran.prefixes[:, 1:], tokens[:, None]], 1)
        return ran.mean - self.table[following]

    def _cosine(self, ran: Ran, errors: Tensor) -> Tensor:
        inner, squares = self._compared(ran, errors)
        return (inner / squares.clamp_min(1e-30).sqrt()).mean(-1)

    def _compared(self, ran: Ran, errors: Tensor) -> tuple[Tensor, Tensor]:
        """The inner products of the update and the gradients that have these ``errors`` ``([k,] n, length, hidden)`` in the
        last hidden states, and their squared lengths: ``([k,] n, layers)``."""
        back = torch.autograd.grad(
            ran.hidden, ran.outputs, grad_outputs=errors.to(ran.hidden), retain_graph=True,
            is_grads_batched=errors.dim() > ran.hidden.dim(),
        )  # fmt: skip
        inner, squares = [], []
        for direction, delta, x in zip(ran.layers.values(), back, ran.inputs):
            delta, x = delta.to(direction), x.to(direction)
            inner.append((delta * (x @ direction.T)).sum((-2, -1)))
            squares.append(((delta @ delta.transpose(-2, -1)) * (x @ x.transpose(1, 2))).sum((-2, -1)))
        return torch.stack(inner, -1), torch.stack(squares, -1)
