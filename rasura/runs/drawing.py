"""Loaders that draw texts as a guarantee assumes, and record their draws.

Each batch can be released once: the protected model takes its draw from here, so a batch from elsewhere, or a batch that is
used twice, is not counted as a random draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from rasura.accounting import Draw, Ledger
from rasura.core.errors import InputError
from rasura.core.rng import Randomness, permutation
from rasura.victims.batching import drawn


class Batches:
    """The row numbers of an epoch's batches. ``poisson``: each row joins each batch at random, in as many batches as with
    ``size`` rows per batch. Otherwise all rows in random order, ``size`` at a time; the order does not depend on the
    texts."""

    def __init__(self, count: int, size: int, rng: Randomness, *, poisson: bool) -> None:
        self.count, self.size, self.rng, self.poisson = count, size, rng, poisson
        self.sizes: deque[int] = deque()

    def __len__(self) -> int:
        return -(-self.count // self.size)

    @property
    def rate(self) -> float:
        """The probability that a row is in a batch."""
        return min(1.0, self.size / self.count)

    def __iter__(self) -> Iterator[list[int]]:
        if self.poisson:
            found = drawn(self.count, self.size, self.rng)
        else:
            order = permutation(self.count, self.rng).tolist()
            found = [order[start : start + self.size] for start in range(0, self.count, self.size)]
        for rows in found:
            self.sizes.append(len(rows))
            yield rows


class DrawnLoader(DataLoader[Any]):
    """A ``DataLoader`` that records how each batch was drawn. An empty batch has the tensors of the first row, with zero
    rows."""

    def __init__(self, loader: Any, ledger: Ledger, rng: Randomness, *, poisson: bool) -> None:
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
        collate: Callable[[list[Any]], Any] = loader.collate_fn

        def collated(rows: list[Any]) -> Any:
            return collate(rows) if rows else _emptied(collate([data[0]]))

        self.drawn = Batches(len(data), size, rng, poisson=poisson)
        self.ledger = ledger
        self.waiting: deque[tuple[int, Draw]] = deque()
        super().__init__(
            data, batch_sampler=self.drawn, collate_fn=collated, num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
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


def _emptied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return type(batch)({k: _emptied(v) for k, v in batch.items()})  # type: ignore[call-arg]  # a dict or its like
    if isinstance(batch, (list, tuple)):
        parts = [_emptied(v) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise InputError(f"a batch of {type(batch).__name__} cannot be made empty; let the collate function return tensors")
