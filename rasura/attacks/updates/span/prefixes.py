"""Decoders: grow prefixes token by token. Any one visible block is enough, since the input of block k at a position depends
only on the tokens up to it (DAGER extends with block 1 over the tokens of block 0; here from whichever block is visible).

A token is evidence of a longer text only if its input is a new direction. In a model with rotary positions, a text that
begins with a repeated word gives each repetition the same input, since attention over equal values returns that value. So a
run of the first token lies in every row space that holds the token once. Such tokens are put aside and are only used where
the texts without them leave a part of the row space unexplained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rasura.attacks.shared.twins import one_of_twins, row_norms
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.predicted import predicted
from rasura.attacks.updates.span.rows import NARROW, RowSpace
from rasura.attacks.updates.span.scan import Scan
from rasura.core.interfaces import AttackFailed
from rasura.core.so_far import tell
from rasura.core.values import Observation
from rasura.victims.models import parts

TOLERANCE = 1e-3
"""Largest residual of a true prefix: float32 through several blocks leaves 1e-7 to 1e-5, a wrong token 1e-2 and more."""

IN_FEW = 1e-4
"""The same where the layer has few inputs, as an adapter's second matrix: with one free dimension of 16, wrong tokens have
less than ``TOLERANCE`` by chance."""

LEVELS = (0.1, 0.3, 1.0)
"""Fractions of the tolerance by which texts are chosen: true tokens stay below the first one where nothing was rounded."""

MOST_REPEATED = 16
"""Maximum number of tokens of a text that explain nothing new. A true text has them in one run, at its beginning. In a
blurred row space they may follow any token, and texts would grow for minutes."""

MOST_GROWN = 8
"""Most prefixes that are grown, for each dimension of the row space and one more. A batch has one for each; of those that
were read, the worst took 4.6, and 2 where a layer predicted the words."""

COMMON = 4096
"""Minimum number of first tokens that are tried before all others: a vocabulary begins with the common ones."""


@dataclass(frozen=True)
class Prefix:
    """Tokens whose every position lies in the visible row spaces.

    ``fits``: for every token, its largest residual relative to its tolerance. ``new``: whether it explains something new.
    ``states`` ``(evidence, inputs)``: inputs of the first deep block of those that do; ``basis`` ``(inputs, evidence)``: an
    orthonormal basis of these.
    """

    tokens: tuple[int, ...]
    fits: tuple[float, ...]
    new: tuple[bool, ...]
    states: Tensor = field(compare=False, repr=False)
    basis: Tensor = field(compare=False, repr=False)

    @property
    def residual(self) -> float:
        """The worst of ``fits``."""
        return max(self.fits, default=0.0)

    @property
    def run(self) -> int:
        """How many of the last tokens explain nothing new."""
        return next((n for n, new in enumerate(reversed(self.new)) if new), len(self.new))

    def cut(self, length: int) -> Prefix:
        """The first ``length`` tokens."""
        kept = sum(self.new[:length])
        return Prefix(
            self.tokens[:length], self.fits[:length], self.new[:length], self.states[:kept], self.basis[:, :kept]
        )  # fmt: skip

    def within(self, level: float) -> Prefix:
        """What comes before the first token that fits worse than ``level``, without last tokens that explain nothing new."""
        found = self.cut(next((n for n, fit in enumerate(self.fits) if fit > level), len(self.tokens)))
        return found.cut(len(found.tokens) - found.run)


class Grower:
    """Extends prefixes by all tokens that the visible blocks accept."""

    def __init__(
        self, seen: Observation, spaces: Mapping[int, RowSpace], inputs: Inputs, ids: Tensor, scan: Scan | None
    ) -> None:
        self.spaces = spaces
        self.inputs = inputs
        self.ids = ids
        self.scan = scan
        self.deep = [b for b in inputs.parts.blocks if b.index in spaces and b.index > 0][:2]
        # Prefixes explain the directions of one block. Of layers that stand in, the one with most: a word that is repeated
        # has one input in block 0.
        in_place = self.deep[0].index < len(parts(inputs.model).blocks)
        self.space = max((spaces[b.index] for b in self.deep), key=lambda space: 0 if in_place else space.rank)
        self.vocabulary = seen.vocabulary
        self.standing = row_norms(seen)
        self.predicted = predicted(seen, inputs) if scan is None else None
        self.starts = len(ids)
        self.grown = 0
        self._bag: dict[int, Tensor] = {}

    def allowed(self, position: int) -> Tensor:
        """Ids that block 0 accepts at ``position`` (all ids where block 0 is hidden)."""
        if self.scan is None:
            return self.ids
        key = position if self.inputs.parts.position_embedding is not None else 0
        if key not in self._bag:
            self._bag[key] = self.ids[self.scan.within(key, TOLERANCE)[0]]
        return self._bag[key]

    def proposed(self, head: tuple[int, ...]) -> Tensor:
        """The ``allowed`` ids that are likely behind ``head``: those that a layer predicts; of first tokens, as many as
        ``starts`` says. All of them where no layer predicts."""
        allowed = self.allowed(len(head))
        if self.predicted is None or len(head) < len(self.vocabulary.prefix):
            return allowed
        if not head:
            return allowed[: self.starts]
        likely = self.predicted(torch.tensor(head))
        return likely[torch.isin(likely, allowed)]

    def indiscriminate(self, position: int) -> bool:
        """Whether block 0 accepts more tokens at ``position`` than a batch of its rank can hold."""
        return self.scan is not None and len(self.allowed(position)) > 2 * self.scan.space.rank

    def states(self, head: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Of each of ``tokens`` ``(k,)`` behind ``head``: the largest residual over its tolerance among the deep visible
        blocks, up to the first that refuses it; and the input of the block of ``space``, ``(k, inputs)``, if it is run."""
        fits, near = torch.zeros(len(tokens), dtype=torch.float64), torch.arange(len(tokens))
        states = torch.zeros(len(tokens), len(self.space.basis), dtype=torch.float64)
        for block in self.deep:  # those that one block refuses are not run up to the next
            space, x = self.spaces[block.index], self.inputs.following(head, tokens[near], [block])[block.index].double()
            if space is self.space:
                states[near] = space.shown(x)
            fits[near] = torch.maximum(fits[near], space.residual(x) / _tolerance(space, x))
            near = near[fits[near] < 1]
            if not len(near):
                break
        return fits, states

    def extensions(self, prefix: Prefix) -> list[Prefix]:
        """All prefixes one token longer that every visible block accepts, best first."""
        self.grown += 1
        position = len(prefix.tokens)
        allowed = self.proposed(prefix.tokens)
        if position > 0 and self.vocabulary.prefix:  # text holds the start token once
            allowed = allowed[allowed != self.vocabulary.prefix[0]]
        elif position < len(self.vocabulary.prefix):
            allowed = allowed[allowed == self.vocabulary.prefix[position]]
        if not len(allowed):
            return []
        residual, states = self.states(torch.tensor(prefix.tokens, dtype=torch.long), allowed)
        order = residual.argsort()
        order = order[residual[order] < 1]
        table = self.inputs.model.get_parameter(self.inputs.parts.word_embedding)
        kept = one_of_twins(table, allowed[order], self.standing)
        return [self._longer(prefix, int(allowed[i]), float(residual[i]), states[i]) for i in order[kept].tolist()]

    def _longer(self, prefix: Prefix, token: int, residual: float, x: Tensor) -> Prefix:
        basis = _widened(self.space, prefix.basis, x[None])
        new = basis.shape[1] > prefix.basis.shape[1]
        states = torch.cat([prefix.states, x[None]]) if new else prefix.states
        return Prefix((*prefix.tokens, token), (*prefix.fits, residual), (*prefix.new, new), states, basis)


