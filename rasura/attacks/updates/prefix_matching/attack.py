"""Prefix matching: a decoder's text, token by token, by how much of the update each prefix explains.

A decoder's loss is a sum over positions, and each term depends on the tokens up to the next one. So the gradient of a
prefix is a part of the gradient of the text, and agrees with it in sign as well. That holds where no row space is left:
AdamW's differences are little more than signs, and the right text explains nearly all of them.

The first tokens are found by their states (``states``). Then a beam grows by three kinds of tokens: those that the update
makes likelier, those that the model expects, and those that stand out in block 0. Two runs of the model tell the first for
the whole vocabulary (the scores of a model before and after reveal what it learned, Zanella-Beguelin et al. 2020). The
gradient of each is compared with the update, and so are those of prefixes with one word changed. The combination is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rasura.attacks.shared.mechanism import announced_dropout
from rasura.attacks.shared.verify import in_span, prove, verified
from rasura.attacks.updates.prefix_matching.agreement import Agreement, read_layers
from rasura.attacks.updates.prefix_matching.states import Beginnings
from rasura.attacks.updates.span.rows import blocks_to_read
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.rng import permutation
from rasura.core.so_far import tell
from rasura.core.specs import AttackSpec, Home
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.core.word_rows import output_layer
from rasura.victims.models import parts
from rasura.victims.positions import positions

BEGUN, WIDE = 4, 8
"""Tokens behind which gradients take over from states, and how many prefixes of them are grown."""

WIDTH = {"quick": 2, "default": 6, "paper": 12}
"""How many prefixes are kept at most, by the budget."""

NEAR = 0.06
"""How near to the best one a prefix must be."""

TRIED, LIKELIEST = 32, 4
"""How many tokens are tried after each, and how many of these are the likeliest: one that the model is sure of has no
gradient, so that the update does not raise it."""

EXPECTED, RAISED, SEEN = 0.5, 1.6, 0.5
"""What a nat of the model's expectation, and a standard deviation of what the update raises and of what stands out in block
0, are worth when tokens are proposed (fitted on five texts of SmolLM2-135M)."""

UNLIKELY, MOST = -12.0, 12.0
"""Nats and standard deviations beyond which a token is no more proposed or ruled out."""

NAT, OUTSTANDING = 0.003, 0.0015
"""What a nat of the model's expectation is worth as agreement, and a standard deviation of what stands out in block 0."""

REPAIRED = 6
"""Tokens after which single words of the best prefix are changed where that agrees better, before those of the text."""

CHANGED, BETTER = 24, 0.003
"""Words that are tried at each place, and by how much one must agree better."""

LONGEST = 64
"""Tokens that are searched where the length is unknown."""

WAIT = 6
"""Tokens that agree no better, behind which a text of unknown length has ended."""


@dataclass(frozen=True)
class Prefix:
    """Tokens, what speaks for them beside, and how far their gradient agrees with the update."""

    tokens: tuple[int, ...]
    beside: float = 0.0
    agrees: float = 0.0

    @property
    def score(self) -> float:
        """By which prefixes of one length are compared."""
        return self.agrees + self.beside


