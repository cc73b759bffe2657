"""GHOST's selection run again on a guess: would it have left the observed substitutes?

The selection draws at most its start, so the private text is one for which each observed substitute is the best of its
place. A sweep asks this of the likely originals of every place, beside the present guess of the others, and decodes the
lattice again with the answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.ghost.lattice import Options, likeliest, likelihood
from rasura.core.interfaces import Prior
from rasura.ghost.selection import CURVATURE, TOGETHER, Selector

WINDOW = 32
"""Tokens around a place that are run, so that the time grows with the text and not with its square."""

NEAR = 5.0
"""Originals are asked for that are at most so many nats less likely than the likeliest of their place. With 4, and at most
8 of them, the gain on 32 sentences of SST-2 is half, since a neighbour that is wrong misleads the language."""

ASKED = 16
"""The most of them."""

TRUST = 2.0
"""The chance of a substitute falls with this power of its rank among those that the selection would try. On 32 sentences of
SST-2, MiniLM, 1 to 4 gain, and asking only whether it is the first gains less."""

SHARE = 0.5
"""The power of the chance by nearness beside that of the rank, since both say in part the same."""


@dataclass(frozen=True)
class Rerun:
    """The selection on texts that became ``text`` (ids, special tokens included), by one ``selector`` in eval mode."""

    selector: Selector
    text: Sequence[int]
    window: int = WINDOW

    def preferred(self, guess: Sequence[int], place: int, originals: Sequence[int]) -> list[int]:
        """How many substitutes the selection would prefer to the observed one at ``place``, for each of ``originals`` in
        place of the guess's; 0 where it would leave it."""
        numbers = self.selector.table.groups[torch.tensor(originals)].tolist()
        alone = dict(zip(numbers, originals))  # The selection tells groups apart, not their tokens.
        ask = self._by_states if self.selector.settings.sweeps else self._by_nearness
        found = dict(zip(alone, ask(guess, place, list(alone.values()))))
        return [found[number] for number in numbers]

    def _by_nearness(self, guess: Sequence[int], place: int, originals: Sequence[int]) -> list[int]:
        """Without sweeps, the nearest substitute stays."""
        out = []
        for token in originals:
            options = torch.cat([torch.tensor([self.text[place]]), self.selector.options(token)])
            away = (self.selector.embedded(options) - self.selector.wanted([token])).square().sum(1)
            out.append(int((away < away[0]).sum()))
        return out

    def _by_states(self, guess: Sequence[int], place: int, originals: Sequence[int]) -> list[int]:
        """As a sweep does at one place: of the substitutes that slope and curvature prefer, those of a smaller error."""
        start = max(0, min(place - self.window // 2, len(self.text) - self.window))
        text, rest = list(self.text[start : start + self.window]), list(guess[start : start + self.window])
        place -= start
        select = self.selector
        wanted = torch.stack([select.wanted([*rest[:place], token, *rest[place + 1 :]]) for token in originals])
        with torch.no_grad():
            goal = select.states(wanted)
        with torch.enable_grad():
            at = select.embedded(torch.tensor([text] * len(originals))).requires_grad_(True)
            errors = (select.states(at) - goal).square().mean((0, 2, 3))
            (slopes,) = torch.autograd.grad(errors.sum(), at)
        at, errors = at.detach(), errors.detach()
        curvature = CURVATURE * errors / (at - wanted).square().sum((1, 2)).clamp_min(1e-12)
        tried = []
        for k, token in enumerate(originals):
            options = select.options(token)
            move = select.embedded(options) - at[k, place]
            order = (move @ slopes[k, place] + curvature[k] * move.square().sum(1)).argsort()
            tried.append(set(options[order[: select.settings.tried or None]].tolist()))
        every = sorted({token for own in tried for token in own})
        theirs = torch.full((len(originals), len(every)), torch.inf)
        size = max(1, TOGETHER // len(text))
        for begin in range(0, len(every), size):
            some = every[begin : begin + size]
            with torch.no_grad():
                states = select.states(select.embedded(torch.tensor([[*text[:place], t, *text[place + 1 :]] for t in some])))
            for k, own in enumerate(tried):
                mine = [n for n, token in enumerate(some) if token in own]
                theirs[k, [begin + n for n in mine]] = (states[:, mine] - goal[:, k : k + 1]).square().mean((0, 2, 3))
        return [int(n) for n in (theirs < errors[:, None] * (1 - 1e-6)).sum(1)]


def asked_again(
    guess: tuple[int, ...],
    options: Options,
    rerun: Rerun,
    prior: Prior | None,
    fixed: frozenset[int],
    beam: int,
    sweeps: int,
) -> tuple[int, ...]:
    """The best of ``guess`` and what ``sweeps`` make of it, by the chances of ``options``, the ranks, and the language."""
    best, least = guess, -math.inf
    for sweep in range(sweeps + 1):
        score = likelihood(prior, fixed, guess)
        weighed: list[tuple[Tensor, Tensor]] = []
        for place, (originals, chances) in enumerate(options):
            if len(originals) < 2:
                weighed.append((originals, chances))
                continue
            shares = dict(zip(originals.tolist(), (SHARE * chances.log()).tolist()))
            near = _near(guess, place, shares, prior, fixed) if sweep < sweeps else [guess[place]]
            ranks = rerun.preferred(guess, place, near)
            logs = [shares[t] - TRUST * math.log1p(rank) for t, rank in zip(near, ranks)]
            score += logs[near.index(guess[place])]
            weighed.append((torch.tensor(near), torch.tensor(logs, dtype=torch.double).exp()))
        if score > least:
            best, least = guess, score
        if sweep == sweeps:
            break
        before, guess = guess, likeliest(weighed, prior, fixed, beam, ASKED + 1)
        if guess == before:
            break
    return best


def _near(
    guess: tuple[int, ...], place: int, shares: dict[int, float], prior: Prior | None, fixed: frozenset[int]
) -> list[int]:
    """The originals of ``place`` worth a rerun, that of ``guess`` among them."""
    chance = {
        token: share + likelihood(prior, fixed, (*guess[:place], token, *guess[place + 1 :]))
        for token, share in shares.items()
    }
    order = sorted(chance, key=lambda token: (-chance[token], token))[:ASKED]
    near = [token for token in order if chance[token] >= chance[order[0]] - NEAR]
    return near if guess[place] in near else [*near, guess[place]]
