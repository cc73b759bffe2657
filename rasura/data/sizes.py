"""How long texts are before they are cut, and how large images before they are cropped and scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rasura.data.given_ids import with_usable_ids
from rasura.data.images import ImageExample
from rasura.data.text import Example, place_of


def text_sizes(examples: Sequence[Example], tokenizer: Any, longest: int) -> list[tuple[int, int]]:
    """For each of ``examples`` how many tokens, those of the model's frame included, are left of it if it is cut to
    ``longest``, and how many it has."""
    examples = with_usable_ids(examples, place_of, tokenizer)
    paired = any(e.text_pair for e in examples)
    second = [e.text_pair or "" for e in examples] if paired else None
    rows = tokenizer([e.text for e in examples], second, verbose=False)["input_ids"]  # or it warns of long texts
    whole = [len(row if e.input_ids is None else e.input_ids) for e, row in zip(examples, rows, strict=True)]
    return [(min(n, longest), n) for n in whole]


def image_sizes(examples: Sequence[ImageExample], size: int) -> list[tuple[int, int]]:
    """For each of ``examples`` its pixels a side as the model takes it, and before: of a side that differs, if any."""
    return [(size, next((n for n in e.pixels.shape[1:] if n != size), size)) for e in examples]
