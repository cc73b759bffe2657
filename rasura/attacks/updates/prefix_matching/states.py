"""The beginning of a decoder's text, by the directions in which the rows of its update lean.

Each row of a layer's gradient is a sum over the inputs of the layer, and its signs still lean towards them. So a prefix is
judged by how much of the rows its states explain in all blocks, whatever follows. Two things mislead that:

- A strong word leans the same way wherever it stands, and would be taken too early. So what a token explains in any context,
  by its states behind random tokens, counts a fifth of what it explains in this one.
- Most tokens of the vocabulary explain something by chance. So few of them are looked at in all blocks: those that stand out
  in block 0, which knows no context, with the model's own expectation, and then in two and in six blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.rows import CHUNK, visible_gradients
from rasura.attacks.updates.span.tokens import candidates
from rasura.core.rng import permutation
from rasura.core.values import Observation
from rasura.victims.models import Block
from rasura.victims.positions import positions

STAGES = ((2, 512), (6, 96))
"""How many blocks look at how many tokens, before the best ``LAST`` go through all blocks."""

LAST, LIKELIEST, BEGINNINGS, FIRST = 24, 6, 64, 16
"""Tokens in all blocks, likeliest ones that are always among them, first tokens that are looked at, and those kept."""

OTHERS = 64
"""Random tokens whose mean states are what all states of a block have in common."""

ANYWHERE = 0.2
"""What a token explains in any context counts this much."""

NAT = 0.02
"""What a nat of the model's expectation is worth, in rows explained, summed over the blocks."""

LEAST, MOST = -3.0, 12.0
"""Standard deviations in block 0 beyond which a token is no more ruled out or proposed."""

IN_FIRST = 0.7
"""Standard deviations in block 0 that a nat is worth."""

IN_ALL = 0.6
"""What a block's rows that a token explains are worth beside ``NAT``, while only some of the blocks look."""

LEFT = 0.03
"""The length of a state, relative to the whole, below which nothing is left of it."""

Begun = tuple[float, list[int], Tensor]
"""A score, tokens, and a basis ``(blocks, hidden, n)`` of their states."""


def outside(x: Tensor, basis: Tensor) -> Tensor:
    """The parts of ``x`` ``(blocks, tokens, hidden)`` outside of ``basis`` ``(blocks, hidden, n)``, of length 1; zero where
    almost nothing is left."""
    whole = x.norm(dim=-1, keepdim=True).clamp_min(1e-9)
    for _ in range(2):
        x = x - (x @ basis) @ basis.transpose(-1, -2)
    left = x.norm(dim=-1, keepdim=True)
    return torch.where(left > LEFT * whole, x / left.clamp_min(1e-9), torch.zeros_like(x))


def explained(left: Tensor, directions: Tensor) -> Tensor:
    """How much of the rows ``left`` ``(blocks, rows, hidden)`` each of ``directions`` ``(blocks, tokens, hidden)`` explains,
    summed over the blocks: ``(tokens,)``."""
    return (directions @ left.transpose(1, 2)).square().mean(2).sum(0)


