"""One text of known length, from the words that a linear picture of the model makes likely.

Up to a visible layer the inputs are roughly linear in the tokens' embeddings. A linear fit by the inputs of texts that the
model ran anyway gives the input of every token of the vocabulary, at every place, by one product, and so how far each is
from the row space, or from the text's own inputs where these are known (``states``). It only proposes: what fits is told by
``Objective``, as everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rasura.attacks.updates.span.scan import squares
from rasura.attacks.updates.span.sentences import rearranged
from rasura.attacks.updates.span_matching.discrete import Beam
from rasura.attacks.updates.span_matching.objective import Body, Objective
from rasura.attacks.updates.span_matching.states import Equations, solve

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

CERTAIN = 6
"""The same where the text's inputs are known."""

STARTS = 4
"""Random texts whose inputs the equations are solved from, at most."""

FAMILIAR = 0.05
"""What is added to every direction's variance of the fit's errors, relative to their mean."""

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
        self.errors = self._fit(table, bodies, inputs)
        self.basis = basis.to(table.dtype)

    def _fit(self, table: Tensor, bodies: Sequence[Body], inputs: Tensor) -> Tensor:
        """The errors of the fit, ``(tokens, width)``."""
        x = table[torch.tensor(bodies)]
        mean, level = x.mean(0), inputs.mean(0)
        flat, goal = (x - mean).flatten(0, 1).double(), (inputs - level).flatten(0, 1).double()
        normal = flat.T @ flat
        normal.diagonal().add_(RIDGE * float(normal.trace()) + 1e-30)
        slope = torch.linalg.solve(normal, flat.T @ goal)
        self.table, self.slope = table, slope.to(table.dtype)
        self.place = level - mean @ self.slope
        errors: Tensor = goal - flat @ slope
        return errors

    def outside(self, ids: Tensor) -> Tensor:
        """How far each of ``ids`` is from fitting at each place, ``(length, ids)``: its squared relative distance from the
        row space."""
        return torch.cat([self._outside(some) for some in torch.split(ids, TOKENS)], 1)

    def _outside(self, ids: Tensor) -> Tensor:
        moved = self.table[ids] @ self.slope
        whole = squares(moved, self.place)
        inside = squares(moved @ self.basis, self.place @ self.basis)
        return 1 - inside / whole.clamp_min(1e-30)


class Sharp(Lens):
    """The same, with distances from the nearest of the text's own inputs ``states`` ``(states, width)``.

    Distances are relative to the variances of the fit's errors. ``frame`` ``(places, width)``: average inputs of the tokens
    around the text that have a state, too.
    """

    def __init__(self, table: Tensor, states: Tensor, bodies: Sequence[Body], inputs: Tensor, frame: Tensor) -> None:
        errors = self._fit(table, bodies, inputs)
        spread = errors.T @ errors / len(errors)
        spread.diagonal().add_(FAMILIAR * float(spread.trace()) / len(spread) + 1e-30)
        metric = torch.linalg.inv(torch.linalg.cholesky(spread)).T.to(table.dtype)
        self.slope, self.place = self.slope @ metric, self.place @ metric
        self.states, self.frame = states @ metric, frame @ metric

    def _outside(self, ids: Tensor) -> Tensor:
        return torch.stack([cost.amin(1) for cost in self._costs(ids)])

    def _costs(self, ids: Tensor) -> Iterator[Tensor]:
        """The squared distance of each of ``ids`` from each state, ``(ids, states)``, place by place."""
        moved = self.table[ids] @ self.slope
        near = moved.square().sum(1, keepdim=True) - 2 * moved @ self.states.T
        for place in self.place:
            yield near + 2 * (moved @ place)[:, None] + (self.states - place).square().sum(1)

    def likely(self, ids: Tensor, state: int, count: int) -> list[list[int]]:
        """The ``count`` of ``ids`` that are nearest to ``state`` at each place."""
        return [ids[cost[:, state].topk(count, largest=False).indices].tolist() for cost in self._costs(ids)]

    def assigned(self, ids: Tensor) -> Body:
        """The text whose places and frame share out the states at the least distance in all."""
        best = [cost.min(0) for cost in self._costs(ids)]
        cost = torch.cat([torch.stack([b.values for b in best]), torch.cdist(self.frame, self.states).square()])
        states = linear_sum_assignment(cost.numpy())[1]
        return tuple(int(ids[b.indices[k]]) for b, k in zip(best, states))


