"""What is counted as a draw is that draw: the same rows of the same persons with the same values, and none is left out."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from private_setting import DATA, Linear, collate
from torch import Tensor
from torch.utils.data import DataLoader, Subset
from transformers import BatchEncoding

import rasura
from rasura.core.errors import InputError
from rasura.runs.drawing import OWNER, ROW
from rasura.runs.marks import changed, marks
from rasura.testing.tiny import tiny

pytest.importorskip("dp_accounting")

FEATURES: Any = [{"features": torch.tensor([1.0 * k, 2.0, k % 5]), "labels": k % 2} for k in range(40)]
DEFENSES = ["dp-sgd:1.0", "directional:100"]


def stacked(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    return {
        "features": torch.stack([r["features"] for r in rows]), "labels": torch.tensor([r["labels"] for r in rows]),
    }  # fmt: skip


def linear(defense: str = "dp-sgd:1.0", size: int = 8, collate_fn: Any = stacked, **options: Any) -> Any:
    workers = options.pop("workers", 0)
    loader: Any = DataLoader(FEATURES, size, collate_fn=collate_fn, num_workers=workers)
    return rasura.protect_training(Linear(3), None, loader, defense, **{"epochs": 2, **options})


def refused(private: Any, batch: Any, words: str) -> None:
    before = private.ledger.state_dict()
    with pytest.raises(InputError, match=words):
        private.model(**batch).loss.backward()
    assert private.ledger.state_dict()["runs"] == before["runs"]


@pytest.mark.parametrize("defense", DEFENSES)
def test_rows_from_elsewhere_are_no_draw_though_they_are_as_many(defense: str) -> None:
    """Row 0 in every batch was counted as drawn by chance: 1.1 was said where 86 is true."""
    private = linear(defense)
    for batch in itertools.chain(private.loader, private.loader):
        rows = batch[ROW].tolist()
        if rows and 0 not in rows:
            other = stacked([FEATURES[0], *(FEATURES[k] for k in rows[1:])])
            refused(private, {**other, ROW: torch.tensor([0, *rows[1:]])}, "and this is another one")
            refused(private, {**other, ROW: batch[ROW]}, f"features of row {rows[0]} is not as the loader handed it out")
            refused(private, other, f"needs {ROW} in each batch")
        private.model(**batch).loss.backward()
    assert private.ledger.releases == 10


@pytest.mark.parametrize("defense", DEFENSES)
def test_a_batch_of_the_same_size_is_not_used_again(defense: str) -> None:
    private = linear(defense, 1)
    earlier: dict[int, Any] = {}
    seen = 0
    for batch in private.loader:
        size = len(batch[ROW])
        before = earlier.get(size, batch)
        if set(before[ROW].tolist()) != set(batch[ROW].tolist()):  # the same rows can be drawn again
            refused(private, before, "this is another one")
            seen += 1
        earlier[size] = batch
        private.model(**batch).loss.backward()
    assert private.ledger.releases == 40 and seen > 5


def test_persons_are_those_who_were_drawn() -> None:
    private = linear(size=2, unit=[k // 10 for k in range(40)])
    for batch in private.loader:
        rows = len(batch[ROW])
        if rows:
            refused(private, {**batch, OWNER: torch.arange(rows)}, f"{OWNER} names other persons than those of the rows")
            refused(private, {**batch, OWNER: batch[OWNER].flip(0) + 1}, f"{OWNER} names other persons")
        mixed = torch.randperm(rows)
        private.model(**{k: v[mixed] for k, v in batch.items()}).loss.backward()
    assert private.ledger.releases == 2


def test_a_collate_function_that_sorts_rows_is_refused_where_they_are_persons() -> None:
    """Rows got the numbers of other persons, so that one person's rows were clipped as several persons'."""

    def by_feature(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return stacked(sorted(rows, key=lambda r: -float(r["features"][2])))

    def masked(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        batch = stacked(rows)
        return {**batch, "features": batch["features"] * torch.rand(batch["features"].shape)}

    unit = [k // 2 for k in range(40)]
    for collate_fn in (by_feature, lambda rows: masked(sorted(rows, key=lambda r: r["labels"]))):
        with pytest.raises(InputError, match=r"changes the order of the rows \("):
            linear(unit=unit, collate_fn=collate_fn)
        linear(collate_fn=collate_fn)
    private = linear(unit=unit, collate_fn=masked)
    private.model(**next(iter(private.loader))).loss.backward()


def test_a_collate_function_that_sorts_some_batches_is_refused_there() -> None:
    """The first eight rows of the data set were alike, so that sorting them showed nothing."""

    def by_feature(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        return stacked(sorted(rows, key=lambda r: -float(r["features"][2])))

    rows: Any = [{**r, "features": r["features"] * torch.tensor([1.0, 1.0, k >= 8])} for k, r in enumerate(FEATURES)]
    loader: Any = DataLoader(rows, 4, collate_fn=by_feature)
    private = rasura.protect_training(Linear(3), None, loader, "dp-sgd:1.0", epochs=2, unit=[k // 10 for k in range(40)])
    with pytest.raises(InputError, match=r"changes the order of the rows \("):
        for batch in private.loader:
            private.model(**batch).loss.backward()


@pytest.mark.parametrize("defense", DEFENSES)
def test_no_batch_is_left_out_for_its_loss(defense: str) -> None:
    """Which steps were missing said who was there."""
    private = linear(defense)
    made = 0
    with pytest.raises(InputError, match="the batch before had no backward pass: its loss was computed"):
        for batch in private.loader:
            loss = private.model(**batch).loss
            if made == 2:
                continue
            made += 1
            loss.backward()
    assert private.ledger.releases == 2
    private = linear(defense)
    with pytest.raises(InputError, match=r"expected batch 3 of 5 of this pass, with \d+ texts, and this is another one"):
        for k, batch in enumerate(private.loader):
            with torch.no_grad():
                private.model(**batch)
            if k != 2:
                private.model(**batch).loss.backward()
    private = linear(defense)
    for k, batch in enumerate(private.loader):
        if k != 4:
            private.model(**batch).loss.backward()
    with pytest.raises(InputError, match=r"batch 5 of 5 of this pass, with \d+ texts, was left out, and the pass has ended"):
        next(iter(private.loader))


@pytest.mark.parametrize("defense", DEFENSES)
def test_looks_at_batches_and_passes_that_go_on_are_no_draws(defense: str) -> None:
    private = linear(defense)
    first = next(iter(private.loader))
    with torch.no_grad():
        for batch in private.loader:
            private.model(**batch)
    for batch in itertools.islice(private.loader, 2):
        private.model(**batch).loss.backward()
    rows = [b[ROW].tolist() for b in private.loader]
    assert rows == private.loader.turn.rows[2:] and private.loader.turn.rows[0] == first[ROW].tolist()
    for batch in itertools.islice(itertools.chain(private.loader, private.loader), 8):
        private.model(**batch).loss.backward()
    assert private.ledger.releases == 10 and private.ledger.epsilon == pytest.approx(private.ledger.planned.epsilon)
    refused(private, next(iter(private.loader)), "planned")


def test_a_batch_in_parts_is_refused_with_what_splits_it() -> None:
    private = linear(size=40)
    batch = next(iter(private.loader))
    for part in ({k: v[:20] for k, v in batch.items()}, {k: torch.cat([v, v]) for k, v in batch.items()}):
        refused(private, part, "this is another one: .* pass physical_batch_size")
    private = linear(size=40, physical_batch_size=7)
    private.model(**next(iter(private.loader))).loss.backward()


@pytest.mark.parametrize("name", ["features", "labels"])
def test_what_a_text_becomes_after_its_draw_is_refused(name: str) -> None:
    private = linear(size=40)
    batch = next(iter(private.loader))
    kept = {k: v.clone() for k, v in batch.items()}
    batch[name][3] = batch[name][3] + 1
    refused(
        private, batch, f"^{name} of row 3 is not as the loader handed it out. What a text becomes must depend on that text"
    )
    private.model(**kept).loss.backward()


def test_a_collate_function_needs_no_word_of_rows_and_keeps_its_kind_of_batch() -> None:
    def encoded(rows: list[dict[str, Any]]) -> BatchEncoding:
        return BatchEncoding({k: v for k, v in stacked(rows).items() if k in ("features", "labels")})

    for masked in (True, False):
        private = linear(size=1, collate_fn=encoded, unit=list(range(40)) if masked else None)
        for batch in private.loader:
            private.model(**batch.to("cpu")).loss.backward()
            assert isinstance(batch, BatchEncoding)
    private = linear(collate_fn=lambda rows: tuple(stacked(rows).values()))
    with pytest.raises(
        InputError, match="a batch of tuple cannot say which rows it holds; let the collate function return a"
    ):
        next(iter(private.loader))


def test_workers_hand_out_the_rows_that_were_drawn() -> None:
    private = linear(workers=2, unit=[k % 20 for k in range(40)])
    for batch in itertools.chain(private.loader, private.loader):
        assert [k % 20 for k in batch[ROW].tolist()] == batch[OWNER].tolist()
        private.model(**batch).loss.backward()
    assert private.ledger.releases == 2 * len(private.loader)


def test_a_data_set_that_gives_many_rows_at_once_is_asked_once_a_batch() -> None:
    class Counting(Subset[Any]):
        asked = 0

        def __getitems__(self, rows: list[int]) -> list[Any]:
            self.asked += 1
            return super().__getitems__(rows)

    data = Counting(FEATURES, range(5, 40))
    loader: Any = DataLoader(data, 20, collate_fn=stacked)
    private = rasura.protect_training(Linear(3), None, loader, "dp-sgd:1.0")
    data.asked = 0
    batches = list(private.loader)
    assert data.asked == 2 and all(b["features"][:, 0].tolist() == [5 + k for k in b[ROW].tolist()] for b in batches)


def test_a_state_is_not_loaded_into_a_pass_that_has_begun() -> None:
    """The batch at hand would count as one of the pass that was spent already."""
    first = linear("directional:100")
    for batch in first.loader:
        first.model(**batch).loss.backward()
    second = linear("directional:100")
    second.ledger.load_state_dict(first.ledger.state_dict())
    second.model(**next(iter(second.loader))).loss.backward()
    assert second.ledger.passes == 2
    third = linear("directional:100")
    loss = third.model(**next(iter(third.loader))).loss
    with pytest.raises(InputError, match="a pass has begun"):
        third.ledger.load_state_dict(first.ledger.state_dict())
    loss.backward()


def test_a_copy_takes_the_batches_as_they_are() -> None:
    model: Any = tiny("bert", "classification", num_labels=2)
    private = rasura.protect_training(model, None, DataLoader(DATA, 24, collate_fn=collate), "dp-sgd:1.0")
    average: Any = torch.optim.swa_utils.AveragedModel(model)
    batch = next(iter(private.loader))
    with torch.no_grad():
        assert torch.equal(average(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 2}, {"include_num_input_tokens_seen": "all"}])
def test_the_trainers_batches_say_their_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=4, save_strategy="no", use_cpu=True, report_to=[],
        disable_tqdm=True, **options,
    )  # fmt: skip
    model = tiny("bert", "classification", num_labels=2)
    data: Any = [{**row, "note": "left out by the Trainer"} for row in DATA]
    trainer = rasura.PrivateTrainer(model, arguments, collate, data, defense="dp-sgd:1.0")
    trainer.train()
    assert trainer.ledger is not None and trainer.ledger.releases == 12


def test_a_loader_made_of_the_loader_is_refused_at_its_first_batch() -> None:
    """As accelerate makes one: what it hands out is not compared with what was drawn."""
    private = linear()
    made: Any = DataLoader(
        private.loader.dataset, batch_sampler=private.loader.batch_sampler, collate_fn=private.loader.collate_fn
    )
    refused(private, next(iter(made)), "by the loader itself, not by one made of it")


# --- marks


@pytest.mark.parametrize(
    "made",
    [
        lambda t: t, lambda t: t.to(torch.int32), lambda t: t.bool(), lambda t: t.float(), lambda t: t.double(),
        lambda t: t.half(), lambda t: t.bfloat16(), lambda t: t.to(torch.complex64), lambda t: t[:, 0],
        lambda t: t[..., None],
    ],
)  # fmt: skip
def test_marks_tell_rows_apart_whatever_they_are_made_of(made: Callable[[Tensor], Tensor]) -> None:
    values = made(torch.tensor([[0, 1, 1], [1, 0, 1], [1, 1, 0], [0, 1, 1]]))
    found = marks({"x": values, "text": ["a"] * 4, "one": torch.zeros(1)}, 4)
    assert set(found) == {"x"} and found["x"].dtype == torch.int64
    alike = [bool((values[0] == v).all()) for v in values]
    assert [int(m) == int(found["x"][0]) for m in found["x"]] == alike
    assert marks({"x": values[:0]}, 0)["x"].shape == (0,)


def test_an_entry_under_a_new_name_needs_values_that_were_handed_out() -> None:
    """A text from elsewhere was in each of 100 steps, under another name than the loader's, and epsilon was that of one step
    in fifty."""
    ids, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    batch = {"input_ids": ids, "attention_mask": mask}
    before = marks(batch, 2)

    def new(values: Tensor) -> tuple[str, int] | None:
        return changed(before, [0, 1], {**batch, "new": values})

    assert new(ids) is None and changed(before, [0, 1], {"renamed": ids}) is None
    assert new(torch.ones_like(ids)) is None and new(torch.zeros(2)) is None
    assert new(ids.masked_fill(mask == 0, -100)) is None, "labels of a language model"
    assert new(torch.tensor([[5, 6, 7], [5, 6, 7]])) == ("new", 1), "a row of another text"
    assert new(ids.float() - ids.float().mean(0)) == ("new", 0), "it depends on the other rows"
    assert new(ids.masked_fill(ids > 8, -100)) == ("new", 1), "which words count may depend on the batch"
    assert new(torch.full((2, 3), 7)) == ("new", 0) and new(torch.rand(3, 2)) == ("new", 0)


def test_a_changed_row_is_named() -> None:
    batch = {"x": torch.arange(12).view(3, 4), "y": torch.arange(3)}
    before = marks(batch, 3)
    assert changed(before, [0, 1, 2], batch) is None
    assert changed(before, [2, 0, 1], {n: t[[2, 0, 1]] for n, t in batch.items()}) is None
    assert changed(before, [0, 1, 2], {"x": batch["x"].to(torch.int32)}) is None
    assert changed(before, [0, 1, 2], {**batch, "y": torch.tensor([0, 1, 1])}) == ("y", 2)
    assert changed(before, [0, 1, 2], {**batch, "x": batch["x"][:, [0, 1, 3, 2]]}) == ("x", 0)
    assert changed(before, [0, 1, 2], {**batch, "x": batch["x"][:2]}) == ("x", 0)
    padded = torch.nn.functional.pad(batch["x"], (0, 3))
    assert changed(before, [0, 1, 2], {"x": padded}) is None, "columns of zeros at the end"


@pytest.mark.parametrize("defense", DEFENSES)
def test_a_training_goes_on_in_a_new_model_where_a_loss_was_lost(defense: str) -> None:
    private = linear(defense)
    batches = iter(private.loader)
    private.model(**next(batches)).loss.backward()
    batch = next(batches)
    private.model(**batch)  # an interruption before the backward pass
    with pytest.raises(InputError, match=r"If that loss is gone, .*load the model's state_dict\(\) into a new model"):
        private.model(**batch)
    again = linear(defense)
    again.model.load_state_dict(private.model.state_dict())
    again.ledger.load_state_dict(private.ledger.state_dict())
    for batch in again.loader:
        again.model(**batch).loss.backward()
    assert again.ledger.releases == 6
