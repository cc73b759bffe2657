"""Factors of a post-norm encoder's gradient by derivatives that are written out (``block_slopes``).

The same values as hooks and autograd give, in far fewer operations and, of the last block, for the first token alone. BERT,
RoBERTa and DistilBERT are such encoders; whether a model works as one is told by comparing both ways once (``factors``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rasura.attacks.updates.gradient_matching.block_slopes import (
    Affine,
    BlockRun,
    BlockWeights,
    DownSlopes,
    Norm,
    Normed,
    UpSlopes,
)
from rasura.victims.models import evaluating, parts, recorded_inputs

BLOCKS = (
    ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
     "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm"),
    ("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "sa_layer_norm", "ffn.lin1", "ffn.lin2",
     "output_layer_norm"),
)  # fmt: skip
"""The modules of a block, in BERT and DistilBERT: query, key, value, output, norm, wide, narrow, norm."""

Activation = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


def _tanh(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    y = x.tanh()
    slope = 1 - y.square()
    return y, slope, -2 * y * slope


def _relu(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.relu(), (x > 0).to(x.dtype), torch.zeros_like(x)


ACTIVATIONS: Mapping[str, Activation] = {"tanh": _tanh, "relu": _relu}
"""Between the two layers of a head: the function, its slope and its second derivative."""


class Names(NamedTuple):
    """Modules: the norm behind the embeddings, the eight of each block, the two layers of the head."""

    first: str
    blocks: list[tuple[str, ...]]
    head: tuple[str, str]


def names(model: nn.Module) -> Names | None:
    """The modules of ``model``, None where they are not those of a post-norm encoder with a head of two layers."""
    known, modules = parts(model), dict(model.named_modules())
    layouts = [layout for layout in BLOCKS if all(f"{b.module}.{m}" in modules for b in known.blocks for m in layout)]
    outside = [lin.module for lin in known.linears if not any(lin.module.startswith(b.module + ".") for b in known.blocks)]
    norms = [n for n, m in modules.items() if isinstance(m, nn.LayerNorm)]
    if known.causal or not layouts or len(outside) != 2 or len(norms) != 2 * len(known.blocks) + 1:
        return None
    return Names(norms[0], [tuple(f"{b.module}.{m}" for m in layouts[0]) for b in known.blocks], (outside[0], outside[1]))


class Encoder:
    """``model``'s weights, as they are now, in the form that the runs below use."""

    def __init__(self, model: nn.Module, found: Names, activation: Activation) -> None:
        self.model, self.names, self.activation = model, found, activation
        self.first = self._norm(found.first)
        self.blocks = [self._block(block) for block in found.blocks]
        self.head = [self._affine(name) for name in found.head]
        self._places: dict[int, Tensor] = {}

    def _affine(self, name: str) -> Affine:
        module: Any = self.model.get_submodule(name)
        return Affine(module.weight.detach(), module.bias.detach())

    def _norm(self, name: str) -> Norm:
        module: Any = self.model.get_submodule(name)
        return Norm(module.weight.detach(), module.bias.detach(), module.eps)

    def _block(self, block: Sequence[str]) -> BlockWeights:
        query, key, value, out, wide, narrow = (self._affine(block[k]) for k in (0, 1, 2, 3, 5, 6))
        both = Affine(*(torch.cat(pair) for pair in zip(key, value)))
        heads = int(self.model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]  # a Hugging Face config
        return BlockWeights(query, both, out, self._norm(block[4]), wide, narrow, self._norm(block[7]), heads)

    def places(self, length: int) -> Tensor:
        """What goes into the first norm where the embeddings are zero, ``(length, hidden)``."""
        if length not in self._places:
            weight = self.head[0].weight
            none, mask = weight.new_zeros(1, length, weight.shape[1]), weight.new_ones(1, length, dtype=torch.long)
            with evaluating(self.model), recorded_inputs(self.model, [self.names.first], stop=False) as seen:
                self.model(inputs_embeds=none, attention_mask=mask)
            self._places[length] = seen[self.names.first][0]
        return self._places[length]


def encoders(model: nn.Module, modules: Collection[str]) -> Iterator[Encoder]:
    """What ``model`` may be, one for each activation of the head; none without ``modules``, or where these are not all among
    its own."""
    found = names(model)
    if (
        found is None
        or not modules
        or not set(modules) <= {found.first, *found.head, *(m for block in found.blocks for m in block)}
    ):
        return
    if all(isinstance(getattr(model.get_submodule(m), "bias", None), Tensor) for m in modules):
        yield from (Encoder(model, found, activation) for activation in ACTIVATIONS.values())


