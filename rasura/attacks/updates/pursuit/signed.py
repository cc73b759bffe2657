"""The text of a causal model from the signs of its output layer's gradient: AdamW's first steps, or compression to signs.

The row of a word in that gradient is ``sum_t (p_t - [y_t = word]) h_t``, up to a factor. Of a word that follows nowhere it
is a sum of states with positive weights, and such rows have much the same signs. The row of a word that follows at t has the
signs of ``-h_t``. The state behind a prefix is known, since the model is: the word whose row has its signs against it is the
next one. A beam of prefixes is extended in this way. What it finds is judged by the signs that the whole text gives the
rows, and improved by inserting, exchanging and leaving out words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.updates.pursuit.states import States
from rasura.core.interfaces import AttackFailed
from rasura.core.values import Observation
from rasura.victims.models import key_value_cache, recorded_inputs

LOOKED_AT = 256
"""Rows that are looked at: those that point the least where most rows do."""

ALIKE = 5.0
"""Standard deviations of chance agreement by which half of the rows must agree with the signs of most rows."""

LONGEST = 128
"""Different words that follow, beyond which no order is looked for."""

SURE, EXPECTED, AGAIN, UNSEEN = 0.6, 0.2, 20.0, 8.0
"""Weights of a row's signs against a state, in standard deviations; of the word's log-probability; and of the share of its
row's signs that are lost where the word was read before. And the deviations that a row lacks of a word that is certain."""

CERTAIN, LN2 = 4.0, math.log(2)
"""What it counts where a word follows that the model is sure of, and whose row tells nothing of it."""

LEAST, ENOUGH = 0.5, 0.9
"""Mean agreement of the rows of words that follow: below it no text is told, and above it no other is looked for."""

AGREES = 0.3
"""Agreement above which the signs of a row are explained."""

EACH = 6
"""Words by which a prefix is extended at most."""

BEGINNING, VARIED = 2, 8
"""Words that are a beginning; and the least different ones that a beam keeps."""

BEAM, ROUNDS = {"quick": 12, "default": 32, "paper": 64}, {"quick": 2, "default": 10, "paper": 30}
"""Budget level -> prefixes that are kept (twice as many of one and two words); rounds in which a text is improved."""

TRIED = 24
"""Changes of each kind that are tried in a round."""

WHOLE, BETTER = 0.97, 0.3
"""Share of the rows that a text fits which no change improves; and rows by which a change must improve others."""

NUMBERS = 1 << 25
"""Logits that are computed at once."""


@dataclass(frozen=True)
class Judged:
    """A ``text`` with its ``fit``, the sum of the rows' ``agreement`` ``(words,)``; what it gives the ``rows``
    ``(words, width)``; the ``states`` behind its words ``(length, width)`` and the ``chances`` there of the words that are
    looked at ``(length, words)``; by place, the word that the model is ``sure`` of."""

    text: tuple[int, ...]
    fit: float
    agreement: Tensor
    rows: Tensor
    states: Tensor
    chances: Tensor
    sure: dict[int, int]


