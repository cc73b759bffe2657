"""The column ``input_ids`` of a data file: tokens that a protection chose, or those of another tokenizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby, takewhile
from typing import Any, TypeVar, cast

from rasura.core.errors import InputError
from rasura.core.vocabulary import readable, unknown_ids

_LOG = logging.getLogger("rasura.data")

E = TypeVar("E")


def with_usable_ids(examples: Sequence[E], place_of: Callable[[Any, int], str], tokenizer: Any) -> list[E]:
    """``examples``, each read at its place, without ``input_ids`` where their text is to be tokenized.

    Ids are used where they decode to the text within the tokenizer's special tokens, as in a file of ``rasura protect``,
    whose text is that of the substitutes. Where they are the tokenizer's own for the text, this makes no difference. A log
    line says once for each file that others are not used. Raises ``InputError`` for ids outside the model's, and for
    padding, which would count as text.
    """
    found: list[E] = []
    paired = any(one.text_pair for one in cast(Any, examples))
    for number, one in enumerate(examples, 1):
        example: Any = one
        if example.input_ids is not None and not _usable(example, place_of(example, number), tokenizer, paired):
            example = replace(example, input_ids=None, token_type_ids=None)
        found.append(example)
    return found


def _usable(example: Any, place: str, tokenizer: Any, paired: bool) -> bool:
    ids, pad = list(example.input_ids), tokenizer.pad_token_id
    if not all(0 <= i < len(tokenizer) for i in ids):
        raise InputError(f"{place}: input_ids outside the model's 0 .. {len(tokenizer) - 1}")
    own = list(tokenizer(example.text, example.text_pair or None, verbose=False)["input_ids"])
    if ids == own:  # among pairs, the tokenizer would put an empty second text beside one alone
        return paired and not example.text_pair
    special = frozenset(tokenizer.all_special_ids) - unknown_ids(tokenizer)
    ends = [(_start(ids[::way], special), _start(own[::way], special)) for way in (1, -1)]
    if any(end.count(pad) > usual.count(pad) for end, usual in ends):
        raise InputError(
            f"{place}: input_ids are padded (token {pad}), and padding would count as text; remove the column input_ids, or "
            "write it without padding"
        )
    if all(end == usual for end, usual in ends):
        decoded = _decoded(ids, tokenizer, special, example.text_pair is not None)
        if _letters(decoded) == _letters(example.text + (example.text_pair or "")):
            return True
    _tell(example.source or place, str(tokenizer.name_or_path))
    return False


def _start(ids: Sequence[int], special: frozenset[int]) -> list[int]:
    return list(takewhile(special.__contains__, ids))


def _decoded(ids: Sequence[int], tokenizer: Any, special: frozenset[int], paired: bool) -> str:
    """The text of ``ids`` as a protection writes it; of a pair, each text for itself."""
    runs = [list(run) for known, run in groupby(ids, special.__contains__) if not known] if paired else [list(ids)]
    unknown = unknown_ids(tokenizer)
    return " ".join(readable(run, lambda some: str(tokenizer.decode(list(some))), special, unknown) for run in runs)


def _letters(text: str) -> str:
    """``text`` without space, which files and tokenizers change."""
    return "".join(text.split())


@cache
def _tell(source: str, tokenizer: str) -> None:
    _LOG.warning(
        f"{source}: the column input_ids holds other tokens than those of the text for the model's tokenizer; in such rows "
        "they are not read, and the text is tokenized"
    )
