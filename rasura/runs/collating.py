"""Rows that keep their number through a collate function, and batches without rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rasura.core.errors import InputError
from rasura.runs.marks import marks

Collate = Callable[[list[Any]], Any]


class Numbered(Dataset[Any]):
    """Rows, each with its number."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.data[row], row

    def __getitems__(self, rows: list[int]) -> list[tuple[Any, int]]:
        """As the fetcher of a ``DataLoader`` asks, which gets all rows at once where the data set can give them."""
        several = getattr(self.data, "__getitems__", None)
        return list(zip([self.data[row] for row in rows] if several is None or not rows else several(rows), rows))


def numbering(loader: Any, masked: bool, entries: Mapping[str, Sequence[int] | None]) -> Collate:
    """The collate function of ``loader`` for rows of ``Numbered``. ``entries``: what a batch says of its rows beside their
    tensors, by name; one figure for each row of the data set, or None for the row's number. With figures, each batch is
    checked by ``check_order``. ``masked``: as ``with_mask``. A
    batch without rows has the tensors of the first row, with zero rows."""
    collate: Collate = loader.collate_fn
    return partial(_with_numbers, partial(with_mask, collate) if masked else collate, loader.dataset, entries)


def check_order(collate: Collate, rows: Sequence[Any], batch: Any = None) -> None:
    """Raises ``InputError`` where ``collate`` puts ``rows`` in an order of its own: they would be taken for other persons'
    rows. They are collated in both directions. ``batch``: what it makes of them as they are, if that is known."""
    one, other = collate(list(rows)) if batch is None else batch, collate(list(rows)[::-1])
    if not isinstance(one, Mapping) or not isinstance(other, Mapping):
        return  # refused at the first batch
    first, second = marks(one, len(rows)), marks(other, len(rows))
    for name in first.keys() & second.keys():
        a, b = first[name], second[name].flip(0)
        if not torch.equal(a, b) and torch.equal(a.sort().values, b.sort().values):
            raise InputError(
                f"the collate function changes the order of the rows ({name}), so they would count for other persons than "
                "those who wrote them; keep the order in which it gets them"
            )


def with_mask(collate: Collate, rows: list[Any]) -> Any:
    """The batch of ``rows`` by ``collate``. Where it holds no attention mask, and no row was padded, it gets one of ones, as
    the model would take it: without a mask it does not say that nothing was padded."""
    batch = collate(rows)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "attention_mask" in batch:
        return batch
    whole = all(isinstance(row, Mapping) and len(row.get("input_ids", ())) == ids.shape[1] for row in rows)
    return _with(batch, {"attention_mask": torch.ones_like(ids)}) if whole else batch


def _with_numbers(
    collate: Collate, data: Any, entries: Mapping[str, Sequence[int] | None], rows: list[tuple[Any, int]]
) -> Any:
    there = [row for row, _ in rows]
    batch = collate(there) if rows else _emptied(collate([data[0]]))
    if len(rows) > 1 and any(of is not None for of in entries.values()):
        check_order(collate, there, batch)
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch of {type(batch).__name__} cannot say which rows it holds; let the collate function "
            "return a dictionary")  # fmt: skip
    said = {n: [k if of is None else of[k] for _, k in rows] for n, of in entries.items()}
    return _with(batch, {n: torch.tensor(numbers, dtype=torch.long) for n, numbers in said.items()})


def _with(batch: Mapping[str, Any], entries: Mapping[str, Tensor]) -> Mapping[str, Any]:
    """A batch of the same kind with ``entries`` as well: loops use what their kind can do, such as ``batch.to(device)``."""
    if not isinstance(batch, MutableMapping):
        return {**batch, **entries}
    made = copy.copy(batch)
    made.update(entries)
    return made


def _emptied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return type(batch)({k: _emptied(v) for k, v in batch.items()})  # type: ignore[call-arg]  # a dict or its like
    if isinstance(batch, (list, tuple)):
        parts = [_emptied(v) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise InputError(f"a batch of {type(batch).__name__} cannot be made empty; let the collate function return tensors")
