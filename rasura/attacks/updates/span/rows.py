"""Row spaces of linear layers' gradients, and the layer inputs that tokens would produce.

The gradient of ``y = W x + b`` is ``sum_t delta_t x_t^T``: while the batch holds fewer tokens than the layer has inputs, its
row space is spanned by the inputs of the private tokens (DAGER, Petrov et al. 2024; here with an exact decomposition).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from rasura.core.errors import NotApplicable
from rasura.core.values import Observation
from rasura.victims.models import ADAPTER, Block, Linear, parts

CHUNK = 2048
"""Tokens whose inputs are computed at once when a whole vocabulary is tested."""

GAP = 30.0
"""A ratio of neighbouring singular values from which the row space certainly ends there."""

NARROW, WIDE_GAP = 32, 1000.0
"""Inputs of a layer, as those of an adapter's second matrix, up to which it takes a wider gap, and no line is drawn. All may
be in use, and singular values are 30 times apart by chance. Where such a space ends, float32 leaves a millionth (adapters of
rank 8 on SmolLM2-135M)."""

ABOVE = 1.3
"""Without such a gap: singular values of at least this many times the noise belong to the row space."""

TOLERANCE = 1e-4
"""Minimum tolerance of a true input's residual: float32 leaves 1e-7 to 1e-5, the next best token of a trained model 1e-2."""

DOUBT = 1.5
"""Tolerance relative to the expected residual: true inputs had .2 to .9 of it (bfloat16, rounded weights), rarely 1.3."""

SMALL = 1e-3
"""Norm of a gradient, relative to the largest, from which it adds to a row space."""

FULL = 0.9
"""Rank relative to the layer's inputs from which a row space that takes any token is nearly full; below, it is blurred."""


@dataclass(frozen=True)
class RowSpace:
    """``basis``: ``(inputs, rank)`` orthonormal, float64. ``noise`` ``(rank,)``: the singular value of the noise relative to
    that of each direction, which is how far off that direction may be. ``known`` ``(inputs,)``: 1 for inputs that the
    gradients show, 0 for inputs where they are blank, which are left out of the comparison; None: all are known."""

    basis: Tensor
    noise: Tensor
    known: Tensor | None = None
    tokens: int | None = None
    """The number of independent inputs, where the basis holds all inputs that the gradients do not rule out."""

    @property
    def rank(self) -> int:
        """Number of independent inputs; the number of private tokens as long as these are independent."""
        return int(self.basis.shape[1]) if self.tokens is None else self.tokens

    @property
    def floor(self) -> float:
        """The largest of ``noise``: the relative size of what may be left of a true input outside the basis."""
        return float(self.noise.max())

    def shown(self, x: Tensor) -> Tensor:
        """``x`` with zeros for the inputs that the gradients do not show."""
        return x if self.known is None else x * self.known.to(x.dtype)

    def outside(self, x: Tensor) -> Tensor:
        """What the space leaves of each row of ``x`` ``(..., inputs)``, in the precision of ``x``."""
        basis, x = self.basis.to(x.dtype), self.shown(x)
        return x - (x @ basis) @ basis.T

    def residual(self, x: Tensor) -> Tensor:
        """``||x outside|| / ||x||`` for each row of ``x`` ``(..., inputs)``, in the precision of ``x``."""
        size: Tensor = self.outside(x).norm(dim=-1) / self.shown(x).norm(dim=-1).clamp_min(1e-30)
        return size

    def tolerance(self, x: Tensor, min_tolerance: float = TOLERANCE) -> Tensor:
        """The residual up to which a row of ``x`` ``(..., inputs)`` may lie in the row space, by its directions' noise."""
        out: Tensor = (DOUBT * self.doubt(x)).clamp(min_tolerance, 0.5)
        return out

    def doubt(self, x: Tensor) -> Tensor:
        """The share of each row of ``x`` ``(..., inputs)`` that the noise of the basis may leave outside it."""
        x = self.shown(x)
        size = ((x @ self.basis.to(x.dtype)) * self.noise.to(x.dtype)).norm(dim=-1)
        out: Tensor = size / x.norm(dim=-1).clamp_min(1e-30)
        return out

    def missing(self, x: Tensor) -> Tensor:
        """``residual`` squared, as ``1 - ||projection||^2 / ||x||^2``: half the work, and good to 1e-6 in float32."""
        x = self.shown(x)
        whole = torch.linalg.vector_norm(x, dim=-1).square()
        inside = torch.linalg.vector_norm(x @ self.basis.to(x.dtype), dim=-1).square()
        out: Tensor = 1 - inside / whole.clamp_min(1e-30)
        return out


