"""Batches of rows that say which they are, made under generators of their own; and batches without rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rasura.core.errors import InputError
from rasura.core.restarted import new_seed, restarted
from rasura.core.rng import Randomness, generator
from rasura.runs.marks import marks
from rasura.victims.unmasked import Alone

Collate = Callable[[list[Any]], Any]

ALONE = "rasura_alone"
"""The entry of a batch for its ``Alone``, until the loader hands it out."""

SOME = 8
"""Number of rows that are collated before the training, to refuse a data set or a collate function as early as possible."""


class Seeded:
    """The ``batches`` of row numbers, each with a new seed for what is drawn while it is fetched and collated. Seeds come
    from the operating system where ``rng`` does; otherwise from a stream of their own, of the seed of ``rng``."""

    def __init__(self, batches: Any, rng: Randomness) -> None:
        self.batches = batches
        self.rng = generator(rng.initial_seed(), "collate") if isinstance(rng, torch.Generator) else rng

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        for rows in self.batches:
            yield [new_seed(self.rng), rows]


class Collated(Dataset[Any]):
    """The batches of ``loader``, each by the pair of its seed and its rows (``Seeded``). ``entries``: what a batch says of
    its rows beside their tensors, by name; one figure for each row of the data set, or None for the row's number. With
    figures, each batch is checked by ``check_order``. ``masked``: as ``with_mask``. A batch without rows has the tensors of
    the first row, with zero rows.

    Rows are fetched and collated under generators that start from the seed. Were they to go on from batch to batch, or to
    start from a seed that is known, one text more would change what is drawn for the others.
    """

    def __init__(self, loader: Any, masked: bool, entries: Mapping[str, Sequence[int] | None]) -> None:
        self.data, self.entries = loader.dataset, entries
        self.collate: Collate = partial(with_mask, loader.collate_fn) if masked else loader.collate_fn

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, drawn: list[Any]) -> Any:
        """The whole batch, as the fetcher of a ``DataLoader`` asks."""
        seed, rows = drawn
        batch = self._made(seed, rows)
        if not isinstance(batch, Mapping):
            raise InputError(f"a batch of {type(batch).__name__} cannot say which rows it holds; let the collate function "
                "return a dictionary")  # fmt: skip
        said = {n: [k if of is None else of[k] for k in rows] for n, of in self.entries.items()}
        return _with(batch, {n: torch.tensor(numbers, dtype=torch.long) for n, numbers in said.items()})

    def _made(self, seed: bytes, rows: list[int]) -> Any:
        """What the collate function makes of ``rows``."""
        several = getattr(self.data, "__getitems__", None)
        with restarted(seed):
            if not rows:
                return _emptied(self.collate([self.data[0]]))
            there = [self.data[row] for row in rows] if several is None else list(several(rows))
            batch = self.collate(there)
            if len(rows) > 1 and any(of is not None for of in self.entries.values()):
                check_order(self.collate, there, batch)
            alone = shapes_alone(self.collate, there, batch) if len(rows) > 1 else {}
        return _with(batch, {ALONE: alone}) if alone else batch

    def check_seeds(self) -> None:
        """Raises ``InputError`` where the first rows become two batches under one seed: what is drawn then does not come
        from the generators that each batch restarts, or what was made before has a part in it."""
        rows = list(range(min(SOME, len(self))))
        first, second = self._made(b"", rows), self._made(b"", rows)
        if not isinstance(first, Mapping) or not isinstance(second, Mapping):
            return  # refused at the first batch
        one, other = marks(first, len(rows)), marks(second, len(rows))
        for name in one:
            if name not in other or not torch.equal(one[name], other[name]):
                raise InputError(
                    "the data set or the collate function made two different batches of the same rows and one seed "
                    f"({name}). It keeps something from batch to batch, or has a generator of its own, so one text more "
                    "would change others too. Let it draw from the generators of torch, numpy.random or random, which each "
                    "batch restarts (for a collate function of transformers, leave seed= out)"
                )


def shapes_alone(collate: Collate, rows: Sequence[Any], batch: Any) -> Alone:
    """The shapes of ``rows`` in which ``collate`` makes them alone, of each entry of ``batch`` in which one has another
    shape: it was padded to the length of others. None of a batch with an attention mask, which says what is padding."""
    if not isinstance(batch, Mapping) or "attention_mask" in batch:
        return {}
    names = [n for n, t in batch.items() if isinstance(t, Tensor) and t.dim() > 1 and len(t) == len(rows)]
    made = [collate([row]) for row in rows] if names else []
    shapes = {n: [tuple(one[n].shape[1:]) for one in made] for n in names}
    return {n: every for n, every in shapes.items() if any(shape != tuple(batch[n].shape[1:]) for shape in every)}


def as_it_is(batch: Any) -> Any:
    """``batch``, which is collated already."""
    return batch


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


def _with(batch: Mapping[str, Any], entries: Mapping[str, Any]) -> Mapping[str, Any]:
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
