"""The order of a decoder's texts where dropout of attention weights hides it from every deeper block.

The layers behind the attention of block 0 show the state z of every token, up to a factor. Of a token x behind the tokens s
this is ``x + sum of w[h, s] u[h, s]``, where x and u are known and w are attention weights of which dropout removed some
(``victims.first_attention``). So a linear system finds w from the row space alone, masks included, while it has fewer
unknowns than the layer has inputs. A token comes next where the w that it needs are those that the model computes for it
there, or nothing. That tells places apart even where a token occurs twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.updates.span.rows import DOUBT, TOLERANCE, RowSpace, row_space, visible_gradients
from rasura.core.values import Observation
from rasura.victims.first_attention import FirstAttention, first_attention

FULL = 0.9
"""Share of the layer's inputs that rank and unknowns may fill together."""

LEAST = 0.01
"""Attention weights below this are not compared."""

NEAR = 0.03
"""Relative difference of a weight from the model's that is rounding: true ones had up to .01 in float32."""

AGREE = 0.6
"""Share of the weights kept by dropout that must be the model's. Of SmolLM2, true tokens had .9, others up to .2."""

BLANK = 1e-5
"""Singular values below this, relative to the largest, are zero: the row space holds several states of a token."""

TRIALS = 512
"""How often a few weights are taken to be what the model says, to find a state among several of the same token."""

SPARE = 3
"""How many weights there must be beyond those that such a trial uses up."""


@dataclass(frozen=True)
class Chain:
    """The beginning of a text. ``tokens``: places in the list of known tokens. ``scale``: what dropout multiplies the
    weights by that it keeps, as the first token shows it. ``agreement``: the least share of a token's weights that are the
    model's."""

    tokens: tuple[int, ...]
    scale: float
    residual: float
    agreement: float


@dataclass(frozen=True)
class Attended:
    """``texts``: the texts' tokens in order, without a causal text's last one. ``whole``: they fill the row space and use
    every known token. ``active``: dropout removed attention weights."""

    texts: tuple[tuple[int, ...], ...]
    whole: bool
    active: bool
    residual: float


