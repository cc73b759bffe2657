"""Hugging Face's Trainer under a protection: ``PrivateTrainer(..., defense="dp-sgd:1.0")`` instead of ``Trainer(...)``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers.trainer_utils import get_last_checkpoint

from rasura.accounting import Guarantee, Ledger
from rasura.core.interfaces import Defense, InputError
from rasura.core.rounding import above
from rasura.runs.checkpoints import PREFIX, kept_canaries, place_for, resume, state_again
from rasura.runs.drawing import DrawnLoader, OrderedLoader
from rasura.runs.earlier import LEDGER
from rasura.runs.gradient_canaries import GradientCanaries
from rasura.runs.guard import Guard, guarded
from rasura.runs.loop_checks import owners_of
from rasura.runs.marks import texts_of
from rasura.runs.private import protect_training


class PrivateTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers has no types here
    """A Hugging Face ``Trainer`` whose steps are protected by ``defense``.

    ``guarantee`` says what the releases made so far guarantee, and ``ledger`` counts them. The ledger is saved with every
    checkpoint and by ``save_model``, a resumed training continues its count, and the logs contain epsilon. A second
    ``train()`` would go beyond the plan and is refused. ``delta``, ``target_epsilon``, ``poisson``, ``seed``, ``unit`` and
    ``canaries`` mean the same as in ``rasura.protect_training``; with ``unit``, batch sizes count persons. With
    ``gradient_accumulation_steps``, one step takes that many times the texts of ``per_device_train_batch_size`` and adds
    noise once; only so many texts are in memory as one device takes. The other parameters are those of ``Trainer``.
    ``model_init`` and ``compute_loss_func`` are not among them: the one would replace the protected model, the other its
    loss.

    Raises ``InputError`` for settings that no guarantee covers: label smoothing, float16, several devices, a data set
    without a length, batches grouped by length or taken in order, a batch size that is searched, and texts of the training
    in ``eval_dataset``: rows with the same tokens, in whichever object they come. Metrics of other texts may steer a
    training.
    """

    def __init__(
        self,
        model: nn.Module,
        args: transformers.TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Dataset[Any] | None = None,
        eval_dataset: Dataset[Any] | dict[str, Dataset[Any]] | None = None,
        processing_class: transformers.PreTrainedTokenizerBase | None = None,
        *,
        defense: str | Defense,
        delta: float | None = None,
        target_epsilon: float | None = None,
        poisson: bool = True,
        seed: int | None = None,
        unit: Sequence[str | int] | None = None,
        canaries: GradientCanaries | None = None,
        compute_metrics: Callable[[transformers.EvalPrediction], dict[str, float]] | None = None,
        callbacks: list[transformers.TrainerCallback] | None = None,
        optimizers: tuple[Optimizer | None, LRScheduler | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        _check_length(train_dataset)
        self.accumulated = 1 if args is None else args.gradient_accumulation_steps
        if args is not None:
            # The protection splits a batch itself: the Trainer would add up noisy gradients.
            args = copy.copy(args)
            args.gradient_accumulation_steps = 1
        self.target_epsilon = target_epsilon
        super().__init__(
            model, args, data_collator, train_dataset, eval_dataset, processing_class, compute_metrics=compute_metrics,
            callbacks=callbacks, optimizers=optimizers, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )  # fmt: skip
        self.defense, self.delta, self.poisson, self.noise_seed = defense, delta, poisson, seed
        self.unit, self.canaries = unit, canaries
        self.ledger: Ledger | None = None
        self._newest: Path | None = None
        self._resumed: Path | None = None
        self._guard: Guard | None = None
        self._protected_loader: DrawnLoader | OrderedLoader | DataLoader[Any] | None = None
        wrong = {
            "label_smoothing_factor": (self.args.label_smoothing_factor, 0),
            "fp16": (self.args.fp16, False),
            "auto_find_batch_size": (self.args.auto_find_batch_size, False),
            "train_sampling_strategy": (getattr(self.args, "train_sampling_strategy", "random"), "random"),
            "number of devices": (max(1, self.args.n_gpu) * self.args.world_size, 1),
        }
        for name, (found, expected) in wrong.items():
            if found != expected:
                raise InputError(f"{name} is {found}; a protected Trainer needs {expected}")
        self._others: list[Any] = [None]
        for one in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
            self._check_others(one)
        # Batches are drawn by chance: there are none to skip when a training is resumed.
        self.args.ignore_data_skip = True

    @property
    def guarantee(self) -> Guarantee | None:
        """What the releases made so far guarantee; None before training. ``ledger.planned`` is the plan's."""
        return None if self.ledger is None else self.ledger.spent()

    def get_train_dataloader(self) -> DrawnLoader | OrderedLoader | DataLoader[Any]:
        """The loader of the protection. A subclass returns it as it is: ``train`` refuses any other."""
        self._protect()
        assert self._protected_loader is not None  # made with the protection
        return self._protected_loader

    def _protect(self) -> Ledger:
        """Protect the model, once. Returns the ledger of its training. Raises ``InputError`` for what cannot be
        protected, and without texts to train on."""
        if self.ledger is not None:
            return self.ledger
        data, collate = self.train_dataset, self.data_collator
        if data is None:
            raise InputError("train_dataset is None; pass the texts to train on to PrivateTrainer")
        if hasattr(data, "column_names"):
            data = self._remove_unused_columns(data, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        plain: Any = DataLoader(
            data, batch_size=self._train_batch_size * self.accumulated, shuffle=True, collate_fn=collate,
            num_workers=self.args.dataloader_num_workers, pin_memory=False,
        )  # fmt: skip
        # As the Trainer counts them: with fractions of epochs the plan is what it runs, and not a step more.
        owners = owners_of(plain, self.unit)
        every = max(1, math.ceil((len(data) if owners is None else len({*owners})) / plain.batch_size))
        steps = self.args.max_steps if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs * every)
        done = protect_training(
            self.model, None, plain, self.defense, epochs=math.ceil(steps / every), max_steps=steps, delta=self.delta,
            target_epsilon=self.target_epsilon, poisson=self.poisson, seed=self.noise_seed,
            physical_batch_size=self._train_batch_size if self.accumulated > 1 else None,
            unit=self.unit, canaries=self.canaries,
        )  # fmt: skip
        self._protected_loader, self.ledger, self._guard = done.loader, done.ledger, guarded(done.model)
        return done.ledger

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As ``Trainer.training_step``, of the texts of one batch. Raises ``InputError`` for a model that is not under the
        protection of this Trainer."""
        if self._guard is None or not any(guarded(one) is self._guard for one in model.modules()):
            raise InputError(
                "the model of this step is not protected by this Trainer, so its gradients would not be private. Train it "
                "by PrivateTrainer.train(); a subclass that has its own train() calls that of PrivateTrainer"
            )
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        return loss

    def get_eval_dataloader(self, eval_dataset: str | Dataset[Any] | None = None) -> DataLoader[Any]:
        """As ``Trainer.get_eval_dataloader``. Raises ``InputError`` for texts of the training."""
        data: Any = self.eval_dataset if eval_dataset is None or isinstance(eval_dataset, str) else eval_dataset
        for one in data.values() if isinstance(data, dict) else [data]:
            self._check_others(one)
        loader: DataLoader[Any] = super().get_eval_dataloader(eval_dataset)
        return loader

    @cached_property
    def _texts(self) -> frozenset[int | None]:
        return frozenset(texts_of(self.train_dataset, self.data_collator))

    def _check_others(self, data: Any) -> None:
        """Raises ``InputError`` where a row of ``data`` has the tokens of a training text, or shows none."""
        if self.train_dataset is None or any(data is one for one in self._others):
            return
        found = list(texts_of(data, self.data_collator))
        if None in found or None in self._texts:
            raise InputError(
                "a row of eval_dataset or train_dataset has no input_ids, so it is not known whether their texts differ; "
                "pass rows with input_ids"
            )
        if same := [k for k, text in enumerate(found) if text in self._texts]:
            raise InputError(
                f"{len(same)} of the {len(found)} rows of eval_dataset are texts of train_dataset, the first one row "
                f"{same[0]}. Their metrics may steer the rate, the number of steps and what is kept, which no epsilon "
                "counts; evaluate on other texts"
            )
        self._others.append(data)

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> transformers.trainer_utils.TrainOutput:
        """As ``Trainer.train``. A resumed training continues the checkpoint's ledger; ``InputError`` if it has none, or if
        another checkpoint beside it holds more releases.

        ``trial`` must be None: a search over hyperparameters trains more than the ledger counts.
        """
        if trial is not None:
            raise InputError("trial was given, but a protected Trainer does not support hyperparameter search")
        ledger = self._protect()
        if self.get_train_dataloader() is not self._protected_loader:
            raise InputError(
                f"get_train_dataloader of {type(self).__name__} returns a loader of its own, whose batches are not drawn as "
                "the guarantee assumes. Leave that method out: choose texts by train_dataset, and make batches of them by "
                "data_collator. For another loader, write a loop under rasura.protect_training"
            )
        if resume_from_checkpoint:
            found = resume_from_checkpoint
            place = get_last_checkpoint(self.args.output_dir) if found is True else str(found)
            if place is None:
                raise InputError(
                    f"resume_from_checkpoint is True, but {self.args.output_dir} holds no checkpoint; leave it out to "
                    "begin, or pass the folder of a checkpoint"
                )
            resume(ledger, Path(place), Path(str(self.args.output_dir)))
            if self.canaries is not None:
                self.canaries.load(kept_canaries(Path(place)))
            self._resumed = Path(place)
        if self.canaries is not None and self.args.save_strategy != "no":
            place_for(Path(str(self.args.output_dir)) / PREFIX)
        try:
            return super().train(resume_from_checkpoint, ignore_keys_for_eval=ignore_keys_for_eval)
        finally:
            self._end()
            self._state_again(self._newest)

    def _state_again(self, *kept: Path | None) -> None:
        """Have the ledgers of the best checkpoint, of that which this training went on from, and of those that are ``kept``
        count all releases by now."""
        if self.ledger is not None:
            state_again(self.ledger, self._resumed, self.state.best_model_checkpoint, *kept)

    def _end(self) -> None:
        """Tell the ledger of the end. It may come before the plan: by a callback, which may have looked at figures of the
        model, or by an error, which a text may have caused. Callbacks can write the Trainer's own counts."""
        if self.ledger is not None:
            self.ledger.end()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.control.should_training_stop:
            self._end()
        folder = Path(self._get_output_dir(trial=None)) / f"{PREFIX}-{self.state.global_step}"
        if self.canaries is not None:  # first, so that no checkpoint has those of another training
            self.canaries.save(place_for(folder))
        super()._save_checkpoint(model, trial)
        self._newest = folder
        self._state_again()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As ``Trainer.save_model``, with the ledger beside the weights: a training that begins from them names it."""
        super().save_model(output_dir, _internal_call)
        if self.ledger is not None:
            self.ledger.save(Path(output_dir or str(self.args.output_dir)) / LEDGER)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As ``Trainer.log``, with the epsilon of the releases made so far, or of the whole plan where a callback ended it
        early, if there is a guarantee. It is rounded up to the four digits that a Trainer prints."""
        if self.control.should_training_stop:
            self._end()
        found = self.guarantee
        if found is not None and found.epsilon is not None:
            logs = {**logs, "epsilon": float(above(found.epsilon))}
        super().log(logs, start_time)


def _check_length(data: Any) -> None:
    """Raises ``InputError`` for texts that are read as a stream; nothing is read."""
    if isinstance(data, IterableDataset) or not (data is None or hasattr(data, "__len__")):
        raise InputError(
            f"train_dataset is a {type(data).__name__}, which is read as a stream and has no fixed number of texts. The "
            "guarantee depends on that number, and on drawing each text by chance; pass a list or a map-style data set"
        )
