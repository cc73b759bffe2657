"""Private texts and images in the form that models take. This module imports nothing else from the package."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Private texts in the form that the model takes.

    ``input_ids``, ``attention_mask`` (0/1) and ``token_type_ids`` are ``(batch, length)`` int64. ``labels`` is ``(batch,)``
    for classification, ``(batch, length)`` with -100 where no loss is taken for a causal model. ``texts`` are the texts as
    given; ``seen`` are the decoded ids without special tokens, the most that an attack could recover.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    texts: tuple[str, ...]
    seen: tuple[str, ...]
    token_type_ids: Tensor | None = None
    special_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.input_ids.dim() != 2 or self.input_ids.shape != self.attention_mask.shape:
            raise ValueError(
                f"input_ids {tuple(self.input_ids.shape)} and attention_mask {tuple(self.attention_mask.shape)} "
                "must both be (batch, length)"
            )
        if len(self.texts) != len(self.input_ids) or len(self.seen) != len(self.input_ids):
            raise ValueError(f"{len(self.input_ids)} rows of ids, {len(self.texts)} texts and {len(self.seen)} seen texts")

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every text, special tokens included."""
        return tuple(int(n) for n in self.attention_mask.sum(1))

    def ids(self, row: int) -> tuple[int, ...]:
        """The ids of one text, special tokens included and padding left out."""
        return tuple(int(i) for i in self.input_ids[row][self.attention_mask[row].bool()])

    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of a Hugging Face model's forward."""
        out = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "labels": self.labels}
        if self.token_type_ids is not None:
            out["token_type_ids"] = self.token_type_ids
        return out

    def to(self, device: torch.device | str) -> Batch:
        """The same batch with its tensors on ``device``."""
        types = None if self.token_type_ids is None else self.token_type_ids.to(device)
        return Batch(
            self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device),
            self.texts, self.seen, types, self.special_ids,
        )  # fmt: skip

    def copied(self) -> Batch:
        """The same batch with tensors of its own."""
        types = None if self.token_type_ids is None else self.token_type_ids.clone()
        return Batch(
            self.input_ids.clone(), self.attention_mask.clone(), self.labels.clone(), self.texts, self.seen, types,
            self.special_ids,
        )  # fmt: skip


@dataclass(frozen=True)
class ImageBatch:
    """Private images in the form that the model takes.

    ``pixel_values`` is ``(batch, channels, height, width)`` in ``[0, 1]``, ``labels`` ``(batch,)`` int64; ``names`` say
    where each image came from.
    """

    pixel_values: Tensor
    labels: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.pixel_values.dim() != 4 or not len(self.pixel_values) == len(self.labels) == len(self.names):
            raise ValueError(
                f"pixel_values {tuple(self.pixel_values.shape)} must be (batch, channels, height, width), with a label "
                f"(found {len(self.labels)}) and a name (found {len(self.names)}) for each"
            )

    def __len__(self) -> int:
        return int(self.pixel_values.shape[0])

    def inputs(self) -> dict[str, Tensor]:
        """The keyword arguments of an image classifier's forward."""
        return {"pixel_values": self.pixel_values, "labels": self.labels}

    def to(self, device: torch.device | str) -> ImageBatch:
        """The same batch with its tensors on ``device``."""
        return ImageBatch(self.pixel_values.to(device), self.labels.to(device), self.names)

    def copied(self) -> ImageBatch:
        """The same batch with tensors of its own."""
        return ImageBatch(self.pixel_values.clone(), self.labels.clone(), self.names)


def contents(batch: Batch | ImageBatch, labels: bool = False) -> list[Hashable]:
    """What the model sees of each text or image of an encoded batch; with ``labels``, what it is asked about them, too.

    Texts that differ only in what the tokenizer drops, or in what was cut, are equal. Every count of different texts rests
    on this.
    """
    found: list[Hashable]
    if isinstance(batch, ImageBatch):
        found = [one.numpy().tobytes() for one in batch.pixel_values]
    else:
        parts = [batch.input_ids] if batch.token_type_ids is None else [batch.input_ids, batch.token_type_ids]
        kept = [mask.bool() for mask in batch.attention_mask]
        found = [tuple(tuple(part[k][some].tolist()) for part in parts) for k, some in enumerate(kept)]
    if not labels or batch.labels.dim() == 2:  # the labels of a causal model are its tokens
        return found
    return [(one, int(label)) for one, label in zip(found, batch.labels)]


def places_of_each(found: Iterable[Hashable], known: Iterable[Hashable] = ()) -> list[int]:
    """The places of what is new in ``found``: neither among ``known``, nor earlier in ``found``."""
    seen, out = set(known), []
    for place, one in enumerate(found):
        if one not in seen:
            seen.add(one)
            out.append(place)
    return out
