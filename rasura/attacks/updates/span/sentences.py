"""Encoders: sentences from tokens with known positions, checked by the row space of a layer that has seen the context.

In one text's first input, a token and its position add up, so a batch of T distinct tokens at P positions spans about T + P
directions and accepts every one of its tokens at every position. After the first attention, a layer has a different input
for every token in its text, so its row space identifies texts: the more of a token's context is right, the nearer the token
is to the row space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rasura.attacks.shared.labelings import pad
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import RowSpace, row_space, visible_gradients
from rasura.attacks.updates.span.tokens import Row
from rasura.core.values import Observation
from rasura.victims.models import layer_inputs, reading_tokens

FLOOR = 5e-6
"""Minimum tolerance of a text's residual: the precision of float32 through a block."""

FOUND = 0.5
"""Largest mean residual of a private text, relative to its tolerance: true texts are below .3; one wrong token gives
several."""

TOGETHER = 128
"""Texts that are scored at once."""

SEGMENT = 4
"""Longest run of tokens that is moved at once."""

DOUBTED = 4
"""How many places, those of the largest residuals, are tried with every token that block 0 accepts there. Where two
neighbours were wrong, both were among the first four."""

AGAIN = 3
"""Starts for each missing text among the tokens that no found text holds. A text whose label meets the opposite one of the
same text elsewhere in the batch leaves little of its gradient, and none of its tokens is likely."""

KICKS = 2
"""How often a text that was not found is changed where its residual is largest, and then improved again."""

T = TypeVar("T")

Text = tuple[tuple[int, int], ...]
"""A text as (token, segment) pairs."""

Choices = dict[int, list[tuple[int, int]]]
"""Position -> the (token, segment) pairs that may stand there."""


def choices(rows: Sequence[Row]) -> Choices:
    """The distinct tokens found at each position."""
    out: Choices = {}
    for row in rows:
        pair = (row.token, row.segment)
        if pair not in out.setdefault(row.position, []):
            out[row.position].append(pair)
    return out


@dataclass(frozen=True)
class Checker:
    """Scores whole texts by how far ``layer``'s inputs lie outside its row space."""

    layer: str
    space: RowSpace
    inputs: Inputs
    pad_id: int

    @torch.no_grad()
    def _states(self, texts: Sequence[Text]) -> Iterator[Tensor]:
        """The layer's inputs for some of the texts at a time, ``(some, longest, hidden)``."""
        for start in range(0, len(texts), TOGETHER):
            some = texts[start : start + TOGETHER]
            ids, mask = pad([[t for t, _ in text] for text in some], self.pad_id)
            extra = {"token_type_ids": pad([[g for _, g in text] for text in some], 0)[0]} if self.inputs.types > 1 else {}
            yield layer_inputs(self.inputs.model, [self.layer], input_ids=ids, attention_mask=mask, **extra)[self.layer]

    def each(self, texts: Sequence[Text]) -> list[tuple[Tensor, Tensor]]:
        """Of every text, the residual at each position, and its tolerance."""
        found = [
            pair
            for states in self._states(texts)
            for pair in zip(self.space.residual(states), self.space.tolerance(states, FLOOR))
        ]
        return [(missed[: len(text)], allowed[: len(text)]) for text, (missed, allowed) in zip(texts, found)]

    def inner(self, texts: Sequence[Text], begin: int, closing: int) -> Tensor:
        """The mean residual of the tokens between the first ``begin`` and the last ``closing`` ones, one for each text.

        A frame's own tokens lie near the row space in any text, so with them the shortest texts would be the best.
        """
        missed = [row for states in self._states(texts) for row in self.space.residual(states)]
        return torch.stack([row[begin : len(text) - closing].mean() for text, row in zip(texts, missed)])

    def private(self, text: Text) -> bool:
        """Whether ``text`` is one of the batch."""
        missed, allowed = self.each([text])[0]
        return float((missed / allowed).mean()) < FOUND


