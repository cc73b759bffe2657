"""The beam of prefixes, and single words that are changed in the best of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.updates.prefix_matching.agreement import Agreement, Ran, read_layers
from rasura.attacks.updates.prefix_matching.states import LEAST, MOST, Beginnings
from rasura.attacks.updates.span.rows import blocks_to_read
from rasura.core.interfaces import Budget
from rasura.core.rng import permutation
from rasura.core.values import Observation

WIDE = 8
"""How many beginnings are grown."""

WIDTH = {"quick": 3, "default": 6, "paper": 12}
"""How many prefixes are kept at most, by the budget."""

NEAR, SHORT = 0.06, 4
"""How near to the best one a prefix must be, unless it has so few tokens."""

TRIED, LIKELIEST = 24, 4
"""How many tokens are tried after each, and as many whose agreement is foreseen to be the best; and how many of the first
are the likeliest: one that the model is sure of has no gradient, so that the update does not raise it."""

CLOSELY, FORESEEN = 2, 256
"""After how many of the best so many more are tried: words of little weight are foreseen badly."""

EXPECTED, RAISED, SEEN = 0.5, 1.6, 0.5
"""What a nat of the model's expectation, and a standard deviation of what the update raises and of what stands out in block
0, are worth when tokens are proposed (fitted on five texts of SmolLM2-135M)."""

EACH, MORE = 8, 16
"""How many that follow a prefix, and how many with a word put in, are judged by all blocks: the last ones alone prefer
strong words that come too early."""

UNLIKELY = -12.0
"""Nats beyond which a token is no more ruled out."""

NAT, OUTSTANDING = 0.001, 0.0015
"""What a nat of the model's expectation is worth as agreement, and a standard deviation of what stands out in block 0."""

FRONT, FRONT_TEXTS, FRONT_WORDS = 8, 3, 24
"""Prefixes of up to so many tokens may have lost their first words: before so many of the best, so many words are tried."""

WITHIN, WITHIN_WORDS = 12, 10
"""Prefixes of up to so many tokens may have lost others: at each place of the best, so many words are tried."""

CHANGED_AT = (4, 6, 9, 24)
"""Tokens at which words of the best prefix are changed. Errors lie at the beginning, where little is known yet."""

MISSING, PROPOSED, HELD = 12, 8, 8
"""Words that are tried at a place: those that stand out beyond the text, those proposed behind the words before, and those
that prefixes which were kept had most often there or beside."""

BEHIND, LAST = 3, 12
"""Tokens behind a changed place that judge the word at first, and how many of the best are judged by the whole text."""

BETTER = 0.003
"""By how much a changed text must agree better."""


@dataclass(frozen=True)
class Prefix:
    """Tokens, how far their gradient agrees with the update, and that with what speaks for them beside (``score``)."""

    tokens: tuple[int, ...]
    agrees: float
    score: float


