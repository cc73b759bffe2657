"""Decepticons, the reader's part: tokens from the measuring layer's gradient, texts from tokens.

Rows of one direction switch on in order, so the difference of two neighbours' gradients holds the tokens between their
levels: mostly none or one. A token that is read is taken out of the other directions' steps, which leaves others alone there
(the peeling of invertible Bloom lookup tables, Goodrich and Mitzenmacher 2011).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rasura.attacks.updates.decepticons.layout import DIRECTIONS, Layout, first_place, matrix

PURE, IMPURE = 1e-5, 0.1
"""Share of a step's energy that may lie beside the one token that is read from it: first, and when no such step is left."""

CHANCE = 0.02
"""Expected number of tokens that noise alone makes up in a whole update."""

EDGE = 50.0
"""A measurement nearer to a step's edge than this may be on either side of it, where steps are hundreds apart."""

FAINT = 1e-7
"""Steps below this share of the strongest step's energy hold rounding."""


@dataclass(frozen=True)
class Token:
    """One token that was read, its ``place`` counted from 0, its text's ``code``, and how strong it was in the direction
    where it was read."""

    word: int
    place: int
    code: Tensor
    energy: float
    direction: int = 0


def steps_of(gradient: Tensor, model: nn.Module, where: Layout) -> Tensor:
    """What each step adds to the measuring layer's gradient ``(rows, width)``: ``(directions, steps, width)``, float64."""
    weight = matrix(model, where.second)[-1, : DIRECTIONS * where.steps].double()
    rows = gradient[: len(weight)].double() / weight[:, None]
    cumulative = rows.reshape(DIRECTIONS, where.steps, -1)
    return cumulative - torch.cat([cumulative[:, 1:], torch.zeros_like(cumulative[:, :1])], 1)


