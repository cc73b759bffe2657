"""Words with twins, told by the whole update where the rows of the embedding do not tell them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from rasura.attacks.shared.comparing import PRECISION
from rasura.attacks.shared.decoys import with_words
from rasura.attacks.shared.twins import Texts, twins
from rasura.attacks.shared.verify import check
from rasura.core.values import Observation

TRIED = 128
"""Texts that are compared with the update at most."""

Words = dict[tuple[int, int], int]
"""Place ``(text, number)`` -> word."""


def untwinned(seen: Observation, tokens: Texts, types: Sequence[Sequence[int]] | None = None) -> Texts:
    """``tokens`` with the words, of those that are twins of each other, with which the update fits best.

    They are tried place by place, then exchanged in pairs. What comes back is no better told than ``tokens`` unless it is
    proven.
    """
    if not twins(seen, tokens):
        return tokens
    best, error, left = tokens, check(seen, tokens, types)[0], TRIED
    before = None
    while before != best:
        before = best
        for moves in (_others, _exchanged):
            for new in moves(seen, best):
                if left <= 0 or error <= PRECISION:
                    return best
                left -= 1
                other = with_words(best, new)
                now = check(seen, other, types)[0]
                if now < error:
                    best, error = other, now
    return best


def _others(seen: Observation, tokens: Texts) -> Iterator[Words]:
    return ({place: word} for place, words in twins(seen, tokens).items() for word in words)


def _exchanged(seen: Observation, tokens: Texts) -> Iterator[Words]:
    alike = twins(seen, tokens)
    at = {place: tokens[place[0]][place[1]] for place in alike}
    return ({a: at[b], b: at[a]} for a, b in combinations(at, 2) if at[b] in alike[a])
