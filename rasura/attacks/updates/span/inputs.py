"""The attention inputs that token ids would produce in the adversary's model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from rasura.core.exact import widened
from rasura.victims.models import Block, key_value_cache, layer_inputs, parts
from rasura.victims.positions import first_inputs, segment_types

ROWS = 4096
"""Most token positions that run through the model at once."""

ABREAST = 256
"""Most tokens that run at one place of one text, none of which sees another one."""

KEPT = 8192
"""Of how many tokens in all keys and values are kept."""

SAME = 1e-5
"""Relative difference of inputs by kept keys and values from those of a whole run that is rounding: float32 leaves 1e-6."""

FAILURES = (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError, NotImplementedError)
"""What a model raises that does not run in this way."""

Way = Callable[[Any, int, Tensor, Sequence[Block]], dict[int, Tensor]]
"""A cache of a head, its length, tokens ``(k,)`` behind it, and blocks -> the inputs of the blocks' attention,
``(k, hidden)``."""


class Inputs:
    """The attention inputs that token ids would produce in the adversary's model; with ``blocks``, the inputs of the layers
    that these name in place of queries, keys and values. Those of a model in half precision are given in float32."""

    def __init__(self, model: nn.Module, blocks: tuple[Block, ...] = ()) -> None:
        self.model = model
        self.parts = replace(parts(model), blocks=blocks) if blocks else parts(model)
        self._heads: dict[tuple[int, tuple[int, ...]], Any] = {}
        self._tried: dict[tuple[str, int, int], int] = {}  # up to how many tokens a way was right; 0 where it was not

    @cached_property
    def types(self) -> int:
        """How many segment types the model knows."""
        return segment_types(self.model)

    def first(self, tokens: Tensor, position: int, segment: int = 0) -> Tensor:
        """Inputs of block 0's attention for ``tokens`` ``(k,)`` at ``position``: ``(k, hidden)``."""
        return widened(first_inputs(self.model, tokens, position, segment))

    @torch.no_grad()
    def deep(self, ids: Tensor, mask: Tensor, blocks: Sequence[Block], types: Tensor | None = None) -> Mapping[int, Tensor]:
        """Inputs of the attention of ``blocks`` for sequences ``(k, length)``: block index -> ``(k, length, hidden)``."""
        extra = {} if types is None or self.types == 1 else {"token_type_ids": types}
        return self._into(blocks, input_ids=ids, attention_mask=mask, **extra)

    def _into(self, blocks: Sequence[Block], **given: Any) -> dict[int, Tensor]:
        """What goes into the attention of ``blocks`` when the model runs on ``given``."""
        modules = [b.qkv[0].module for b in sorted(blocks, key=lambda b: b.index)]
        found = layer_inputs(self.model, modules, **given)
        return {b.index: widened(found[b.qkv[0].module]) for b in blocks}

    @torch.no_grad()
    def following(self, head: Tensor, tokens: Tensor, blocks: Sequence[Block]) -> Mapping[int, Tensor]:
        """Inputs of the attention of ``blocks`` of a decoder for each of ``tokens`` ``(k,)`` behind the tokens ``head``
        ``(length,)``: block index -> ``(k, hidden)``.

        The head runs once where the model keeps its keys and values, and only its last token does where the head without
        it ran before. Whether that gives the same is tried first; where it does not, the head runs with every token.
        """
        for way in self._ways if len(head) and len(tokens) > 1 else []:
            found = self._behind(way, head, tokens, blocks)
            if found is not None:
                return found
        return _joined([self._rerun(head, chunk, blocks) for chunk in torch.split(tokens, max(1, ROWS // (len(head) + 1)))])

    def _behind(self, way: Way, head: Tensor, tokens: Tensor, blocks: Sequence[Block]) -> dict[int, Tensor] | None:
        """The same by ``way``; None where running the head again gives something else.

        The first and the last of the tokens are compared, once for so many behind a head of this length: where a layer sees
        the last tokens only, or all are more than the model takes, the last one shows it.
        """
        size = ABREAST if way == self._abreast else max(1, ROWS // (len(head) + 1))
        if way == self._abreast and not self._seen_whole(len(head) + min(size, len(tokens))):
            return None
        found: list[dict[int, Tensor]] = []
        behind = way.__name__, len(head), max(b.index for b in blocks)
        for chunk in torch.split(tokens, size):
            tried = self._tried.get(behind)
            try:
                one = None if tried == 0 else way(self._ran(head, blocks), len(head), chunk, blocks)
            except FAILURES:
                one = None
            if one is not None and len(chunk) > (tried or 0):
                ends = torch.tensor([0, len(chunk) - 1])
                again = self._rerun(head, chunk[ends], blocks)
                one = one if all(_same(one[index][ends], x) for index, x in again.items()) else None
            self._tried[behind] = 0 if one is None else max(tried or 0, len(chunk))
            if one is None:
                return None
            found.append(one)
        return _joined(found)

    def _rerun(self, head: Tensor, tokens: Tensor, blocks: Sequence[Block]) -> dict[int, Tensor]:
        whole = torch.cat([head.expand(len(tokens), -1), tokens[:, None]], 1)
        return {index: x[:, -1] for index, x in self.deep(whole, torch.ones_like(whole), blocks).items()}

    def _ran(self, head: Tensor, blocks: Sequence[Block]) -> Any:
        """The keys and values of ``head``, of the blocks below the last of ``blocks``."""
        last, whole = max(b.index for b in blocks), tuple(head.tolist())
        cache = self._heads.get((last, whole))
        if cache is None:
            before = self._heads.get((last, whole[:-1]))
            cache, new = (key_value_cache(self.model), head) if before is None else (copy.deepcopy(before), head[-1:])
            self._into(
                blocks,
                input_ids=new[None],
                past_key_values=cache,
                use_cache=True,
                attention_mask=torch.ones_like(head)[None],
            )
            self._heads[last, whole] = cache
            while sum(len(tokens) for _, tokens in self._heads) > KEPT and len(self._heads) > 1:
                self._heads.pop(next(iter(self._heads)))
        return cache

    def _abreast(self, cache: Any, place: int, tokens: Tensor, blocks: Sequence[Block]) -> dict[int, Tensor]:
        """All tokens at one place behind the head in one run, none of which sees another one. The keys do not tell the
        place: a run that ends before the first attention keeps none."""
        own = copy.deepcopy(cache)
        length, count = own.get_seq_length(), len(tokens)
        dtype = self.model.get_parameter(self.parts.word_embedding).dtype
        mask = torch.full((count, length + count), torch.finfo(dtype).min, dtype=dtype)
        mask[:, :length] = 0.0
        mask[:, length:].fill_diagonal_(0.0)
        found = self._into(
            blocks, input_ids=tokens[None], past_key_values=own, use_cache=True, attention_mask=mask[None, None],
            position_ids=torch.full_like(tokens, place)[None],
        )  # fmt: skip
        return {index: x[0] for index, x in found.items()}

    def _kept(self, cache: Any, place: int, tokens: Tensor, blocks: Sequence[Block]) -> dict[int, Tensor]:
        """Each token behind a copy of the head's keys and values."""
        own = copy.deepcopy(cache)
        length = own.get_seq_length() + 1
        own.batch_repeat_interleave(len(tokens))
        found = self._into(
            blocks, input_ids=tokens[:, None], past_key_values=own, use_cache=True,
            attention_mask=tokens.new_ones(len(tokens), length),
        )  # fmt: skip
        return {index: x[:, -1] for index, x in found.items()}

    def _seen_whole(self, length: int) -> bool:
        """Whether every layer sees all tokens of a text of ``length``, as far as the configuration says. A mask for tokens
        abreast knows nothing of layers that see the last tokens only."""
        config: Any = getattr(self.model, "config", None)
        text = config.get_text_config() if config is not None else None
        windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
        return all(window is None or length < window for window in windows)

    @cached_property
    def _ways(self) -> list[Way]:
        """The ways of running tokens behind keys and values that the model kept of a head, fastest first, which give the
        inputs that running the head again gives."""
        ids = torch.tensor([5, 6, 7, 8, 9]) % len(self.model.get_parameter(self.parts.word_embedding))
        head, tokens, blocks = ids[:3], ids[3:], self.parts.blocks[:3][-1:]
        again = self._rerun(head, tokens, blocks)[blocks[0].index]

        @torch.no_grad()
        def same(way: Way) -> bool:
            try:
                for n in range(1, len(head) + 1):
                    cache = self._ran(head[:n], blocks)
                found = way(cache, len(head), tokens, blocks)[blocks[0].index]
            except FAILURES:
                return False
            return _same(found, again)

        return [way for way in (self._abreast, self._kept) if same(way)]


def _same(found: Tensor, again: Tensor) -> bool:
    """Whether each row of ``found`` is that of ``again`` but for rounding."""
    return found.shape == again.shape and bool(((found - again).norm(dim=1) <= SAME * again.norm(dim=1)).all())


def _joined(chunks: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    return {index: torch.cat([chunk[index] for chunk in chunks]) for index in chunks[0]}
