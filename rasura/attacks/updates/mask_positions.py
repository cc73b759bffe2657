"""Mask positions: which entries of the word embedding are sealed names the words, before anything is opened.

A client that seals what is large in its own gradient seals the rows of its own words, since other rows are zero; one that
drops what is small drops the others. Whoever sees which entries are hidden needs no gradient at all. A mask from public
weights, from chance, or from an earlier aggregate lies the same way whatever the text.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import AttackSpec, Home
from rasura.core.values import Grant, Observation, Parameter, Reconstruction
from rasura.victims.models import parts

WINDOW = 33
"""Rows of the vocabulary among which one that carries a word stands out; words of one text seldom are neighbours."""

MAX_FRACTION = 0.1
"""Fraction of rows above which the rows that stand out are not words: the mask then follows something else."""


def standing_out(counts: Tensor) -> Tensor:
    """The indices of rows whose ``counts`` ``(rows,)`` of hidden entries differ from the median of the rows around them."""
    half = WINDOW // 2
    padded = torch.cat([counts[:half].flip(0), counts, counts[-half:].flip(0)])
    usual = padded.unfold(0, WINDOW, 1).median(dim=1).values
    return (counts != usual).nonzero().flatten()


class MaskPositions:
    """Reads the bag of words, given once for every text, off the positions of hidden entries in the word embedding.

    Raises ``NotApplicable`` where no single entries of it are hidden, ``AttackFailed`` where the mask does not follow words.
    """

    name = "mask-positions"
    needs = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses = frozenset({Grant.BATCH_SIZE})

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        found = parts(seen.model)
        visible = seen.visible.get(found.word_embedding)
        if visible is None or bool(visible.all()) or not bool(visible.any()) or len(visible) < WINDOW:
            raise NotApplicable("the word embedding is not partly hidden, so there are no positions to read")
        rows = standing_out((~visible).sum(1).cpu())
        special = seen.vocabulary.special_ids
        words = [int(i) for i in rows if int(i) < seen.vocabulary.size]
        if len(rows) > MAX_FRACTION * len(visible):
            raise AttackFailed(
                f"{len(rows)} of {len(visible)} rows differ from those around them: the mask follows weights or chance, "
                "not words"
            )
        if not set(words) - special:
            raise AttackFailed("no row of the word embedding is hidden differently from those around it")
        details: dict[str, Parameter] = {"distinct_tokens": len(words)}
        places = None if found.position_embedding is None else seen.visible.get(found.position_embedding)
        if places is not None and len(places) >= WINDOW:
            counts = (~places).sum(1)
            there = (counts != counts.median()).nonzero().flatten()
            if 0 < len(there) < len(places) // 2:
                details["longest"] = int(there[-1]) + 1
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        return Reconstruction((tuple(words),) * size, "matched", ordered=False, details=details)


SPEC = AttackSpec(
    name="mask-positions",
    about="infers the words from which entries of the word embedding are encrypted or dropped",
    source="Rasura",
    make=MaskPositions,
    seconds=0.1,
    embedding=True,
    protection=True,
    home=Home(defense="sealing:grad=0.3"),
)