class Run:
    """One batch of texts through ``encoder`` and back, and the slopes of what is made of both."""

    def __init__(self, encoder: Encoder, mask: Tensor) -> None:
        """``mask`` ``(texts, length)``."""
        self.encoder = encoder
        texts, length = mask.shape
        dtype, heads = encoder.first.weight.dtype, encoder.blocks[0].heads
        hidden = encoder.first.weight.new_zeros(mask.shape).masked_fill_(~mask.bool(), torch.finfo(dtype).min)
        hidden = hidden[:, None].expand(-1, heads, -1).reshape(texts * heads, 1, length)
        last = len(encoder.blocks) - 1
        self.blocks = [BlockRun(w, hidden, texts, length, k == last) for k, w in enumerate(encoder.blocks)]

    def through(self, e: Tensor) -> tuple[Tensor, ...]:
        """Logits ``(texts, classes)`` for embeddings ``e`` ``(texts, length, hidden)``, and the inputs of all layers.

        Of the first norm, of each block (query's, key and value's, output's, norm's, wide's, narrow's, norm's) and of the
        head's two; of norms the normalised ones.
        """
        dense, classes = self.encoder.head
        self.norm = Normed((e + self.encoder.places(e.shape[1])).flatten(0, 1), self.encoder.first)
        h, out = self.norm.out, [self.norm.hat]
        for block in self.blocks:
            begin, h = h, block.through(h)
            out += [block.read, begin, block.c, block.middle.hat, block.middle.out, block.m, block.end.hat]
        self.pooled, self.slope, self.bend = self.encoder.activation(nn.functional.linear(h, *dense))
        out += [h, self.pooled]
        return (nn.functional.linear(self.pooled, *classes), *(x.detach() for x in out))

    def back(self, dz: Tensor, whole: bool) -> tuple[Tensor, ...]:
        """The slopes of the loss by the outputs of all layers, from ``dz``, those by the logits.

        Of the first norm, of each block's eight layers, and of the head's two. Without ``whole`` the first norm's is zero.
        """
        dense, classes = self.encoder.head
        self.whole, self.dpooled = whole, dz @ classes.weight
        ddense = self.dpooled * self.slope
        d, out = ddense @ dense.weight, [dz, ddense]
        for block in reversed(self.blocks):
            begin, far = d, whole or block is not self.blocks[0]
            d = block.back(d, far)
            width = block.dq.shape[1]
            out += [begin, block.end.du, block.df, block.middle.d, block.middle.du]
            out += [block.dkv[:, width:], block.dkv[:, :width], block.dq]
        if whole:
            self.norm.back(d)
        out.append(self.norm.d if whole else torch.zeros_like(self.norm.u))
        return tuple(x.detach() for x in reversed(out))

    def up(self, by: Sequence[Tensor]) -> Tensor:
        """The slope by ``dz`` from those by what ``back`` gave."""
        dense, classes = self.encoder.head
        a = self.norm.up(torch.zeros_like(by[0]), by[0]) if self.whole else None
        for k, block in enumerate(self.blocks):
            a = block.up(a, UpSlopes(*by[1 + 8 * k : 9 + 8 * k]))
        assert a is not None
        a = torch.addmm(by[-2], a, dense.weight.T)
        self.by_dense = a * self.dpooled * self.bend
        return torch.addmm(by[-1], a * self.slope, classes.weight.T)

    def down(self, dz: Tensor, by: Sequence[Tensor]) -> Tensor:
        """The slope by the embeddings ``(rows, hidden)`` from ``dz``, those by the logits, and by what ``through`` gave."""
        dense, classes = self.encoder.head
        d = torch.addmm(by[-1], dz, classes.weight) * self.slope + self.by_dense
        d = torch.addmm(by[-2], d, dense.weight)
        for k, block in reversed(list(enumerate(self.blocks))):
            some = by[1 + 7 * k : 8 + 7 * k]
            d = block.down(d, DownSlopes(some[0] if block.first else None, *some[1:]))
        if not self.whole:
            self.norm.by_hat, self.norm.by_u = torch.zeros_like(self.norm.u), torch.zeros_like(self.norm.u)
        return self.norm.down(d, by[0])


class _Through(torch.autograd.Function):
    """``Run.through``, differentiable once."""

    @staticmethod
    def forward(ctx: Any, run: Run, e: Tensor) -> tuple[Tensor, ...]:
        ctx.run, ctx.shape = run, e.shape
        return run.through(e)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dz: Tensor, *by: Tensor) -> tuple[None, Tensor]:
        return None, ctx.run.down(dz, by).view(ctx.shape)


class _Back(torch.autograd.Function):
    """``Run.back``, differentiable once: the reverse of ``_Through`` follows, since ``dz`` hangs on its logits."""

    @staticmethod
    def forward(ctx: Any, run: Run, whole: bool, dz: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        return run.back(dz, whole)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *by: Tensor) -> tuple[None, None, Tensor]:
        return None, None, ctx.run.up(by)


def by_hand(
    encoder: Encoder, e: Tensor, mask: Tensor, loss: Callable[[Tensor], Tensor], *, graph: bool, whole: bool = True
) -> dict[str, tuple[Tensor, Tensor]]:
    """By module: the input, of a norm the normalised one, and the slope of ``loss`` by the output, each ``(rows, width)``.

    ``e`` ``(texts, length, hidden)``, ``mask`` ``(texts, length)``; ``loss`` maps logits ``(texts, classes)`` to losses.
    ``graph``: both can be differentiated by ``e``. Without ``whole`` the slope of the first norm is zero.
    """
    run = Run(encoder, mask)
    with torch.set_grad_enabled(graph):
        logits, *x = _Through.apply(run, e)  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        if not graph:
            logits.requires_grad_(True)
        (dz,) = torch.autograd.grad(loss(logits).sum(), logits, create_graph=graph)
    with torch.set_grad_enabled(graph):
        d = _Back.apply(run, whole, dz)  # type: ignore[no-untyped-call]
    found = {encoder.names.first: (x[0], d[0])}
    for k, block in enumerate(encoder.names.blocks):
        read, begin, c, middle, wide, narrow, end = x[1 + 7 * k : 8 + 7 * k]
        inputs = (read if run.blocks[k].first else begin, begin, begin, c, middle, wide, narrow, end)
        found |= dict(zip(block, zip(inputs, d[1 + 8 * k : 9 + 8 * k])))
    return found | dict(zip(encoder.names.head, zip(x[-2:], d[-2:])))