def checker(seen: Observation, spaces: Mapping[int, RowSpace], inputs: Inputs) -> Checker | None:
    """A checker by the first feed-forward layer, which is cheapest to reach, or otherwise by the attention of a deeper
    block. ``spaces``: row spaces of attention inputs, by block. None where neither shows a row space.
    """
    known, pad_id = inputs.parts, seen.vocabulary.pad_id or 0
    first = known.blocks[0]
    behind = [lin for lin in known.linears if lin.module.startswith(f"{first.module}.") and lin not in first.qkv]
    behind = reading_tokens(inputs.model, behind)
    # A layer that has seen the context tells at least as many inputs apart as the first one; much less is a gap among
    # singular values that is none, and texts of which nothing is told.
    least = spaces[0].rank / 2 if 0 in spaces else 0
    for lin in behind[1:]:  # the first one ends the attention, and its inputs are mixtures that say little of one token
        gradients = visible_gradients(seen, [lin])
        space = row_space(gradients) if gradients and gradients[0].shape[1] == known.hidden else None
        if space is not None and space.rank >= least:
            return Checker(lin.module, space, inputs, pad_id)
    for block in known.blocks[1:]:
        if block.index in spaces and spaces[block.index].rank >= least:
            return Checker(block.qkv[0].module, spaces[block.index], inputs, pad_id)
    return None


def rearranged(text: Sequence[T], begin: int, end: int, longest: int = 1) -> list[tuple[T, ...]]:
    """``text`` with a run of up to ``longest`` items moved, or two swapped, all between ``begin`` and ``end``."""
    text = tuple(text)
    out: dict[tuple[T, ...], None] = {}
    for i in range(begin, end):
        for stop in range(i + 1, min(i + longest, end) + 1):
            run, rest = text[i:stop], text[:i] + text[stop:]
            out |= {rest[:at] + run + rest[at:]: None for at in range(begin, end - len(run) + 1)}
        for j in range(i + 1, end):
            out[(*text[:i], text[j], *text[i + 1 : j], text[i], *text[j + 1 :])] = None
    out.pop(text, None)
    return list(out)


