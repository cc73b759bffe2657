"""The assignment of recovered to private texts (GRAB, appendix B.3: the best text for each; here one to one, which is
stricter). Equal private texts are one text: who read it once has read all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence

import numpy as np
from scipy.optimize import linear_sum_assignment

from rasura.core.values import UNKNOWN, Reconstruction, Transcript, Vocabulary
from rasura.core.vocabulary import UNREADABLE

UNREAD = rf"(?<!\S){UNREADABLE}(?!\S)"
"""A word that the tokenizer does not know, in the text as the model saw it. It counts as a word, and no guess names it."""


def own_tokens(ids: Sequence[int], truth: Transcript) -> list[int]:
    """``ids`` without special and unknown tokens. None is left of a text of which the tokenizer knows no word: there is
    nothing in it to recover, so every metric of it is NaN, which means not measured."""
    special = truth.text_batch.special_ids | truth.vocabulary.special_ids
    return [i for i in ids if i not in special and i != UNKNOWN]


def unknown_words(ids: Sequence[int], vocabulary: Vocabulary) -> int:
    """How many of ``ids`` stand for words of the text that the tokenizer does not know. Nobody reads them from an update or
    from what a service is sent, so a text that has some is never read whole."""
    return sum(i in vocabulary.unknown_ids for i in ids)


def worded(ids: Sequence[int], vocabulary: Vocabulary) -> bool:
    """Whether the tokenizer knows any word of the text that a service was sent as ``ids``; if not, nothing of it can be
    measured."""
    return any(i not in vocabulary.special_ids for i in ids)


def named_text(ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """The text of the guess ``ids``. Who names the token of unknown words names no word."""
    return vocabulary.text([i for i in ids if i not in vocabulary.unknown_ids])


def read_texts(guess: Reconstruction, truth: Transcript) -> list[str]:
    """The recovered texts without special tokens, and without the words that the tokenizer does not know. ``guess.texts``,
    which people are shown, have a mark for each; they count only where there are no tokens, and without these marks."""
    if guess.tokens:
        return [named_text(t, truth.vocabulary) for t in guess.tokens]
    return [re.sub(UNREAD, " ", text) for text in guess.texts]


def assign(scores: np.ndarray, references: Sequence[Hashable]) -> list[int]:
    """For each of the ``references`` (row of ``scores`` ``(references, recovered)``), the recovered text assigned to it, -1
    for none.

    One to one, with the greatest sum. Equal references share a recovered text: where a batch holds a text twice, its mean
    gradient is that of the text alone, so an attack that read it names it once.
    """
    number = {reference: row for row, reference in reversed(list(enumerate(references)))}
    rows, out = sorted(number.values()), dict.fromkeys(number.values(), -1)
    if scores.size:
        for row, column in zip(*linear_sum_assignment(-scores[rows])):
            out[rows[int(row)]] = int(column)
    return [out[number[reference]] for reference in references]


def paired(
    references: Sequence[str], recovered: Sequence[str], score: Callable[[str, str], float]
) -> list[tuple[float, int]]:
    """The score of each reference with the recovered text assigned to it, and that text's number (-1: none, score 0)."""
    table = np.array([[score(r, g) for g in recovered] for r in references]).reshape(len(references), len(recovered))
    return [(float(table[i, j]) if j >= 0 else 0.0, j) for i, j in enumerate(assign(table, references))]
