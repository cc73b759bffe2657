"""The pursuit itself: it finds one token and its position after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rasura.attacks.updates.pursuit.dictionary import dictionary
from rasura.attacks.updates.pursuit.fits import Fit
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.tokens import candidates
from rasura.core.so_far import tell
from rasura.core.values import UNKNOWN, Grant, Observation
from rasura.victims.positions import positions

MAX_LENGTH = 40
"""Positions that are searched where the length is unknown."""

DIRECTIONS = 64
"""Candidates are measured against this many directions of what is left: those with the most energy."""

MAX_FILLED = 0.6
"""Fraction of the layer's inputs that tokens may fill. Beyond it, any token could be explained."""

STANDS_OUT = 1.1
"""A token is taken while its gain is at least this many times the best gain of tokens that cannot be there (true
tokens: 1.15 and more)."""


class Search:
    """The pursuit for tokens and their positions. ``ends``: where texts end, as far as this is known."""

    def __init__(self, seen: Observation, fit: Fit, memory_mb: int, rng: torch.Generator) -> None:
        self.fit, self.rng = fit, rng
        self.inputs, self.ids = Inputs(seen.model), candidates(seen.vocabulary)
        self.batch = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        self.ends = sorted(seen.lengths) if Grant.LENGTHS in seen else []
        length = max(self.ends) if self.ends else MAX_LENGTH
        longest = positions(seen.model) or length
        self.max_length = min(length, longest)
        self.known = bool(self.ends)
        self.control = list(range(longest - 1, self.max_length, -max(1, longest // 8)))[:4]
        places = [*range(self.max_length), *self.control]
        self.dictionary = dictionary(self.inputs, self.ids, places, memory_mb)
        self.prefix, self.suffix = seen.vocabulary.prefix, seen.vocabulary.suffix

    def __call__(self) -> dict[int, list[int]]:
        """Position -> tokens, best first."""
        found: dict[int, list[int]] = {}
        for place, token in enumerate(self.prefix):
            found[place] = [token]
        for end in sorted(set(self.ends)):
            for place, token in enumerate(self.suffix, end - len(self.suffix)):
                found.setdefault(place, []).append(token)
        picked = 0
        # Gains fall as tokens are taken, so a place whose last gain is small need not be asked again.
        bounds = {place: (float("inf"), -1) for place in range(len(self.prefix), self.max_length)}
        while sum(map(len, found.values())) < MAX_FILLED * self.inputs.parts.hidden:
            for place in [p for p in bounds if p >= self.max_length or len(found.get(p, [])) >= self._room(p)]:
                del bounds[place]
            if not bounds:
                break
            left = self.left(found)
            fresh: set[int] = set()
            while (place := max(bounds, key=lambda p: bounds[p][0])) not in fresh:
                gains = self.gains(left, place)
                gains[torch.isin(self.ids, torch.tensor(found.get(place, [])))] = 0.0
                bounds[place] = (float(gains.max()), int(self.ids[gains.argmax()]))
                fresh.add(place)
            gain, token = bounds[place]
            if (picked == 0 or not self.known) and gain < STANDS_OUT * self._chance(left):
                break
            picked += 1
            found.setdefault(place, []).append(token)
            bounds[place] = (float("inf"), -1)
            self._tell(found)
            if not self.known and self.suffix and token == self.suffix[-1]:
                self.ends.append(place + 1)
                if len(self.ends) == self.batch:
                    self.max_length = max(self.ends)
                    found = {p: t for p, t in found.items() if p < self.max_length}
        return found if picked else {}

    def _tell(self, found: Mapping[int, Sequence[int]]) -> None:
        if self.batch == 1:
            tell(lambda: [[found.get(n, [UNKNOWN])[0] for n in range(max(found) + 1)]])
        else:
            tell(lambda: [list(dict.fromkeys(t for here in found.values() for t in here))], ordered=False)

    def _chance(self, left: Left) -> float:
        """The best gain of tokens that cannot be there: at places that no text reaches and, where a place changes too little
        of an input for that, mirrored."""
        if not self.control:
            return 0.0
        if not self.places_tell:
            left = Left(self.mirror @ left.directions, left.strong)
        return max(float(self.gains(left, place).max()) for place in self.control)

    @cached_property
    def places_tell(self) -> bool:
        """Whether a token gains so much less where no text reaches that it stands out at its own place. In MPNet it does
        not: the same word at two places has nearly one input."""
        own = torch.nn.functional.normalize(self.dictionary.inputs(len(self.prefix)))
        others = (torch.nn.functional.normalize(self.dictionary.inputs(place)) for place in self.control)
        return all(STANDS_OUT * float((own * other).sum(1).square().median()) < 1 for other in others)

    @cached_property
    def mirror(self) -> Tensor:
        """A reflection that gives inputs which no token has, and which are spread as those of tokens are: all principal
        axes but the first are turned around or left, by chance."""
        inputs = self.dictionary.inputs(self.control[0])
        axes = torch.linalg.eigh(inputs.T @ inputs).eigenvectors
        turned = torch.randint(0, 2, (len(axes),), generator=self.rng) * 2.0 - 1
        turned[-1] = 1.0
        mirror: Tensor = (axes * turned) @ axes.T
        return mirror

    def left(self, found: Mapping[int, Sequence[int]]) -> Left:
        """What the tokens of ``found`` leave unexplained."""
        some = [self.inputs.first(torch.tensor(tokens), place) for place, tokens in found.items() if tokens]
        inputs = torch.cat(some) if some else torch.empty(0, self.inputs.parts.hidden)
        left = self.fit.left(inputs)
        values, vectors = torch.linalg.eigh(left.T @ left)
        floor = values[: len(values) // 2].mean()
        strong = vectors[:, -DIRECTIONS:] * (values[-DIRECTIONS:] - floor).clamp_min(0).sqrt()
        return Left(torch.cat([strong, torch.linalg.qr(inputs.T).Q], 1), strong.shape[1])

    def _room(self, place: int) -> int:
        """How many texts may have a token of their own at ``place``."""
        if len(self.ends) < self.batch:
            return self.batch
        return sum(end > place for end in self.ends)

    def gains(self, left: Left, place: int) -> Tensor:
        """How much of ``left`` each token at ``place`` would explain, ``(candidates,)``."""
        along, size = self.dictionary.along(left.directions, place).square(), self.dictionary.sizes(place)
        beside = (size - along[:, left.strong :].sum(1)).clamp_min(0.05 * float(size.mean()))
        gain: Tensor = along[:, : left.strong].sum(1) / beside
        return gain


@dataclass(frozen=True)
class Left:
    """``directions`` ``(hidden, k)``: first ``strong`` of what is left, then an orthonormal basis of what is explained."""

    directions: Tensor
    strong: int
