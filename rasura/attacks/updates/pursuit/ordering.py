"""The order of a causal text's words in noise: one after the other, by the part of the gradient that each would have.

Behind a prefix, the model's state ``h`` and what it expects, ``p``, are known. The next word ``y`` has the part
``(p - onehot(y)) h^T`` of the output layer's gradient, which is compared with the observed one as a whole: a matched filter,
so that the noise of one number counts, and not that of a row. A beam of prefixes is extended by the words that are known to
follow (``following``). Each is judged by how much of the gradient all of its parts explain together, less what its words
would explain at their own places, and by how likely the model itself finds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rasura.attacks.updates.pursuit.states import States
from rasura.core.values import Observation
from rasura.victims.models import recorded_inputs

BEAM, FIRST = 24, (256, 128, 64)
"""Prefixes that are kept; more of one, two and three words, which say little."""

STARTS = 64
"""First words that are tried, beside those that follow: no loss is taken on the first. By the size of their rows, which a
tied embedding has of them, and as many that are frequent."""

LONGEST = 32
"""Different words beyond which no order is looked for."""

MISFIT, WHOLE = 0.1, 0.03
"""Deviation, by the size of a word's row, of what the parts of a right prefix leave unexplained; and of a whole text."""

AGAIN = 10.0
"""Log odds against a word that is used again."""

EXPECTED = 256
"""Words of what the model expects that count in the product of two parts: nearly all of it."""

NUMBERS = 1 << 25
"""Logits that are computed at once."""


@dataclass(frozen=True)
class Part:
    """What one word adds to the gradient: ``state`` ``(width,)``; at the words that are known to follow ``(words,)``; and of
    what the model expected the ``likeliest`` words, with their chances less 1 at the word itself."""

    state: Tensor
    at_words: Tensor
    likeliest: Tensor
    chances: Tensor


@dataclass(frozen=True)
class Prefix:
    """The ``tokens`` of a beginning, the first ``begun`` of which follow nothing, and the parts of the others. ``inner``:
    the observed gradient along their sum; ``square``: that of their sum; ``needed``: what its words would explain;
    ``likely``: its log-probability."""

    tokens: tuple[int, ...]
    begun: int
    parts: tuple[Part, ...] = ()
    inner: float = 0.0
    square: float = 0.0
    needed: float = 0.0
    likely: float = 0.0
    score: float = 0.0

    def whole(self, words: int, surer: float) -> float:
        """How good it is as a text by itself, one of ``words`` at each place, where what it explains counts ``surer`` times
        what it counts of a prefix."""
        explained = self.score + self.needed - self.likely
        return surer * explained + self.likely - math.log(words + 1) * len(self.tokens)


def starts_of(seen: Observation, likely: Sequence[int], frequencies: Tensor) -> list[tuple[int, ...]]:
    """Beginnings of texts that are tried, all of one length: the words that are ``likely`` and those that are frequent. The
    first word of a text that begins with the tokenizer's own tokens follows these."""
    frequent = frequencies.topk(min(STARTS, len(frequencies))).indices.tolist()
    first = [t for t in dict.fromkeys([*likely, *frequent]) if t not in seen.vocabulary.special_ids]
    frame = [tuple(seen.vocabulary.prefix)] if seen.vocabulary.prefix else []
    return frame + [(t,) for t in first if not frame or len(frame[0]) == 1]


