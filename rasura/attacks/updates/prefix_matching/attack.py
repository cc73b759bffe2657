"""Prefix matching: a decoder's text, token by token, by how much of the update each prefix explains.

A decoder's loss is a sum over positions, and each term depends on the tokens up to the next one. So the gradient of a
prefix is a part of the gradient of the text, and agrees with it in sign as well. That holds where no row space is left:
AdamW's differences are little more than signs, and the right text explains nearly all of them.

The first tokens are found by their states (``states``). Then a beam grows by four kinds of tokens: those that the update
makes likelier, those that the model expects, those that stand out in block 0, and those whose agreement is foreseen to be
best. Two runs of the model tell the first for the whole vocabulary (the scores of a model before and after reveal what it
learned, Zanella-Beguelin et al. 2020). The gradient of each is compared with the update in the last blocks, and that of the
best in all blocks. So are those of prefixes with one word changed, or with one more in front, since a text may be found
from its middle on. The combination is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from rasura.attacks.shared.mechanism import announced_dropout
from rasura.attacks.shared.precision import in_full_precision
from rasura.attacks.shared.verify import in_span, prove, verified
from rasura.attacks.updates.prefix_matching.search import BETTER, Prefix, Search
from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.so_far import tell
from rasura.core.specs import AttackSpec, Home
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.core.word_rows import output_layer
from rasura.victims.models import parts
from rasura.victims.positions import positions

BEGUN = (3, 2)
"""Tokens behind which gradients take over from states, and again where no text was proven. Each start also draws other
texts to compare with."""

LONGEST = 64
"""Tokens that are searched where the length is unknown."""

ENDED, WAIT = 2, 6
"""Tokens that agree no better, behind which a text of unknown length may have ended, and has."""

READ_AGAIN = 2
"""How often the search goes on from a text with changed words."""


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
        if not all(bool(torch.isfinite(g).all()) for g in seen.gradients.values()):
            raise NotApplicable("the update holds NaN or infinity")
        longest = max(seen.lengths) if Grant.LENGTHS in seen else min(LONGEST, positions(seen.model) or LONGEST)
        if longest < 2:
            raise NotApplicable("a text of one token has no loss")
        lengths = range(longest if Grant.LENGTHS in seen else len(seen.vocabulary.prefix) + 2, longest + 1)
        wide = in_full_precision(seen, budget)
        tried, guesses = set[tuple[int, ...]](), list[Prefix]()
        for begun in BEGUN:
            for guess in self._read(Search(wide, begun, rng, budget), lengths):
                if guess.tokens not in tried and (proof := prove(seen, [guess.tokens])):
                    return verified(proof, {"agreement": guess.agrees})
                tried.add(guess.tokens)
            guesses.append(guess)
        best = max(guesses, key=lambda p: p.agrees)
        return in_span((best.tokens,), seen, believed=False, details={"signs": True, "agreement": best.agrees})

    @staticmethod
    def _read(search: Search, lengths: range) -> Iterator[Prefix]:
        """Texts of one of ``lengths`` that may be whole; the last one is the guess."""
        kept = search.begin(lengths[-1])
        for _ in range(READ_AGAIN):
            best, longer = kept, list[Prefix]()
            while len(kept[0].tokens) < lengths[-1] and (len(lengths) == 1 or len(longer) < WAIT):
                kept = search.grow(kept)
                tell(partial(list, [kept[0].tokens]))
                top, most = max(kept, key=lambda p: p.agrees), max(p.agrees for p in best)
                if len(lengths) == 1 or top.agrees >= most + BETTER:
                    best, longer = kept, []
                else:
                    longer.append(top)
                if len(longer) == ENDED:
                    yield from (max(best, key=lambda p: p.agrees), *longer)
            yield from longer
            best = sorted(best, key=lambda p: p.agrees)
            yield from best
            changed = search.change(best[-1], lengths)
            yield changed
            if changed == best[-1]:
                return
            kept = [changed]


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
