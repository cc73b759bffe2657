"""Hugging Face's Trainer behind a protection: ``PrivateTrainer(..., defense="dp-sgd:1.0")`` instead of ``Trainer(...)``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import transformers
from torch.utils.data import DataLoader
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from rasura.accounting import Guarantee, Ledger
from rasura.core.interfaces import Defense, InputError
from rasura.runs.private import protect_training

LEDGER = "rasura_ledger.json"
"""The ledger's file in a checkpoint's folder."""


class PrivateTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types here
    """A ``Trainer`` whose steps are protected by ``defense``; ``guarantee`` says what the releases made so far guarantee.

    ``ledger`` counts them from ``train()`` on: it is saved with every checkpoint, a resumed training goes on counting, and
    epsilon stands in the logs. ``train()`` again goes beyond the plan and is refused. ``delta``, ``poisson`` and ``seed`` as
    in ``rasura.protect_training``. Raises ``InputError`` for settings that a guarantee cannot stand on: gradient
    accumulation, label smoothing, float16, several devices, a data set without a length, max_steps, batches grouped by
    length.
    """

    def __init__(
        self,
        *positional: Any,
        defense: str | Defense,
        delta: float | None = None,
        poisson: bool = True,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*positional, **options)
        self.defense, self.delta, self.poisson, self.noise_seed = defense, delta, poisson, seed
        self.ledger: Ledger | None = None
        self._protected_loader: Any = None
        wrong = {
            "gradient_accumulation_steps": (self.args.gradient_accumulation_steps, 1),
            "label_smoothing_factor": (self.args.label_smoothing_factor, 0),
            "fp16": (self.args.fp16, False),
            "number of devices": (max(1, self.args.n_gpu) * self.args.world_size, 1),
            "max_steps": (self.args.max_steps, -1),
        }
        for name, (found, expected) in wrong.items():
            if found != expected:
                raise InputError(f"{name} is {found}; a protected Trainer needs {expected}")
        # Batches are drawn by chance: there are none to skip when a training is resumed.
        self.args.ignore_data_skip = True

    @property
    def guarantee(self) -> Guarantee | None:
        """What the releases made so far guarantee; None before training. ``ledger.planned`` is the plan's."""
        return None if self.ledger is None else self.ledger.spent()

    def get_train_dataloader(self) -> Any:
        """The loader of the protection; protects the model when it is first asked for."""
        if self._protected_loader is None:
            data, collate = self.train_dataset, self.data_collator
            if hasattr(data, "column_names"):
                data = self._remove_unused_columns(data, description="training")
            else:
                collate = self._get_collator_with_removed_columns(collate, description="training")
            plain: Any = DataLoader(
                data, batch_size=self._train_batch_size, shuffle=True, collate_fn=collate,
                num_workers=self.args.dataloader_num_workers, pin_memory=False,
            )  # fmt: skip
            done = protect_training(
                self.model, None, plain, self.defense, epochs=math.ceil(self.args.num_train_epochs), delta=self.delta,
                poisson=self.poisson, seed=self.noise_seed,
            )  # fmt: skip
            self._protected_loader, self.ledger = done.loader, done.ledger
        return self._protected_loader

    def train(self, resume_from_checkpoint: Any = None, **rest: Any) -> Any:
        """As ``Trainer.train``. Resumed, it goes on with the checkpoint's ledger; ``InputError`` where that has none."""
        if resume_from_checkpoint:
            found = resume_from_checkpoint
            place = get_last_checkpoint(self.args.output_dir) if found is True else str(found)
            self.get_train_dataloader()
            assert self.ledger is not None  # the loader made it
            self.ledger.load(Path(str(place)) / LEDGER)
        return super().train(resume_from_checkpoint=resume_from_checkpoint, **rest)

    def _save_checkpoint(self, *positional: Any, **named: Any) -> None:
        super()._save_checkpoint(*positional, **named)
        if self.ledger is not None:
            folder = Path(self._get_output_dir(trial=None)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self.ledger.save(folder / LEDGER)

    def log(self, logs: dict[str, float], *positional: Any, **named: Any) -> None:
        """As ``Trainer.log``, with epsilon of the releases made so far, where there is a guarantee."""
        found = self.guarantee
        if found is not None and found.epsilon is not None:
            logs = {**logs, "epsilon": found.epsilon}
        super().log(logs, *positional, **named)
