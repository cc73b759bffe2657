"""What a training job may say of the model that it stores: the figures of the kept epoch, and how many texts they rest on.
No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rasura.metrics.learned import accuracy_interval

MIN_TEXTS = 5
"""Of fewer held-out texts no figure is stated: one text more that is right would move the accuracy by a quarter or more."""

Figures = Mapping[str, float | None]

OF_TRAINING = "train_loss"
"""The figure that needs no held-out text."""


def judged(epochs: Sequence[Figures], kept: int | None, held_out: int | None) -> dict[str, Any]:
    """What may be said of ``epochs``, of which the job's model has the weights of number ``kept`` (the first is 1).

    ``held_out``: how many different texts judged the epochs, none of them trained on. Gives ``epochs``, where None was not
    measured, and ``kept``: its ``epoch``, ``held_out``, ``figures``, ``accuracy_interval`` (of 95 %, over the best of these
    epochs) and ``reason``, why figures are None, or empty. ``epoch`` is None where no epoch is complete, or where an older
    server noted none.
    """
    reason = ""
    if not epochs or kept is None or held_out is None:
        reason = "of an older server, which did not note what the figures rest on" if epochs else "no epoch is complete"
        kept = held_out = None
    elif held_out < MIN_TEXTS:
        reason = f"fewer than {MIN_TEXTS} different ones that are not trained on"
    stated = [{n: None if reason and n != OF_TRAINING else value for n, value in one.items()} for one in epochs]
    figures = stated[kept - 1] if kept is not None else {}
    if not reason and None in figures.values():
        reason = "what is not measured is not a finite number"
    interval = None
    if figures.get("accuracy") is not None:
        interval = accuracy_interval({"after": figures, "n_test": held_out, "epochs_compared": len(epochs)})
    about = {"epoch": kept, "held_out": held_out, "figures": figures, "accuracy_interval": interval, "reason": reason}
    return {"epochs": stated, "kept": about}
