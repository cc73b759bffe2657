"""What chance puts into a row space: the residual below which a token is no chance hit.

The null distribution comes from tokens that were not found: what the observed row space leaves of their inputs. A guess is
believed under three conditions. Its residuals are so small that, over a hundred searches, fewer than one token would reach
them by chance. They are clearly below those of other tokens at the same position. And the guess explains the whole row
space, not a part of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from rasura.attacks.shared.twins import NEAR
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.passing import FALSE, fitted_chance
from rasura.attacks.updates.span.rows import DOUBT, TOLERANCE, RowSpace
from rasura.attacks.updates.span.tokens import EDGE, Row
from rasura.core.values import UNKNOWN
from rasura.victims.models import Block

UNEXPLAINED = 0.3
"""Largest part of a direction of the row space that the guess may leave unexplained, unless noise allows more."""

OTHERS = 512
"""Number of other tokens tried at a position."""

NEIGHBOURS = 8
"""How many of these are the words nearest to the token found."""

MAX_TEXTS = 4
"""Number of a decoder's texts at whose first, middle and last position others are tried. Each try runs the model up to the
block."""


class Chance:
    """What a row space leaves of other tokens' inputs, and the residual that chance reaches there.

    Kept are two moments and no inputs: hundreds of places with thousands of others would fill gigabytes.
    """

    def __init__(self) -> None:
        self._count = 0
        self._finite = True
        self._origin = self._sum = self._products = torch.zeros(())

    def add(self, outside: Tensor) -> float:
        """Take in what is left ``outside`` ``(others, inputs)`` of others at one place, over their sizes. Returns the
        smallest of their residuals; NaN, below which nothing is, if there are none."""
        if not len(outside):
            return math.nan
        x = outside.double()
        if not self._count:
            self._origin = x.mean(0)  # far from zero, products would lose what differs
        x = x - self._origin
        self._count += len(x)
        self._finite &= bool(torch.isfinite(x).all())
        self._sum = self._sum + x.sum(0)
        self._products = self._products + x.T @ x
        return float(outside.norm(dim=1).min())

    def limit(self, trials: float) -> float:
        """The largest residual that fewer than ``FALSE`` of ``trials`` tokens reach by chance; 0 where no such limit is
        known.

        A Gaussian with the others' covariance puts at most ``volume(r) / ((2 pi)^(k/2) * product of k deviations)`` into a
        ball of radius r, by any k of its axes. Every k gives a bound, and the best one is used.
        """
        if self._count < 2 or not self._finite:
            return 0.0
        mean = self._sum / self._count
        covariance = (self._products - self._count * torch.outer(mean, mean)) / (self._count - 1)
        variance = torch.linalg.eigvalsh(covariance).flip(0)
        # A quarter of the samples, at most: the smaller ones of more axes than that are no estimate.
        variance = variance[variance > 1e-12 * variance[0]][: max(1, self._count // 4)]
        if not len(variance):
            return 0.0
        best, logs = -math.inf, 0.0
        for k, v in enumerate(variance.tolist(), 1):
            logs += 0.5 * math.log(v)
            radius = (math.log(FALSE / max(trials, 1.0)) + k / 2 * math.log(2) + math.lgamma(k / 2 + 1) + logs) / k
            best = max(best, radius)
        return math.exp(best)


def explained(space: RowSpace, states: Tensor) -> bool:
    """Whether ``states`` ``(tokens, inputs)`` explain every direction of the row space, up to its noise."""
    if len(states) < space.rank:
        return False
    x = space.shown(states.double())
    _, values, rows = torch.linalg.svd(x / x.norm(dim=1, keepdim=True).clamp_min(1e-300), full_matrices=False)
    own = rows[values > 1e-6 * values[0]]
    left = (space.basis - own.T @ (own @ space.basis)).norm(dim=0)
    return bool((left <= (DOUBT * space.noise).clamp_min(UNEXPLAINED)).all())


def outside(space: RowSpace, inputs: Tensor) -> Tensor:
    """What the row space leaves of ``inputs`` ``(k, width)``, over their sizes; its norms are the residuals.

    Inputs of size zero are left out, such as that of the padding token where nothing is added to its embedding.
    """
    x = space.shown(inputs.double())
    size = x.norm(dim=1, keepdim=True)
    left = space.outside(x) / size.clamp_min(1e-300)
    kept: Tensor = left[size[:, 0] > 1e-12]
    return kept


def stand_clear(residuals: Tensor, others: Tensor, limit: float) -> bool:
    """Whether the ``residuals`` ``(tokens,)`` of a guess are below what chance gives, and clearly below other tokens'.

    ``others``: for each token the smallest residual of another one at its place; or one value for all tokens.
    """
    if not len(residuals) or not len(others):
        return False
    return bool((residuals <= limit).all()) and bool((residuals <= EDGE * others).all())


def others_of(inputs: Inputs, ids: Tensor, found: set[int]) -> Tensor:
    """Tokens other than those ``found``: the nearest ones to each, and some from the whole vocabulary ``ids``.

    A twin of a token that was found is none of them, since no row space tells the two apart: ``verify.in_span`` leaves such
    places open."""
    table = inputs.model.get_parameter(inputs.parts.word_embedding).detach()
    own = torch.tensor(sorted(found), dtype=torch.long)
    squares = table.square().sum(1)
    far = squares - 2 * table[own] @ table.T  # the squared distance, but for what all share
    alike = (far + squares[own, None] <= NEAR**2 * squares[own, None]).any(0)
    alike[own] = True
    rest: Tensor = ids[~alike[ids]]
    if len(rest) <= OTHERS:
        return rest
    spread = rest[torch.linspace(0, len(rest) - 1, OTHERS).long()]
    far[:, torch.cat([alike.nonzero().flatten(), _without(ids, len(table))])] = torch.inf
    near = far.topk(min(NEIGHBOURS, len(rest)), largest=False).indices
    return torch.tensor(sorted({*spread.tolist(), *near.flatten().tolist()}))


def _without(ids: Tensor, size: int) -> Tensor:
    """All indices below ``size`` but ``ids``."""
    there = torch.zeros(size, dtype=torch.bool)
    there[ids] = True
    return (~there).nonzero().flatten()


def tokens_believed(
    space: RowSpace, inputs: Inputs, ids: Tensor, texts: Sequence[Sequence[tuple[int, int]]], *, positional: bool
) -> bool:
    """Whether the null of block 0 supports the (token, segment) pairs of ``texts``, at their positions if ``positional``."""
    standing = sorted({(n * positional, t, s) for text in texts for n, (t, s) in enumerate(text) if t != UNKNOWN})
    others = others_of(inputs, ids, {t for _, t, _ in standing})
    if not standing or not len(others):
        return False
    states = torch.cat([inputs.first(torch.tensor([t]), n, s) for n, t, s in standing])
    if not explained(space, states):
        return False
    chance = Chance()
    places = sorted({(n, s) for n, _, s in standing})
    beside = {(n, s): chance.add(outside(space, inputs.first(others, n, s))) for n, s in places}
    nearest = torch.tensor([beside[n, s] for n, _, s in standing], dtype=torch.double)
    residuals = space.residual(states.double())
    for n, s in places:
        here = [(m, r) == (n, s) for m, _, r in standing]
        moved = _ids({t for _, t, _ in standing} - {t for (_, t, _), stands in zip(standing, here) if stands})
        if len(moved) and _beaten(residuals[torch.tensor(here)], outside(space, inputs.first(moved, n, s))):
            return False
    return stand_clear(residuals, nearest, chance.limit(len(ids) * len(beside)))


def prefixes_believed(spaces: Mapping[int, RowSpace], inputs: Inputs, ids: Tensor, texts: Sequence[Sequence[int]]) -> bool:
    """The same for a decoder's ``texts``, by any one of the blocks above the first that ``spaces`` has."""
    whole = [torch.tensor(text) for text in texts]
    blocks = [b for b in inputs.parts.blocks if b.index in spaces and b.index > 0]
    others = others_of(inputs, ids, {t for text in texts for t in text})[:OTHERS]
    if not (whole and blocks and len(others) and all(map(len, whole))):
        return False
    # The first block alone is usually enough, and costs a small part of a run through all.
    return any(_believed_by(some, spaces, inputs, len(ids), whole, others) for some in (blocks[:1], blocks[1:]) if some)


