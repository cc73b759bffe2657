"""Subclasses of ``PrivateTrainer``: whatever they replace, nothing is trained without the protection."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from private_setting import DATA, collate
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from transformers import Trainer, TrainingArguments

from rasura import GradientCanaries, PrivateTrainer
from rasura.accounting import epsilon
from rasura.core.errors import InputError
from rasura.testing.tiny import tiny

pytest.importorskip("dp_accounting")

LOADER = r"^get_train_dataloader of Weighted returns a loader of its own"


class Stream(IterableDataset[Any]):
    """Texts without an end."""

    def __iter__(self) -> Any:
        return itertools.cycle(DATA)


class Weighted(PrivateTrainer):
    """Draws rare texts more often, as many scripts do."""

    def get_train_dataloader(self) -> Any:
        sampler = WeightedRandomSampler([1.0] * 24, 24)
        return DataLoader(self.train_dataset, batch_size=8, sampler=sampler, collate_fn=self.data_collator)


def private(kind: type[PrivateTrainer], folder: Path, data: Any = DATA, **options: Any) -> PrivateTrainer:
    """A trainer of two steps of six texts."""
    usual: dict[str, Any] = {
        "max_steps": 2,
        "save_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "per_device_train_batch_size": 6,
    }
    own: Any = {k: options.pop(k) for k in ("canaries", "poisson", "defense") if k in options}
    args = TrainingArguments(str(folder), **{**usual, **options})
    model = tiny("bert", "classification", num_labels=2)
    return kind(model, args, collate, data, **({"defense": "dp-sgd:1.0", "delta": 1e-3} | own))


@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 3}, {"canaries": GradientCanaries(20)}, {"poisson": False}]
)
def test_a_loader_of_its_own_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """It trained without any protection and without a word: the protection came with the loader."""
    trainer = private(Weighted, tmp_path, **options)
    before = {n: p.clone() for n, p in trainer.model.named_parameters()}
    with pytest.raises(InputError, match=LOADER):
        trainer.train()
    assert all(bool((p == before[n]).all()) for n, p in trainer.model.named_parameters())


def test_a_loader_of_its_own_is_refused_where_a_training_goes_on(tmp_path: Path) -> None:
    private(PrivateTrainer, tmp_path).train()
    with pytest.raises(InputError, match=LOADER):
        private(Weighted, tmp_path, max_steps=4).train(resume_from_checkpoint=True)


def test_a_train_of_its_own_does_not_go_around_the_protection(tmp_path: Path) -> None:
    class Around(Weighted):
        def train(self, *given: Any, **named: Any) -> Any:
            return Trainer.train(self, *given, **named)

    trainer = private(Around, tmp_path)
    with pytest.raises(InputError, match=r"^the model of this step is not protected by this Trainer"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_step_of_another_model_is_refused(tmp_path: Path) -> None:
    class Other(PrivateTrainer):
        def training_step(self, model: Any, *given: Any) -> Any:
            return super().training_step(tiny("bert", "classification", num_labels=2), *given)

    with pytest.raises(InputError, match=r"^the model of this step is not protected by this Trainer"):
        private(Other, tmp_path).train()


def test_a_subclass_that_looks_at_the_loader_trains_under_the_protection(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looks(PrivateTrainer):
        def get_train_dataloader(self) -> Any:
            seen.append(super().get_train_dataloader())
            return seen[-1]

    trainer = private(Looks, tmp_path)
    trainer.train()
    assert len(set(map(id, seen))) == 1 and len(seen) > 1
    assert trainer.guarantee is not None and trainer.guarantee.epsilon == epsilon(1.0, 6 / 24, 2, 1e-3)


def test_a_trainer_without_texts_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^train_dataset is None; pass the texts to train on"):
        private(PrivateTrainer, tmp_path, data=None).train()


def test_a_stream_of_texts_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """One without an end was read without an end where eval_dataset was compared with it."""
    args = TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True)
    model = tiny("bert", "classification", num_labels=2)
    with pytest.raises(InputError, match=r"^train_dataset is a Stream, which is read as a stream"):
        PrivateTrainer(model, args, collate, Stream(), DATA[:2], defense="dp-sgd:1.0")
    with pytest.raises(InputError, match=r"^train_dataset is a generator, which is read as a stream"):
        PrivateTrainer(model, args, collate, (row for row in DATA), DATA[:2], defense="dp-sgd:1.0")  # type: ignore[arg-type]


@pytest.mark.parametrize("reads", [lambda found: found.logits, lambda found: found["logits"], lambda found: found[1]])
def test_a_loss_of_its_own_hears_what_it_may_use(reads: Any, tmp_path: Path) -> None:
    class Logits(PrivateTrainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            return reads(model(**inputs)).mean()

    says = (
        r"^the output of a protected model has no .*(logits'?|entry 1) in training, only the loss.* may return outputs\.loss"
    )
    with pytest.raises(InputError, match=says):
        private(Logits, tmp_path).train()


def test_a_loss_of_its_own_may_look_whether_there_are_logits(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Looks(PrivateTrainer):
        def compute_loss(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
            found = model(**inputs)
            with torch.no_grad():
                seen.append((hasattr(found, "logits"), found.get("logits"), model(**inputs).logits.shape))
            return found.loss if found[0] is found["loss"] else None

    private(Looks, tmp_path, bf16=True).train()
    assert {one[:2] for one in seen} == {(False, None)} and seen[0][2][1] == 2