class Beginnings:
    """Grows the first tokens of the text of ``seen`` by the ``blocks``, whose query, key and value gradients are visible."""

    def __init__(self, seen: Observation, blocks: Sequence[Block], rng: torch.Generator) -> None:
        self.seen, self.blocks, self.inputs = seen, blocks, Inputs(seen.model)
        rows = [torch.cat(visible_gradients(seen, b.qkv)).float() for b in blocks]
        fewest = min(len(some) for some in rows)
        self.signs = torch.stack([some[:fewest] / some[:fewest].norm(dim=1, keepdim=True).clamp_min(1e-30) for some in rows])
        self.ids = candidates(seen.vocabulary)
        place = min(len(seen.vocabulary.prefix) + 1, (positions(seen.model) or 2) - 1)
        self.first = torch.cat([self.inputs.first(chunk, place) for chunk in torch.split(self.ids, CHUNK)])
        self.middle = self.first.mean(0)
        drawn = self.ids[permutation(len(self.ids), rng)[: 8 + OTHERS]]
        self.contexts, self._anywhere = (drawn[:4].tolist(), drawn[4:8].tolist()), dict[int, Tensor]()
        self.common = self._common(drawn[8:])

    @torch.no_grad()
    def __call__(self, length: int, width: int) -> list[tuple[int, ...]]:
        """The ``width`` best prefixes of ``length`` tokens, the frame's included, best first."""
        frame = list(self.seen.vocabulary.prefix)
        kept: list[Begun] = [(0.0, frame, self.common)]
        while len(kept[0][1]) < length:
            grown = [one for score, prefix, basis in kept for one in self._grown(score, prefix, basis)]
            most = width if kept[0][1] else max(width, FIRST)
            kept = sorted(grown, key=lambda one: -one[0])[:most]
        return [tuple(prefix) for _, prefix, _ in kept[:width]]

    def standing_out(self, prefix: Sequence[int] = ()) -> Tensor:
        """How much of block 0's rows each token explains beyond ``prefix``, in standard deviations: ``(ids,)``."""
        known = torch.cat([self.first[torch.isin(self.ids, torch.tensor([*prefix, -1]))], self.middle[None]])
        basis = torch.linalg.qr(known.T)[0]
        x = self.first - self.middle
        most = x.square().sum(1)
        x = x - (x @ basis) @ basis.T
        left = self.signs[0] - (self.signs[0] @ basis) @ basis.T
        told = (x @ left.T).square().mean(1) / torch.maximum(x.square().sum(1), 0.02 * most).clamp_min(1e-30)
        out: Tensor = (told - told.mean()) / told.std().clamp_min(1e-30)
        return out

    def _common(self, others: Tensor) -> Tensor:
        """What all states of a block have in common, as a first token and behind others: a basis ``(blocks, hidden, 2)``."""
        alone = self._states([], others).mean(1)
        behind = sum((self._states(context, others).mean(1) for context in self.contexts), torch.zeros(()))
        out: Tensor = torch.linalg.qr(torch.stack([alone, behind], 2))[0]
        return out

    def _grown(self, before: float, prefix: list[int], basis: Tensor) -> list[Begun]:
        """``prefix`` with each of its best next tokens."""
        expected = self._expected(prefix)
        tokens = self._looked_at(prefix, basis, expected)
        left = self._left(basis)
        x = outside(self._states(prefix, tokens), basis)
        if prefix:
            always = outside(self._generic(tokens.tolist()), basis)
            here = outside(x - (x * always).sum(2, keepdim=True) * always, basis)
            told = explained(left, here) + ANYWHERE * explained(left, always)
        else:
            told = explained(left, x) / 2
        score = before + told + NAT * expected[torch.searchsorted(self.ids, tokens)]
        return [
            (float(score[k]), [*prefix, int(tokens[k])], torch.cat([basis, x[:, k, :, None]], 2))
            for k in score.topk(min(len(score), FIRST)).indices.tolist()
        ]

    def _left(self, basis: Tensor) -> Tensor:
        """What a basis leaves of the signs."""
        signs = self.signs[: len(basis)]
        return signs - (signs @ basis) @ basis.transpose(1, 2)

    def _expected(self, prefix: Sequence[int]) -> Tensor:
        """The model's log probabilities of each of ``ids`` behind ``prefix``; of a first token, none is likelier."""
        if not prefix:
            return torch.zeros(len(self.ids))
        ids = torch.tensor([list(prefix)])
        logits = self.seen.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        out: Tensor = logits[0, -1].float().log_softmax(0)[self.ids]
        return out

    def _looked_at(self, prefix: list[int], basis: Tensor, expected: Tensor) -> Tensor:
        """The tokens that are looked at in all blocks."""
        worth = self.standing_out(prefix).clamp(LEAST, MOST) + IN_FIRST * expected
        tokens = self.ids[worth.topk(min(len(self.ids), STAGES[0][1])).indices]
        if not prefix:
            return tokens[:BEGINNINGS]
        for count, most in STAGES:
            tokens, inner = tokens[:most], basis[:count]
            told = explained(self._left(inner), outside(self._states(prefix, tokens, count), inner))
            worth = IN_ALL * len(self.blocks) / len(inner) * told + NAT * expected[torch.searchsorted(self.ids, tokens)]
            tokens = tokens[worth.argsort(descending=True)]
        likeliest = self.ids[expected.topk(min(LIKELIEST, len(self.ids))).indices].tolist()
        return torch.tensor(list(dict.fromkeys([*tokens[:LAST].tolist(), *likeliest])))

    def _generic(self, tokens: list[int]) -> Tensor:
        """The mean states of ``tokens`` behind random ones, ``(blocks, tokens, hidden)``."""
        if new := [t for t in tokens if t not in self._anywhere]:
            behind = [self._states(list(context), torch.tensor(new)) for context in self.contexts]
            mean = sum((x / x.norm(dim=2, keepdim=True) for x in behind), torch.zeros(()))
            self._anywhere |= {token: mean[:, k] for k, token in enumerate(new)}
        return torch.stack([self._anywhere[t] for t in tokens], 1)

    def _states(self, prefix: Sequence[int], tokens: Tensor, count: int | None = None) -> Tensor:
        """The inputs of the first ``count`` blocks for ``tokens`` behind ``prefix``: ``(blocks, tokens, hidden)``."""
        blocks = self.blocks[:count]
        if prefix:
            found = self.inputs.following(torch.tensor(list(prefix)), tokens, blocks)
            return torch.stack([found[b.index] for b in blocks]).float()
        alone = self.inputs.deep(tokens[:, None], torch.ones_like(tokens)[:, None], blocks)
        return torch.stack([alone[b.index][:, 0] for b in blocks]).float()
