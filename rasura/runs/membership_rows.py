"""What the ``rows.json`` of a training says beside its rows: the model that it began on, and how it learned."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rasura.core.errors import InputError
from rasura.victims.fingerprint import fingerprint
from rasura.victims.loading import Victim
from rasura.victims.recipe import Recipe

LEARNED = (
    "epochs", "batch_size", "learning_rate", "weight_decay", "optimizer", "precision", "schedule", "warmup", "momentum",
    "betas", "accumulate", "clip", "keep",
)  # fmt: skip
"""Fields of a recipe that shadow models share with the audited model."""

EPOCHS = 5
"""Epochs of shadow models where nothing says how long the audited model learned."""


def began(victim: Victim, model: str, recipe: Recipe) -> dict[str, Any]:
    """What ``rows.json`` says of a training with ``recipe`` that begins on ``victim``, the model called ``model``."""
    return {"base": model, "base_weights": body(victim), "recipe": {n: asdict(recipe)[n] for n in LEARNED}}


def body(victim: Victim) -> str:
    """The fingerprint of a model's weights without those of a head that was drawn at random."""
    return fingerprint(victim.model, beside=victim.fresh)


def told_by(rows: str, members: str) -> dict[str, Any]:
    """What the file ``rows`` says. Raises ``InputError`` for one that no training wrote."""
    try:
        found = json.loads(Path(rows).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError
    except (OSError, ValueError, RecursionError):
        raise no_rows(rows, members) from None
    return found


def no_rows(rows: str, members: str) -> InputError:
    """The refusal of a file that does not list rows of ``members``."""
    return InputError(f"{rows} does not list rows of {members}; expected the rows.json of its training run")


def learned(model: str, members: str, rows: str | None, seed: int, given: Mapping[str, Any]) -> Recipe:
    """How shadow models of ``model`` learn: as ``rows`` say that it did, for as many epochs as its weights are of, or
    ``EPOCHS``; all but what was ``given``. Raises ``InputError`` for a file that no training wrote."""
    told = {} if rows is None else told_by(rows, members).get("recipe", {})
    if not isinstance(told, dict):
        raise no_rows(str(rows), members)
    values = {"epochs": EPOCHS, **{n: told[n] for n in LEARNED if n in told}}
    if told.get("schedule") == "constant":  # of another schedule, fewer epochs would be another one
        values["epochs"] = _kept(Path(model).parent / "result.json", told) or values["epochs"]
    values |= given
    try:
        if "betas" in values:
            values["betas"] = tuple(values["betas"])
        return Recipe(**values, patience=max(1, values["epochs"]), seed=seed)
    except TypeError:
        raise no_rows(str(rows), members) from None


def _kept(result: Path, recipe: Mapping[str, Any]) -> int | None:
    """The epoch whose weights a training kept by its ``recipe``; None where its ``result`` does not say."""
    try:
        found = json.loads(result.read_text(encoding="utf-8"))
        epoch = found["epochs" if recipe.get("keep") == "last" else "best_epoch"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return epoch if type(epoch) is int and epoch > 0 else None
