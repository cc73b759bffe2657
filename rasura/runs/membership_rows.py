"""What a training says beside its rows: the model that it began on, how it learned, under which protection, and how much of
each text it saw."""

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


def began(victim: Victim, model: str, recipe: Recipe, cut: Mapping[str, Any]) -> dict[str, Any]:
    """What ``rows.json`` says of a training with ``recipe`` that begins on ``victim``, the model called ``model``. ``cut``:
    its ``truncate`` and ``max_length``. ``compared`` of its recipe: how many epochs the held-out texts may choose among."""
    learned = {n: asdict(recipe)[n] for n in LEARNED} | {"compared": recipe.compared}
    return {"base": model, "base_weights": body(victim), "recipe": learned, "cut": dict(cut)}


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


def cut(told: Mapping[str, Any], rows: str, truncate: bool, max_length: int | None) -> tuple[bool, int | None]:
    """Whether texts are cut, and to how many tokens: as in the training whose ``rows`` said ``told``, which saw no more of
    them. Raises ``InputError`` where another length was asked for."""
    found = told.get("cut")
    if not isinstance(found, dict):  # written by an earlier version
        return truncate, max_length
    length = found.get("max_length")
    if max_length not in (None, length):
        saw = "whole texts" if length is None else f"at most {length} tokens of each text"
        raise InputError(f"the training of {rows} saw {saw}, not {max_length} tokens; leave --max-length out")
    return truncate or found.get("truncate") is True, length


def trained_under(model: str) -> str | None:
    """The protection of the training whose result lies beside ``model``; None where none does."""
    found = _result(Path(model).parent / "result.json").get("defense")
    return found if isinstance(found, str) and found else None


def _result(path: Path) -> Mapping[str, Any]:
    """The result of a training; empty where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _kept(result: Path, recipe: Mapping[str, Any]) -> int | None:
    """The epoch whose weights a training kept by its ``recipe``; None where its ``result`` does not say."""
    epoch = _result(result).get("epochs" if recipe.get("keep") == "last" else "best_epoch")
    return epoch if type(epoch) is int and epoch > 0 else None
