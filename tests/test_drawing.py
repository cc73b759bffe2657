"""Loaders that draw texts as a guarantee assumes: which rows, how many, and what account is kept of them."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from rasura.accounting import Draw, Ledger, Run
from rasura.core.errors import InputError
from rasura.core.restarted import restarted
from rasura.core.rng import generator, secret_generator
from rasura.runs.drawing import ROW, Batches, DrawnLoader
from rasura.runs.marks import Copies
from rasura.runs.private import protect_training

ROWS: Any = list(range(10, 34))


def drawn(loader: Any, *, poisson: bool = True) -> DrawnLoader:
    """The loader that a protected model trains with."""
    return DrawnLoader(loader, Ledger([], Run(24, 5, 3)), generator(0), poisson=poisson)


def test_shuffled_batches_hold_every_row_once() -> None:
    made = Batches(10, 4, generator(0), poisson=False)
    passes = [list(made) for _ in range(3)]
    for found in passes:
        assert [len(rows) for rows in found] == [4, 4, 2] and sorted(row for rows in found for row in rows) == list(
            range(10)
        )
    assert passes[0] != passes[1]
    assert (made.count, made.size, made.poisson, made.rate) == (10, 4, False, 0.4)


def test_poisson_batches_are_as_many_and_each_row_joins_by_chance() -> None:
    made = Batches(500, 50, generator(0), poisson=True)
    found = list(made)
    sizes = [len(rows) for rows in found]
    assert len(found) == len(made) == 10 and len(set(sizes)) > 3 and 400 < sum(sizes) < 600
    assert all(sorted(set(rows)) == sorted(rows) for rows in found) and len({row for rows in found for row in rows}) < 500


@pytest.mark.parametrize(
    ("count", "size", "batches", "rate"), [(10, 4, 3, 0.4), (8, 4, 2, 0.5), (3, 4, 1, 1.0), (1, 1, 1, 1)]
)
def test_a_pass_has_as_many_batches_as_its_rows_make(count: int, size: int, batches: int, rate: float) -> None:
    for poisson in (True, False):
        made = Batches(count, size, generator(0), poisson=poisson)
        assert len(made) == batches == len(list(made)) and made.rate == rate


def stacked(rows: list[int]) -> dict[str, Tensor]:
    return {"ids": torch.tensor(rows)}


def taken(loader: DrawnLoader, batch: dict[str, Tensor]) -> Draw:
    """The draw of a batch that is then released."""
    draw = loader.take(batch, batch[ROW].tolist())
    loader.release()
    return draw


def test_batches_are_taken_once_in_the_order_in_which_they_were_handed_out() -> None:
    loader = drawn(DataLoader(ROWS, 5, shuffle=True, collate_fn=stacked), poisson=False)
    handed = list(loader)
    assert [len(b["ids"]) for b in handed] == [5, 5, 5, 5, 4]
    assert sorted(torch.cat([b["ids"] for b in handed]).tolist()) == ROWS
    assert all(b["ids"].tolist() == [ROWS[k] for k in b[ROW].tolist()] for b in handed)
    with pytest.raises(
        InputError, match=r"^expected batch 1 of 5 of this pass, with 5 texts, and this is another one: each"
    ):
        taken(loader, handed[1])
    assert taken(loader, handed[0]) == Draw("disjoint", number=1)
    with pytest.raises(InputError, match="expected batch 2 of 5"):
        taken(loader, handed[0])
    part = iter(loader)
    again = next(part)
    assert torch.equal(again[ROW], handed[1][ROW]), "a pass that was left goes on where it was left"
    assert [b[ROW].tolist() for b in part] == [b[ROW].tolist() for b in handed[2:]]
    assert [taken(loader, b) for b in handed[1:]] == [Draw("disjoint", number=1)] * 4
    with pytest.raises(
        InputError, match=r"^this batch was not handed out in this pass.*use torch.no_grad\(\); to end early"
    ):
        taken(loader, handed[4])
    assert taken(loader, next(iter(loader))) == Draw("disjoint", number=2)


def test_a_pass_that_ended_without_one_of_its_batches_is_not_followed_by_another() -> None:
    loader = drawn(DataLoader(ROWS, 5, collate_fn=stacked), poisson=False)
    for k, batch in enumerate(loader):
        if k < 4:
            taken(loader, batch)
    for _ in range(2):
        with pytest.raises(
            InputError, match=r"^batch 5 of 5 of this pass, with 4 texts, was left out, and the pass has ended"
        ):
            next(iter(loader))
    assert taken(loader, batch).number == 1
    assert [taken(loader, b).number for b in loader] == [2] * 5


def test_a_poisson_draw_tells_its_rate_and_an_empty_batch_is_not_passed_over() -> None:
    loader = drawn(DataLoader(ROWS, 1, collate_fn=stacked))
    handed = list(loader)
    sizes = [len(b["ids"]) for b in handed]
    assert len(sizes) == 24 and sizes.count(0) > 1 and sum(sizes) > 0
    first, full = sizes.index(0), next(k for k, n in enumerate(sizes) if n and 0 in sizes[:k])
    for batch in handed[:first]:
        taken(loader, batch)
    with pytest.raises(InputError, match="with 0 texts, and this is another one"):
        taken(loader, handed[full])
    for batch in handed[first:]:
        assert taken(loader, batch) == Draw("poisson", 1 / 24)
    with pytest.raises(InputError, match="was not handed out in this pass"):
        taken(loader, handed[0])


class Endless(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[int]:
        return iter(ROWS)

    def __len__(self) -> int:
        return len(ROWS)


class Lengthless:
    def __getitem__(self, row: int) -> int:
        return ROWS[row]


NO_SIZE = (
    r"^the loader has no batch size, or its data set has no length; both are needed to draw texts. Pass a DataLoader over a "
    r"list or a map-style data set$"
)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(ROWS, None),
        DataLoader(Endless(), 2),
        DataLoader(Lengthless(), 2, sampler=SequentialSampler(ROWS)),  # type: ignore[arg-type]
        DataLoader(ROWS[:0], 2),
    ],
    ids=["no size", "a stream", "no length", "nothing"],
)
def test_what_has_no_size_or_no_length_is_not_drawn_from(loader: Any) -> None:
    with pytest.raises(InputError, match=NO_SIZE):
        drawn(loader)


def test_the_loader_keeps_what_the_given_one_does_besides_drawing() -> None:
    def doubled(rows: list[int]) -> dict[str, Tensor]:
        return {"ids": 2 * torch.tensor(rows)}

    given: DataLoader[Any] = DataLoader(ROWS, 24, collate_fn=doubled, num_workers=1, pin_memory=True)
    loader = drawn(given, poisson=False)
    assert loader.num_workers == 1 and loader.pin_memory and loader.dataset.data is ROWS  # type: ignore[attr-defined]  # of Numbered
    (batch,) = drawn(DataLoader(ROWS, 24, collate_fn=doubled), poisson=False)
    assert sorted(batch["ids"].tolist()) == [2 * row for row in ROWS]


Pair = namedtuple("Pair", "ids, more")


def test_an_empty_batch_is_of_the_same_make_without_rows() -> None:
    def made(rows: list[int]) -> dict[str, Any]:
        ids = torch.tensor(rows)
        return {"ids": ids, "all": [ids, (ids, ids[:, None].expand(-1, rows[0]))], "pair": Pair(ids, more=[ids])}

    loader = drawn(DataLoader(ROWS, 1, collate_fn=made))
    empty = next(b for b in loader if not len(b["ids"]))
    assert type(empty) is dict and type(empty["all"]) is list and type(empty["all"][1]) is tuple
    assert empty["ids"].shape == empty["all"][0].shape == (0,) and empty["all"][1][1].shape == (0, 10), "as of the first row"
    assert empty["ids"].dtype == torch.int64
    assert type(empty["pair"]) is Pair and len(empty["pair"].ids) == len(empty["pair"].more[0]) == 0


def test_a_batch_that_cannot_be_made_empty_is_refused() -> None:
    loader = drawn(DataLoader(ROWS, 1, collate_fn=lambda rows: str(rows)))
    with pytest.raises(InputError, match=r"^a batch of str cannot be made empty; let the collate function return tensors$"):
        list(loader)


class Drawing:
    """Rows in which each of the three libraries draws a number, and a collate function that draws another."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> list[float]:
        return [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002

    @staticmethod
    def collated(rows: list[list[float]]) -> dict[str, Tensor]:
        return {"drawn": torch.tensor(rows), "mask": torch.bernoulli(torch.full((len(rows), 40), 0.5))}


def draws(workers: int, seed: int | None = None) -> Tensor:
    """What is drawn for 24 rows in one pass, after the seed that a Trainer sets; sorted, since the order is by chance."""
    for start in (torch.manual_seed, np.random.seed, random.seed):
        start(42)
    given = DataLoader[Any](Drawing(), 24, collate_fn=Drawing.collated, num_workers=workers)  # type: ignore[arg-type]
    rng = secret_generator() if seed is None else generator(seed)
    (batch,) = DrawnLoader(given, Ledger([], Run(24, 24, 3)), rng, poisson=False)
    return torch.cat([batch["drawn"], batch["mask"]], 1)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_drawn_for_a_batch_does_not_follow_from_a_seed_that_is_known(workers: int) -> None:
    """If it did, one text more would change the numbers of all after it, and the sum by more than a clip."""
    one, other = draws(workers), draws(workers)
    assert not (one == other)[:, :3].any() and not torch.equal(one[:, 3:], other[:, 3:])
    assert torch.equal(draws(workers, seed=3), draws(workers, seed=3)), "of a seeded training all follows from its seed"
    assert not torch.equal(draws(workers, seed=3), draws(workers, seed=4))


@pytest.mark.parametrize("seed", [None, 0])
def test_each_batch_draws_anew_and_leaves_the_generators_as_they_were(seed: int | None) -> None:
    given = DataLoader[Any](Drawing(), 8, collate_fn=Drawing.collated)  # type: ignore[arg-type]
    rng = secret_generator() if seed is None else generator(seed)
    loader = DrawnLoader(given, Ledger([], Run(24, 8, 3)), rng, poisson=False)
    before = np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]  # of NumPy, a tuple by default  # noqa: NPY002
    found = {tuple(batch["mask"].reshape(-1).tolist()) for batch in [*loader, *loader]}
    assert len(found) == 6 and (np.random.get_state()[1].tolist(), random.getstate()) == before  # type: ignore[index]  # noqa: NPY002


