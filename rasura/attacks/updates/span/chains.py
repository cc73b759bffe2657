"""Texts of a decoder grown word by word from what the last block's gradient predicts (``predicted``), without a row space.

Where rounding to 16 bits blurs the row spaces, the words may still be known, as a bag, but not their order. The column space
of the last block tells which word follows a prefix all the same: of the next word's ``delta``, .1 to 2 % lies outside it, of
others' 4 % and more (SmolLM2-135M, bfloat16, single texts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from rasura.attacks.shared.verify import check, in_span, prove, verified
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.predicted import Predicted, predicted
from rasura.core.values import UNKNOWN, Grant, Observation, Parameter, Reconstruction

SECOND = 4
"""Words that are tried behind a first token: its ``delta`` is weak in models whose attention rests on it. And the most that
are tried behind a longer prefix where several lie near."""

NEAR = 0.02
"""Share of a next word's ``delta`` that lies outside the column space at most. Words that are alike, such as numbers, lie
near it, too: behind ``4,2`` of ``4,250`` it was .0065 of the right one, and .024 of the next (SmolLM2-135M, bfloat16)."""

STARTS, RUNS = 64, 512
"""Most first tokens, and most prefixes that are tried."""

EXPLAINED = 0.1
"""Texts are taken whose update differs from the observed one by at most this share of its size. Exact ones leave .0016 to
.0018 at bfloat16 (SmolLM2-135M)."""


def or_chained(guess: Reconstruction, seen: Observation) -> Reconstruction:
    """``guess``, or texts grown from its words, where it has no proof and these explain the update as it does not."""
    if seen.task != "causal" or (guess.ordered and guess.confidence != "matched"):
        return guess
    tells = predicted(seen, Inputs(seen.model))
    if tells is None or (guess.ordered and check(seen, guess.tokens)[0] < EXPLAINED):
        return guess
    words = dict.fromkeys(t for text in guess.tokens for t in text if t != UNKNOWN)
    starts = list(seen.vocabulary.prefix[:1]) or list(words)[:STARTS]
    for texts in chained(tells, starts, seen.batch_size if Grant.BATCH_SIZE in seen else 1):
        if check(seen, texts)[0] < EXPLAINED:
            proof, details = prove(seen, texts), dict[str, Parameter](chained=True)
            return in_span(texts, seen, believed=False, details=details) if proof is None else verified(proof, details)
    return guess


def chained(tells: Predicted, starts: Sequence[int], size: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """The ``size`` longest texts so far that grow from ``starts``, each time that another one of them ended."""
    ended: list[tuple[int, ...]] = []
    alive: list[tuple[int, ...]] = [(t,) for t in reversed(starts)]
    for _ in range(RUNS):
        if not alive:
            return
        head = alive.pop()
        # A run of the first token has one state, behind which the same follows again.
        following = [t for t in _following(tells, head) if {*head, t} != {head[0]}]
        alive += [(*head, t) for t in reversed(following)]  # the nearest is the next
        if not following and len(head) > 2:
            ended = sorted([*ended, head], key=len, reverse=True)[:size]
            if len(ended) == size and head in ended:
                yield tuple(ended)


def _following(tells: Predicted, head: tuple[int, ...]) -> Iterator[int]:
    """The words that clearly follow ``head``, the nearest first; without any, those that lie near it. Behind a first token,
    these are words behind which one clearly follows."""
    _, (outside,) = tells.outside(torch.tensor([head]))
    clear = tells.clear(outside)
    if clear or len(head) > 1:
        near = outside.topk(SECOND, largest=False)
        yield from clear or near.indices[near.values < NEAR].tolist()
        return
    for token in outside.topk(SECOND, largest=False).indices.tolist():
        if tells.clear(tells.outside(torch.tensor([(*head, token)]))[1][0]):
            yield token