def scaled(matrices: Sequence[Tensor]) -> list[Tensor]:
    """``matrices`` with norm 1, in float64, so that none dominates the others. One that is tiny compared with the largest is
    left out, since it would bring in the rounding of larger numbers."""
    largest = max((float(m.norm()) for m in matrices), default=0.0)
    return [m.double() / m.double().norm() for m in matrices if float(m.norm()) > SMALL * largest]


def row_space(matrices: Sequence[Tensor]) -> RowSpace | None:
    """The common row space of gradients ``(outputs, inputs)``; None where none stands out (too many tokens, or noise).

    It ends at a gap of the singular values; without a gap (rounding, noise) it ends where they join the line through the
    smaller ones, which are noise, unless the layer is narrow.
    """
    kept = scaled(matrices)
    if not kept:
        return None
    stacked = torch.cat(kept)
    if len(stacked) > stacked.shape[1]:
        stacked = torch.linalg.qr(stacked).R
    _, values, rows = torch.linalg.svd(stacked, full_matrices=False)
    max_rank = max(1, min(len(values) - 1, int(0.98 * stacked.shape[1])))
    ratios = values[:-1] / values[1:].clamp_min(1e-30 * float(values[0]))
    # Behind the noise floor ratios mean nothing: exact zeros (a dead layer) would give endless ones.
    ratios[values[:-1] < 1e-12 * values[0]] = 0.0
    rank = int(ratios[:max_rank].argmax()) + 1
    narrow = stacked.shape[1] <= NARROW
    if float(ratios[rank - 1]) < (WIDE_GAP if narrow else GAP):
        rank = 0 if narrow else _above_noise(values)
        if not rank:
            return None
    known = stacked.ne(0).any(0)
    return RowSpace(rows[:rank].T.contiguous(), values[rank] / values[:rank], None if known.all() else known)


def _above_noise(values: Tensor) -> int:
    """How many of the singular ``values`` are above the noise. The logarithms of noise fall on a line, except for the last
    ones."""
    index = torch.arange(len(values), dtype=values.dtype)
    some = slice(int(0.4 * len(values)), int(0.8 * len(values)))
    if some.stop - some.start < 2 or not float(values[some].min()) > 0:
        return 0
    line = torch.stack([index, torch.ones_like(index)], 1)
    fitted = torch.linalg.lstsq(line[some], values[some].log()[:, None]).solution
    noise = (line @ fitted)[:, 0].exp()
    return int((values > ABOVE * noise).long()[: some.start].cumprod(0).sum())


def visible_gradients(seen: Observation, linears: Sequence[Linear]) -> list[Tensor]:
    """Gradients of those ``linears`` that the adversary sees whole, as ``(outputs, inputs)``."""
    whole = ((lin, seen.whole(lin.weight)) for lin in linears)
    return [gradient.T if lin.transposed else gradient for lin, gradient in whole if gradient is not None]