class _Codebook:
    """The codes of all words and places, and what a token with given codes is in the measured layer's input."""

    def __init__(self, model: nn.Module, where: Layout) -> None:
        found = where.found
        assert found.position_embedding is not None
        self.where = where
        self.start = first_place(model)
        self.words = model.get_parameter(found.word_embedding).float()
        self.places = model.get_parameter(found.position_embedding)[self.start :].float()
        self.scale = float(model.get_parameter(f"{where.norm}.weight")[where.word].mean())
        self.first = matrix(model, where.first).double()
        assert where.first.bias is not None
        self.bias = model.get_parameter(where.first.bias).double()

    def nearest(self, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Word and place nearest to each step ``(n, width)``, and which sign of it they are nearest to."""
        where, found = self.where, []
        for part in torch.split(steps.float(), 256):
            best = []
            for table, at in ((self.words, where.word), (self.places, where.place)):
                mine = part[:, at] - part[:, at].mean(1, keepdim=True)
                fits = mine @ table[:, at].T
                best += [fits.max(1), (-fits).max(1)]
            plus = best[0].values + best[2].values >= best[1].values + best[3].values
            word = torch.where(plus, best[0].indices, best[1].indices)
            found.append((word, torch.where(plus, best[2].indices, best[3].indices), plus.float() * 2 - 1))
        word, place, sign = (torch.cat(parts) for parts in zip(*found))
        return word, place, sign.double()

    def fit(self, steps: Tensor, word: Tensor, place: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The token of given word and place that each step is most like.

        Returns its code, its input to the measuring layer, what it is multiplied with in the step, and their cosine outside
        the code.
        """
        where = self.where
        own = slice(where.code.stop, -1)
        ideal = torch.zeros_like(steps)
        ideal[:, where.word] = self.words[word][:, where.word].double()
        ideal[:, where.place] = self.places[place][:, where.place].double()
        rest = steps - steps[:, own].mean(1, keepdim=True)
        factor = (rest[:, own] * ideal[:, own]).sum(1) / ideal[:, own].square().sum(1)
        cosine = factor * ideal[:, own].norm(dim=1) / rest[:, own].norm(dim=1).clamp_min(1e-300)
        code = steps[:, where.code] / factor[:, None]
        ideal[:, where.code] = code - code.mean(1, keepdim=True)
        ideal[:, -1] = self.words[word][:, -1].double()
        inputs = self.scale * torch.nn.functional.layer_norm(ideal, ideal.shape[1:])
        inputs[:, -1] = 0
        many = (steps[:, :-1] * inputs[:, :-1]).sum(1) / inputs.square().sum(1)
        return ideal[:, where.code], inputs, many, cosine

    def step(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The step of each input ``(n, width)`` in each direction, ``(n, directions)``; and the step beside it where
        rounding may have put it, else the same."""
        measured = (inputs @ self.first.T + self.bias)[:, : DIRECTIONS * self.where.steps]
        measured = measured.reshape(len(inputs), DIRECTIONS, -1)
        home = ((measured > 0).sum(2) - 1).clamp_min(0)
        above = (home + 1).clamp_max(self.where.steps - 1)
        low = measured.gather(2, home[..., None])[..., 0] < EDGE
        high = measured.gather(2, above[..., None])[..., 0] > -EDGE
        return home, torch.where(low, (home - 1).clamp_min(0), torch.where(high, above, home))


def read_tokens(gradient: Tensor, model: nn.Module, where: Layout) -> tuple[list[Token], float]:
    """The tokens of the batch, as far as their steps can be told apart, and the share of the energy that is left over."""
    steps = steps_of(gradient, model, where)
    book = _Codebook(model, where)
    energy = steps[..., :-1].square().sum(2)
    total, width = float(energy.sum()), where.found.hidden - 1
    # Most steps are empty, so the weakest tell how much noise there is.
    noise = float(energy.flatten().quantile(0.1)) / width
    if noise * width <= FAINT * float(energy.max()):
        found = _distinct(_read_at(steps, book, noise, 1, FAINT * float(energy.max()), peel=True))
    else:
        # A step is between rows, so more rows on both sides of it show it better, as far as no other step is among them.
        scales = [1 << k for k in range(7) if 1 << k <= where.steps // 4]
        found = _merged([t for scale in scales for t in _read_at(steps, book, noise, scale, 0.0, peel=False)])
    return found, float(steps[..., :-1].square().sum()) / max(total, 1e-300)


def _seen_wider(steps: Tensor, scale: int) -> Tensor:
    """The difference of the means of ``scale`` rows on both sides of each step; ``steps`` itself at scale 1."""
    if scale == 1:
        return steps
    rows = steps.flip(1).cumsum(1).flip(1)
    before, behind = rows[:, :1].expand(-1, scale - 1, -1), torch.zeros_like(rows[:, :1]).expand(-1, scale, -1)
    mean = torch.cat([before, rows, behind], 1).cumsum(1)
    mean = torch.cat([torch.zeros_like(mean[:, :1]), mean], 1)
    mean = (mean[:, scale:] - mean[:, :-scale]) / scale
    return mean[:, : steps.shape[1]] - mean[:, scale : scale + steps.shape[1]]


def _read_at(steps: Tensor, book: _Codebook, noise: float, scale: int, faint: float, *, peel: bool) -> list[Token]:
    """Tokens read at one scale, strongest fits first; ``steps`` is left with what is not read.

    ``peel``: take a token out of every direction, not only where it was read; its code must be exact for that.
    """
    where, found = book.where, list[Token]()
    width = where.found.hidden - 1
    own = width - where.code.stop
    noise = noise / scale
    min_energy = max(noise * width * (1 + 4 * math.sqrt(2 / width)), faint)
    chance = math.sqrt(2 * math.log(len(book.words) * len(book.places) * steps[..., 0].numel() / CHANCE) / own)
    touched = torch.ones_like(steps[..., 0], dtype=torch.bool)
    share = PURE if peel else IMPURE
    for _ in range(where.steps):
        seen = _seen_wider(steps, scale)
        energy = seen[..., :-1].square().sum(2)
        k, at = (touched & (energy > min_energy)).nonzero(as_tuple=True)
        touched[:] = False
        if not len(k):
            if share == IMPURE:
                break
            share, touched = IMPURE, torch.ones_like(touched)
            continue
        word, place, sign = book.nearest(seen[k, at])
        code, inputs, many, cosine = book.fit(seen[k, at], word, place)
        beside = (seen[k, at] - many[:, None] * inputs)[:, where.code.stop : -1].square().sum(1)
        sound = (cosine * sign > chance) & (beside < share * energy[k, at] + 1.5 * noise * own) & (many * sign > 0)
        home, other = book.step(inputs)
        for i in (cosine * sign).argsort(descending=True).tolist():
            direction, step = int(k[i]), int(at[i])
            if not sound[i]:
                break
            if touched[direction, step]:
                continue
            found.append(Token(int(word[i]), int(place[i]), code[i], float(energy[k[i], at[i]]), direction))
            # Where it was read it is taken out, whatever rounding says of the step's edge.
            out = [(direction, step)]
            for d in (d for d in range(DIRECTIONS) if peel and d != direction):
                both = [int(home[i, d]), int(other[i, d])]
                out.append((d, max(both, key=lambda h: float(steps[d, h, :-1] @ inputs[i, :-1] * many[i]))))
            for d, h in out:
                steps[d, h] -= many[i] * inputs[i]
                touched[d, max(0, h - scale + 1) : h + scale] = True
    return found


def _distinct(tokens: Sequence[Token]) -> list[Token]:
    """The strongest of each token that was read more than once: at a step's edge it is in two of them."""
    out: dict[tuple[int, int], list[Token]] = {}
    for t in sorted(tokens, key=lambda t: -t.energy):
        if not any(_same(o.code, t.code) for o in out.get((t.word, t.place), [])):
            out.setdefault((t.word, t.place), []).append(t)
    return [t for group in out.values() for t in group]


def _merged(tokens: Sequence[Token]) -> list[Token]:
    """Tokens read in noise, where each direction reads the same ones: as many copies of one as the most of a direction."""
    same: dict[tuple[int, int], list[Token]] = {}
    for t in sorted(tokens, key=lambda t: -t.energy):
        same.setdefault((t.word, t.place), []).append(t)
    out = []
    for group in same.values():
        copies = max(sum(t.direction == d for t in group) for d in range(DIRECTIONS))
        code = torch.stack([t.code for t in group]).mean(0)
        out += [replace(group[0], code=code)] if copies == 1 else group[:copies]
    return out


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) < 0.1 * float(one.norm() + other.norm()) / 2