class Ordering:
    """Orders ``words``, which follow in the one text of ``seen``. ``rows``: the observed gradient of the output layer
    ``module``, ``(vocabulary, width)``, in ``noise``; ``frequencies`` ``(vocabulary,)``."""

    def __init__(
        self,
        seen: Observation,
        module: str,
        rows: Tensor,
        words: list[int],
        states: States,
        noise: float,
        frequencies: Tensor,
    ) -> None:
        self.model, self.module, self.rows, self.words = seen.model, module, rows, torch.tensor(words)
        rest = states.mean - states.mean @ states.directions.T @ states.directions
        law = torch.cat([states.directions, torch.nn.functional.normalize(rest, dim=0)[None]])
        sizes = ((rows[self.words] @ law.T).square().sum(1) - len(law) * noise**2).clamp_min(0)
        self.scale, whole = (2 * (noise**2 + misfit**2 * float(sizes.median())) for misfit in (MISFIT, WHOLE))
        self.surer = self.scale / whole
        self.own = sizes / self.scale
        largest = rows.square().sum(1).topk(min(STARTS, len(rows))).indices.tolist()
        self.starts = starts_of(seen, [*words, *largest], frequencies)

    @torch.no_grad()
    def __call__(self) -> tuple[int, ...] | None:
        """The text; None where no order of four fifths of the words is found."""
        beam, found = [Prefix(start, begun=len(start)) for start in self.starts], list[Prefix]()
        for place in range(len(self.words) * 3 // 2 + 3):
            width = FIRST[place] if place < len(FIRST) else BEAM
            beam = self.longer(beam, width, per_prefix=max(3, 2 * width // len(beam)))
            found += beam[:6]
        best = max(found, key=lambda prefix: prefix.whole(len(self.words), self.surer))
        missing = set(self.words.tolist()) - set(best.tokens)
        return best.tokens if 5 * len(missing) <= len(self.words) else None

    def longer(self, beam: list[Prefix], width: int, per_prefix: int) -> list[Prefix]:
        """The best ``width`` prefixes of one word more."""
        states, chances = self._expected([prefix.tokens for prefix in beam])
        longer: list[tuple[float, int, int, Prefix]] = []
        for n, (prefix, state, p) in enumerate(zip(beam, states, chances)):
            likeliest = p.topk(min(EXPECTED, len(p))).indices
            base = p[self.words]
            shared = torch.zeros(len(self.words))
            for one in prefix.parts:
                shared += float(one.state @ state) * (float(one.chances @ p[one.likeliest]) - one.at_words)
            along = self.rows @ state
            inner = prefix.inner + float(p @ along) - along[self.words]
            own = (float(p @ p) - 2 * base + 1) * float(state @ state)
            square = prefix.square + 2 * shared + own
            explained = inner.clamp_min(0).square() / square.clamp_min(1e-30) / self.scale
            used = torch.isin(self.words, torch.tensor(prefix.tokens[prefix.begun :], dtype=torch.long))
            needed = prefix.needed + torch.where(used, torch.full_like(self.own, AGAIN), self.own)
            likely = prefix.likely + base.clamp_min(1e-30).log()
            score = explained - needed + likely
            for j in score.topk(min(per_prefix, len(score))).indices.tolist():
                word = int(self.words[j])
                at_words = base.clone()
                at_words[j] -= 1
                where = torch.tensor(sorted({*likeliest.tolist(), word}))
                part = Part(state, at_words, where, p[where] - (where == word).float())
                new = Prefix(
                    (*prefix.tokens, word), prefix.begun, (*prefix.parts, part), float(inner[j]), float(square[j]),
                    float(needed[j]), float(likely[j]), float(score[j]),
                )  # fmt: skip
                longer.append((-new.score, n, j, new))
        return [new for *_, new in sorted(longer, key=lambda one: one[:3])[:width]]

    def _expected(self, prefixes: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """The states of the prefixes, ``(prefixes, width)``, and what the model expects, ``(prefixes, vocabulary)``."""
        ids = torch.tensor(prefixes)
        states, chances = [], []
        for some in torch.split(ids, max(1, NUMBERS // (ids.shape[1] * len(self.rows)))):
            with recorded_inputs(self.model, [self.module], stop=False) as inputs:
                logits = self.model(input_ids=some, attention_mask=torch.ones_like(some)).logits[:, -1]
            states.append(inputs[self.module][:, -1].float().cpu())
            chances.append(logits.float().cpu().softmax(-1))
        return torch.cat(states), torch.cat(chances)
