"""What ``TrainingArguments`` and a schedule let steer a ``PrivateTrainer``: a loss, which no epsilon counts, or nothing.

Lists of what is understood, by name and, where it matters, by value. Anything else is a doubt.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

from rasura.accounting.configurations.facts import Unread, Value
from rasura.accounting.configurations.scopes import Scopes

COUNTED = ("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps")
"""Arguments of ``TrainingArguments`` that the figures are taken from."""

_ARGUMENTS_BESIDE = (
    "output_dir", "overwrite_output_dir", "weight_decay", "max_grad_norm", "seed", "data_seed", "bf16", "fp16", "tf32",
    "use_cpu", "no_cuda", "report_to", "run_name", "disable_tqdm", "remove_unused_columns", "label_names", "do_train",
    "do_eval", "do_predict", "torch_compile", "per_device_eval_batch_size", "gradient_checkpointing",
    "gradient_checkpointing_kwargs", "learning_rate", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "adam_beta1",
    "adam_beta2", "adam_epsilon", "eval_steps", "eval_delay", "eval_on_start", "eval_accumulation_steps", "save_steps",
    "save_only_model", "save_safetensors", "save_on_each_node",
)  # fmt: skip
_BEGINNINGS = ("logging_", "hub_", "push_to_", "dataloader_")
"""Arguments of ``TrainingArguments``, and how others begin, that change neither what is released nor what is kept of it,
whatever their value is."""

_MOMENTS = ("no", "steps", "epoch")
_VALUES: Mapping[str, tuple[Value, ...]] = {
    "lr_scheduler_type": (
        "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt",
        "cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay",
    ),
    "optim": (
        "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit",
        "paged_adamw_32bit", "adafactor", "adagrad", "rmsprop", "sgd", "lion_32bit", "lion_8bit",
    ),
    "eval_strategy": _MOMENTS, "save_strategy": _MOMENTS,
    "load_best_model_at_end": (None, False),
}  # fmt: skip
"""Arguments of ``TrainingArguments`` that can let a loss steer the training, or choose what is kept of it, with the values
that do not."""

_SCHEDULES = (
    "get_constant_schedule", "get_constant_schedule_with_warmup", "get_cosine_schedule_with_warmup",
    "get_linear_schedule_with_warmup", "get_polynomial_decay_schedule_with_warmup", "ConstantLR", "CosineAnnealingLR",
    "ExponentialLR", "LinearLR", "MultiStepLR", "OneCycleLR", "PolynomialLR", "StepLR",
)  # fmt: skip
"""Schedules of a Trainer that look at nothing but the number of the step."""


def argument_doubts(given: Mapping[str, Value], place: str) -> Iterator[str]:
    """Each of the arguments ``given`` to ``TrainingArguments`` at ``place`` that is not known to look at no text."""
    for name, allowed in _VALUES.items():
        if (value := given.get(name, allowed[0])) not in allowed:
            says = f"it may look at texts, which no epsilon counts; {', '.join(map(str, allowed))} are known not to"
            yield f"{name} is {shown(value)} ({place}): {says}"
    if given.get("metric_for_best_model") is not None and given.get("save_total_limit") is not None:
        yield f"save_total_limit ({place}) keeps the best by metric_for_best_model, which looks at texts"
    known = (*COUNTED, *_ARGUMENTS_BESIDE, *_VALUES, "metric_for_best_model", "greater_is_better", "save_total_limit")
    if strange := [one for one in given if one not in known and not one.startswith(_BEGINNINGS)]:
        yield f"TrainingArguments ({place}) has arguments that are not known here: {', '.join(strange)}"


def schedule_doubts(scopes: Scopes, pair: ast.expr | None, place: str) -> Iterator[str]:
    """The schedule in ``optimizers`` of a ``PrivateTrainer``, unless it is known to look at no loss."""
    if pair is None:
        return
    given: ast.expr | None = pair.elts[1] if isinstance(pair, ast.Tuple) and len(pair.elts) == 2 else pair
    if given is not None and (variable := scopes.read(given)) is not None:
        given = scopes.assigned(variable)
    none = isinstance(given, ast.Constant) and given.value is None
    if not none and not (isinstance(given, ast.Call) and scopes.original(given.func) in _SCHEDULES):
        yield f"optimizers ({place}) is {ast.unparse(pair)[:60]}: whether the schedule looks at a loss is not known"


def shown(value: Value) -> str:
    """A value in words."""
    return value.text if isinstance(value, Unread) else str(value)