def _believed_by(
    blocks: Sequence[Block],
    spaces: Mapping[int, RowSpace],
    inputs: Inputs,
    count: int,
    whole: Sequence[Tensor],
    others: Tensor,
) -> bool:
    """Whether any of ``blocks`` believes the texts ``whole``, beside ``others`` of ``count`` tokens in all."""
    own: dict[int, list[Tensor]] = {b.index: [] for b in blocks}
    chance = {b.index: Chance() for b in blocks}
    nearest: dict[int, list[float]] = {b.index: [] for b in blocks}
    beaten = dict.fromkeys(own, False)
    for number, text in enumerate(whole):
        for index, x in inputs.deep(text[None], torch.ones_like(text[None]), blocks).items():
            own[index].append(x[0].double())
        for n in sorted({0, len(text) // 2, len(text) - 1}) if number < MAX_TEXTS else ():
            moved = _elsewhere(whole, text[:n])
            for index, x in inputs.following(text[:n], torch.cat([others, moved]), blocks).items():
                space, mine = spaces[index], own[index][-1][n : n + 1]
                nearest[index].append(chance[index].add(outside(space, x[: len(others)])))
                beaten[index] |= _beaten(space.residual(mine), outside(space, x[len(others) :]))
    trials = count * sum(map(len, whole))
    for index in (index for index in own if not beaten[index]):
        space, states = spaces[index], torch.cat(own[index])
        least = torch.tensor(nearest[index], dtype=torch.double).min()[None]
        if explained(space, states) and stand_clear(space.residual(states), least, chance[index].limit(trials)):
            return True
    return False


def _beaten(residuals: Tensor, outside: Tensor) -> bool:
    """Whether a word of the guess from elsewhere, of which ``outside`` ``(words, inputs)`` is left at a place, clearly fits
    there better than one of those named, of ``residuals``. One that fits as well is no sign: of words that several texts
    share, every place of one is in the row space with the places of the others."""
    if not len(outside):
        return False
    worst = float(residuals.max())
    return worst > TOLERANCE and float(outside.norm(dim=1).min()) < EDGE * worst


def _elsewhere(texts: Sequence[Tensor], head: Tensor) -> Tensor:
    """The tokens of ``texts`` that follow ``head`` in none of them. A run of one token goes on with the same input."""
    here = {int(t[len(head)]) for t in texts if len(t) > len(head) and torch.equal(t[: len(head)], head)}
    run = set(head.tolist())
    return _ids({int(i) for t in texts for i in t} - here - (run if len(run) == 1 else set()))


def _ids(tokens: Collection[int]) -> Tensor:
    return torch.tensor(sorted(tokens), dtype=torch.long)


def rows_believed(space: RowSpace, rows: Sequence[Row], trials: float, owed: int) -> bool:
    """Whether ``rows``, fitted under dropout, are no chance hits and fill the row space except for ``owed`` copies. Dropout
    masks make the input of every token different, so if there are more rows than dimensions, one of them is false: in a
    batch, a token at the position of another text.
    """
    if not rows or not len(rows) <= space.rank <= len(rows) + owed:
        return False
    return fitted_chance(space.rank, len(space.basis), max(row.residual for row in rows), trials) <= FALSE


def each_once(rows: Sequence[Row], texts: Sequence[Sequence[tuple[int, int]]], frame: Collection[int]) -> bool:
    """Whether the (token, segment) pairs of ``texts`` are the tokens of ``rows`` at their places, each once, but for those
    of the ``frame`` and holes: a row that is used twice leaves another text without its token."""
    apart = {*frame, UNKNOWN}
    named = Counter((n, t) for text in texts for n, (t, _) in enumerate(text) if t not in apart)
    return named == Counter((row.position, row.token) for row in rows if row.token not in apart)
