"""Which tokens stand where: the plain span test, and the robust test, which also works under active dropout."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.updates.span.rows import TOLERANCE, RowSpace
from rasura.attacks.updates.span.scan import Scan
from rasura.core.values import Vocabulary

TOLERANT = 2e-2
"""Largest error of a fitted coordinate, relative to the coordinates' mean size. A token with little influence on the loss
lies deep in the numerical noise of the row space; a wrong token misses most coordinates by far more."""


COMMON = 8
"""How many tokens of a position (nearest to the row space first) are searched for again where copies hide each other; twice
as many in the second half of the rounds."""

STARTS = 8
"""Fits of each of these tokens in a round."""

FRUITLESS = 5
"""Rounds without a new copy after which a token is no longer searched for at a position: one fit in 10 to 20 finds a true
copy."""

POLISH = 4
"""Steps in float64 that end a robust fit."""


@dataclass(frozen=True)
class Row:
    """One private token, with its layer input ``(hidden,)``, in which dropped coordinates are zero."""

    position: int
    token: int
    segment: int
    input: Tensor
    residual: float


def candidates(vocabulary: Vocabulary) -> Tensor:
    """All ids that text can hold, special ones included."""
    return torch.tensor([i for i in range(vocabulary.size) if i not in vocabulary.unused_ids])


def plain(scan: Scan, position: int) -> list[Row]:
    """Tokens whose input at ``position`` lies in the row space, best first (DAGER's first-layer test)."""
    for segment in range(scan.inputs.types):
        hits, states, residual = scan.within(position, TOLERANCE, segment)
        if len(hits):
            found = zip(scan.ids[hits].tolist(), states, residual.tolist())
            return [Row(position, token, segment, state, r) for token, state, r in found]
    return []


@dataclass(frozen=True)
class Fit:
    """Robust fits of candidates, each ``(k, hidden)`` or ``(k,)``: ``inputs`` with dropped coordinates exactly zero,
    ``explained`` the fraction of coordinates that are right or zero, ``kept`` the fraction that are right."""

    inputs: Tensor
    explained: Tensor
    kept: Tensor

    def accepted(self) -> list[int]:
        """Candidates of which every coordinate is either right or zero. This is the signature of dropout, so it is no chance
        hit."""
        return [int(i) for i in ((self.explained > 0.97) & (self.kept > 0.5)).nonzero().flatten()]


def robust_fit(
    space: RowSpace,
    targets: Tensor,
    *,
    zeros: Tensor | None = None,
    decay: float = 0.75,
    known: Sequence[Sequence[Tensor]] = (),
) -> Fit:
    """Fit each row of ``targets`` ``(k, hidden)`` by the row space where dropped coordinates are sparse errors.

    Iteratively reweighted least squares with weights ``1 / (r^2 + width^2)``, ``width`` shrinking by ``decay`` from half the
    coordinates' mean size to the numerical floor (graduated non-convexity): it finds rows where L1 settles on a mixture of
    near copies. ``zeros`` ``(k, n)`` names coordinates that the first steps hold at zero. Of several copies of a token, this
    leads to the one in which dropout removed them. A fit that is hopeless, or on its way to one of the ``known`` inputs of
    its candidate (one sequence a row), is given up early.
    """
    whole, targets = targets, space.shown(targets)
    scale = targets.abs().mean(1, keepdim=True)
    held = targets if zeros is None else targets.scatter(1, zeros, 0.0)
    alive = torch.arange(len(targets))
    normal, ridge = space.coarse, 1e-6
    e, width = held.float(), 0.5 * scale.float()
    near = torch.zeros_like(e)
    coarse = math.ceil(math.log(1e-4) / math.log(decay))
    first = round(math.log(0.03) / math.log(decay))
    for step in range(coarse + POLISH):
        if step == coarse:  # which coordinates were dropped is settled; float64 brings the rest
            normal, ridge, decay = space.normal, 1e-13, 0.1
            e, near, width = held[alive], near.double(), width.double()
        r = e - near
        w = 1 / (r * r + width * width) if step else torch.ones_like(e)
        if step < first and zeros is not None:
            w.scatter_(1, zeros, 1e4 * w.mean(1, keepdim=True).expand_as(zeros))
        w = w / w.mean(1, keepdim=True)
        right_side = ((w * e) @ normal.basis)[:, :, None]
        solved = torch.cholesky_solve(right_side, torch.linalg.cholesky_ex(normal(w, ridge)).L)[:, :, 0]
        near = solved @ normal.basis.T
        width = width * decay
        if step in (first, round(1.5 * first)):
            # Any row space of rank N explains N coordinates of anything; a true token soon has many more.
            share = ((e - near).abs() < 0.02 * scale[alive]).double().mean(1)
            going = share > space.rank / targets.shape[1] + (0.03 if step == first else 0.15)
            for i, k in enumerate(alive.tolist()) if known else ():
                going[i] &= all(float((near[i] - other).norm()) > 0.1 * float(other.norm()) for other in known[k])
            alive, e, near, width = alive[going], e[going], near[going], width[going]
            if not len(alive):
                break
    fitted = torch.zeros_like(targets)
    fitted[alive] = near.double()
    wrong, size = (targets - fitted).abs(), fitted.abs()
    close = TOLERANT * scale
    right = wrong < close
    return Fit(
        torch.where((size < wrong) & (targets != 0), 0.0, whole),
        (right | (size < close)).double().mean(1),
        right.double().mean(1),
    )


class Search:
    """Searches for all private tokens under active dropout, until as many are found as the row space has dimensions.

    ``copies``: how many texts may share a token at one place. ``opening``: tokens that open every text; one copy is enough.
    """

    def __init__(self, scan: Scan, *, copies: int, opening: Sequence[int] = (), rng: torch.Generator) -> None:
        self.scan = scan
        self.space, self.inputs, self.ids = scan.space, scan.inputs, scan.ids
        self.copies = copies
        self.opening = tuple(enumerate(opening))
        self.rng = rng
        self.rows: list[Row] = []
        self.nearest: list[Tensor] = []
        """The tokens of each position, nearest to the row space first. Set by the search."""
        self._inputs: dict[tuple[int, int, int], Tensor] = {}

    def __call__(self, longest: int, *, known_length: bool, prefilter: int, rounds: int) -> list[Row]:
        """Rows at the first ``longest`` positions; ``prefilter`` candidates a position, best plain residual first.

        A first pass fits some of them everywhere; further rounds search for copies and for tokens hidden by others.
        """
        some = min(48, prefilter)
        best = self.nearest
        empty = 0
        for position in range(longest):
            missing = self.scan.missing(position)
            best.append(self.ids[missing.topk(min(prefilter, len(self.ids)), largest=False).indices])
            empty = 0 if self._fit(position, best[-1][:some]) else empty + 1
            if empty > 1 and not known_length:
                break
        if prefilter > some and not self.complete:
            for position, tokens in enumerate(best):
                self._fit(position, tokens[some:])
        self._again(rounds)
        return self.rows

    @property
    def complete(self) -> bool:
        """Whether every dimension of the row space is explained, copies of the opening included."""
        return len(self.rows) + self.owed >= self.space.rank

    @property
    def owed(self) -> int:
        """Copies of the opening that need not be found."""
        counts = Counter((r.position, r.token) for r in self.rows)
        return sum(self.copies - counts[key] for key in self.opening if counts[key])

    def _fit(self, position: int, tokens: Tensor) -> bool:
        """The first fits at a position; the segment is the first one in which a token fits."""
        for segment in range(self.inputs.types):
            targets = self.inputs.first(tokens, position, segment).double()
            fit = robust_fit(self.space, targets)
            found = [self._add(position, int(tokens[i]), segment, fit.inputs[i]) for i in fit.accepted()]
            if any(found):
                return True
        return False

    def _add(self, position: int, token: int, segment: int, x: Tensor) -> bool:
        known = [r.input for r in self.rows if (r.position, r.token, r.segment) == (position, token, segment)]
        # The fit is exact, so another copy differs by whole coordinates.
        if any(float((k - x).norm()) < 1e-2 * float(x.norm()) for k in known) or len(known) >= self.copies:
            return False
        self.rows.append(Row(position, token, segment, x, float(self.space.residual(x))))
        return True

    def _again(self, rounds: int) -> None:
        """Copies of found tokens, and tokens that also stand elsewhere: there a mixture of near copies fits best at first.

        A random coordinate held at zero singles out one of several. Tokens of the opening need no copy, and only the
        first few of a place have any: they are the common ones.
        """
        fruitless = 0
        waited: Counter[tuple[int, int, int]] = Counter()
        for number in range(rounds):
            wide = COMMON if number < rounds // 2 else 2 * COMMON
            found: dict[tuple[int, int, int], list[Tensor]] = {}
            for row in self.rows:
                found.setdefault((row.position, row.token, row.segment), []).append(row.input)
            tokens = {token for _, token, _ in found}
            near = [(n, int(t), 0) for n, ids in enumerate(self.nearest) for t in ids[:wide] if int(t) in tokens]
            keys = [key for key in dict.fromkeys([*found, *near]) if key[:2] not in self.opening]
            keys = [key for key in keys if len(found.get(key, [])) < self.copies and (key in near or key[2])]
            keys = [key for key in keys if waited[key] < FRUITLESS]
            if self.complete or fruitless > 1 or not keys:
                return
            new, starts = 0, [key for key in keys for _ in range(STARTS)]
            for begin in range(0, len(starts), 192):
                part = starts[begin : begin + 192]
                targets = torch.cat([self._input(key) for key in part]).double()
                zeros = torch.multinomial(targets.abs(), 1, generator=self.rng)
                known = [found.get(key, []) for key in part]
                fit = robust_fit(self.space, targets, zeros=zeros, decay=0.85, known=known)
                fresh = [part[i] for i in fit.accepted() if self._add(*part[i], fit.inputs[i])]
                new += len(fresh)
                for key in fresh:
                    waited[key] = -1
            waited.update(keys)
            fruitless = 0 if new else fruitless + 1

    def _input(self, key: tuple[int, int, int]) -> Tensor:
        if key not in self._inputs:
            position, token, segment = key
            self._inputs[key] = self.inputs.first(torch.tensor([token]), position, segment)
        return self._inputs[key]
