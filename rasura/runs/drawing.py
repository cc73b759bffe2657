"""Loaders that draw texts as a guarantee assumes, and record their draws.

Each batch can be released once: the protected model takes its draw from here, so a batch from elsewhere, or a batch that is
used twice, is not counted as a random draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from rasura.accounting import Draw, Ledger
from rasura.core.errors import InputError
from rasura.core.rng import Randomness, permutation
from rasura.victims.batching import by_person, drawn
from rasura.victims.fixed_order import FixedOrder

OWNER = "rasura_owner"
"""The entry of a batch that says whose each row is, ``(rows,)`` int64."""

ROW = "rasura_row"
"""The entry of a batch in a fixed order that says which rows of the data set it holds, ``(rows,)`` int64."""


class Batches:
    """The row numbers of an epoch's batches. ``poisson``: each row joins each batch at random, in as many batches as with
    ``size`` rows per batch. Otherwise all rows in random order, ``size`` at a time; the order does not depend on the
    texts. ``owners``: the number of the person of each row; ``count`` persons are drawn, each with all of their rows."""

    def __init__(
        self, count: int, size: int, rng: Randomness, *, poisson: bool, owners: Sequence[int] | None = None
    ) -> None:
        self.count, self.size, self.rng, self.poisson = count, size, rng, poisson
        self.rows = None if owners is None else by_person(owners)
        self.sizes: deque[int] = deque()

    def __len__(self) -> int:
        return -(-self.count // self.size)

    @property
    def rate(self) -> float:
        """The probability that a row, or a person, is in a batch."""
        return min(1.0, self.size / self.count)

    def __iter__(self) -> Iterator[list[int]]:
        if self.poisson:
            found = drawn(self.count, self.size, self.rng)
        else:
            order = permutation(self.count, self.rng).tolist()
            found = [order[start : start + self.size] for start in range(0, self.count, self.size)]
        for some in found:
            rows = some if self.rows is None else [row for owner in some for row in self.rows[owner]]
            self.sizes.append(len(rows))
            yield rows


class DrawnLoader(DataLoader[Any]):
    """A ``DataLoader`` that records how each batch was drawn. An empty batch has the tensors of the first row, with zero
    rows. ``owners``: the number of the person of each row, who are then drawn; each batch says at ``OWNER`` whose its rows
    are. ``masked``: as ``with_mask``."""

    def __init__(
        self, loader: Any, ledger: Ledger, rng: Randomness, *, poisson: bool, owners: Sequence[int] | None = None,
        masked: bool = False,
    ) -> None:  # fmt: skip
        data, size = checked_loader(loader)
        collate = _collating(loader, masked)

        def collated(rows: list[Any]) -> Any:
            return collate(rows) if rows else _emptied(collate([data[0]]))

        count = len(data) if owners is None else len(set(owners))
        self.drawn = Batches(count, size, rng, poisson=poisson, owners=owners)
        self.ledger = ledger
        self.waiting: deque[tuple[int, Draw]] = deque()
        super().__init__(
            data if owners is None else _Numbered(data, owners), batch_sampler=self.drawn,
            collate_fn=collated if owners is None else partial(_with_numbers, collated, OWNER),
            num_workers=loader.num_workers, pin_memory=loader.pin_memory,
        )  # fmt: skip

    def __iter__(self) -> Any:
        number = self.ledger.begin()
        self.waiting.clear()
        self.drawn.sizes.clear()
        draw = Draw("poisson", self.drawn.rate) if self.drawn.poisson else Draw("disjoint", number=number)
        for batch in super().__iter__():
            self.waiting.append((self.drawn.sizes.popleft(), draw))
            yield batch

    def take(self, rows: int) -> Draw:
        """The draw of the earliest batch of ``rows`` texts that was handed out and not released yet.

        Raises ``InputError`` if there is none, and if an empty batch was skipped: a missing release would reveal that the
        batch was empty.
        """
        sizes = [size for size, _ in self.waiting]
        if rows not in sizes:
            raise InputError(
                f"no batch of {rows} texts is waiting: use each batch of the loader that protect_training "
                "returned for one backward pass; to evaluate, use torch.no_grad()"
            )
        place = sizes.index(rows)
        if 0 in sizes[:place]:
            raise InputError("an empty batch was skipped; run its backward pass as well: its noise hides that it was empty")
        draw = self.waiting[place][1]
        for _ in range(place + 1):
            self.waiting.popleft()
        return draw


class OrderedLoader(DataLoader[Any]):
    """A ``DataLoader`` whose passes are alike: the batches of ``order``, each of which says at ``ROW`` which rows it holds.

    A pass that is begun again after an interruption is refused. Only the next batch of the order can be released.
    ``masked``: as ``with_mask``.
    """

    def __init__(self, loader: Any, order: FixedOrder, *, masked: bool = False) -> None:
        data, _ = checked_loader(loader)
        self.order = order
        super().__init__(
            _Numbered(data, range(len(data))), batch_sampler=order.parts,
            collate_fn=partial(_with_numbers, _collating(loader, masked), ROW), num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
        )  # fmt: skip

    def __iter__(self) -> Any:
        made = self.order.ledger.releases % len(self.order.parts)
        if made:
            raise InputError(
                f"dp-ftrl: the pass before ended after {made} of its {len(self.order.parts)} batches, and a pass cannot be "
                "begun again. Use every batch of a pass; to end a training early, stop for good"
            )
        return super().__iter__()


class _Numbered(Dataset[Any]):
    """Rows, each with a number: its own, or that of the person whose it is."""

    def __init__(self, data: Any, numbers: Sequence[int]) -> None:
        self.data, self.numbers = data, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        return self.data[row], self.numbers[row]


def _collating(loader: Any, masked: bool) -> Callable[[list[Any]], Any]:
    collate: Callable[[list[Any]], Any] = loader.collate_fn
    return partial(with_mask, collate) if masked else collate


def with_mask(collate: Callable[[list[Any]], Any], rows: list[Any]) -> Any:
    """The batch of ``rows`` by ``collate``. Where it holds no attention mask, and no row was padded, it gets one of ones, as
    the model would take it: without a mask it does not say that nothing was padded."""
    batch = collate(rows)
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor) or ids.dim() != 2 or "attention_mask" in batch:
        return batch
    whole = all(isinstance(row, Mapping) and len(row.get("input_ids", ())) == ids.shape[1] for row in rows)
    return {**batch, "attention_mask": torch.ones_like(ids)} if whole else batch


def _with_numbers(collated: Callable[[list[Any]], Any], entry: str, rows: list[tuple[Any, int]]) -> dict[str, Any]:
    batch = collated([row for row, _ in rows])
    if not isinstance(batch, Mapping):
        what = "whose its rows are" if entry == OWNER else "which rows it holds"
        raise InputError(f"a batch of {type(batch).__name__} cannot say {what}; let the collate function "
            "return a dictionary")  # fmt: skip
    return {**batch, entry: torch.tensor([number for _, number in rows], dtype=torch.long)}


def checked_loader(loader: Any) -> tuple[Any, int]:
    """The data set and the batch size of ``loader``. Raises ``InputError`` where it chooses texts in a way of its own."""
    data, size = loader.dataset, loader.batch_size
    if size is None or isinstance(data, IterableDataset) or not hasattr(data, "__len__") or not len(data):
        raise InputError("the loader has no batch size, or its data set has no length; both are needed to "
            "draw texts. Pass a DataLoader over a list or a map-style data set")  # fmt: skip
    if not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        raise InputError(
            f"the loader chooses texts by a {type(loader.sampler).__name__}, for which no guarantee holds; "
            "pass a DataLoader over only the texts to train on (torch.utils.data.Subset)"
        )
    if isinstance(loader.sampler, RandomSampler) and loader.sampler.replacement:
        raise InputError("the loader draws texts with replacement, which no guarantee covers; pass replacement=False")
    return data, size


def numbered(unit: Sequence[str | int], count: int) -> list[int]:
    """The number of the person of each of ``count`` rows, from what ``unit`` calls them. Raises ``InputError`` for another
    number of entries, and for an entry that is not text or a whole number: such rows would pass for a person each."""
    if len(unit) != count:
        raise InputError(f"unit names the persons of {len(unit)} rows, but the data set has {count}")
    found: dict[str | int, int] = {}
    for row, name in enumerate(unit):
        if isinstance(name, bool) or not isinstance(name, (str, int)) or not str(name).strip():
            raise InputError(f"unit: row {row} has the person {name!r}; expected text or a whole number for every row")
        found.setdefault(name, len(found))
    return [found[name] for name in unit]


def _emptied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return type(batch)({k: _emptied(v) for k, v in batch.items()})  # type: ignore[call-arg]  # a dict or its like
    if isinstance(batch, (list, tuple)):
        parts = [_emptied(v) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise InputError(f"a batch of {type(batch).__name__} cannot be made empty; let the collate function return tensors")
