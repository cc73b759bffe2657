"""Span matching: optimise embeddings to lie in the row spaces of all visible layers, then settle on tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from rasura.attacks.dummies import nearest_tokens, ordinary_ids, template, token_table
from rasura.attacks.span.completion import uncovered
from rasura.attacks.span.rows import RowSpace, block_spaces, visible_blocks
from rasura.attacks.span_matching.discrete import Beam, beam_search, fill_holes
from rasura.attacks.span_matching.objective import Body, Objective
from rasura.attacks.verify import VERIFIED, check
from rasura.interfaces import AttackFailed, Budget, InputError, NotApplicable
from rasura.priors.ngram import Unigram
from rasura.values import Grant, Observation, Parameter, Reconstruction, Vocabulary

FLOOR = 1e-7
"""Squared relative residual under which a text is exact: float32 leaves 1e-12 to 1e-9, one wrong token 1e-3 and more."""

ALIKE = 0.7
"""Share of common tokens above which the search for one more text keeps away from one that is found."""

COMMON = 100
"""Common tokens that join the pool where the tokens of the restarts alone do not make a text."""


@dataclass(frozen=True)
class Work:
    """Work of one level: restarts and steps of the continuous search, width of the beam, rounds, sweeps of a beam, and how
    many holes are opened where a beam is stuck."""

    restarts: int
    steps: int
    beam: int
    rounds: int
    sweeps: int = 6
    holes: int = 16


LEVELS: Mapping[str, Work] = {
    "quick": Work(8, 80, 2, 1, sweeps=2, holes=0),
    "default": Work(16, 100, 4, 5),
    "paper": Work(32, 200, 8, 10),
}
"""After 100 steps no restart moves to another text any more, but the tokens that most restarts agree on are the private ones
(all of them among the first 10 to 35, six CoLA sentences, last block only): their order is for the beam."""


@dataclass(frozen=True)
class SpanMatching:
    """Ours: the general attack for whatever layers are visible, first-order only.

    Minimises the mean distance of every visible layer's inputs from the observed row spaces minus a coverage term that
    falls to zero, over the embeddings, from many restarts as one batch; the tokens that restarts agree on are the pool of a
    beam search for each text by itself. Needs no labels. A residual at the float floor, and then the gradient itself, verify
    a text. With dropout active the texts with the least residual are ``matched``.
    """

    name: str = "span-matching"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS})
    learning_rate: float = 0.03
    coverage: float = 0.01
    levels: Mapping[str, Work] = field(default_factory=lambda: LEVELS)

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        observed, seen = seen, uncovered(seen)
        blocks = visible_blocks(seen)
        if not blocks:
            raise NotApplicable("no whole query, key or value gradient is visible")
        spaces = block_spaces(seen, blocks)
        if not spaces:
            raise AttackFailed("no visible layer shows a row space: too many tokens for its width, or noise covers the gap")
        search = _Search(self, seen, spaces, self.levels[budget.level], rng)
        found, rounds = search()
        tokens = tuple(search.objective.whole(text) for _, text in found)
        details: dict[str, Parameter] = {"rounds": rounds, "blocks": ",".join(map(str, sorted(spaces)))}
        worst = max(r for r, _ in found)
        if worst < FLOOR:
            error, labels = check(observed, tokens)
            if error < VERIFIED:
                return Reconstruction(tokens, "verified", labels=labels, residual=error, details=details)
        return Reconstruction(tokens, "matched", residual=worst**0.5, details=details)


class _Search:
    """One attack on one observation: the tokens that restarts agree on, the texts found, and the best near misses."""

    def __init__(
        self, settings: SpanMatching, seen: Observation, spaces: Mapping[int, RowSpace], work: Work, rng: torch.Generator
    ) -> None:
        self.settings, self.work, self.rng = settings, work, rng
        self.common: list[int] = []
        vocabulary = seen.vocabulary
        self.objective = Objective(seen.model, spaces, vocabulary)
        self.size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        self.lengths = seen.lengths if Grant.LENGTHS in seen else self._even(spaces, vocabulary)
        # One text has as many tokens as the space has dimensions; several share them in a way that is not known.
        self.resize = self.size > 1 and Grant.LENGTHS not in seen
        self.table, self.ordinary = token_table(seen.model, vocabulary).float(), ordinary_ids(vocabulary)
        self.frame, self.mask, self.free = template(vocabulary, self.lengths)
        # Words that are in most texts are the ones that an optimisation finds last.
        with suppress(InputError):  # a vocabulary of another language
            self.common = Unigram.english(vocabulary).top(COMMON)
        self.bag: Counter[int] = Counter()
        self.found: Beam = []
        self.near: Beam = []

    def _even(self, spaces: Mapping[int, RowSpace], vocabulary: Vocabulary) -> tuple[int, ...]:
        total = Counter(space.rank for space in spaces.values()).most_common(1)[0][0]
        least = len(vocabulary.prefix) + len(vocabulary.suffix) + 1
        return tuple(max(least, total // self.size + (k < total % self.size)) for k in range(self.size))

    def __call__(self) -> tuple[Beam, int]:
        """One text for each of the batch, best first, and how many rounds it took."""
        rounds = 0
        while rounds < self.work.rounds and len(self.found) < self.size:
            rounds += 1
            starts = self._continuous()
            while len(self.found) < self.size and self._discrete(starts):
                pass
        return (self.found + [hit for hit in self.near if not self._alike(hit[1])])[: self.size], rounds

    def _alike(self, text: Body) -> bool:
        return any(sum((Counter(text) & Counter(known)).values()) > ALIKE * len(text) for _, known in self.found)

    def _discrete(self, starts: list[Body]) -> bool:
        """Looks for one more text; whether it was found."""
        longest = sum(self.lengths) // self.size
        taken = Counter(t for _, text in self.found for t in text)
        first = [t for t, _ in self.bag.most_common() if t not in taken][: 2 * longest * self.size + 8]
        pool = first + [t for t in taken if t not in first]
        fresh = [tuple(t for t in s if t not in taken) or s for s in starts] if self.resize else starts
        beam = self._beam(fresh, pool)
        if beam and beam[0][0] >= FLOOR and self.work.holes:
            stuck = [text for _, text in sorted({*beam, *self.near})]
            mended = fill_holes(
                self.objective,
                stuck,
                self.table,
                self.ordinary,
                rate=self.settings.learning_rate,
                holes=self.work.holes,
                rng=self.rng,
            )
            again = stuck + mended[: 2 * self.work.beam]
            extra = [t for text in mended[:8] for t in text]
            wider = dict.fromkeys([*pool[: 2 * longest], *extra, *self.common])
            beam = sorted([*beam, *self._beam(again, list(wider))])
        if beam and beam[0][0] < FLOOR:
            self.found.append(beam[0])
            self.near = [hit for hit in self.near if not self._alike(hit[1])]
            return True
        self.near = sorted({*self.near, *beam})[: 4 * self.size]
        return False

    def _beam(self, starts: list[Body], pool: list[int]) -> Beam:
        return beam_search(
            self.objective,
            starts,
            pool,
            width=self.work.beam,
            floor=FLOOR,
            sweeps=self.work.sweeps,
            rng=self.rng,
            resize=self.resize,
            barred=self._alike,
        )

    def _continuous(self) -> list[Body]:
        """Adam on the free embeddings of random batches; counts the tokens of all restarts and returns the best texts."""
        work, settings, objective = self.work, self.settings, self.objective
        free = self.free
        drawn = self.ordinary[torch.randint(len(self.ordinary), (work.restarts, *free.shape), generator=self.rng)]
        e = self.table[torch.where(free, drawn, self.frame)].clone().requires_grad_(True)
        optimizer = torch.optim.Adam([e], lr=settings.learning_rate)
        tokens = drawn
        for step in range(work.steps):
            weight = settings.coverage * max(0.0, 1 - step / (0.9 * work.steps))
            (slope,) = torch.autograd.grad(objective.embeddings(e, self.mask, weight).sum(), e)
            if not bool(torch.isfinite(slope).all()):
                raise AttackFailed("the optimisation diverged (gradient not finite)")
            e.grad = slope * free[..., None]
            optimizer.step()
            if step in (work.steps // 2, work.steps - 1):
                flat = e.detach()[:, free].flatten(0, 1)
                tokens[:, free] = nearest_tokens(flat, self.table, self.ordinary, 1).reshape(work.restarts, -1)
                for row in tokens:
                    self.bag.update(set(row[free].tolist()))
        bodies = list(dict.fromkeys(tuple(text[real].tolist()) for row in tokens for text, real in zip(row, free)))
        return [bodies[int(i)] for i in objective.texts(bodies).argsort()[: work.beam * self.size]]