class Search:
    """The beam of prefixes for the text of ``seen``; states tell its first ``begun`` tokens behind the frame."""

    def __init__(self, seen: Observation, begun: int, rng: torch.Generator, budget: Budget) -> None:
        self.begun, self.width, self.frame = begun, WIDTH[budget.level], len(seen.vocabulary.prefix)
        self.beginnings = Beginnings(seen, blocks_to_read(seen), rng)
        self.ids = self.beginnings.ids
        self.held = defaultdict[int, Counter[int]](Counter)
        self.outstanding = torch.zeros(seen.vocabulary.size)
        self.outstanding[self.ids] = self.beginnings.standing_out().clamp(LEAST, MOST)
        drawn = permutation(len(self.ids), rng)[: min(64, len(self.ids) // 4 * 4)]
        self.agreement = Agreement(seen.model, read_layers(seen), self.ids[drawn].reshape(4, -1), budget.memory_mb)

    def begin(self, length: int) -> list[Prefix]:
        """The prefixes of ``length`` tokens, at most."""
        return self._kept(self._judged(self.beginnings(min(length, self.begun + self.frame), WIDE)))

    def grow(self, kept: Sequence[Prefix]) -> list[Prefix]:
        """The best prefixes that are one token longer."""
        size = len(kept[0].tokens)
        grown = [*self._followed(kept[:CLOSELY], FORESEEN), *self._followed(kept[CLOSELY:], TRIED)]
        length = size - self.frame
        fronts = kept[:FRONT_TEXTS] if length <= FRONT else []
        more = [new for p in fronts for new in self._with_one_more(p.tokens, FRONT_WORDS, 1)]
        within = kept[:1] if length <= WITHIN else []
        more += [new for p in within for new in self._with_one_more(p.tokens, WITHIN_WORDS, length)]
        grown += _best(self._judged(more, every=False), MORE)
        longer = self._kept(self._judged([p.tokens for p in grown]))
        if length + 1 in CHANGED_AT:
            longer = self._kept([*longer, self.change(longer[0], range(size + 1, size + 2))])
        return longer

    def _followed(self, kept: Sequence[Prefix], count: int) -> Iterator[Prefix]:
        """Each of ``kept`` with each of its best next tokens by the last blocks; ``count``: how many are tried because their
        agreement is foreseen to be the best."""
        for texts in self.agreement.at_once(torch.tensor([prefix.tokens for prefix in kept])) if kept else ():
            ran = self.agreement.run(texts)
            logs = ran.logs[:, -1][:, self.ids]
            raised = self.agreement.raised(ran, slice(-1, None))[:, 0, self.ids]
            worth = self._proposed(texts.tolist(), logs, raised).topk(min(TRIED, len(self.ids)), dim=1).indices
            foreseen = self.agreement.foreseen(ran)[:, self.ids] + NAT * logs.clamp_min(UNLIKELY)
            beside = foreseen.scatter(1, worth, -torch.inf).topk(min(count, len(self.ids) - worth.shape[1]), dim=1).indices
            tokens = self.ids[torch.cat([worth, beside], 1)]
            before = ran.logs[:, :-1].gather(2, texts[:, 1:, None]).sum((1, 2))
            expected = before[:, None] + ran.logs[:, -1].gather(1, tokens)
            for text, row, *told in zip(texts.tolist(), tokens.tolist(), self.agreement.followed(ran, tokens), expected):
                yield from _best(self._prefixes([(*text, token) for token in row], *told), EACH)

    def change(self, prefix: Prefix, lengths: range) -> Prefix:
        """``prefix``, of one of ``lengths``, with words changed, exchanged, put in or left out, as long as that agrees
        better."""
        while True:
            best = max(self._changed(prefix.tokens, lengths), key=lambda p: p.agrees, default=prefix)
            if best.agrees < prefix.agrees + BETTER:
                return prefix
            prefix = best

    def _changed(self, text: tuple[int, ...], lengths: range) -> list[Prefix]:
        """The best texts with one word of ``text`` changed, judged by what follows closely at first."""
        ran = self.agreement.run(torch.tensor([text]))
        begun = [0.0, 0.0, *self.agreement.begun(ran)]
        tries = [(begun[n] - begun[-1], text[:n]) for n in range(2, len(text)) if n in lengths]
        for place, words in enumerate(self._words(text, ran), self.frame):
            before, behind = text[:place], text[place:]
            put_in = [(*before, word, *behind)[: lengths[-1]] for word in words if place < lengths[-1]]
            others = [(*before, word, *behind[1:]) for word in words] if behind else []
            others += [(*before, behind[1], behind[0], *behind[2:])] if len(behind) > 1 else []
            left_out = [(*before, *behind[1:])] if behind and len(text) - 1 in lengths else []
            for texts in filter(None, (put_in, others, left_out)):
                judged = max(2, min(place + 1 + BEHIND, len(texts[0]), len(text)))
                agrees, _ = self.agreement.whole(torch.tensor([one[:judged] for one in texts]))
                tries += zip((agrees - begun[judged]).tolist(), texts)
        best = sorted(tries, key=lambda one: -one[0])[:LAST]
        return self._judged([one for gained, one in best if gained > 0])

    def _words(self, text: tuple[int, ...], ran: Ran) -> list[list[int]]:
        """What is tried at each place of ``text`` behind the frame, and at its end; ``ran``: what the model makes of it."""
        before = [text[:n] for n in range(max(self.frame, 1), len(text) + 1)]
        places = slice(len(before[0]) - 1, None)
        raised = self.agreement.raised(ran, places)[0][:, self.ids]
        worth = self._proposed(before, ran.logs[0, places][:, self.ids], raised)
        missing = self._missing(text, MISSING + PROPOSED)
        proposed = self.ids[worth.topk(min(PROPOSED, len(self.ids)), dim=1).indices].tolist()
        words = ([] if self.frame else [missing]) + [[*missing[:MISSING], *some] for some in proposed]
        return [list(dict.fromkeys([*some, *self._held(place)])) for place, some in enumerate(words, self.frame)]

    def _held(self, place: int) -> list[int]:
        """The words that prefixes which were kept had most often at ``place`` or beside."""
        near = sum((self.held[place + step] for step in (-1, 0, 1)), Counter[int]())
        return [token for token, _ in near.most_common(HELD)]

    def _with_one_more(self, text: tuple[int, ...], words: int, places: int) -> Iterator[tuple[int, ...]]:
        """``text`` with each word that it may have lost before each of its first ``places`` tokens."""
        for word in self._missing(text, words):
            for place in range(self.frame, self.frame + places):
                yield *text[:place], word, *text[place:]

    def _missing(self, text: tuple[int, ...], count: int) -> list[int]:
        """The words that stand out most, beyond those of ``text`` and at all: what they alone explain beside a text is told
        better, but so is what tokens without a direction of their own explain."""
        told = self.beginnings.standing_out(text).clamp(-MOST, MOST) + self.outstanding[self.ids]
        told = told.masked_fill(torch.isin(self.ids, torch.tensor(text)), -torch.inf)
        found: list[int] = self.ids[told.topk(min(count, len(self.ids))).indices].tolist()
        return found

    def _proposed(self, before: Sequence[Sequence[int]], expected: Tensor, raised: Tensor) -> Tensor:
        """What speaks for each of ``ids`` as the next token of each of ``before``; ``expected`` and ``raised``: what the
        model expects and the update raises there, ``(prefixes, ids)`` each."""
        # What a token explains is explained already where it stands in the prefix.
        new = torch.stack([~torch.isin(self.ids, torch.tensor(text)) for text in before]) * self.outstanding[self.ids]
        proposed = EXPECTED * expected.clamp_min(UNLIKELY) + RAISED * raised.clamp(-MOST, MOST) + SEEN * new
        return proposed.scatter(1, expected.topk(min(LIKELIEST, len(self.ids)), dim=1).indices, torch.inf)

    def _judged(self, texts: Sequence[tuple[int, ...]], *, every: bool = True) -> list[Prefix]:
        """``texts``, each run by itself and judged by all blocks, or by the last ones only."""
        out = list[Prefix]()
        for length in sorted({len(text) for text in texts}):
            some = [text for text in dict.fromkeys(texts) if len(text) == length]
            out += self._prefixes(some, *self.agreement.whole(torch.tensor(some), every=every))
        return out

    def _prefixes(self, texts: Sequence[tuple[int, ...]], agrees: Tensor, expected: Tensor) -> list[Prefix]:
        """``texts`` with what was found of them."""
        seen = torch.stack([self.outstanding[list(set(text))].sum() for text in texts])
        score = agrees + NAT * expected.clamp_min(UNLIKELY * len(texts[0])) + OUTSTANDING * seen
        return [Prefix(*one) for one in zip(texts, agrees.tolist(), score.tolist())]

    def _kept(self, found: Sequence[Prefix]) -> list[Prefix]:
        """The best of prefixes of one length, each once."""
        best = _best({p.tokens: p for p in found}.values(), self.width)
        near = NEAR if len(best[0].tokens) - self.frame > SHORT else torch.inf
        kept = [p for p in best if p.score > best[0].score - near]
        for prefix in kept:
            for place, token in enumerate(prefix.tokens):
                self.held[place][token] += 1
        return kept


def _best(prefixes: Iterable[Prefix], count: int) -> list[Prefix]:
    """The ``count`` best of ``prefixes``."""
    return sorted(prefixes, key=lambda p: -p.score)[:count]
