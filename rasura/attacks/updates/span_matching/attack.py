"""Span matching: optimise embeddings to lie in the row spaces of all visible layers, then settle on tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from rasura.attacks.shared.dummies import nearest_tokens, ordinary_ids, template, token_table
from rasura.attacks.shared.precision import in_full_precision
from rasura.attacks.shared.verify import prove, verified
from rasura.attacks.updates.span.completion import uncovered
from rasura.attacks.updates.span.decay import less_decay
from rasura.attacks.updates.span.rows import RowSpace, block_spaces, blocks_to_read
from rasura.attacks.updates.span_matching.discrete import Beam, beam_search, fill_holes
from rasura.attacks.updates.span_matching.guided import Guided
from rasura.attacks.updates.span_matching.objective import Body, Objective, readout
from rasura.attacks.updates.span_matching.states import equations
from rasura.core.interfaces import AttackFailed, Budget, InputError
from rasura.core.specs import AttackSpec, Home
from rasura.core.values import Grant, Observation, Parameter, Reconstruction
from rasura.priors.ngram import Unigram
from rasura.victims.models import parts
from rasura.victims.positions import check_takes_embeddings, positions

FLOOR = 1e-7
"""Squared relative residual under which a text is exact: float32 leaves 1e-12 to 1e-9, one wrong token 1e-3 and more."""

PATIENCE = 2
"""How often a search by likely words that is stuck goes on with twice as many of them."""

COMMON = 100
"""Common tokens that join the pool where the tokens of the restarts alone do not make a text."""


@dataclass(frozen=True)
class Work:
    """Work of one level: restarts and steps of the continuous search, width of the beam, rounds, sweeps of a beam, how many
    holes are opened where a beam is stuck, and starts of the search by likely words, which comes first for a single text."""

    restarts: int
    steps: int
    beam: int
    rounds: int
    sweeps: int = 6
    holes: int = 16
    starts: int = 2


LEVELS: Mapping[str, Work] = {
    "quick": Work(8, 80, 2, 1, sweeps=2, holes=0, starts=1),
    "default": Work(16, 100, 2, 5),
    "paper": Work(32, 200, 8, 10, starts=4),
}
"""After 100 steps no restart moves to another text any more, but the tokens that most restarts agree on are the private ones
(all of them among the first 10 to 35, six CoLA sentences, last block only): their order is for the beam."""


@dataclass(frozen=True)
class SpanMatching:
    """Ours: the general attack for whatever layers are visible, first-order only.

    Minimises the mean distance of every visible layer's inputs from the observed row spaces, and of what the head reads from
    its own, minus a coverage term that falls to zero, over the embeddings, from many restarts as one batch; the tokens that
    restarts agree on are the pool of a beam search for one text. Of a single text of which the last block alone is visible,
    the heads of its attention first give the inputs of all tokens (``states``). The next text is looked for beside the found
    ones, with what they leave of the row spaces. Needs no labels and no lengths: all texts together have as many tokens as
    the row space has dimensions. A residual at the float floor, and then the gradient itself, verify a text. With dropout
    active the texts with the least residual are ``matched``.
    """

    name: str = "span-matching"
    needs: frozenset[Grant] = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS, Grant.LENGTHS})
    learning_rate: float = 0.03
    coverage: float = 0.01
    levels: Mapping[str, Work] = field(default_factory=lambda: LEVELS)

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        check_takes_embeddings(seen.model)
        observed, seen = seen, uncovered(less_decay(in_full_precision(seen, budget)))
        spaces = block_spaces(seen, blocks_to_read(seen))
        if not spaces:
            raise AttackFailed(
                "no visible layer shows a row space: too many tokens for its width, or rounding or noise covers the gap"
            )
        search = _Search(self, seen, spaces, self.levels[budget.level], rng, completed=bool(observed.visible))
        found = search()
        tokens = tuple(search.objective.whole(text) for _, text in found)
        details: dict[str, Parameter] = {"rounds": search.rounds, "blocks": ",".join(map(str, sorted(spaces)))}
        worst = max(r for r, _ in found)
        if worst < FLOOR:
            proof = prove(observed, tokens)
            if proof is not None:
                return verified(proof, details)
        return Reconstruction(tokens, "matched", residual=worst**0.5, details=details)


class _Search:
    """One attack on one observation: the tokens that restarts agree on, the texts found, and the best near misses."""

    def __init__(
        self,
        settings: SpanMatching,
        seen: Observation,
        spaces: Mapping[int, RowSpace],
        work: Work,
        rng: torch.Generator,
        *,
        completed: bool = False,
    ) -> None:
        self.settings, self.work, self.rng, self.completed = settings, work, rng, completed
        self.vocabulary = vocabulary = seen.vocabulary
        self.size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        self.objective = Objective(seen.model, spaces, vocabulary, readout(seen, self.size))
        self.equations = None
        last = parts(seen.model).blocks[-1]
        if self.size == 1 and list(spaces) == [last.index] and self.objective.read is not None:
            self.equations = equations(seen, spaces[last.index], last)
        self.given = list(seen.lengths) if Grant.LENGTHS in seen else None
        self.total = max(space.rank for space in spaces.values())
        self.longest = positions(seen.model) or self.total
        if self.total > self.size * self.longest:
            why = "" if Grant.BATCH_SIZE in seen else "the batch holds several texts, or "
            raise AttackFailed(
                f"the row space has {self.total} dimensions, more than the {self.size * self.longest} tokens that the model "
                f"takes in {self.size} text{'s' * (self.size > 1)}: {why}rounding or noise blurs it"
            )
        self.table, self.ordinary = token_table(seen.model, vocabulary).float(), ordinary_ids(vocabulary)
        # Words that are in most texts are the ones that an optimisation finds last.
        self.common: list[int] = []
        with suppress(InputError):  # a vocabulary of another language
            self.common = Unigram.english(vocabulary).top(COMMON)
        self.bag: Counter[int] = Counter()
        self.found: Beam = []
        self.near: Beam = []
        self.rounds = 0

    def __call__(self) -> Beam:
        """One text for each of the batch, as they were found, then the best near misses."""
        if self.size > 1 or self._resize or not self._guided():
            while len(self.found) < self.size and self._one():
                pass
        return (self.found + self.near)[: self.size]

    def _guided(self) -> bool:
        """Looks for a single text by its likely words; whether it was found."""
        length = self._lengths()[0] - len(self.objective.whole(()))
        if length < 1 or not self.work.starts:
            return False
        given = self.objective, self.table, self.ordinary, self.common, length, FLOOR, self.rng
        guided = Guided(*given, self.equations)
        return self._climbed(guided) or (guided.states is not None and self._climbed(Guided(*given)))

    def _climbed(self, guided: Guided) -> bool:
        """Whether one of the starts of ``guided`` ends at a text."""
        work = self.work
        for _ in range(work.starts):
            self.rounds += 1
            beam = guided.climb(guided.start(work.beam), PATIENCE)
            if beam[0][0] >= FLOOR and work.holes:
                text = beam[0][1]
                mended = self._mended([text], work.holes // 2)
                beam = guided.climb(guided.best([text, *mended[: 2 * work.beam]], work.beam), PATIENCE)
            if beam[0][0] < FLOOR:
                self.found, self.near = beam[:1], []
                return True
            self._missed(self._judged([body for _, body in beam]))
        return False

    def _judged(self, texts: list[Body]) -> Beam:
        """``texts`` by their objective, whatever a search judged them by."""
        return sorted(zip(self.objective.texts(texts).tolist(), texts))

    def _one(self) -> bool:
        """Looks for one more text; whether it was found."""
        for _ in range(self.work.rounds):
            self.rounds += 1
            starts = self._continuous()
            if self._discrete(starts):
                return True
        return False

    @property
    def _rest(self) -> int:
        """How many tokens the texts have together that are still looked for."""
        return self.total - sum(len(self.objective.whole(text)) for _, text in self.found)

    @property
    def _resize(self) -> bool:
        """Whether a text's length is not known: several share the space, or its rank is that of a completion, which may have
        one dimension too many."""
        return self.given is None and (self.completed or self.size - len(self.found) > 1)

    def _lengths(self) -> list[int]:
        """Lengths of the texts that are still looked for; drawn at random where they are not known."""
        if self.given is not None:
            return list((Counter(self.given) - Counter(len(self.objective.whole(b)) for _, b in self.found)).elements())
        count = self.size - len(self.found)
        min_length = len(self.objective.whole((0,)))
        spare = max(0, self._rest - count * min_length)
        cuts = sorted(torch.randint(spare + 1, (count - 1,), generator=self.rng).tolist())
        return [min(min_length + b - a, self.longest) for a, b in zip([0, *cuts], [*cuts, spare])]

    def _barred(self, text: Body) -> bool:
        """Whether ``text`` is known, or longer than the model takes."""
        return len(self.objective.whole(text)) > self.longest or any(text == known for _, known in self.found)

    def _discrete(self, starts: list[Body]) -> bool:
        """From ``starts`` to one more text; whether it was found."""
        taken = Counter(t for _, text in self.found for t in text)
        first = [t for t, _ in self.bag.most_common() if t not in taken][: self._rest + 6]
        pool = first + [t for t in taken if t not in first]
        beam = self._beam(starts, pool, resize=self._resize)
        if beam and beam[0][0] >= FLOOR and self.work.holes:
            stuck = [text for _, text in sorted({*beam, *self.near})]
            mended = self._mended(stuck, self.work.holes)
            again = stuck + mended[: 2 * self.work.beam]
            extra = [t for text in mended[:8] for t in text]
            wider = dict.fromkeys([*pool, *extra, *self.common])
            beam = sorted([*beam, *self._beam(again, list(wider))])
        if beam and beam[0][0] < FLOOR:
            self.found.append(beam[0])
            self.objective.exclude([text for _, text in self.found])
            self.near = []  # their residuals were those of a search that still had this text before it
            return True
        self._missed(beam)
        return False

    def _mended(self, texts: list[Body], holes: int) -> list[Body]:
        """``texts`` with a token that may be in no pool, best first."""
        rate = self.settings.learning_rate
        return fill_holes(self.objective, texts, self.table, self.ordinary, rate=rate, holes=holes, rng=self.rng)

    def _missed(self, beam: Beam) -> None:
        """Keep the best near misses, those of ``beam`` among them."""
        self.near = sorted({*self.near, *beam})[: 4 * self.size]

    def _beam(self, starts: list[Body], pool: list[int], *, resize: bool = False) -> Beam:
        return beam_search(
            self.objective,
            starts,
            pool,
            width=self.work.beam * (self.size - len(self.found)),
            floor=FLOOR,
            sweeps=self.work.sweeps,
            rng=self.rng,
            resize=resize,
            barred=self._barred,
        )

    def _continuous(self) -> list[Body]:
        """Adam on the free embeddings of random batches; counts the tokens of all restarts and returns the best texts."""
        work, settings, objective = self.work, self.settings, self.objective
        lengths = [self._lengths() for _ in range(work.restarts)]
        texts = template(self.vocabulary, [n for batch in lengths for n in batch])
        frame, mask, free = (x.reshape(work.restarts, -1, x.shape[-1]) for x in texts)
        drawn = self.ordinary[torch.randint(len(self.ordinary), free.shape, generator=self.rng)]
        e = self.table[torch.where(free, drawn, frame)].clone().requires_grad_(True)
        optimizer = torch.optim.Adam([e], lr=settings.learning_rate)
        for step in range(work.steps):
            weight = settings.coverage * max(0.0, 1 - step / (0.9 * work.steps))
            (slope,) = torch.autograd.grad(objective.embeddings(e, mask, weight).sum(), e)
            if not bool(torch.isfinite(slope).all()):
                raise AttackFailed("the optimisation diverged (gradient not finite)")
            e.grad = slope * free[..., None]
            optimizer.step()
            if step in (work.steps // 2, work.steps - 1):
                drawn[free] = nearest_tokens(e.detach()[free], self.table, self.ordinary, 1)[:, 0]
                for row, real in zip(drawn, free):
                    self.bag.update(set(row[real].tolist()))
        bodies = list(dict.fromkeys(tuple(x[real].tolist()) for x, real in zip(drawn.flatten(0, 1), free.flatten(0, 1))))
        return [bodies[int(i)] for i in objective.texts(bodies).argsort()[: work.beam * self.size]]


SPEC = AttackSpec(
    name="span-matching",
    about="searches for one text that fits all visible layers",
    source="Rasura",
    make=SpanMatching,
    seconds=20.0,
    growth=1.5,
    work={"quick": 0.5, "default": 1.0, "paper": 15.0},
    home=Home(reads=True),
)