class Signed:
    """Reads the text of ``seen`` from ``signs``, those of the gradient of its output layer ``module``, ``(vocabulary,
    width)``. ``states``: the law of its states; ``level``: the budget's. ``bag``: the words that follow in any text.

    Raises ``AttackFailed`` where noise hides the signs, or no row points against the others.
    """

    def __init__(self, seen: Observation, module: str, signs: Tensor, states: States, level: str) -> None:
        self.model, self.module, self.law, self.vocabulary = seen.model, module, states, len(signs)
        self.beam, self.rounds = BEAM[level], ROUNDS[level]
        common = signs.sum(0).sign()
        if float(common @ states.mean) < 0:  # an update of the opposite sign: most rows lie along the states
            signs, common = -signs, -common
        against = (signs @ common) / signs.shape[1]
        if float(against.median()) < ALIKE / math.sqrt(signs.shape[1]):
            raise AttackFailed("the signs of the output layer's rows do not agree, as in noise")
        lowest = against.topk(min(LOOKED_AT, len(signs)), largest=False)
        self.words, self.signs = lowest.indices, signs[lowest.indices]
        self.place = {int(word): k for k, word in enumerate(self.words)}
        self.bag = tuple(sorted({*(against < 0).nonzero().flatten().tolist()} - seen.vocabulary.special_ids))
        if not self.bag:
            raise AttackFailed("no row of the output layer points against the others")

    @torch.no_grad()
    def text(self, beginnings: Sequence[Sequence[tuple[int, ...]]]) -> tuple[int, ...] | None:
        """The text, which begins as one of ``beginnings``, groups of the same length each, of which a later one is tried
        where the text of an earlier one leaves signs open. None where it does not give most of the signs of the words that
        follow."""
        best, text = LEAST, None
        for starts in beginnings:
            found = self._improved(self._read(starts), starts)
            bag = [self.place[word] for word in self.bag if word != found.text[0]]
            agreement = float(found.agreement[bag].mean()) if bag else 0.0
            if agreement > best:
                best, text = agreement, found.text
            if best > ENOUGH:
                break
        return text

    def _agreement(self, rows: Tensor) -> Tensor:
        """How much each of ``rows`` ``(words, width)`` agrees with its signs, from -1 to 1: ``(words,)``."""
        return (rows.sign() * self.signs).mean(1)

    def _fit(self, text: tuple[int, ...], rows: Tensor) -> tuple[float, Tensor]:
        """The sum of the agreement of ``rows`` ``(words, width)`` with the signs, and that of each: ``(words,)``. The row of
        a word that only begins the text does not count: a tied embedding has its input gradient as well."""
        agreement = self._agreement(rows)
        if text[0] in self.place and text[0] not in text[1:]:
            agreement[self.place[text[0]]] = 0.0
        return float(agreement.sum()), agreement

    def _wanted(self, states: Tensor, chances: Tensor, rows: Tensor) -> Tensor:
        """How well each word would follow each of ``states`` ``(n, width)``, where it has the ``chances`` ``(n, words)`` and
        the rows already are ``rows`` ``(n, words, width)``: ``(n, words)``."""
        own = torch.nn.functional.normalize(states - self.law.mean, dim=1)
        lost = torch.stack([self._lost(*one) for one in zip(states, chances, rows)])
        against = -own @ self.signs.T + UNSEEN * chances  # a word that was expected has little of its state
        return SURE * against + EXPECTED * chances.clamp_min(1e-12).log() + AGAIN * lost

    def _lost(self, state: Tensor, chances: Tensor, rows: Tensor) -> Tensor:
        """The agreement that each word's row loses where the word follows ``state``: ``(words,)``, none above 0. A row that
        does not agree has none to lose."""
        before, after = self._agreement(rows), self._agreement(rows + (chances - 1)[:, None] * state)
        return torch.where(before > AGREES, after - before, 0.0).clamp(max=0)

    def _read(self, starts: Sequence[tuple[int, ...]]) -> Judged:
        """The text that gives the rows most of their signs, of those on the way of a beam."""
        texts, scores, rows = list(starts), [0.0] * len(starts), torch.zeros(len(starts), *self.signs.shape)
        cache, new = key_value_cache(self.model), torch.tensor(texts)
        best: tuple[float, tuple[int, ...]] = (-math.inf, texts[0])
        for place in range(len(self.bag) * 3 // 2 + 3):
            states, chances, sure = self._next(new, cache)
            top = self._wanted(states, chances, rows).topk(min(EACH, len(self.words)), dim=1)
            every = [
                (scores[n] + value, n, int(self.words[k]))
                for n in range(len(texts))
                for value, k in zip(top.values[n].tolist(), top.indices[n].tolist())
            ] + [(scores[n] + CERTAIN, n, word) for n, word in sure.items()]
            chosen = _varied(sorted(every, reverse=True), texts, self.beam * 2 if place < 2 else self.beam)
            from_ = torch.tensor([n for _, n, _ in chosen])
            given = chances[from_].clone()
            for one, (*_, word) in zip(given, chosen):
                if word in self.place:
                    one[self.place[word]] -= 1
            rows = rows[from_] + given[..., None] * states[from_][:, None]
            texts = [(*texts[n], word) for _, n, word in chosen]
            scores = [score for score, *_ in chosen]
            cache.reorder_cache(from_)
            new = torch.tensor([[text[-1]] for text in texts])
            best = max(best, *((self._fit(text, own)[0], text) for text, own in zip(texts, rows)))
        return self._judged([best[1]])[0]

    def _next(self, new: Tensor, cache: object) -> tuple[Tensor, Tensor, dict[int, int]]:
        """The states behind prefixes that end with ``new`` ``(n, tokens)`` and begin as in ``cache``: ``(n, width)``. The
        chances there of the words that are looked at: ``(n, words)``; and the words that the model is sure of there."""
        with recorded_inputs(self.model, [self.module], stop=False) as inputs:
            logits = self.model(input_ids=new, past_key_values=cache, use_cache=True).logits[:, -1].float().log_softmax(1)
        return inputs[self.module][:, -1].float(), logits[:, self.words].exp(), self._sure(logits)

    def _sure(self, logits: Tensor) -> dict[int, int]:
        """By row of log-probabilities ``(n, vocabulary)``, the word that takes more than half, if its gradient's row is none
        of those that are looked at. Where such a word follows, its row has no part of the state."""
        most = logits.max(1)
        found = zip(most.values.tolist(), most.indices.tolist())
        return {n: word for n, (value, word) in enumerate(found) if value > -LN2 and word not in self.place}

    def _judged(self, texts: Sequence[tuple[int, ...]]) -> list[Judged]:
        length, found = max(map(len, texts)), list[Judged]()
        ids = torch.tensor([[*text, *[text[-1]] * (length - len(text))] for text in texts])  # what follows changes nothing
        for some in torch.split(ids, max(1, NUMBERS // (length * self.vocabulary))):
            with recorded_inputs(self.model, [self.module], stop=False) as inputs:
                logits = self.model(input_ids=some).logits.float().log_softmax(-1)
            for states, likely in zip(inputs[self.module].float(), logits):
                text = texts[len(found)]
                states, likely = states[: len(text)], likely[: len(text)]
                chances = likely[:, self.words].exp()
                given = chances[:-1].clone()
                for place, word in enumerate(text[1:]):
                    if word in self.place:
                        given[place, self.place[word]] -= 1
                rows = given.T @ states[:-1]
                found.append(Judged(text, *self._fit(text, rows), rows, states, chances, self._sure(likely)))
        return found

    def _improved(self, read: Judged, starts: Sequence[tuple[int, ...]]) -> Judged:
        """``read`` after changes that improve its fit, the best of each round."""
        for _ in range(self.rounds if read.fit < WHOLE * len(self.words) else 0):
            others = sorted(self._changes(read, starts), key=len)
            best = max(self._judged(others), key=lambda one: one.fit) if others else read
            if best.fit <= read.fit + BETTER:
                break
            read = best
        return read

    def _changes(self, read: Judged, starts: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
        """Texts that differ from that of ``read`` by a word that is inserted, exchanged, left out or the first, or that end
        earlier."""
        text, begun = read.text, len(starts[0])
        wanted = self._wanted(read.states, read.chances, read.rows.expand(len(text), *self.signs.shape)).flatten()
        likely = wanted.topk(min(2 * TRIED, len(wanted))).indices.tolist()
        pairs = [(at // len(self.words), int(self.words[at % len(self.words)])) for at in likely]
        found: set[tuple[int, ...]] = set()
        for place, word in [(k + 1, word) for k, word in [*pairs, *read.sure.items()] if k + 1 >= begun]:
            found |= {(*text[:place], word, *text[place:]), (*text[:place], word, *text[place + 1 :])}
        doubted = sorted(range(begun, len(text)), key=lambda k: self._doubt(read, k))[:TRIED]
        found |= {text[:k] + text[k + 1 :] for k in doubted}
        found |= {text[:k] for k in range(max(begun + 1, len(text) - TRIED), len(text))}
        if len(starts) > 1:
            poor = [(int(self.words[k]),) for k in read.agreement.topk(TRIED // 2, largest=False).indices]
            for first in dict.fromkeys([*poor, *starts[:TRIED]]):
                found |= {(*first, *text[begun:]), (*first, *text)}
        return {one for one in found if len(one) > begun} - {text}

    def _doubt(self, read: Judged, place: int) -> float:
        """How well the word at ``place`` follows there: the signs of its row against the state."""
        row = self.place.get(read.text[place])
        return -math.inf if row is None else -float(self.signs[row] @ (read.states[place - 1] - self.law.mean))


def _varied(
    every: Sequence[tuple[float, int, int]], texts: Sequence[tuple[int, ...]], width: int
) -> list[tuple[float, int, int]]:
    """The first ``width`` of ``every`` extension of ``texts``, of which few have one beginning: a wrong one may look better
    until the end."""
    chosen, same = list[tuple[float, int, int]](), Counter[tuple[int, ...]]()
    for one in every:
        beginning = (*texts[one[1]], one[2])[:BEGINNING]
        if same[beginning] < max(1, width // VARIED) and len(chosen) < width:
            same[beginning] += 1
            chosen.append(one)
    return chosen