def attended(seen: Observation, tokens: Sequence[int], *, size: int) -> Attended | None:
    """The texts that the ``tokens`` of the row space of block 0 form; ``size`` of them, 0 if their number is not known.

    None where the model's block 0 has another form, its layers behind the attention are not visible or too noisy, a token is
    left over, or the texts are too long for the system.
    """
    block = first_attention(seen.model)
    space = row_space(visible_gradients(seen, block.linears)) if block else None
    if block is None or space is None or space.floor > NEAR:
        return None
    known = tuple(dict.fromkeys(tokens))
    search = _Search(block, known, space, size)
    if size and not search.fits(-(-space.rank // size)):
        return None  # the longest text has at least so many tokens
    open_, done = search.roots(), []
    for _ in range(4 * space.rank):
        if not open_:
            break
        chain = open_.pop()
        if not search.fits(len(chain.tokens) + 1):
            return None
        further = search.behind(chain)
        open_ += further
        if not further:
            done.append(chain)
    done = sorted(done, key=lambda c: len(c.tokens), reverse=True)[: size or None]
    if open_ or not done or {i for chain in done for i in chain.tokens} != set(range(len(known))):
        return None
    texts = tuple(tuple(known[i] for i in chain.tokens) for chain in done)
    whole = sum(map(len, texts)) == space.rank and size in (0, len(done))
    active = min(c.agreement for c in done) < 1 - NEAR
    return Attended(texts, whole, active, max(c.residual for c in done))


class _Search:
    """Grows texts from ``space``, the row space of the layers behind attention. ``texts``: their number, 0 if not known."""

    def __init__(self, block: FirstAttention, known: Sequence[int], space: RowSpace, texts: int) -> None:
        self.block, self.space, self.texts = block, space, texts
        self.tolerance = max(TOLERANCE, DOUBT * space.floor)
        self.ids = torch.tensor(known)
        x, u = block.embedded(self.ids) * block.gain, block.shares(self.ids) * block.gain
        self.size = space.shown(x).norm(dim=1)
        self.x, self.u = space.outside(x), space.outside(u)
        """What the row space leaves of x ``(tokens, hidden)`` and of u ``(tokens, heads, hidden)``."""

    def fits(self, length: int) -> bool:
        """Whether the system of a text of ``length`` tokens has clearly more equations than unknowns."""
        hidden = len(self.space.basis) if self.space.known is None else int(self.space.known.sum())
        return length * self.block.heads + self.space.rank <= FULL * hidden

    def roots(self) -> list[Chain]:
        """First tokens: their attention is all on themselves."""
        found = []
        for i in self._possible(()):
            w, null, residual = self._weights((i,))
            w, scale, agreement = nearest(w, null, torch.ones_like(w), scaled=True)
            kept, gone = (w - scale).abs() <= NEAR * scale, w.abs() <= NEAR * scale
            if bool((kept | gone).all()) and agreement > 0 and scale > (0 if self.block.free else 1 - NEAR):
                found.append(Chain((i,), scale, residual, agreement))
        return found

    def behind(self, chain: Chain) -> list[Chain]:
        """``chain`` with each token that can come next."""
        possible = self._possible(chain.tokens)
        if not possible:
            return []
        by_model = self.block.weights(torch.stack([self.ids[[*chain.tokens, i]] for i in possible]))
        out = []
        for i, model in zip(possible, by_model):
            whole = (*chain.tokens, i)
            goal = torch.stack([model[:, [n for n, k in enumerate(whole) if k == p]].sum(1) for p in dict.fromkeys(whole)])
            w, null, residual = self._weights(whole)
            again = len(chain.tokens) - len(set(chain.tokens)) + (i in chain.tokens)
            if null.shape[1] < again or (len(whole) == 2 and i in chain.tokens and self.texts != 1):
                continue  # a state between those of the same token, or the first token of another text
            goal = goal.flatten() * (1.0 if self.block.free else chain.scale)
            _, _, agreement = nearest(w, null, goal, scaled=self.block.free)
            kept = 1.0 if self.block.free else 1 / chain.scale
            if agreement >= AGREE * kept:
                out.append(Chain(whole, chain.scale, max(residual, chain.residual), min(agreement, chain.agreement)))
        return out

    def _possible(self, head: tuple[int, ...]) -> list[int]:
        """Tokens whose x is a combination of the row space and of the u of ``head`` and of their own."""
        used = sorted(set(head))
        left = self.x.clone()
        base = torch.linalg.qr(self.u[used].flatten(0, 1).T).Q
        left -= (left @ base) @ base.T
        new = [i for i in range(len(self.ids)) if i not in used]
        own = self.u[new] - (self.u[new] @ base) @ base.T
        own = torch.linalg.qr(own.transpose(1, 2)).Q
        left[new] -= torch.einsum("khr,kr->kh", own, torch.einsum("khr,kh->kr", own, left[new]))
        small = left.norm(dim=1) <= self.tolerance * self.size
        return [int(i) for i in small.nonzero()]

    def _weights(self, text: tuple[int, ...]) -> tuple[Tensor, Tensor, float]:
        """The w that make a state of the last token of ``text``, by different token and head: one solution, what may be
        added to it ``(weights, dimensions)``, and the residual."""
        a = self.u[list(dict.fromkeys(text))].flatten(0, 1).T
        target = self.x[text[-1]]
        left, values, right = torch.linalg.svd(a, full_matrices=False)
        kept = values > BLANK * values[0]
        w: Tensor = -(right[kept].T @ ((left.T @ target)[kept] / values[kept]))
        return w, right[~kept].T, float((target + a @ w).norm() / self.size[text[-1]])


def nearest(w: Tensor, null: Tensor, goal: Tensor, *, scaled: bool) -> tuple[Tensor, float, float]:
    """The ``w + null z`` that has most of the weights of ``goal``, times a scale that is free if ``scaled``, else 1; the
    scale; and the share of the weights of note that agree, without those that z and the scale can always make agree.

    Dropout zeroes some weights, and the others are exact: a few are taken to be what ``goal`` says, which gives z, and the
    z with which most others agree is the right one. Draws are fixed. The share is 0 where too few are of note.
    """
    free = torch.cat([null, -goal[:, None]], 1) if scaled else null
    unknown = free.shape[1]
    of_note = (goal > LEAST).nonzero().flatten()
    if len(of_note) < unknown + SPARE:
        return w, 1.0, 0.0
    if not unknown:
        return w, 1.0, float(((w - goal).abs() <= NEAR * goal)[of_note].double().mean())
    rng = torch.Generator().manual_seed(0)
    drawn = of_note[torch.rand(TRIALS, len(of_note), generator=rng).argsort(1)[:, :unknown]]
    target = -w if scaled else goal - w
    z, bad = torch.linalg.solve_ex(free[drawn], target[drawn])
    z[bad != 0] = torch.nan
    scale = z[:, -1] if scaled else torch.ones(TRIALS, dtype=w.dtype)
    tried = w + z[:, : null.shape[1]] @ null.T
    near = (tried - scale[:, None] * goal).abs() <= NEAR * scale[:, None] * goal
    agree, best = near[:, of_note].sum(1).max(0)
    return tried[best], float(scale[best]), (int(agree) - unknown) / (len(of_note) - unknown)
