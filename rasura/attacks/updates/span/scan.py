"""What a row space leaves of block 0's inputs of all words at all places.

The input of word v at place p is ``(y_v + z_p) / s_vp + shift`` (``folding``): y and z are the embedding e and the offset o
behind the norm's linear part, and ``s^2 = (||e||^2 + 2 <e, o> + ||o||^2) / width + eps``. Its squared norm, and that of its
projection onto a basis B, follow from ``y B``, ``<y, z>`` and ``<e, o>``: one product of V x d x N for many places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.shared.twins import one_of_twins
from rasura.attacks.updates.span.folding import Form, form
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import DOUBT, RowSpace
from rasura.victims.positions import positions

ROWS = 1024
"""Words whose embeddings are in work at once: they stay in the cache."""

PLACES = 16
"""Places that are scanned at once."""


@dataclass(frozen=True)
class Left:
    """Of words at places, ``(places, words)``: ``missing``, the squared share of their inputs outside the row space, and
    ``doubt``, the share that the noise of the basis may put there."""

    missing: Tensor
    doubt: Tensor


class Scan:
    """Tests of all ``ids`` at the first ``places`` (as many as the model has; one where none is added) against ``space``.

    What was found at a place is kept. ``standing``: which of several twins is taken (``attacks.shared.twins``).
    """

    def __init__(self, space: RowSpace, inputs: Inputs, ids: Tensor, places: int, standing: Tensor | None = None) -> None:
        self.space, self.inputs, self.ids, self.standing = space, inputs, ids, standing
        rows = positions(inputs.model)
        self.places = 1 if rows is None else min(places, rows)
        self.form = form(inputs.model)
        self._kept: dict[tuple[int, int], Left] = {}

    def missing(self, position: int, segment: int = 0) -> Tensor:
        """The squared share outside the row space of the inputs of all ids at ``position``, ``(k,)``; good to 1e-5."""
        return self.left(position, segment)[0]

    def within(self, position: int, least: float, segment: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Indices of the ids whose residual is in ``space.tolerance``, best first, their inputs and residuals in float64. Of
        twins it is one."""
        missing, doubt = self.left(position, segment)
        near = missing < (2 * (DOUBT * doubt).clamp(max(1.5e-3, least), 0.5)).square()
        hits = near.nonzero().flatten()
        states = self.inputs.first(self.ids[hits], position, segment).double() if len(hits) else self.space.basis.T[:0]
        residual = self.space.residual(states)
        order = residual.argsort()
        order = order[(residual < self.space.tolerance(states, least))[order] & (states[order].norm(dim=1) > 0)]
        table = self.inputs.model.get_parameter(self.inputs.parts.word_embedding)
        order = order[one_of_twins(table, self.ids[hits[order]], self.standing)]
        return hits[order], states[order], residual[order]

    def left(self, position: int, segment: int) -> tuple[Tensor, Tensor]:
        """``Left`` at one place, each ``(k,)``."""
        group = PLACES if self.form is not None else 1
        key = position // group, segment
        if key not in self._kept:
            self._kept[key] = self._scanned(key[0] * group, group, segment)
        left = self._kept[key]
        return left.missing[position % group], left.doubt[position % group]

    @torch.no_grad()
    def _scanned(self, start: int, group: int, segment: int) -> Left:
        if self.form is None:
            chunks = (self.inputs.first(chunk, start, segment) for chunk in torch.split(self.ids, ROWS))
            found = [one_by_one(self.space, x) for x in chunks]
        else:
            offsets = self.form.offsets(min(start + group, self.places), segment)[start:]
            folded = Folded(self.form, self.space, offsets)
            found = [folded(chunk) for chunk in torch.split(self.ids, ROWS)]
        return Left(torch.cat([f.missing for f in found], 1), torch.cat([f.doubt for f in found], 1))


def one_by_one(space: RowSpace, x: Tensor) -> Left:
    """Of inputs ``x`` ``(words, hidden)`` at one place, as they are."""
    return Left(space.missing(x)[None], space.doubt(x)[None])


class Folded:
    """Of words, by their ids, at places that add ``offsets`` ``(places, width)``."""

    def __init__(self, form: Form, space: RowSpace, offsets: Tensor) -> None:
        self.form, self.space = form, space
        self.basis, self.noise = space.basis.to(form.table), space.noise.to(form.table)
        self.offsets = form.norm.middle(offsets)
        self.stretched = space.shown(form.norm.stretched(self.offsets))
        self.shift = space.shown(form.norm.shift)

    def __call__(self, words: Tensor) -> Left:
        """``words``: ids ``(k,)``."""
        norm, z, shift = self.form.norm, self.stretched, self.shift
        e = norm.middle(self._embeddings(words))
        y = self.space.shown(norm.stretched(e))
        by = norm.inverse(squares(e, self.offsets))
        whole = squares(y, z, by, shift).clamp_min(1e-30)
        y, z, shift = y @ self.basis, z @ self.basis, shift @ self.basis
        missing = 1 - squares(y, z, by, shift) / whole
        doubt = squares(y * self.noise, z * self.noise, by, shift * self.noise).clamp_min(0) / whole
        return Left(missing, doubt.sqrt())

    def _embeddings(self, words: Tensor) -> Tensor:
        if bool(words.diff().eq(1).all()):  # the table itself, and no copy
            return self.form.table[int(words[0]) : int(words[-1]) + 1]
        return self.form.table[words]


def squares(y: Tensor, z: Tensor, by: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """``||(y_v + z_p) by_pv + shift||^2`` for each p and v, ``(p, v)``, of ``y`` ``(v, n)`` and ``z`` ``(p, n)``."""
    out: Tensor = torch.linalg.vector_norm(y, dim=1).square().expand(len(z), -1)
    if bool(z.any()):
        out = torch.addmm(out, z, y.T, alpha=2) + z.square().sum(1, keepdim=True)
    if by is None:
        return out
    out = out * by
    if shift is not None and bool(shift.any()):
        return (out + 2 * ((y @ shift) + (z @ shift)[:, None])) * by + shift @ shift
    return out * by
