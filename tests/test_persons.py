"""A guarantee for persons: all texts of one person are drawn, clipped and hidden together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_setting import DATA, collate
from torch import Tensor
from torch.utils.data import DataLoader

import rasura
from rasura.accounting import Ledger, Run
from rasura.accounting.ledger import counted
from rasura.core.errors import InputError
from rasura.core.rng import generator
from rasura.defenses.dp_sgd import dp_sgd
from rasura.testing.tiny import tiny
from rasura.victims.step import message_for

pytest.importorskip("dp_accounting")
pytest.importorskip("opacus")

PERSONS = [f"p{k * k % 7}" for k in range(24)]
"""Four persons with three to seven texts each, in mixed order."""


def protected(defense: Any = "dp-sgd:1.0", *, unit: Any = PERSONS, size: int = 2, **options: Any) -> tuple[Any, Any, Any]:
    model: Any = tiny("bert", "classification", num_labels=2)
    loader: Any = DataLoader(DATA, size, collate_fn=collate)
    model, _, loader, ledger = rasura.protect_training(model, None, loader, defense, unit=unit, **options)
    return model, loader, ledger


def gradients_of(rows: list[int]) -> dict[str, Tensor]:
    model: Any = tiny("bert", "classification", num_labels=2)
    model(**collate([DATA[k] for k in rows])).loss.backward()
    return {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("noise", ["gaussian", "laplace"])
def test_a_person_adds_at_most_the_clip_whatever_they_wrote(most: int | None, noise: str) -> None:
    """Against the mean gradient of each person's texts, clipped and added up."""
    rows = {"a": [0, 3, 5, 6], "b": [1], "c": [2, 4]}
    batch = collate([DATA[k] for some in rows.values() for k in some])
    message, _, _ = message_for(
        tiny("bert", "classification", num_labels=2), batch, 7, (dp_sgd(1e-12, 0.05, noise),), generator(0), expected=1,
        most=most, counts=[4, 1, 2],
    )  # fmt: skip
    order = 2 if noise == "gaussian" else 1
    total: dict[str, Any] = {}
    for some in rows.values():
        found = gradients_of(some)
        size = float(torch.cat([g.reshape(-1) for g in found.values()]).norm(order))
        for name, g in found.items():
            total[name] = total.get(name, 0) + g * min(1.0, 0.05 / size)
    for name, g in total.items():
        assert torch.allclose(message.gradients[name].double(), g, atol=1e-6), name


@pytest.mark.slow
def test_persons_are_drawn_whole_and_the_guarantee_is_theirs() -> None:
    persons = len(set(PERSONS))
    model, loader, ledger = protected(epochs=3)
    assert "for each person" in ledger.planned.statement and len(loader) == persons // 2
    drawn = []
    for _ in range(3):
        for batch in loader:
            there = [PERSONS.index(p) for p in dict.fromkeys(PERSONS)]
            owners = batch["rasura_owner"].tolist()
            for number in set(owners):
                assert owners.count(number) == PERSONS.count(PERSONS[there[number]])
            drawn.append(len(set(owners)))
            model(**batch).loss.backward()
    spent = ledger.spent()
    assert spent.rate == 2 / persons and spent.delta == 0.1 / persons and len(set(drawn)) > 1
    assert spent.neighbours == "all texts of one person are there or not" and "for each person" in spent.statement
    # The same noise for texts would promise less to a person and more to a text.
    assert Ledger(ledger.defense, Run(24, 2, 3)).planned.epsilon < spent.epsilon


def test_rows_in_another_order_are_still_one_person() -> None:
    model, loader, ledger = protected(size=4, seed=0)
    batch = next(b for b in loader if len(set(b["rasura_owner"].tolist())) > 1)
    mixed = torch.randperm(len(batch["labels"]), generator=generator(1))
    model(**{k: v[mixed] for k, v in batch.items()}).loss.backward()
    assert ledger.releases == 1
    with torch.no_grad():
        assert model(**batch).logits.shape == (len(mixed), 2)


