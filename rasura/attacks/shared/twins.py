"""Words whose embeddings are nearly equal: behind a hidden embedding, texts that exchange them have the same update.

SmolLM2 has a dozen of them, which its training never saw. A guess that holds one is no better than the guess with another,
unless the update itself tells the words apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rasura.core.values import UNKNOWN, Observation
from rasura.victims.models import parts

NEAR = 0.05
"""Two words are twins if their embeddings are not further apart than this, relative to the word's own. Most twins of
SmolLM2 are within .001; 18 of its 49,152 words have one. MPNet and DistilBERT have none within .2."""

MOST = 8
"""Twins of a word that are tried: the nearest. What tells the word from these tells it from those that are further away."""

CHUNK = 4096
"""Rows of a table that are compared at once."""

FEW = 2048
"""Words among which twins are looked for pair by pair. No batch accepts more."""

FLOOR = 1e-9
"""A row below this fraction of another is none."""

Texts = tuple[tuple[int, ...], ...]


def nearest(table: Tensor, tokens: Sequence[int], among: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` words of ``among`` nearest to each of ``tokens`` by the rows of ``table``, if there are as many.

    Returns their ids and the distances, both ``(tokens, count)``, nearest first; a word is no neighbour of itself.
    """
    own = torch.tensor(list(tokens), dtype=torch.long)
    rows = _rows(table, own)
    barred = torch.ones(len(table), dtype=torch.bool)
    barred[among] = False
    found, far = torch.zeros(len(own), 0, dtype=torch.long), torch.zeros(len(own), 0)
    for start in range(0, len(table), CHUNK):
        others = table[start : start + CHUNK].detach().float().cpu()
        squares = others.square().sum(1) - 2 * rows @ others.T  # the squared distance, but for what all share
        some = torch.arange(start, start + len(others))
        squares[(own[:, None] == some) | barred[some]] = torch.inf
        found, far = torch.cat([found, some.expand(len(own), -1)], 1), torch.cat([far, squares], 1)
        far, order = far.topk(min(count, far.shape[1]), largest=False)
        found = found.gather(1, order)
    apart = torch.stack([_rows(table, ids) - row for ids, row in zip(found, rows)]).norm(dim=2)
    apart[far == torch.inf] = torch.inf
    return found, apart


def _rows(table: Tensor, ids: Tensor) -> Tensor:
    return table[ids.to(table.device)].detach().float().cpu()


def twins(seen: Observation, tokens: Sequence[Sequence[int]]) -> dict[tuple[int, int], list[int]]:
    """Of every place ``(text, number)`` whose word has twins: those that the rows of the embedding's gradient do not tell
    from it, at most ``MOST``, nearest first. Holes have none, nor has what the tokenizer puts around a text.

    The last token of a causal text is no input: there, words are twins by the output layer.
    """
    found = parts(seen.model)
    last = found.head if seen.task == "causal" and not found.tied else None
    inner: list[tuple[int, int]] = []
    ends: list[tuple[int, int]] = []
    for row, text in enumerate(tokens):
        for n in _free(text, seen):
            (ends if last is not None and n == len(text) - 1 else inner).append((row, n))
    out = _twins_at(seen, found.word_embedding, False, tokens, inner)
    if last is not None:
        out |= _twins_at(seen, last.weight, last.transposed, tokens, ends)
    return out


def _free(text: Sequence[int], seen: Observation) -> list[int]:
    """The places of ``text`` that the tokenizer does not fill by itself, without holes."""
    prefix, suffix = seen.vocabulary.prefix, seen.vocabulary.suffix
    start = len(prefix) if tuple(text[: len(prefix)]) == prefix else 0
    end = len(text) - len(suffix) if suffix and tuple(text[-len(suffix) :]) == suffix else len(text)
    return [n for n in range(start, end) if text[n] != UNKNOWN]


def _twins_at(
    seen: Observation, name: str, transposed: bool, tokens: Sequence[Sequence[int]], places: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], list[int]]:
    words = sorted({int(tokens[row][n]) for row, n in places})
    weights: Tensor = seen.model.get_parameter(name)
    table = weights.T if transposed else weights
    among = torch.tensor([i for i in range(min(seen.vocabulary.size, len(table))) if i not in seen.vocabulary.unused_ids])
    if not words or len(among) < 2:
        return {}
    ids, far = nearest(table, words, among, MOST)
    sizes = _rows(table, torch.tensor(words)).norm(dim=1)
    close = {
        word: [i for i, d in zip(some.tolist(), apart.tolist()) if d <= NEAR * size and not _told(seen, word, i)]
        for word, some, apart, size in zip(words, ids, far, sizes.tolist())
    }
    return {(row, n): some for row, n in places if (some := close[int(tokens[row][n])])}


def _told(seen: Observation, word: int, other: int) -> bool:
    """Whether the word embedding's gradient has a row for ``word`` and none for ``other``, both visible."""
    name = parts(seen.model).word_embedding
    gradient, mask = seen.gradients.get(name), seen.visible.get(name)
    if gradient is None or (mask is not None and not bool(mask[[word, other]].all())):
        return False
    return float(gradient[other].norm()) <= FLOOR * float(gradient[word].norm()) > 0


def row_norms(seen: Observation) -> Tensor | None:
    """The norms of the rows of the word embedding's gradient; None where it is not in the update."""
    rows = seen.gradients.get(parts(seen.model).word_embedding)
    return None if rows is None else rows.detach().float().cpu().norm(dim=1)


def one_of_twins(table: Tensor, ids: Tensor, standing: Tensor | None) -> Tensor:
    """Places in ``ids`` of words that are no twins of each other by their rows of ``table``, in order.

    Of twins it is the one that stands out most by ``standing`` (``row_norms``), otherwise the first. Where all were kept, as
    many texts would fit as there are ways to exchange them.
    """
    if not 1 < len(ids) <= FEW:
        return torch.arange(len(ids))
    rows = _rows(table, ids)
    alike = torch.cdist(rows, rows) <= NEAR * rows.norm(dim=1)[:, None]
    weight = -torch.arange(len(ids), dtype=torch.float) if standing is None else standing[ids]
    best = torch.where(alike | torch.eye(len(ids), dtype=torch.bool), weight, -torch.inf).argmax(1)
    return torch.tensor(sorted(set(best.tolist())))