class Search:
    """The beam of prefixes for the text of ``seen``."""

    def __init__(self, seen: Observation, rng: torch.Generator, budget: Budget) -> None:
        self.seen, self.width, self.frame = seen, WIDTH[budget.level], len(seen.vocabulary.prefix)
        self.beginnings = Beginnings(seen, blocks_to_read(seen), rng)
        self.ids, self.outstanding = self.beginnings.ids, self.beginnings.standing_out()
        drawn = permutation(len(self.ids), rng)[: min(64, len(self.ids) // 4 * 4)]
        self.agreement = Agreement(seen.model, read_layers(seen), self.ids[drawn].reshape(4, -1), budget.memory_mb)

    def begin(self, length: int) -> list[Prefix]:
        """The prefixes of ``length`` tokens, at most ``BEGUN`` and the frame's."""
        found = self.beginnings(min(length, BEGUN + self.frame), WIDE)
        return [
            Prefix(text, agrees=agrees) for text, agrees in zip(found, self.agreement.whole(torch.tensor(found)).tolist())
        ]

    def grow(self, kept: Sequence[Prefix]) -> list[Prefix]:
        """The best prefixes that are one token longer."""
        texts = torch.tensor([prefix.tokens for prefix in kept])
        proposed, beside = self._proposed(texts)
        best = proposed.topk(min(TRIED, len(self.ids)), dim=1).indices
        tokens, beside = self.ids[best], beside.gather(1, best)
        agrees = self.agreement.followed(texts, tokens)
        grown = [
            Prefix((*prefix.tokens, token), prefix.beside + more, agreed)
            for prefix, *rows in zip(kept, tokens.tolist(), beside.tolist(), agrees.tolist())
            for token, more, agreed in zip(*rows)
        ]
        grown.sort(key=lambda p: -p.score)
        return [p for p in grown[: self.width] if p.score > grown[0].score - NEAR]

    def repair(self, prefix: Prefix, lengths: range) -> Prefix:
        """``prefix``, of one of ``lengths``, with words changed, put in or left out, as long as that agrees better."""
        while True:
            places = range(self.frame, len(prefix.tokens))
            best = max((self._changed(prefix, place, lengths) for place in places), key=lambda p: p.agrees, default=prefix)
            if best.agrees < prefix.agrees + BETTER:
                return prefix
            prefix = best

    def _changed(self, prefix: Prefix, place: int, lengths: range) -> Prefix:
        """The best of ``prefix`` with another word at ``place``, with one more, without that one, or without all from it."""
        before, behind = prefix.tokens[:place], prefix.tokens[place:]
        worth = self._proposed(torch.tensor([before]))[0][0] if before else self.outstanding
        words = self.ids[worth.topk(min(CHANGED, len(self.ids))).indices].tolist()
        texts = [[(*before, word, *behind[1:]) for word in words]]
        texts.append([(*before, word, *behind[: lengths[-1] - place - 1]) for word in words])
        if len(prefix.tokens) - 1 in lengths:
            texts.append([(*before, *behind[1:])])
        if place in lengths:
            texts.append([before])
        found = []
        for some in texts:
            agrees = self.agreement.whole(torch.tensor(some))
            k = int(agrees.argmax())
            found.append(replace(prefix, tokens=some[k], agrees=float(agrees[k])))
        return max(found, key=lambda p: p.agrees)

    def _proposed(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """What speaks for each of ``ids`` after each of ``texts``; and without the signs of all blocks, as agreement."""
        expected, raised = (found[:, self.ids] for found in self.agreement.expected(texts))
        # What a token explains is explained already where it stands in the prefix.
        new = torch.stack([~torch.isin(self.ids, text) for text in texts]) * self.outstanding
        expected = expected.clamp_min(UNLIKELY)
        proposed = EXPECTED * expected + RAISED * raised.clamp(-MOST, MOST) + SEEN * new
        proposed.scatter_(1, expected.topk(min(LIKELIEST, len(self.ids)), dim=1).indices, torch.inf)
        return proposed, NAT * expected + OUTSTANDING * new


class PrefixMatching:
    """Reads one text of a decoder from any update that has its gradient's signs: differences of AdamW, of adapters included.

    Needs visible queries, keys or values. ``verified`` where repeating the client's training gives the update; else
    ``matched``, the text that agrees most. Of several texts it returns one, ``matched``. ``details``: ``agreement``, the
    mean cosine of the layers' gradients and the update.
    """

    name = "prefix-matching"
    needs = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses = frozenset({Grant.LENGTHS, Grant.MECHANISM})

    def __call__(self, seen: Observation, *, rng: torch.Generator, budget: Budget) -> Reconstruction:
        known = parts(seen.model)
        if seen.task != "causal" or not known.causal or output_layer(seen.model) is None:
            raise NotApplicable("only the loss of a causal language model adds up from prefix to prefix")
        if announced_dropout(seen):
            raise NotApplicable("dropout was active, so a prefix does not determine its gradient")
        if next(seen.model.parameters()).dtype.itemsize < 4:
            raise NotApplicable("the weights have 16 bits, in which a small step moves no probability")
        if not all(bool(torch.isfinite(g).all()) for g in seen.gradients.values()):
            raise NotApplicable("the update holds NaN or infinity")
        longest = max(seen.lengths) if Grant.LENGTHS in seen else min(LONGEST, positions(seen.model) or LONGEST)
        search = Search(seen, rng, budget)
        lengths = range(longest if Grant.LENGTHS in seen else search.frame + 2, longest + 1)
        found = self._read(search, lengths)
        for prefix in found:
            if proof := prove(seen, [prefix.tokens]):
                return verified(proof, {"agreement": prefix.agrees})
        best = search.repair(found[0], lengths)
        if best is not found[0] and (proof := prove(seen, [best.tokens])):
            return verified(proof, {"agreement": best.agrees})
        return in_span((best.tokens,), seen, believed=False, details={"signs": True, "agreement": best.agrees})

    @staticmethod
    def _read(search: Search, lengths: range) -> list[Prefix]:
        """The texts of one of ``lengths`` that may be whole, best first."""
        kept, repaired = search.begin(lengths[-1]), search.frame + REPAIRED
        best, longer = kept, list[Prefix]()
        while len(kept[0].tokens) < lengths[-1] and (len(lengths) == 1 or len(longer) < WAIT):
            kept = search.grow(kept)
            if len(kept[0].tokens) == repaired:
                kept = list({p.tokens: p for p in (*kept, search.repair(kept[0], range(repaired, repaired + 1)))}.values())
            tell(partial(list, [kept[0].tokens]))
            top = max(kept, key=lambda p: p.agrees)
            if len(lengths) == 1 or top.agrees >= max(p.agrees for p in best) + BETTER:
                best, longer = kept, []
            else:
                longer.append(top)
        return [*sorted(best, key=lambda p: -p.agrees), *longer]


SPEC = AttackSpec(
    name="prefix-matching",
    about="reads a decoder's text from the signs that differences of AdamW keep",
    source="Rasura; scores of two models as in Zanella-Beguelin et al. 2020",
    make=PrefixMatching,
    seconds=50.0,
    growth=1.0,
    work={"quick": 0.5, "default": 1.0, "paper": 2.0},
    tasks=frozenset({"causal"}),
    home=Home(family="llama", task="causal", reads=True),
)