@pytest.mark.slow
def test_the_ledger_remembers_whom_it_protects(tmp_path: Path) -> None:
    model, loader, ledger = protected()
    for batch in loader:
        model(**batch).loss.backward()
    ledger.save(tmp_path / "ledger.json")
    assert counted(tmp_path / "ledger.json").statement == ledger.spent().statement
    _, _, again = protected()
    again.load(tmp_path / "ledger.json")
    assert again.releases == ledger.releases
    texts = Ledger(ledger.defense, Run(ledger.run.examples, 2, 1))
    with pytest.raises(InputError, match=r"persons, but this training has \d+ texts"):
        texts.load(tmp_path / "ledger.json")
    broken = {**json.loads((tmp_path / "ledger.json").read_text()), "unit": "household"}
    with pytest.raises(InputError, match="invalid numbers"):
        Ledger(ledger.defense, ledger.run).load_state_dict(broken)


def test_a_person_written_in_several_ways_is_one() -> None:
    """Files give one person's number as 7 and as "7", and a name with accents in two ways: each was said to be hidden, and
    had half of their texts under another number."""
    _, _, plain = protected(unit=["7", "r\u00e9mi", "ann"] * 8)
    _, _, mixed = protected(unit=[7, "re\u0301mi", "ann", "7", "r\u00e9mi", " ann "] * 4)
    assert mixed.run == plain.run and mixed.run.examples == 3
    assert mixed.planned == plain.planned


@pytest.mark.parametrize("column", [np.array, torch.tensor])
def test_persons_may_be_the_numbers_of_a_column(column: Any) -> None:
    numbers = [7, 8, 9] * 8
    assert protected(unit=column(numbers))[2].run == protected(unit=numbers)[2].run


def test_what_no_guarantee_for_persons_covers_is_refused() -> None:
    for unit in (PERSONS[:-1], [*PERSONS[:-1], None], [*PERSONS[:-1], float("nan")], [*PERSONS[:-1], " "], [True] * 24):
        with pytest.raises(InputError, match="unit"):
            protected(unit=unit)
    for defense, options in (("directional:100", {}), ("none", {}), ("dp-sgd:1.0", {"poisson": False})):
        with pytest.raises(InputError, match="for persons needs dp-sgd"):
            protected(defense, **options)
    model, loader, _ = protected()
    batch = next(iter(loader))
    with pytest.raises(InputError, match="pass on all that its batches hold"):
        model(**{k: v for k, v in batch.items() if k != "rasura_owner"})
    with pytest.raises(InputError, match="has the shape"):
        model(**{**batch, "rasura_owner": batch["rasura_owner"][:, None]})
    texts, plain, _ = protected(unit=None)
    with pytest.raises(InputError, match="pass on all that its batches hold"):
        texts(**next(iter(plain)), rasura_owner=torch.zeros(2, dtype=torch.long))
    with pytest.raises(InputError, match="return a dictionary"):
        loader = DataLoader(DATA, 2, collate_fn=lambda rows: [torch.zeros(len(rows))])
        made = rasura.protect_training(tiny("bert", "classification"), None, loader, "dp-sgd:1.0", unit=PERSONS)
        next(iter(made.loader))


@pytest.mark.slow
def test_the_trainer_protects_persons(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=5, per_device_train_batch_size=2, save_strategy="no", use_cpu=True, report_to=[],
        disable_tqdm=True,
    )  # fmt: skip
    model = tiny("bert", "classification", num_labels=2)
    trainer = rasura.PrivateTrainer(model, arguments, collate, DATA, defense="dp-sgd", target_epsilon=8.0, unit=PERSONS)
    trainer.train()
    assert trainer.ledger is not None and trainer.ledger.releases == 5 and trainer.ledger.epsilon <= 8
    assert trainer.guarantee is not None and "each person" in trainer.guarantee.statement
