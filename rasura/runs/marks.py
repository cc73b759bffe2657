"""Marks of a batch's rows: whether what is trained on is still what the loader handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Marks = Mapping[str, Tensor]
"""For each entry of a batch, a number for each row, ``(rows,)`` int64 in main memory."""


def marks(batch: Mapping[str, Any], rows: int) -> Marks:
    """A number for each row of every tensor of ``batch`` that has ``rows`` rows. Equal rows have equal marks, and others
    differ but for a chance of about 2 to the -60. Columns of zeros at the end count as none."""
    tensors = {n: t for n, t in batch.items() if isinstance(t, Tensor) and t.shape[:1] == (rows,)}
    return {n: _marks(t.detach()) for n, t in tensors.items()}


class Copies:
    """Texts that were seen in several rows, by what the model takes of them, without padding on either side."""

    def __init__(self) -> None:
        self.rows: dict[int, set[int]] = {}
        self.often: dict[int, int] = {}

    def seen(self, inputs: Mapping[str, Tensor], rows: Sequence[int]) -> tuple[int, int]:
        """How many texts were seen in several rows, with ``rows`` of the batch ``inputs``, and in how many at most."""
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        if ids is not None and ids.dim() == 2:
            whole = ids + 1  # so that no token is padding
            if mask is not None and mask.shape == ids.shape:
                there = mask != 0
                whole = (whole * there).gather(1, there.int().argsort(dim=1, descending=True, stable=True))  # padding last
            for row, mark in zip(rows, _marks(whole.detach()).tolist(), strict=True):
                theirs = self.rows.setdefault(mark, set())
                theirs.add(row)
                if len(theirs) > 1:
                    self.often[mark] = len(theirs)
        return len(self.often), max(self.often.values(), default=0)


def texts_of(data: Any, collate: Callable[[list[Any]], Any]) -> Iterator[int | None]:
    """For each row of ``data`` a number of its text, equal where its tokens are equal without padding; None for a row that
    shows no tokens, neither itself nor as a batch of ``collate``."""
    for row in (data[k] for k in range(len(data))) if hasattr(data, "__len__") else data:
        shown = row if isinstance(row, Mapping) and "input_ids" in row else collate([row])
        if not isinstance(shown, Mapping) or "input_ids" not in shown:
            yield None
            continue
        ids, mask = (torch.as_tensor(shown.get(n, ())).reshape(-1) for n in ("input_ids", "attention_mask"))
        yield int(_marks((ids[mask != 0] if mask.shape == ids.shape else ids)[None] + 1))


def changed(before: Marks, order: Sequence[int], batch: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """The first entry of ``batch`` that has other values than were handed out, and the first such row; None if there is
    none. ``order``: which row of ``before`` each row of ``batch`` is. Entries of ``before`` alone are not compared.

    An entry under a new name needs the values of some entry that was handed out, zeros or ones throughout, or those of
    another entry of ``batch`` with -100 wherever its attention mask is 0, as labels of a language model.
    """
    handed = {name: mark[list(order)] for name, mark in before.items()}
    now = marks(batch, len(order))
    for name, values in batch.items():
        found = now.get(name)
        if name not in handed and (_plain(values) or _ignoring(values, batch, handed)):
            continue
        known = [handed[name]] if name in handed else list(handed.values())
        differs = [torch.ones(1) if found is None else found != one for one in known] or [torch.ones(1)]
        if all(bool(one.any()) for one in differs):
            return name, int(min(differs, key=lambda one: int((one != 0).sum())).nonzero()[0])
    return None


def _plain(values: Tensor) -> bool:
    return not values.numel() or bool((values == 0).all()) or bool((values == 1).all())


def _ignoring(values: Tensor, batch: Mapping[str, Tensor], handed: Marks) -> bool:
    """Whether ``values`` are those of an entry that was handed out, with -100 exactly where the attention mask, which was
    handed out too, is 0."""
    mask = batch.get("attention_mask")
    if mask is None or "attention_mask" not in handed or mask.shape != values.shape:
        return False
    there = [t for n, t in batch.items() if n in handed and t.shape == values.shape]
    return any(torch.equal(values, t.masked_fill(mask == 0, -100)) for t in there)


def _marks(values: Tensor) -> Tensor:
    rows = len(values)
    if not values.numel():
        return torch.zeros(rows, dtype=torch.int64)
    if values.is_floating_point() or values.is_complex():
        kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32}
        values = values.contiguous().view(kinds.get(values.element_size(), torch.int64))
    flat = values.reshape(rows, -1).to(torch.int64)
    return (flat * _weights(flat.shape[1], flat.device)).sum(1).cpu()


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers that look random, ``(count,)`` int64, by Steele et al. 2014 (SplitMix64); products wrap around."""
    z = torch.arange(1, count + 1, device=device) * -7046029254386353131
    z = (z ^ (z >> 30)) * -4658895280553007687
    z = (z ^ (z >> 27)) * -7723592293110705685
    return (z ^ (z >> 31)) | 1
