"""Vectors of tokens: a model's own table, or a file in the format of GloVe."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.values import Vocabulary


def glove(path: str | Path, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The vectors of a text file, a word and its numbers a line: ``(vocabulary, width)`` float32, and which tokens have one.

    A token is looked up by its text, as it is and in lower case. Raises ``InputError`` for a file that cannot be read, lines
    of different widths, and a file that knows no token.
    """
    wanted: dict[str, list[int]] = {}
    for i in range(vocabulary.size):
        word = "" if i in vocabulary.wordless else vocabulary.decode([i]).strip()
        for form in {word, word.lower()} - {""}:
            wanted.setdefault(form, []).append(i)
    found: dict[int, list[float]] = {}
    width = 0
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                fields = line.rstrip().split(" ")
                if number == 1 and len(fields) == 2:
                    continue  # word2vec states how many words and numbers there are
                width = width or len(fields) - 1
                # A few words hold blanks themselves: the numbers are counted from the right.
                word = " ".join(fields[: len(fields) - width])
                if not word or width < 1:
                    raise InputError(f"{path}, line {number}: {len(fields) - 1} numbers, expected {width} behind a word")
                if word in wanted:
                    vector = [float(x) for x in fields[len(fields) - width :]]
                    for i in wanted[word]:
                        found.setdefault(i, vector)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read as word vectors ({error}); expected a word and its numbers a line"
        ) from None
    if not found:
        raise InputError(f"{path} holds no word of the model's vocabulary; expected vectors in the model's language")
    table, known = torch.zeros(vocabulary.size, width), torch.zeros(vocabulary.size, dtype=torch.bool)
    for i, vector in found.items():
        table[i], known[i] = torch.tensor(vector), True
    return table, known
