"""First and second derivatives of one post-norm transformer block, written out: no graph is kept.

A block is read four times: ``through`` gives its outputs, ``back`` the gradient of the loss by each layer's output, ``up``
the slopes of what is made of these gradients, and ``down`` the slopes by the block's input. ``up`` is the reverse of
``back``, so it begins at the first block, and ``down`` the reverse of ``through``. Each costs one product a layer, the
least for a second derivative. Rows are ``(texts * length, width)``; heads are ``(texts * heads, length, width / heads)``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Norm(NamedTuple):
    """A LayerNorm's parameters."""

    weight: Tensor
    bias: Tensor
    eps: float


class Affine(NamedTuple):
    """A linear layer: ``weight`` ``(outputs, inputs)``, ``bias`` ``(outputs,)``."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one block; ``key_value`` is both layers in one."""

    query: Affine
    key_value: Affine
    out: Affine
    middle: Norm
    wide: Affine
    narrow: Affine
    end: Norm
    heads: int


class Normed:
    """A LayerNorm at one input ``u`` ``(rows, width)``: its output, and derivatives of first and second order."""

    def __init__(self, u: Tensor, norm: Norm) -> None:
        self.u, self.norm = u, norm
        self.hat, self.mean, self.rate = torch.native_layer_norm(u, u.shape[-1:], None, None, norm.eps)
        self.out = torch.addcmul(norm.bias, self.hat, norm.weight)

    def _slope(self, d: Tensor, weight: Tensor | None) -> Tensor:
        shape, mask = self.u.shape[-1:], [True, False, False]
        found = torch.ops.aten.native_layer_norm_backward(d, self.u, shape, self.mean, self.rate, weight, None, mask)
        return found[0]  # type: ignore[no-any-return]

    def back(self, d: Tensor) -> Tensor:
        """The slope by ``u`` from the slope ``d`` by the output."""
        self.d = d
        self.du = self._slope(d, self.norm.weight)
        return self.du

    def up(self, a: Tensor, more: Tensor) -> Tensor:
        """The slope by ``d`` from the slope ``a`` by what ``back`` gave; ``more`` is added."""
        inner = self.d * self.norm.weight
        moved = torch.addcmul(a * (inner * self.hat).mean(1, True), inner, (a * self.hat).mean(1, True))
        self.by_hat = moved.mul_(-self.rate)
        self.by_u = self.hat * ((a * self.du).mean(1, True) * -self.rate)
        return torch.addcmul(more, self._slope(a, None), self.norm.weight)

    def down(self, d: Tensor, more: Tensor) -> Tensor:
        """The slope by ``u`` from the slopes ``d`` by the output and ``more`` by the normalised input."""
        return self._slope(torch.addcmul(self.by_hat.add_(more), d, self.norm.weight), None).add_(self.by_u)


def gelu_bend(f: Tensor) -> Tensor:
    """The second derivative of GELU at ``f``."""
    square = f.square()
    return (square * -0.5).exp_().mul_(square.neg_().add_(2)).mul_(1 / math.sqrt(2 * math.pi))


