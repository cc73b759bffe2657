"""Ledgers and trainers of trainings that end before their plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from private_setting import DATA, collate
from transformers import TrainerCallback, TrainingArguments

from rasura import PrivateTrainer
from rasura.accounting import Ledger, Run
from rasura.registry import parse_defense
from rasura.testing.tiny import tiny

OTHERS: Any = [{"input_ids": [1, 60 + k, 3, 41, 2], "attention_mask": [1] * 5, "labels": k % 2} for k in range(4)]


def ledger(defense: str, sampling: Any) -> Ledger:
    """For ten texts, four a step, four passes."""
    return Ledger([p.mechanism for p in parse_defense(defense)], Run(10, 4, 4, 1e-3, sampling), sizes=[7, 3])


def trainer_of_five_steps(
    folder: Path, at_two: Callable[[Any], None], steps: int = 5, event: str = "on_step_end", **options: Any
) -> Any:
    """A trainer of five ``steps``, or more, whose callback does ``at_two`` with the control in an ``event`` after two steps.
    The state is then in ``control.seen``."""

    def looks(self: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 2:
            control.seen = state
            at_two(control)

    usual = {"max_steps": steps, "save_steps": 2, "logging_steps": 1, "report_to": [], "use_cpu": True}
    args = TrainingArguments(str(folder), per_device_train_batch_size=6, **{**usual, **options})
    model = tiny("bert", "classification", num_labels=2)
    return PrivateTrainer(
        model, args, collate, DATA, OTHERS if "eval_strategy" in options else None, defense="dp-sgd:1.0", delta=1e-3,
        callbacks=[type("Looks", (TrainerCallback,), {event: looks})()],
    )  # fmt: skip


def fails(control: Any) -> None:
    raise ArithmeticError("pruned")