class Guided:
    """Climbs from likely words to a text under ``floor``. No text is judged twice, whatever start leads to it.

    Where ``equations`` give the text's own inputs, a text above ``floor`` is judged by its distance from them.
    """

    def __init__(
        self, objective: Objective, table: Tensor, ordinary: Tensor, common: Collection[int], length: int, floor: float,
        rng: torch.Generator, equations: Equations | None = None,
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
        self.states: Tensor | None = None
        self.first_inputs = self._run(self.first)[1]
        if equations is not None:
            self.states = self._solved(equations)
        self.likely = LIKELY if self.states is None else CERTAIN
        self.lens = self._lens()

    def _run(self, bodies: Sequence[Body]) -> tuple[list[float], Tensor]:
        """Objectives of ``bodies``, and what goes into the layer that the lens is of, whole texts."""
        kept: list[Tensor] = []
        scores, inputs = self.objective.texts(bodies, kept=kept), torch.cat(kept)
        if self.states is not None:
            scores = torch.where(scores < self.floor, scores, self._apart(inputs, self.states).clamp_min(self.floor))
        return scores.tolist(), inputs

    def _solved(self, equations: Equations) -> Tensor | None:
        """The text's own inputs, without the one that is read; from those of random texts."""
        basis = self.objective.spaces[0].basis
        for inputs in self.first_inputs[:STARTS]:
            found = solve(equations, inputs[self._unread].double() @ basis)
            if found is not None:
                return (found @ basis.T).to(self.table.dtype)
        return None

    @property
    def _unread(self) -> list[int]:
        """The places of a whole text that the head does not read."""
        assert self.objective.read is not None
        length = len(self.objective.whole(())) + self.length
        return [k for k in range(length) if k != self.objective.read.position % length]

    def _apart(self, inputs: Tensor, states: Tensor) -> Tensor:
        """The squared relative distance of each text's ``inputs`` from ``states``, whichever is whose: ``(texts,)``."""
        costs = torch.cdist(inputs[:, self._unread], states).square()
        matched = [float(cost[linear_sum_assignment(cost.numpy())].sum()) for cost in costs]
        return torch.tensor(matched) / float(states.square().sum())

    def _lens(self) -> Lens:
        inputs = torch.cat([self.first_inputs, self.inputs]) if self.recent else self.first_inputs
        begin = len(self.objective.prefix)
        own, bodies = inputs[:, begin : begin + self.length], [*self.first, *self.recent]
        if self.states is None:
            return Lens(self.table, self.objective.spaces[0].basis, bodies, own)
        frame = [k for k in self._unread if not begin <= k < begin + self.length]
        return Sharp(self.table, self.states, bodies, own, inputs[:, frame].mean(0))

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
        """The best of random texts of likely words. Where the text's inputs are known, their likeliest words, ordered."""
        if isinstance(self.lens, Sharp):
            ((_, body),) = self.best([self.lens.assigned(self.ordinary)], 1)
            return self.best([self._ordered(body, ORDER_PATIENCE)], 1)
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
            if isinstance(self.lens, Sharp):
                beam = self._reseated(beam, self.lens)
            if beam[0][0] == before:
                beam = self._words(beam, self.likely << tries)
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

    def _reseated(self, beam: Beam, lens: Sharp) -> Beam:
        """``beam`` after tokens that fit their states least gave way, for as long as that helps."""
        score = float("inf")
        while self.floor <= beam[0][0] < score:
            score, body = beam[0]
            beam = self.best([*(body for _, body in beam), *self._replaced(body, lens)], len(beam))
        return beam

    def _replaced(self, body: Body, lens: Sharp) -> list[Body]:
        """``body`` without the token that is farthest from its state; instead, wherever, words that are near the state."""
        assert self.states is not None
        cost = torch.cdist(self._run([body])[1][0, self._unread], self.states).square()
        begin = len(self.objective.prefix)
        owners = dict(zip(self._unread, linear_sum_assignment(cost.numpy())[1]))
        apart = {k: float(cost[self._unread.index(k), owners[k]]) for k in range(begin, begin + self.length) if k in owners}
        worst = max(apart, key=lambda k: apart[k])
        rest = (*body[: worst - begin], *body[worst - begin + 1 :])
        words = lens.likely(self.ordinary, int(owners[worst]), self.likely)
        return [(*rest[:at], word, *rest[at:]) for at, some in enumerate(words) for word in some]

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
