"""What is said to be known of the texts behind an update, against the model that made it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from rasura.core.errors import InputError
from rasura.victims.loading import Victim
from rasura.victims.models import one_class_each
from rasura.victims.positions import longest_text

LOADED = 'a folder or hub id is rasura.load("my-model", "classification")'
"""What is passed for a model where its name was given."""


def whole_numbers(given: Any, name: str) -> tuple[int, ...] | None:
    """``given`` as whole numbers, one for each text; None without any. Raises ``InputError`` for anything else."""
    if given is None:
        return None
    try:
        return tuple(map(index, given)) or None
    except TypeError:
        raise InputError(f"{name} are not whole numbers; expected one for each text, such as {name}=(0, 1)") from None


def check_known(labels: Sequence[int] | None, lengths: Sequence[int] | None, victim: Victim) -> None:
    """Raises ``InputError`` where ``labels`` are none of the model's classes, or no text of it has one of ``lengths``."""
    if labels is not None:
        _check_labels(labels, victim)
    if lengths is not None:
        _check_lengths(lengths, victim)


def _check_labels(labels: Sequence[int], victim: Victim) -> None:
    if victim.task != "classification":
        raise InputError(f"labels are given, but the task is {victim.task}, whose texts have no classes; leave them out")
    if not one_class_each(victim.model):
        raise InputError(f"labels are given, but {victim.name} does not give each text one class; leave them out")
    classes = victim.num_labels
    if wrong := [k for k in labels if not 0 <= k < classes]:
        hint = "; they are counted from 0" if max(labels) == classes and min(labels) > 0 else ""
        raise InputError(f"label {wrong[0]} is none of the classes 0 .. {classes - 1} of {victim.name}{hint}")


def _check_lengths(lengths: Sequence[int], victim: Victim) -> None:
    frame = len(victim.vocabulary.prefix) + len(victim.vocabulary.suffix)
    longest = longest_text(victim.model)
    if wrong := [n for n in lengths if not frame < n <= longest]:
        special = f", {frame} of them the tokenizer's own around each text" if frame else ""
        raise InputError(
            f"length {wrong[0]} is that of no text of {victim.name}: expected {frame + 1} .. {longest} tokens{special}"
        )
