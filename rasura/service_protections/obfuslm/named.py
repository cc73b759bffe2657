"""The token ids that a model's configurations name: public in the served folder, so they must mean the same there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from rasura.core.interfaces import InputError

IDS = re.compile(r"_token_ids?$|_token_index$|suppress_tokens$|^padding_idx$|^(bad|force)_words_ids$")
"""Entries whose every number is a token's id."""


def named_ids(model: nn.Module) -> frozenset[int]:
    """Every id that the configurations of ``model`` name, also that of generation: what pads, begins or ends a text, and
    what an answer is forced to hold or kept from. Raises ``InputError`` for a watermark, which hangs on all ids."""
    told: list[Any] = [getattr(model, name, None) for name in ("config", "generation_config")]
    found = [one.to_dict() for one in told if hasattr(one, "to_dict")]
    if any(one.get("watermarking_config") for one in found):
        raise InputError(
            "the model's generation_config has a watermarking_config, which chooses words by their ids, and ObfusLM gives "
            "words other ids; remove it"
        )
    return frozenset(i for one in found for i in _named(one))


def _named(told: Mapping[Any, Any]) -> Iterator[int]:
    for name, value in told.items():
        if IDS.search(str(name)):
            yield from _whole(value)
        elif name == "forced_decoder_ids":  # each a place and an id
            yield from _whole([pair[1] for pair in value or ()])
        elif name == "sequence_bias":  # by ids, or each the ids and a number
            yield from _whole(list(value) if isinstance(value, Mapping) else [pair[0] for pair in value or ()])
        elif isinstance(value, Mapping):
            yield from _named(value)


def _whole(value: Any) -> Iterator[int]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        for one in value:
            yield from _whole(one)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value
