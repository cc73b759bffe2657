"""The facts of a public tokenizer. This module imports nothing else from the package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

UNREADABLE = "·"
"""Stands in a text for a token that the tokenizer puts in place of what it does not know."""


@dataclass(frozen=True)
class Vocabulary:
    """The facts of the public tokenizer: sizes, special ids, and how ids become text.

    ``prefix`` and ``suffix`` are the ids that the tokenizer puts around each text (BERT: ``[CLS]`` and ``[SEP]``).
    ``control_ids`` are special to the tokenizer too, but stand at none of its named places (SmolLM2: ``<file_sep>``).
    ``unknown_ids`` stand for words of the text which the tokenizer does not know: special ids (BERT: ``[UNK]``), and rows of
    the model's embedding that the tokenizer has no token for.
    """

    size: int
    decode: Callable[[Sequence[int]], str]
    encode: Callable[[str], list[int]]
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    pad_id: int | None = None
    special_ids: frozenset[int] = frozenset()
    unused_ids: frozenset[int] = frozenset()
    unknown_ids: frozenset[int] = frozenset()
    control_ids: frozenset[int] = frozenset()

    @property
    def marks(self) -> frozenset[int]:
        """Special and control ids. They belong to the form of a text, so no protection of its words replaces them."""
        return self.special_ids | self.control_ids

    @property
    def wordless(self) -> frozenset[int]:
        """The ids that stand for no word, and must not be put in the place of one: marks, and unused ids."""
        return self.marks | self.unused_ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of ``ids`` without special and out-of-range ids, with ``UNREADABLE`` for unknown words."""
        return readable(
            [i for i in ids if 0 <= i < self.size], self.decode, self.special_ids - self.unknown_ids, self.unknown_ids
        )  # fmt: skip


NO_TEXT = Vocabulary(0, decode=lambda ids: "", encode=lambda text: [])
"""The vocabulary of a step on images."""


PROBED = 256
"""Tokens that ``tokenizer_digest`` joins into one text."""

ACCENTS = str.maketrans("aeiou", "\u00e1\u00e9\u00ed\u00f3\u00fa")
UNUSUAL = "\ufb01ne \u2083\uff13 \u65e5\u672c\u8a9e a\u200bb\u0000c  d\te\n\nf \U0001f600 1234567 don't"
"""Characters that tokenizers clean, split or join in different ways."""


@lru_cache(maxsize=8)
def tokenizer_digest(vocabulary: Vocabulary) -> str:
    """Sixteen hex digits that tell a tokenizer from others by what it does, since its file differs between versions of a
    library: the text of every token, the tokens of these texts in a row, as they are, capitalized and with accents, those of
    unusual characters, and the special tokens."""
    v = vocabulary
    words = [v.decode([i]) for i in range(v.size)]
    rows = [" ".join(words[k : k + PROBED]) for k in range(0, v.size, PROBED)]
    read = [v.encode(text) for row in rows for text in (row, row.title(), row.translate(ACCENTS))]
    frame = (v.prefix, v.suffix, v.pad_id, *(sorted(some) for some in (v.special_ids, v.unused_ids, v.unknown_ids)))
    return hashlib.sha256(json.dumps([words, read, v.encode(UNUSUAL), frame]).encode()).hexdigest()[:16]


def readable(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], left_out: Collection[int], unknown: Collection[int]
) -> str:
    """The text of ``ids`` without those ``left_out``, with ``UNREADABLE`` for each that is ``unknown``."""
    runs = [(one, list(some)) for one, some in groupby((i for i in ids if i not in left_out), key=lambda i: i in unknown)]
    if not any(one for one, _ in runs):
        return decode([i for _, some in runs for i in some])
    return " ".join(" ".join(UNREADABLE for _ in some) if one else decode(some).strip() for one, some in runs)


def unknown_ids(tokenizer: Any) -> frozenset[int]:
    """The ids with which a Hugging Face ``tokenizer`` stands for what it does not know; none where it has no token for that
    alone (GPT-2 ends its texts with the same)."""
    names = ("pad", "bos", "eos", "cls", "sep", "mask")
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in names}
    return frozenset({tokenizer.unk_token_id} - others - {None})
