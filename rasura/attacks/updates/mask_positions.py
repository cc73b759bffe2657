"""Mask positions: which entries of the word embedding are sealed names the words, before anything is opened.

A client that seals what is large in its own gradient seals the rows of its own words, since other rows are zero; one that
drops what is small drops the others. Whoever sees which entries are hidden needs no gradient at all. A mask from public
weights, from chance, or from an earlier aggregate lies the same way whatever the text.

A causal model's output layer, which may be the word embedding, has no row of zeros: the words that the model expected have
large ones too. The words of the text have the largest, and how many entries of a row are hidden tells how large it is.
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

MAX_FRACTION_FILLED = 0.2
"""The same of the large rows of an output layer (measured: at most 0.15, and at least 0.27 behind masks of other kinds)."""

LARGEST, LARGE = 5, 0.3
"""Rows of an output layer are words if they are at least so large as a share of the median of the largest ones."""


def standing_out(counts: Tensor) -> Tensor:
    """The indices of rows whose ``counts`` ``(rows,)`` of hidden entries differ from the median of the rows around them."""
    half = WINDOW // 2
    padded = torch.cat([counts[:half].flip(0), counts, counts[-half:].flip(0)])
    usual = padded.unfold(0, WINDOW, 1).median(dim=1).values
    return (counts != usual).nonzero().flatten()


def by_size(counts: Tensor, rows: Tensor, width: int) -> tuple[Tensor, int]:
    """``rows`` of an output layer, ``width`` entries wide, the largest first, and how many of them are large; by ``counts``
    ``(rows,)`` of hidden entries.

    A row is taken for normal: of entries with deviation s, a share ``2 (1 - Phi(t / s))`` exceeds a threshold t.
    """
    marked = counts if float(counts.median()) < width / 2 else width - counts  # what is large is sealed, or alone is sent
    share = (marked[rows].double() + 0.5) / (width + 1)
    size, order = (1 / torch.special.ndtri(1 - share / 2)).sort(descending=True)
    return rows[order], int((size >= LARGE * size[:LARGEST].median()).sum())


class MaskPositions:
    """Reads the bag of words, given once for every text, off the positions of hidden entries in the word embedding, or in
    an output layer of its own where no single entries of the embedding are hidden.

    Raises ``NotApplicable`` where no single entries of either are hidden, ``AttackFailed`` where the mask does not follow
    words.
    """

    name = "mask-positions"
    needs = frozenset({Grant.MODEL, Grant.BASE_MODEL})
    uses = frozenset({Grant.BATCH_SIZE, Grant.LENGTHS})

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        found = parts(seen.model)
        output = [found.head.weight] if seen.task == "causal" and found.head is not None else []
        hidden = {n: ~seen.visible[n].cpu() for n in (found.word_embedding, *output) if n in seen.visible}
        table = next((n for n, h in hidden.items() if bool(h.any()) and not bool(h.all()) and len(h) >= WINDOW), "")
        if not table:
            raise NotApplicable("no table of words is partly hidden, so there are no positions to read")
        counts = hidden[table].sum(1)
        rows = standing_out(counts)
        large, most = len(rows), MAX_FRACTION
        filled = table in output or (found.tied and seen.task == "causal")
        if filled:
            rows, large = by_size(counts, rows, hidden[table].shape[1])
            most = MAX_FRACTION_FILLED
        if large > most * len(counts):
            raise AttackFailed(
                f"{large} of {len(counts)} rows differ from those around them: the mask follows weights or chance, not words"
            )
        rows = rows[: sum(seen.lengths) if filled and Grant.LENGTHS in seen else large]
        special = seen.vocabulary.special_ids
        words = [int(i) for i in rows if int(i) < seen.vocabulary.size]
        if not set(words) - special:
            raise AttackFailed("no row of words is hidden differently from those around it")
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
    about="infers the words from which entries of their rows are encrypted or dropped",
    source="Rasura",
    make=MaskPositions,
    seconds=0.1,
    embedding=True,
    protection=True,
    home=Home(defense="sealing:grad=0.3"),
)