def _tolerance(space: RowSpace, x: Tensor) -> Tensor:
    """The largest residual of each row of ``x`` ``(k, inputs)`` that lies in ``space``."""
    return space.tolerance(x, IN_FEW if len(space.basis) <= NARROW else TOLERANCE)


def _widened(space: RowSpace, basis: Tensor, states: Tensor) -> Tensor:
    """``basis`` and the directions of ``states`` outside it that exceed the tolerance with which these are known."""
    for x, tolerance in zip(states, _tolerance(space, states)):
        new = x
        for _ in range(2):  # a second time for what rounding left
            new = new - basis @ (basis.T @ new)
        if float(new.norm()) > float(tolerance * x.norm()):
            basis = torch.cat([basis, (new / new.norm())[:, None]], 1)
    return basis


def grow(
    seen: Observation,
    spaces: Mapping[int, RowSpace],
    inputs: Inputs,
    ids: Tensor,
    *,
    scan: Scan | None,
    longest: int,
    batch_size: int | None = None,
    lengths: tuple[int, ...] | None = None,
) -> list[Prefix]:
    """The texts of the batch, without a last token that has no gradient: prefixes that the visible blocks accept and that
    together explain their row space. ``choose`` selects at most ``batch_size`` of them.

    Needs a visible block above the first. ``scan``: block 0's, where that is visible. ``longest`` bounds the tokens of a
    text that explain something new; ``lengths`` are those of the texts without a last token that has no gradient.

    Raises ``AttackFailed`` if block 0 tells tokens apart as little as the deeper blocks tell prefixes, or if ``MOST_GROWN``
    are grown: growing them all would take hours and name nothing.
    """
    grower = Grower(seen, spaces, inputs, ids, scan)
    if grower.predicted is not None:
        grower.starts = max(COMMON, len(ids) // 8)
    chosen, explained = _texts(grower, longest, batch_size)
    while explained < grower.space.rank and grower.predicted is not None:
        if grower.starts < len(ids):
            grower.starts = len(ids)
        else:
            grower.predicted = None
        chosen, explained = _texts(grower, longest, batch_size)
    return chosen if lengths is None else _with_beginnings(chosen, lengths)


def _texts(grower: Grower, longest: int, batch_size: int | None) -> tuple[list[Prefix], int]:
    """The texts that ``grower`` finds, and how many dimensions of its row space they explain."""
    nothing = grower.space.basis[:, :0]
    alive = [Prefix((), (), (), nothing.T, nothing)]
    done, chosen = list[Prefix](), list[Prefix]()
    explained = 0
    while alive:
        ended, runs = _grown(grower, alive, longest, batch_size)
        done += ended
        chosen, explained = choose(done, grower.space, batch_size)
        if explained >= grower.space.rank:
            break
        alive = runs
    return chosen, explained


def _grown(grower: Grower, alive: list[Prefix], longest: int, batch_size: int | None) -> tuple[list[Prefix], list[Prefix]]:
    """What grows from ``alive`` by tokens that explain something new: the prefixes that end, and those that can only be
    continued by a token that explains nothing new."""
    done, runs = list[Prefix](), list[Prefix]()
    most = max(grower.space.rank, 1)
    while alive:
        following: list[Prefix] = []
        accepted, position = 0, len(alive[0].tokens)
        for prefix in alive:
            longer = grower.extensions(prefix) if prefix.basis.shape[1] < longest else []
            accepted += len(longer)
            runs += [p for p in longer if p.run and p.new.count(False) <= MOST_REPEATED]
            longer = [p for p in longer if not p.run]
            following += longer
            if not longer and prefix.tokens:
                done.append(prefix)
        # A true batch has no more live prefixes than tokens.
        crowded = accepted > most and grower.indiscriminate(position)
        if crowded or grower.grown > MOST_GROWN * (most + 1):
            held = f"the row spaces (rank {most} and less) accept more tokens and more prefixes than they can hold"
            raise AttackFailed(f"{held}: noise or hidden entries blur them")
        alive = sorted(following, key=lambda p: p.residual)[:most]
        _tell([*alive, *done], batch_size)
    return done, sorted(runs, key=lambda p: p.residual)[:most]


def _tell(prefixes: Sequence[Prefix], batch_size: int | None) -> None:
    tell(lambda: [p.tokens for p in sorted(prefixes, key=lambda p: -len(p.tokens))[:batch_size]])


def choose(prefixes: Sequence[Prefix], space: RowSpace, batch_size: int | None) -> tuple[list[Prefix], int]:
    """The texts among ``prefixes``, and how many dimensions of the row space they explain, by the strictest of ``LEVELS``
    that suffices."""
    tried = [_chosen([p.within(level) for p in prefixes], space, batch_size) for level in LEVELS]
    return max(tried, key=lambda found: min(found[1], space.rank))


def _chosen(prefixes: Sequence[Prefix], space: RowSpace, batch_size: int | None) -> tuple[list[Prefix], int]:
    """Takes, one by one, the prefix that explains most of what the others do not, until nothing is left to explain or
    ``batch_size`` are taken. A text that is the beginning of another one explains nothing by itself."""
    rest = list({p.tokens: p for p in prefixes}.values())
    chosen: list[Prefix] = []
    known = space.basis[:, :0]
    while rest and (batch_size is None or len(chosen) < batch_size):
        wider = [_widened(space, known, p.states) for p in rest]
        best = max(range(len(rest)), key=lambda k: (wider[k].shape[1], -rest[k].residual))
        if wider[best].shape[1] == known.shape[1]:
            break
        known = wider[best]
        chosen.append(rest.pop(best))
    return chosen, known.shape[1]


def _with_beginnings(texts: list[Prefix], lengths: tuple[int, ...]) -> list[Prefix]:
    """``texts`` and, for each of the ``lengths`` that none of them has, the beginning of one: a text may be the beginning of
    another one."""
    owed = sorted(lengths, reverse=True)
    for p in texts[: len(owed)]:
        owed.remove(min(owed, key=lambda n: abs(n - len(p.tokens))))
    found = list(texts)
    for n in owed:
        found += [p.cut(n) for p in texts if len(p.tokens) >= n][:1]
    return found