class Finder:
    """Finds the texts of a batch among the tokens ``allowed`` at each position, by descent from many starts.

    ``likely``: those of the tokens that texts are first made of; the others are tried where the residual is large.
    ``prefix`` and ``suffix``: the tokenizer's own tokens around a text; the suffix's last one ends it, or any token where
    there is none. ``lengths``: the lengths that a text may have and for which tokens were found at every position; without
    any, no text can be found.
    """

    def __init__(
        self,
        allowed: Choices,
        score: Checker,
        *,
        prefix: Sequence[int],
        suffix: Sequence[int],
        lengths: Iterable[int] | None,
        rng: torch.Generator,
        likely: Choices,
    ) -> None:
        self.allowed, self.likely, self.score, self.rng = allowed, likely, score, rng
        self.begin, self.closing = len(prefix), len(suffix[-1:])
        self.ends = frozenset(suffix[-1:]) or frozenset(t for options in allowed.values() for t, _ in options)
        can_end = [n + 1 for n, options in sorted(allowed.items()) if any(t in self.ends for t, _ in options)]
        possible = set(lengths) if lengths is not None else can_end or [max(allowed) + 1]
        shortest = self.begin + self.closing + 1
        self.lengths = [n for n in sorted(possible) if n >= shortest and all(k in allowed for k in range(n))]

    def __call__(self, groups: Sequence[Sequence[Row]], size: int, restarts: int) -> tuple[list[Text], list[Text]]:
        """Up to ``size`` different texts of the batch, from each group of rows, then from ``restarts`` random texts, likely
        ones and then others; and the other texts in which a search ended, best first."""
        found: list[Text] = []
        rest: dict[Text, float] = {}
        if not self.lengths:
            return found, []
        self._search([*map(self._of, groups), *[None] * restarts], size, found, rest)
        if len(found) < size and self.likely != self.allowed:
            used = {pair for text in found for pair in text}
            self.likely = {n: [o for o in here if o not in used] or here for n, here in self.allowed.items()}
            self._search([None] * (AGAIN * (size - len(found))), size, found, rest)
        return found, sorted(rest, key=lambda text: rest[text])

    def _search(self, starts: Iterable[Text | None], size: int, found: list[Text], rest: dict[Text, float]) -> None:
        """Add to ``found`` and ``rest`` what descents from ``starts`` (None: random) end in, until ``size`` are found."""
        for start in starts:
            if len(found) >= size:
                return
            text, score = self._descended(start or self._random(found))
            for _ in range(KICKS):
                if self.score.private(text):
                    break
                other, least = self._descended(self._kicked(text))
                if least < score:
                    text, score = other, least
            if not self.score.private(text):
                rest[text] = score
            elif text not in found:
                found.append(text)

    def _scores(self, texts: Sequence[Text]) -> Tensor:
        return self.score.inner(texts, self.begin, self.closing)

    def _draw(self, below: int) -> int:
        return int(torch.randint(below, (1,), generator=self.rng))

    def _of(self, group: Sequence[Row]) -> Text:
        known = {r.position: (r.token, r.segment) for r in group}
        last = max((n for n, (t, _) in known.items() if t in self.ends), default=max(known))
        return tuple(known.get(n, self.allowed[n][0]) for n in range(last + 1) if n in self.allowed)

    def _random(self, found: Iterable[Text]) -> Text:
        """A text made, as far as possible, of tokens that no found text holds: every token belongs to some text."""
        used = {pair for text in found for pair in text}
        length, text = self.lengths[self._draw(len(self.lengths))], []
        for n in range(length):
            options = self._options(n, n == length - 1)
            options = [o for o in options if o not in used] or options
            text.append(options[self._draw(len(options))])
        return tuple(text)

    def _options(self, place: int, last: bool) -> list[tuple[int, int]]:
        """What likely stands at ``place``: a closing token where it is the ``last`` place, any other token elsewhere."""
        for among in (self.likely, self.allowed):
            here = [o for o in among.get(place, []) if (o[0] in self.ends) == last]
            if here:
                return here
        return self.allowed.get(place, [])

    def _kicked(self, text: Text) -> Text:
        """``text`` with other tokens where its residual is large, at random."""
        missed, _ = self.score.each([text])[0]
        chance = 0.7 * (missed / missed.max()).square()
        out = list(text)
        for n in range(self.begin, len(text) - 1):
            if float(torch.rand((), generator=self.rng)) < float(chance[n]):
                options = self._options(n, last=False)
                out[n] = options[self._draw(len(options))]
        return tuple(out)

    def _descended(self, text: Text) -> tuple[Text, float]:
        """Improves ``text`` until no replaced, added, dropped or moved token does."""
        best = float(self._scores([text])[0])
        last = float("inf")
        while best < last and not self.score.private(text):
            last = best
            order = torch.randperm(max(0, len(text) - self.begin), generator=self.rng) + self.begin
            text, best = self._replaced(text, best, order.tolist(), self.likely)
            worst: list[int] = []
            if best == last and self.likely != self.allowed:
                missed, _ = self.score.each([text])[0]
                worst = (missed[self.begin :].topk(min(DOUBTED, len(text) - self.begin)).indices + self.begin).tolist()
                text, best = self._replaced(text, best, worst, self.allowed)
            if best == last:
                text, best = self._better(text, best, [*self._resized(text), *self._longer(text, worst, self.allowed)])
            if best == last:
                text, best = self._better(text, best, self._permitted(rearranged(text, self.begin, len(text) - 1, SEGMENT)))
        return text, best

    def _replaced(self, text: Text, best: float, places: Iterable[int], among: Choices) -> tuple[Text, float]:
        """``text`` with the best of the tokens ``among`` each of ``places``; all tokens of a place are tried at once."""
        for n in places:
            here = among.get(n, []) if n < len(text) - 1 else self._options(n, last=True)
            text, best = self._better(text, best, [(*text[:n], o, *text[n + 1 :]) for o in here if o != text[n]])
        return text, best

    def _resized(self, text: Text) -> list[Text]:
        """``text`` cut off, with one token less, or with one that is likely more."""
        last = len(text) - 1
        out = [(*text[: n - 1], o) for n in self.lengths if n <= last for o in self._options(n - 1, last=True)]
        if last in self.lengths:
            out += self._permitted((*text[:n], *text[n + 1 :]) for n in range(self.begin, last))
        return out + self._longer(text, range(self.begin, last + 1), self.likely)

    def _longer(self, text: Text, places: Iterable[int], among: Choices) -> list[Text]:
        """``text`` with one token more, of those ``among`` one of ``places``."""
        if len(text) + 1 not in self.lengths:
            return []
        return self._permitted((*text[:n], o, *text[n:]) for n in places for o in among.get(n, []))

    def _permitted(self, texts: Iterable[Text]) -> list[Text]:
        return [text for text in texts if all(pair in self.allowed.get(n, ()) for n, pair in enumerate(text))]

    def _better(self, text: Text, best: float, others: Sequence[Text]) -> tuple[Text, float]:
        if not others:
            return text, best
        scores = self._scores(others)
        k = int(scores.argmin())
        return (others[k], float(scores[k])) if float(scores[k]) < best - 1e-9 else (text, best)
