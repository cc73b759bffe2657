"""Words that may stand at a place, and texts of them, from the gradient of block 0 alone.

That gradient is ``sum_t delta_t x_t^T``. What a text's inputs x leave of it at the best deltas is a distance in closed form,
which dropout in later layers does not touch: no model runs. Dropout behind the embeddings takes a share of an input's
entries away, so that a private word lies off the row space, but nearer than nearly all others: of 276 words of 16 SST-2
sentences (dropout 0.1, MiniLM, 14 to 25 tokens) 170 were the nearest at their places, and all were among the nearest twelve.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import RowSpace, block_spaces, visible_blocks, visible_gradients
from rasura.attacks.updates.span.scan import Scan
from rasura.core.values import UNKNOWN as OVER
from rasura.core.values import Observation
from rasura.victims.positions import positions

NEAREST = 12
"""Words of a place."""

CHAINS, SWEEPS = 16, 30
"""Texts that are drawn side by side, and how often each of their places is drawn again."""

WEIGHT = 20.0
"""Weight of ``distance`` beside the logarithm of a gradient's distance: a wrong word adds about as much to either."""

HOT, COLD = 3e-3, 2e-4
"""Temperatures of the first and the last sweep: a wrong word adds 1e-3 to 1e-2 to a text's distance."""

RIDGE = 1e-3
"""Squared length, of unit inputs, under which directions of a text's span do not count in full: inputs nearly the same."""


@dataclass(frozen=True)
class Likely:
    """``words`` ``(places, count)``: ids, the nearest to the row space first. ``gradient`` ``(rank, inputs)``: block 0's,
    query, key and value of the same size, turned so that it has as few rows as its row space has dimensions."""

    words: Tensor
    inputs: Inputs
    space: RowSpace
    gradient: Tensor

    def distance(self, ids: Tensor) -> Tensor:
        """What block 0's gradient says against batches ``ids`` ``(candidates, batch, width)``: the share of it that they do
        not explain, and half the share of their inputs that it does not; ``(candidates,)``."""
        x = self._made(ids.clamp_min(0).flatten(0, 1)) * (ids != OVER).flatten(0, 1)[..., None]
        return self._distance(x.view(len(ids), -1, x.shape[-1]))

    def _made(self, ids: Tensor) -> Tensor:
        """Inputs of block 0, as unit vectors, of texts ``ids`` ``(texts, length)``: ``(texts, length, inputs)``."""
        made = [self.inputs.first(row, place) for place, row in enumerate(ids.T)]
        return nn.functional.normalize(self.space.shown(torch.stack(made, 1)), dim=-1)

    def _distance(self, x: Tensor) -> Tensor:
        real = x.square().sum(-1)
        outside = (self.space.missing(x) * real).sum(1) / real.sum(1)
        return left(self.gradient, x) + 0.5 * outside

    def texts(self, ids: Tensor, free: Tensor, rng: torch.Generator) -> Tensor:
        """Texts ``(CHAINS, places)`` like ``ids`` ``(places,)`` with likely words where ``free``, by simulated annealing
        (Kirkpatrick, Gelatt and Vecchi 1983): the best that each chain passed."""
        length = int((ids != OVER).sum())
        words = torch.where(free[:length, None], self.words[:length], ids[:length, None])
        x, place = self._made(words.T).transpose(0, 1), torch.arange(length)
        spots, count = free[:length].nonzero().flatten(), words.shape[1]

        def distance(drawn: Tensor) -> Tensor:
            return self._distance(x[place, drawn.reshape(-1, length)]).view(drawn.shape[:-1])

        drawn = torch.randint(min(4, count), (CHAINS, length), generator=rng)
        chain, best, kept = torch.arange(CHAINS), distance(drawn), drawn.clone()
        for sweep in range(SWEEPS):
            heat = HOT * (COLD / HOT) ** (sweep / (SWEEPS - 1))
            for spot in spots[torch.randperm(len(spots), generator=rng)].tolist():
                tried = drawn[:, None].repeat(1, count, 1)
                tried[:, :, spot] = torch.arange(count)
                far = distance(tried)
                odds = torch.softmax((far.amin(1, keepdim=True) - far) / heat, 1)
                pick = torch.multinomial(odds, 1, generator=rng)[:, 0]
                drawn, far = tried[chain, pick], far[chain, pick]
                better = far < best
                best, kept = torch.where(better, far, best), torch.where(better[:, None], drawn, kept)
        out = ids.repeat(CHAINS, 1)
        out[:, :length] = words[place, kept]
        return out[best.argsort()]


def left(gradient: Tensor, x: Tensor) -> Tensor:
    """The share of ``||gradient||^2`` that no deltas with the inputs ``x`` ``(texts, length, inputs)``, unit vectors, make
    up for: ``min ||gradient - delta^T x||^2 / ||gradient||^2``, but for ``RIDGE``; ``(texts,)``."""
    gram = x @ x.mT + RIDGE * torch.eye(x.shape[1], dtype=x.dtype)
    along = x @ gradient.T
    made: Tensor = (along * torch.linalg.solve(gram, along)).sum((1, 2))
    return 1 - made / gradient.square().sum()


def likely(seen: Observation, ordinary: Tensor, width: int) -> Likely | None:
    """The words of ``ordinary`` that lie nearest at each of ``width`` places, for a batch of one.

    None where block 0 shows no row space, or the model adds no positions, so that all places are alike.
    """
    first = [block for block in visible_blocks(seen) if block.index == 0]
    space = block_spaces(seen, first).get(0)
    if space is None or (positions(seen.model) or 0) < width:
        return None
    inputs = Inputs(seen.model)
    scan = Scan(space, inputs, ordinary, width)
    count = min(NEAREST, len(ordinary))
    best = [scan.missing(place).topk(count, largest=False).indices for place in range(width)]
    stacked = torch.cat([g / g.norm().clamp_min(1e-30) for g in visible_gradients(seen, first[0].qkv)])
    basis = space.basis.to(stacked.dtype)
    turned = torch.linalg.qr(stacked @ basis).R @ basis.T
    return Likely(ordinary[torch.stack(best)], inputs, space, turned)