def masked_gradients(seen: Observation, linears: Sequence[Linear]) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of ``linears``, all of them in the update, as ``(outputs, inputs)``; and bool masks of what is visible."""
    gradients = [seen.gradients[lin.weight] for lin in linears]
    masks = [seen.visible.get(lin.weight, torch.ones_like(g, dtype=torch.bool)) for lin, g in zip(linears, gradients)]
    turned = [[m.T if lin.transposed else m for lin, m in zip(linears, found)] for found in (gradients, masks)]
    return turned[0], turned[1]


def visible_blocks(seen: Observation) -> tuple[Block, ...]:
    """Blocks with at least one wholly visible Q, K or V gradient that is not zero everywhere."""
    return tuple(b for b in parts(seen.model).blocks if any(bool(g.any()) for g in visible_gradients(seen, b.qkv)))


def blocks_that_tell(seen: Observation) -> tuple[Block, ...]:
    """``visible_blocks`` without those of which adapters show combinations of inputs alone."""
    return tuple(block for block in visible_blocks(seen) if tells_inputs(seen, block.qkv))


def blocks_to_read(seen: Observation) -> tuple[Block, ...]:
    """``visible_blocks``, at least one. Raises ``NotApplicable`` and says why there is none."""
    found = visible_blocks(seen)
    if found:
        return found
    read = [lin for block in parts(seen.model).blocks for lin in block.qkv]
    if visible_gradients(seen, read):
        adapters = "; adapters in their first round show fewer tokens than their rank, and none under dropout"
        raise NotApplicable(
            "the visible query, key and value gradients are all zero: these layers were not trained, or they are adapters "
            f"in their first round{adapters if any(ADAPTER[0] in lin.weight for lin in read) else ''}"
        )
    raise NotApplicable("no whole query, key or value gradient is visible")


def tells_inputs(seen: Observation, linears: Sequence[Linear]) -> bool:
    """Whether the row space of ``linears``, which have one input, can be that of all its inputs. True but of adapters.

    The gradient of an adapter's first matrix A is ``B^T sum_t delta_t x_t^T``. B, which is known, has few directions after a
    first round with a short text. Where A shows as many as B has, these may be combinations of more inputs. The gradient of
    B does not depend on B: where its row space has no more directions, there are no more inputs.
    """
    sizes = {lin: float(whole.norm()) for lin in linears if (whole := seen.whole(lin.weight)) is not None}
    if not all(ADAPTER[0] in lin.weight for lin in sizes):
        return True
    space = row_space(visible_gradients(seen, linears))
    if space is None:
        return False
    second = {lin: lin.weight.replace(*ADAPTER) for lin in sizes}
    kept = [second[lin] for lin, size in sizes.items() if size > SMALL * max(sizes.values())]
    most = sum(_rank(seen.model.get_parameter(name).detach()) or seen.model.get_parameter(name).shape[1] for name in kept)
    shown = max((_rank(whole) for name in second.values() if (whole := seen.whole(name)) is not None), default=0)
    return shown <= space.rank and (space.rank < most or shown > 0)


def _rank(matrix: Tensor) -> int:
    """The number of directions of the row space of ``matrix``; 0 where none stands out."""
    space = row_space([matrix])
    return 0 if space is None else space.rank


def block_spaces(seen: Observation, blocks: Sequence[Block], most: int | None = None) -> dict[int, RowSpace]:
    """The row space of the attention input, by block index, for those of ``blocks`` that show one; of the first ``most``."""
    told = (block for block in blocks if tells_inputs(seen, block.qkv))
    spaces = ((block.index, row_space(visible_gradients(seen, block.qkv))) for block in told)
    return dict(islice(((index, space) for index, space in spaces if space is not None), most))


def adapter_spaces(seen: Observation, most: int) -> dict[int, RowSpace]:
    """The same by an encoder's adapters in an early round, if nothing else tells inputs; empty where block 0 shows none.

    In the first round, the second matrix B of such an adapter is zero, so the first one, A, has no gradient. That of B is
    ``sum_t delta_t (A x_t)^T``. Where A makes more numbers of an input than there are tokens, the gradient rules out inputs:
    those x for which A x is outside its row space.
    """
    known = parts(seen.model)
    if known.causal or blocks_that_tell(seen):
        return {}
    spaces = {block.index: _not_ruled_out(seen, block) for block in known.blocks[:most]}
    return {index: space for index, space in spaces.items() if space is not None} if spaces[0] is not None else {}


def fresh_adapters(seen: Observation, block: Block) -> list[tuple[RowSpace, Tensor, Tensor]]:
    """Of the adapters of a block's queries, keys and values that show a row space, those that show the most inputs: the row
    space of the gradient of B, that gradient ``(outputs, rank)``, and A ``(rank, hidden)``, in float64.

    Queries of the last block have the gradient of the classifier's token alone, and tell nothing of other inputs.
    """
    found = []
    for first in (lin.weight for lin in block.qkv if ADAPTER[0] in lin.weight):
        gradient = seen.whole(first.replace(*ADAPTER))
        if gradient is not None and (space := row_space([gradient])) is not None:
            found.append((space, gradient.double(), seen.model.get_parameter(first).detach().double()))
    most = max((space.rank for space, *_ in found), default=0)
    return [one for one in found if one[0].rank == most]


def _not_ruled_out(seen: Observation, block: Block) -> RowSpace | None:
    """What a block's fresh adapters leave; None where they rule out no input."""
    found = fresh_adapters(seen, block)
    if not found:
        return None
    normals = torch.cat([a.T @ torch.linalg.svd(space.basis).U[:, space.rank :] for space, _, a in found], 1)
    basis = torch.linalg.svd(normals / normals.norm(dim=0)).U[:, normals.shape[1] :]
    noise = torch.full_like(basis[0], max(space.floor for space, *_ in found))
    return RowSpace(basis, noise, tokens=found[0][0].rank)


def as_sent(seen: Observation) -> Observation:
    """The observation without its masks: tensors that are wholly hidden are absent, and other hidden entries are zeros."""
    there = {n: g for n, g in seen.gradients.items() if n not in seen.visible or bool(seen.visible[n].any())}
    return replace(seen, message=replace(seen.message, gradients=there, visible={}))
