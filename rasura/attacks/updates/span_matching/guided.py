"""One text of known length, from the words that a linear picture of the model makes likely.

Up to a visible layer the inputs are roughly linear in the tokens' embeddings. A linear fit by the inputs of texts that the
model ran anyway gives the input of every token of the vocabulary, at every place, by one product, and so how far each is
from the row space. It only proposes: what fits is told by ``Objective``, as everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from rasura.attacks.updates.span.scan import squares
from rasura.attacks.updates.span.sentences import rearranged
from rasura.attacks.updates.span_matching.discrete import Beam
from rasura.attacks.updates.span_matching.objective import Body, Objective

RIDGE = 3e-3
"""Ridge of the linear fit, relative to the trace of its normal matrix."""

SAMPLES = 4
"""Tokens of random texts, for each dimension of the embeddings, that the first fit is made of."""

RECENT = 600
"""Texts judged last that later fits are made of, too: the search is among them."""

TOKENS = 1 << 16
"""Tokens whose inputs are held at a time."""

DRAWS = 128
"""Texts of likely words that a start is the best of."""

LIKELY = 12
"""Likely tokens, of the whole vocabulary and of the common ones, that are tried at a place; twice as many where stuck."""

RUN = 4
"""Longest run of tokens that is moved as one."""

ORDERS = 32
"""Orders that are judged at a time; the best of the first ones that improve is taken."""

ORDER_PATIENCE = 2
"""How many times that many are judged without success; four times as many where stuck."""


class Lens:
    """``inputs ~ place + embedding @ slope``, by least squares with a ridge.

    Fitted to texts ``bodies`` of one length and their ``inputs`` ``(texts, length, width)``. ``table``: embeddings
    ``(vocabulary, hidden)``; ``basis``: that of the row space, ``(width, rank)``.
    """

    def __init__(self, table: Tensor, basis: Tensor, bodies: Sequence[Body], inputs: Tensor) -> None:
        x = table[torch.tensor(bodies)]
        mean, level = x.mean(0), inputs.mean(0)
        flat, goal = (x - mean).flatten(0, 1).double(), (inputs - level).flatten(0, 1).double()
        normal = flat.T @ flat
        normal.diagonal().add_(RIDGE * float(normal.trace()) + 1e-30)
        slope = torch.linalg.solve(normal, flat.T @ goal).to(table.dtype)
        self.table, self.basis, self.slope, self.place = table, basis.to(table.dtype), slope, level - mean @ slope

    def outside(self, ids: Tensor) -> Tensor:
        """The squared relative distance from the row space of each of ``ids`` at each place: ``(length, ids)``."""
        return torch.cat([self._outside(some) for some in torch.split(ids, TOKENS)], 1)

    def _outside(self, ids: Tensor) -> Tensor:
        moved = self.table[ids] @ self.slope
        whole = squares(moved, self.place)
        inside = squares(moved @ self.basis, self.place @ self.basis)
        return 1 - inside / whole.clamp_min(1e-30)


class Guided:
    """Climbs from likely words to a text under ``floor``. No text is judged twice, whatever start leads to it."""

    def __init__(
        self, objective: Objective, table: Tensor, ordinary: Tensor, common: Collection[int], length: int, floor: float,
        rng: torch.Generator,
    ) -> None:  # fmt: skip
        self.objective, self.table, self.ordinary, self.floor, self.rng = objective, table, ordinary, floor, rng
        self.common = torch.isin(ordinary, torch.tensor(sorted(common), dtype=torch.long)).nonzero().flatten()
        self.length = length
        self.scores: dict[Body, float] = {}
        self.recent: list[Body] = []
        self.inputs = table.new_empty(0)
        count = max(64, SAMPLES * table.shape[1] // length)
        drawn = self.ordinary[torch.randint(len(ordinary), (count, length), generator=rng)].tolist()
        self.first = [tuple(text) for text in drawn]
        self.first_inputs = self._run(self.first)[1]
        self.lens = self._lens()

    def _run(self, bodies: Sequence[Body]) -> tuple[list[float], Tensor]:
        """Objectives of ``bodies``, and what goes into the layer that the lens is of."""
        kept: list[Tensor] = []
        scores = self.objective.texts(bodies, kept=kept).tolist()
        begin = len(self.objective.prefix)
        return scores, torch.cat(kept)[:, begin : begin + self.length]

    def _lens(self) -> Lens:
        inputs = torch.cat([self.first_inputs, self.inputs]) if self.recent else self.first_inputs
        return Lens(self.table, self.objective.spaces[0].basis, [*self.first, *self.recent], inputs)

    def judge(self, bodies: Iterable[Body]) -> None:
        """Judge those of ``bodies`` that are new."""
        fresh = [body for body in dict.fromkeys(bodies) if body not in self.scores]
        if fresh:
            scores, inputs = self._run(fresh)
            self.scores.update(zip(fresh, scores))
            self.recent = [*self.recent, *fresh][-RECENT:]
            self.inputs = torch.cat([self.inputs, inputs])[-RECENT:] if len(self.inputs) else inputs[-RECENT:]

    def best(self, bodies: Iterable[Body], count: int) -> Beam:
        """The ``count`` best of ``bodies``, best first."""
        bodies = set(bodies)
        self.judge(sorted(bodies))
        return sorted((self.scores[body], body) for body in bodies)[:count]

    def start(self, width: int) -> Beam:
        """The best of random texts of likely words."""
        likely = self.ordinary[self.lens.outside(self.ordinary).topk(LIKELY, largest=False).indices]
        weights = 1 / (torch.arange(LIKELY) + 1.0).expand(DRAWS * self.length, -1)
        picks = torch.multinomial(weights, 1, generator=self.rng).view(DRAWS, self.length)
        return self.best({tuple(likely[range(self.length), row].tolist()) for row in picks}, width)

    def climb(self, beam: Beam, patience: int) -> Beam:
        """``beam`` after sweeps of words and orders by turns, until one is under the floor or nothing improves any more,
        with up to ``2 ** patience`` times as many words."""
        width, tries = len(beam), 0
        while tries <= patience:
            before = beam[0][0]
            beam = self._words(beam, LIKELY << tries)
            if beam[0][0] >= self.floor:
                beam = self.best(
                    [self._ordered(beam[0][1], ORDER_PATIENCE << (2 * tries)), *(body for _, body in beam)], width
                )
            if beam[0][0] < self.floor:
                break
            tries = 0 if beam[0][0] < before else tries + 1
            self.lens = self._lens()
        return beam

    def _words(self, beam: Beam, count: int) -> Beam:
        """``beam`` after the likeliest words were tried at every place."""
        width, outside = len(beam), self.lens.outside(self.ordinary)
        for place in torch.randperm(self.length, generator=self.rng).tolist():
            row = outside[place]
            near = row.topk(min(count, len(row)), largest=False).indices
            usual = self.common[row[self.common].topk(min(count, len(self.common)), largest=False).indices]
            words = self.ordinary[torch.cat([near, usual])].tolist()
            texts = {body for _, body in beam}
            beam = self.best(texts | {(*t[:place], word, *t[place + 1 :]) for t in texts for word in words}, width)
            if beam[0][0] < self.floor:
                break
        return beam

    def _ordered(self, body: Body, patience: int) -> Body:
        """``body`` after swaps and moves that improve it, until ``patience`` times ``ORDERS`` others in a row do not.

        What the lens likes comes first.
        """
        while self.scores[body] >= self.floor:
            words = sorted(set(body))
            likely = dict(zip(words, self.lens.outside(torch.tensor(words)).T.tolist()))
            others = [other for other in rearranged(body, 0, len(body), RUN) if other not in self.scores]
            others.sort(key=lambda other: (sum(likely[t][k] for k, t in enumerate(other)), other))
            for some in (others[k : k + ORDERS] for k in range(0, min(len(others), patience * ORDERS), ORDERS)):
                score, other = self.best(some, 1)[0]
                if score < self.scores[body]:
                    body = other
                    break
            else:
                return body
        return body