class BlockRun:
    """One block on ``texts`` texts of ``length`` tokens. ``mask`` ``(texts * heads, 1, length)`` is added to the attention's
    scores. With ``first`` only the first token leaves the block, which is all that the head reads of the last one."""

    def __init__(self, weights: BlockWeights, mask: Tensor, texts: int, length: int, first: bool) -> None:
        self.w, self.mask, self.texts, self.length, self.first = weights, mask, texts, length, first
        self.scale = (weights.query.weight.shape[0] // weights.heads) ** -0.5

    def _heads(self, x: Tensor, layers: int = 1) -> Tensor:
        """Rows of ``layers`` layers side by side as heads, ``(layers, texts * heads, tokens, width)``."""
        out = x.reshape(self.texts, -1, layers, self.w.heads, x.shape[1] // (layers * self.w.heads)).permute(2, 0, 3, 1, 4)
        return out.reshape(layers, -1, *out.shape[3:])

    def _rows(self, *x: Tensor) -> Tensor:
        """The reverse of ``_heads``, of one layer or several."""
        shape = (self.texts, self.w.heads, x[0].shape[1], x[0].shape[2])
        return torch.stack([y.view(shape) for y in x], 1).permute(0, 3, 1, 2, 4).reshape(self.texts * shape[2], -1)

    def _at_read(self, h: Tensor) -> Tensor:
        """What of ``h`` belongs to tokens that leave the block: a view."""
        return h.view(self.texts, self.length, -1)[:, 0] if self.first else h

    def through(self, h: Tensor) -> Tensor:
        """The block's output for its input ``h``."""
        w, self.h = self.w, h
        self.read = self._at_read(h).contiguous()
        self.q = self._heads(nn.functional.linear(self.read, *w.query))[0]
        self.k, self.v = self._heads(nn.functional.linear(h, *w.key_value), 2)
        scores = torch.baddbmm(self.mask, self.q, self.k.mT, alpha=self.scale)
        self.p = torch.softmax(scores, -1)
        self.c = self._rows(torch.bmm(self.p, self.v))
        self.middle = Normed(nn.functional.linear(self.c, *w.out).add_(self.read), w.middle)
        self.f = nn.functional.linear(self.middle.out, *w.wide)
        self.m = nn.functional.gelu(self.f)
        self.end = Normed(nn.functional.linear(self.m, *w.narrow).add_(self.middle.out), w.end)
        return self.end.out

    def _gelu(self, d: Tensor) -> Tensor:
        return torch.ops.aten.gelu_backward(d, self.f)  # type: ignore[no-any-return]

    def _softmax(self, d: Tensor) -> Tensor:
        return torch.ops.aten._softmax_backward_data(d, self.p, -1, d.dtype)  # type: ignore[no-any-return]

    def back(self, d: Tensor, whole: bool = True) -> Tensor:
        """The slope by the input from the slope ``d`` by the output; not so far without ``whole``."""
        w = self.w
        du = self.end.back(d)
        self.dm = du @ w.narrow.weight
        self.df = self._gelu(self.dm)
        du = self.middle.back(torch.addmm(du, self.df, w.wide.weight))
        self.dc = self._heads(du @ w.out.weight)[0]
        self.dp = torch.bmm(self.dc, self.v.mT)
        self.ds = self._softmax(self.dp)
        self.dq = self._rows(torch.bmm(self.ds, self.k).mul_(self.scale))
        self.dkv = self._rows(torch.bmm(self.ds.mT, self.q).mul_(self.scale), torch.bmm(self.p.mT, self.dc))
        if not whole:
            return d
        out = self.dkv @ w.key_value.weight
        self._at_read(out).add_(torch.addmm(du, self.dq, w.query.weight))
        return out

    def up(self, a: Tensor | None, by: UpSlopes) -> Tensor:
        """The slope by ``d`` from ``a``, the slope by what ``back`` gave (None: it did not go so far), and ``by``."""
        w, s = self.w, self.scale
        aq, akv, au = by.query, torch.cat([by.key, by.value], 1), by.out
        if a is not None:
            read = self._at_read(a)
            aq, akv, au = aq + read @ w.query.weight.T, akv.addmm_(a, w.key_value.weight.T), au + read
        aq, (ak, av) = self._heads(aq)[0] * s, self._heads(akv, 2)  # aq may be a view of by.query, which autograd gave
        ak.mul_(s)
        a_ds = torch.baddbmm(torch.bmm(aq, self.k.mT), self.q, ak.mT)
        self.by_k, self.by_q = torch.bmm(self.ds.mT, aq), torch.bmm(self.ds, ak)
        a_dp = self._softmax(a_ds)
        mean, share = (self.p * self.dp).sum(-1, True), (a_ds * self.p).sum(-1, True)
        self.by_p = torch.baddbmm(a_ds * (self.dp - mean) - share * self.dp, self.dc, av.mT)
        self.by_v = torch.bmm(a_dp.mT, self.dc)
        a_dc = torch.baddbmm(torch.bmm(self.p, av), a_dp, self.v)
        a = self.middle.up(torch.addmm(au, self._rows(a_dc), w.out.weight.T), by.middle)
        a_df = torch.addmm(by.wide, a, w.wide.weight.T)
        self.by_f = gelu_bend(self.f).mul_(a_df).mul_(self.dm)
        return self.end.up(torch.addmm(a + by.narrow, self._gelu(a_df), w.narrow.weight.T), by.end)

    def down(self, d: Tensor, by: DownSlopes) -> Tensor:
        """The slope by the input from the slopes ``d`` by the output, ``by``, and what ``up`` kept."""
        w, s = self.w, self.scale
        du = self.end.down(d, by.end)
        df = self._gelu(torch.addmm(by.narrow, du, w.narrow.weight)).add_(self.by_f)
        du = self.middle.down(torch.addmm(du.add_(by.wide), df, w.wide.weight), by.middle)
        dc = self._heads(torch.addmm(by.out, du, w.out.weight))[0]
        ds = self._softmax(torch.baddbmm(self.by_p, dc, self.v.mT)).mul_(s)
        dq = self._rows(torch.baddbmm(self.by_q, ds, self.k))
        dkv = self._rows(torch.baddbmm(self.by_k, ds.mT, self.q), torch.baddbmm(self.by_v, self.p.mT, dc))
        out = torch.addmm(by.key_value, dkv, w.key_value.weight)
        if by.query is not None:
            du.add_(by.query)
        self._at_read(out).add_(torch.addmm(du, dq, w.query.weight))
        return out


class UpSlopes(NamedTuple):
    """Slopes by the gradients that ``BlockRun.back`` found, in the order of the layers."""

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    middle: Tensor
    wide: Tensor
    narrow: Tensor
    end: Tensor


class DownSlopes(NamedTuple):
    """Slopes by the layers' inputs, and of norms by the normalised input. ``query`` is None where its input is the same as
    that of key and value."""

    query: Tensor | None
    key_value: Tensor
    out: Tensor
    middle: Tensor
    wide: Tensor
    narrow: Tensor
    end: Tensor
