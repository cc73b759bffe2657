"""Loaders that draw texts as a guarantee assumes, and record their draws.

Each batch can be released once, and in its turn: the protected model takes its draw from here. A batch from elsewhere, one
that is used twice, and one after a batch that was left out are refused: they would be counted as draws and are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from rasura.accounting import Draw, Ledger
from rasura.core.errors import InputError
from rasura.core.rng import Randomness, permutation
from rasura.data.columns import person
from rasura.runs.collating import ALONE, Collated, Seeded, as_it_is
from rasura.runs.marks import Copies, Marks, changed, marks
from rasura.victims.batching import by_person, drawn
from rasura.victims.fixed_order import FixedOrder
from rasura.victims.unmasked import Alone

OWNER = "rasura_owner"
"""The entry of a batch that says whose each row is, ``(rows,)`` int64."""

ROW = "rasura_row"
"""The entry of a batch that says which rows of the data set it holds, ``(rows,)`` int64."""

ONCE = (
    "each batch of the loader that protect_training returned gets one backward pass, whole, unchanged and in the order of "
    "the loader, whatever its loss is. None is left out, used twice or split (for the memory, pass physical_batch_size). To "
    "evaluate, use torch.no_grad(); to end early, stop for good"
)


class Handed(NamedTuple):
    """What a loader remembers of a batch: marks of its rows, and the shapes that they have alone."""

    marks: Marks
    alone: Alone


def handed_out(batch: Any) -> Handed:
    """What to remember of ``batch``. The shapes are taken out of it: they are not for the model."""
    alone = batch.pop(ALONE, {})
    return Handed(marks(batch, len(batch[ROW])), alone)


class Batches:
    """The row numbers of an epoch's batches. ``poisson``: each row joins each batch at random, in as many batches as with
    ``size`` rows per batch. Otherwise all rows in random order, ``size`` at a time; the order does not depend on the
    texts. ``owners``: the number of the person of each row; ``count`` persons are drawn, each with all of their rows."""

    def __init__(
        self, count: int, size: int, rng: Randomness, *, poisson: bool, owners: Sequence[int] | None = None
    ) -> None:
        self.count, self.size, self.rng, self.poisson = count, size, rng, poisson
        self.rows = None if owners is None else by_person(owners)

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
            yield some if self.rows is None else [row for owner in some for row in self.rows[owner]]


class Pass:
    """The batches of one pass, drawn when it begins. Each is the next one until it was released: a batch that was left out
    comes again, and none is drawn a second time. ``number``: of the pass, once texts were trained on in it."""

    def __init__(self, drawn: Batches) -> None:
        self.drawn, self.next = drawn, 0
        self.rows: list[list[int]] = []
        self.number: int | None = None
        self.handed: dict[int, Handed] = {}

    def begin(self) -> int:
        """The place of the next batch, in a new pass if all batches were released."""
        if not self.waiting:
            self.rows, self.next, self.number, self.handed = list(self.drawn), 0, None, {}
        return self.next

    def __len__(self) -> int:
        return len(self.drawn)

    def __iter__(self) -> Iterator[list[int]]:
        first = self.begin()
        yield from self.rows[first:]

    @property
    def waiting(self) -> int:
        """How many batches of the pass were not released."""
        return len(self.rows) - self.next


class DrawnLoader(DataLoader[Any]):
    """A ``DataLoader`` that records how each batch was drawn, and which rows are in it: a batch says so at ``ROW``. An empty
    batch has the tensors of the first row, with zero rows. ``owners``: the number of the person of each row, who are then
    drawn; each batch says at ``OWNER`` whose its rows are. ``masked``: as ``with_mask``.

    Only the next batch of a pass can be released, whole and as it was handed out. A pass that was left before its end goes
    on with the first batch that was not released.
    """

    def __init__(
        self, loader: Any, ledger: Ledger, rng: Randomness, *, poisson: bool, owners: Sequence[int] | None = None,
        masked: bool = False,
    ) -> None:  # fmt: skip
        data, size = checked_loader(loader)
        count = len(data) if owners is None else len(set(owners))
        self.drawn, self.ledger, self.owners = Batches(count, size, rng, poisson=poisson, owners=owners), ledger, owners
        self.turn = Pass(self.drawn)
        self.left_out, self.copies = False, Copies()
        self.alone: Alone = {}  # of the batch that was taken
        entries: dict[str, Sequence[int] | None] = {ROW: None, **({} if owners is None else {OWNER: owners})}
        made = Collated(loader, masked, entries)
        made.check_seeds()
        super().__init__(
            made, batch_sampler=Seeded(self.turn, rng), collate_fn=as_it_is,
            num_workers=loader.num_workers, pin_memory=loader.pin_memory,
        )  # fmt: skip

    def __iter__(self) -> Any:
        turn = self.turn
        if self.left_out and turn.waiting:
            raise InputError(
                f"{self._place()} texts, was left out, and the pass has ended. To go on, run the backward pass of that "
                f"batch: {ONCE}"
            )
        self.left_out = False
        first = turn.begin()
        for place, batch in enumerate(super().__iter__(), first):
            turn.handed[place] = handed_out(batch)
            yield batch
        self.left_out = turn.next > first  # the pass was trained on, not only looked at

    def take(self, inputs: Mapping[str, Tensor], rows: Sequence[int], owners: Sequence[int] | None = None) -> Draw:
        """The draw of the batch that holds ``rows`` of ``owners``, with the tensors ``inputs``. It stays the next one until
        ``release``.

        Raises ``InputError`` unless this is the next batch of the pass, whole and as it was handed out.
        """
        turn = self.turn
        handed = turn.handed.get(turn.next)
        if handed is None:
            raise InputError(
                f"this batch was not handed out in this pass by the loader itself, not by one made of it: {ONCE}"
            )
        drawn = turn.rows[turn.next]
        if sorted(rows) != sorted(drawn):
            raise InputError(f"expected {self._place()} texts, and this is another one: {ONCE}")
        if self.owners is not None and list(owners or ()) != [self.owners[row] for row in rows]:
            raise InputError(f"{OWNER} names other persons than those of the rows that were drawn; pass it on as it is")
        self.alone = checked_values(handed, drawn, rows, inputs)
        if self.owners is None:
            self.ledger.copies = max(self.ledger.copies, self.copies.seen(inputs, rows))
        if turn.number is None:
            turn.number = self.ledger.begin()
        return Draw("poisson", self.drawn.rate) if self.drawn.poisson else Draw("disjoint", number=turn.number)

    def release(self) -> None:
        """The batch of ``take`` was released; the one after it is the next."""
        self.turn.handed.pop(self.turn.next, None)
        self.turn.next += 1

    def _place(self) -> str:
        turn = self.turn
        return f"batch {turn.next + 1} of {len(turn.rows)} of this pass, with {len(turn.rows[turn.next])}"


class OrderedLoader(DataLoader[Any]):
    """A ``DataLoader`` whose passes are alike: the batches of ``order``, each of which says at ``ROW`` which rows it holds.

    A pass that is begun again after an interruption is refused. Only the next batch of the order can be released, as it was
    handed out. ``masked``: as ``with_mask``.
    """

    def __init__(self, loader: Any, order: FixedOrder, *, masked: bool = False) -> None:
        checked_loader(loader)
        self.order = order
        self.handed: dict[int, Handed] = {}
        self.copies = Copies()
        self.alone: Alone = {}  # of the batch that was taken
        made = Collated(loader, masked, {ROW: None})
        made.check_seeds()
        super().__init__(
            made, batch_sampler=Seeded(order.parts, order.rng), collate_fn=as_it_is,
            num_workers=loader.num_workers, pin_memory=loader.pin_memory,
        )  # fmt: skip

    def __iter__(self) -> Any:
        made = self.order.ledger.releases % len(self.order.parts)
        if made:
            raise InputError(
                f"dp-ftrl: the pass before ended after {made} of its {len(self.order.parts)} batches, and a pass cannot be "
                "begun again. Use every batch of a pass; to end a training early, stop for good"
            )
        return self._handed_out(super().__iter__())

    def _handed_out(self, batches: Iterator[Any]) -> Iterator[Any]:
        for place, batch in enumerate(batches):
            self.handed[place] = handed_out(batch)
            yield batch

    def take(self, inputs: Mapping[str, Tensor], rows: Sequence[int], owners: Sequence[int] | None = None) -> Draw:
        """The draw of the batch that holds ``rows``, with the tensors ``inputs``. Raises ``InputError`` unless it is the
        next one of the order, as it was handed out."""
        draw = self.order.take(rows)
        place = self.order.ledger.releases % len(self.order.parts)
        if place not in self.handed:
            raise InputError(f"dp-ftrl: this batch was not handed out by the loader: {ONCE}")
        self.alone = checked_values(self.handed[place], self.order.parts[place], rows, inputs)
        self.order.ledger.copies = max(self.order.ledger.copies, self.copies.seen(inputs, rows))
        return draw

    def release(self) -> None:
        """The ledger counts the turns of an order."""


def checked_values(handed: Handed, drawn: Sequence[int], rows: Sequence[int], inputs: Mapping[str, Tensor]) -> Alone:
    """The shapes that ``rows`` have alone. Raises ``InputError`` where an entry of ``inputs``, which holds them, is not as
    the batch was ``handed`` out that holds the rows ``drawn``."""
    places = {row: place for place, row in enumerate(drawn)}
    order = [places[row] for row in rows]
    found = changed(handed.marks, order, inputs)
    if found is not None:
        has = (
            "is not as the loader handed it out" if found[0] in handed.marks else "is in no batch that the loader handed out"
        )
        raise InputError(
            f"{found[0]} of row {rows[found[1]]} {has}. What a text becomes must depend on "
            "that text alone: change it in the data set or in the collate function"
        )
    return {name: [shapes[place] for place in order] for name, shapes in handed.alone.items()}


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
    """The number of the person of each of ``count`` rows, from what ``unit`` calls them; 7, "7" and " 7" are one. Raises
    ``InputError`` for another number of entries, and for an entry that is not text or a whole number: such rows would pass
    for a person each."""
    unit = unit.tolist() if isinstance(unit, np.ndarray | Tensor) else unit
    if len(unit) != count:
        raise InputError(f"unit names the persons of {len(unit)} rows, but the data set has {count}")
    found: dict[str, int] = {}
    for row, name in enumerate(unit):
        if isinstance(name, bool) or not isinstance(name, (str, int)) or not str(name).strip():
            raise InputError(f"unit: row {row} has the person {name!r}; expected text or a whole number for every row")
        found.setdefault(person(name), len(found))
    return [found[person(name)] for name in unit]
