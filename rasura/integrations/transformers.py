"""Hugging Face's Trainer behind a protection: ``PrivateTrainer(..., defense="dp-sgd:1.0")`` instead of ``Trainer(...)``."""

from __future__ import annotations

import math
from typing import Any

import transformers
from torch.utils.data import DataLoader

from rasura.accounting import Guarantee
from rasura.interfaces import Defense, InputError
from rasura.private import protect_training


class PrivateTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types here
    """A ``Trainer`` whose steps are protected by ``defense``; ``guarantee`` says what holds once training has begun.

    ``delta``, ``poisson`` and ``seed`` as in ``rasura.protect``. Raises ``InputError`` for settings that a guarantee cannot
    stand on: gradient accumulation, label smoothing, float16, several devices, a data set without a length, max_steps.
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
        self.guarantee: Guarantee | None = None
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
            self._protected_loader, self.guarantee = done.loader, done.guarantee
        return self._protected_loader