def test_generators_start_from_the_whole_seed_and_go_on_as_before() -> None:
    before = torch.get_rng_state()
    with restarted(b"a"):
        one = torch.rand(2000), np.random.rand(2000), [random.random() for _ in range(2000)]  # noqa: NPY002
        normal = torch.randn(2000)
    with pytest.raises(ArithmeticError), restarted(b"a"):
        assert (
            torch.equal(torch.rand(2000), one[0]) and (np.random.rand(2000) == one[1]).all() and random.random() == one[2][0]  # noqa: NPY002
        )
        raise ArithmeticError
    assert torch.equal(torch.get_rng_state(), before)
    for drawn in (*map(torch.as_tensor, one), (1 + torch.erf(normal / 2**0.5)) / 2):  # uniform, as the seed's bits are
        assert torch.histc(drawn.double(), 10, 0, 1).min() > 150
    # PyTorch's own seed has 32 bits.
    words = torch.Generator().set_state(torch.get_rng_state())
    with restarted(b"b"):
        started = torch.get_rng_state()
        assert not torch.equal(words.manual_seed(torch.initial_seed()).get_state(), started)


class OwnGenerator:
    """A collate function with a generator of its own, as those of transformers with ``seed=``."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(42)

    def __call__(self, rows: list[int]) -> dict[str, Tensor]:
        return {"ids": torch.tensor(rows), "mask": torch.rand(len(rows), 8, generator=self.generator)}


@pytest.mark.parametrize("defense", ["dp-sgd:1.0", "dp-ftrl:1.0/band=2", "directional:10"])
def test_a_collate_function_with_a_generator_of_its_own_is_refused(defense: str) -> None:
    pytest.importorskip("dp_accounting")
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"two different batches of the same rows and one seed \(mask\)"):
        protect_training(model, None, DataLoader(ROWS, 5, collate_fn=OwnGenerator()), defense)


def test_a_copy_is_one_however_much_padding_is_on_either_side() -> None:
    found = Copies()
    for row, (left, right) in enumerate([(0, 0), (2, 0), (0, 3), (1, 1)]):
        ids = torch.tensor([[0] * left + [5, 0, 6] + [0] * right, [0] * left + [5, 6, 0] + [0] * right])
        mask = torch.tensor([[0] * left + [1, 1, 1] + [0] * right] * 2)
        told = found.seen({"input_ids": ids, "attention_mask": mask}, [2 * row, 2 * row + 1])
    assert told == (2, 4)
