"""Texts of a decoder grown word by word from what the last block's gradient predicts (``predicted``), without a row space.

Where rounding to 16 bits blurs the row spaces, the words may still be known, as a bag, but not their order. The column space
of the last block tells which word follows a prefix all the same: little of the next word's ``delta`` lies outside it, and
more of others'. Words that are alike, such as numbers, lie near it, too, so several prefixes are grown side by side.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from rasura.attacks.shared.verify import check, in_span, prove, verified
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.predicted import Predicted, predicted
from rasura.attacks.updates.span.rows import CHUNK, row_space, visible_gradients
from rasura.attacks.updates.span.tokens import candidates
from rasura.core.values import UNKNOWN, Grant, Observation, Parameter, Reconstruction
from rasura.victims.positions import positions

FOLLOWS = 0.02
"""A next word counts for a text if less than this share of its ``delta`` lies outside the column space, else against it. In
texts of 13 to 131 tokens, right ones had .002 to .05. The nearest had .05 to .25 behind wrong words, and .16 to .22 behind
the end (SmolLM2-135M wholly in bfloat16)."""

EXACT, TIMES = 1e-4, 30.0
"""Shares below ``EXACT`` count as this one. And a word counts against a text that has ``TIMES`` its median share, however
little it is: behind the end of a text in float32, random words lie near."""

SURE, LIKELY, IDLE = 0.1, 0.5, 0.05
"""A word that the model expects has a small ``delta``, which rounding blurs. From the probability ``1 - SURE`` on, it counts
the less the surer the model is. From ``LIKELY`` on, it is tried even if others lie nearer. Every word costs ``IDLE``, so no
text grows on forever by words that are expected."""

BRANCHES, ABREAST = 3, 4
"""Words that are tried behind a prefix, beside one that is likely; and prefixes with the same two first words that are grown
side by side, for each text of the batch."""

OPENINGS = 8
"""Pairs of first words that are grown on, beside two for each text of the batch. The third word tells the right ones."""

DROP, BEHIND = 2.0, 8.0
"""How far a score may fall below the best that its prefix had, and below that of one with the same two first words."""

STARTS, LONGEST, ROOM = 32, 512, 2
"""Most first tokens that are tried; most tokens of a text, in all and for each dimension of the column space. What grows on
beyond that repeats itself, and is none."""

TRIED = 4
"""Texts that are tried in each place of the batch. The one with which the update is explained best is taken."""

EXPLAINED = 0.1
"""Texts are taken whose update differs from the observed one by at most this share of its size. Exact ones leave .0016 to
.0018 where the update was rounded to bfloat16 (SmolLM2-135M), and .05 where it was computed in it."""


@dataclass(frozen=True)
class Chain:
    """A prefix: its ``tokens``, the shares ``outside`` of those that tell, its ``score``, the ``best`` one on the way, and
    with how many tokens that was."""

    tokens: tuple[int, ...]
    outside: tuple[float, ...] = ()
    score: float = 0.0
    best: float = 0.0
    ends: int = 1

    @property
    def text(self) -> tuple[int, ...]:
        """The tokens with which it scored best."""
        return self.tokens[: self.ends]

    def longer(self, token: int, outside: float, expected: float) -> Chain:
        """With one ``token`` more, whose ``delta`` has the share ``outside`` and whose probability is ``expected``.

        What follows a first token tells nothing of it: where attention rests on it, its state is the same whatever it is.
        """
        tells = min(1.0, (1 - expected) / SURE) if len(self.tokens) > 1 else 0.0
        outside = max(outside, EXACT)
        most = min(FOLLOWS, TIMES * median(self.outside)) if self.outside else FOLLOWS
        score, tokens = self.score + tells * math.log(most / outside) - IDLE, (*self.tokens, token)
        best, ends = (score, len(tokens)) if score >= self.best else (self.best, self.ends)
        return Chain(tokens, (*self.outside, outside) if tells == 1 else self.outside, score, best, ends)

    def adds(self, others: Sequence[tuple[int, ...]]) -> float:
        """What it scored behind the words with which one of ``others`` begins, too."""
        shared = max((_shared(self.text, text) for text in others), default=0)
        return self.best * (1 - shared / self.ends)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


def or_chained(guess: Reconstruction, seen: Observation) -> Reconstruction:
    """``guess``, or texts grown from its words, where it has no proof and these explain the update as it does not."""
    if seen.task != "causal" or (guess.ordered and guess.confidence != "matched"):
        return guess
    tells = predicted(seen, Inputs(seen.model))
    if tells is None or (guess.ordered and check(seen, guess.tokens)[0] < EXPLAINED):
        return guess
    starts = list(seen.vocabulary.prefix[:1]) or first_words(seen, guess)
    size = seen.batch_size if Grant.BATCH_SIZE in seen else None
    texts = explaining(seen, chained(tells, starts, size or 1), size)
    if texts is None:
        return guess
    proof, details = prove(seen, texts), dict[str, Parameter](chained=True)
    return in_span(texts, seen, believed=False, details=details) if proof is None else verified(proof, details)


def first_words(seen: Observation, guess: Reconstruction) -> list[int]:
    """The words that texts may begin with, the likeliest first: those nearest to the row space of any layer of block 0, then
    those of ``guess``. A first token has no gradient by its query, but much by its key and value."""
    inputs, ids = Inputs(seen.model), candidates(seen.vocabulary)
    orders = list[list[int]]()
    for gradient in visible_gradients(seen, inputs.parts.blocks[0].qkv):
        if (space := row_space([gradient])) is not None:
            near = torch.cat([space.residual(inputs.first(some, 0).double()) for some in torch.split(ids, CHUNK)])
            orders.append(ids[near.argsort()[:STARTS]].tolist())
    found = dict.fromkeys(token for some in zip(*orders) for token in some)
    found |= dict.fromkeys(t for text in guess.tokens for t in text if t != UNKNOWN)
    return list(found)[:STARTS]


def chained(tells: Predicted, starts: Sequence[int], size: int) -> list[Chain]:
    """Every way in which a text that grows from ``starts`` may end, the best first; ``size``: how many texts there are."""
    ended: dict[tuple[int, ...], Chain] = {}
    alive = [Chain((t,)) for t in starts]
    most, context = min(LONGEST, ROOM * (tells.rank + 1)), positions(tells.model)
    while alive and len(alive[0].tokens) < most:
        logits, outside = tells.outside(torch.tensor([chain.tokens for chain in alive]))
        following = list[Chain]()
        for chain, expected, shares in zip(alive, logits.softmax(1), outside):
            longer = list(_longer(chain, expected, shares)) if len(chain.tokens) != context else []
            following += longer
            if not longer and chain.ends > 2 and chain.best >= ended.get(chain.text, chain).best:
                ended[chain.text] = chain
        alive = _kept(following, size)
    return sorted(ended.values(), key=lambda chain: -chain.best)


def _longer(chain: Chain, expected: Tensor, shares: Tensor) -> Iterator[Chain]:
    """``chain`` with each of the next words that may be right, by the probabilities ``expected`` and the ``shares`` outside,
    both ``(vocabulary,)``."""
    few = min(BRANCHES, len(shares))
    tokens = shares.topk(few, largest=False).indices.tolist() + (expected > LIKELY).nonzero()[:, 0].tolist()
    for token in dict.fromkeys(tokens):
        longer = chain.longer(token, float(shares[token]), float(expected[token]))
        # A run of the first token has one state, behind which the same follows again.
        if longer.score > longer.best - DROP and {*longer.tokens} != {longer.tokens[0]}:
            yield longer


def _kept(chains: Sequence[Chain], size: int) -> list[Chain]:
    """The best of ``chains`` with each pair of first words, for a batch of ``size`` texts."""
    by_opening = defaultdict[tuple[int, ...], list[Chain]](list)
    for chain in sorted(chains, key=lambda c: -c.score):
        by_opening[chain.tokens[:2]].append(chain)
    found = list[Chain]()
    for count, group in enumerate(by_opening.values()):  # that of the best chain first
        if len(group[0].tokens) == 2 or count < OPENINGS + 2 * size:
            found += [c for c in group[: ABREAST * size] if c.score > group[0].score - BEHIND]
    return found


def explaining(seen: Observation, ways: Sequence[Chain], size: int | None) -> tuple[tuple[int, ...], ...] | None:
    """Texts among ``ways`` that together explain the update, one by one the one that adds most; ``size`` of them, if that
    is known. None if they do not."""
    texts, error = list[tuple[int, ...]](), math.inf
    while len(texts) < (size or len(ways)) and (size or error >= EXPLAINED):
        left = sorted((c for c in ways if c.adds(texts) > 0), key=lambda c: -c.adds(texts))[:TRIED]
        tried = [(check(seen, [*texts, c.text])[0], c.text) for c in left]
        if not tried or (not size and min(tried)[0] >= error):
            break
        error, text = min(tried)
        texts.append(text)
    return tuple(texts) if error < EXPLAINED and len(texts) == (size or len(texts)) else None
