"""Which texts of a file a training is trained on, and which are held out to judge it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rasura.core.batches import Batch
from rasura.core.errors import InputError
from rasura.core.rng import generator
from rasura.data.text import Example
from rasura.runs.train_plan import TrainPlan
from rasura.victims.batching import apart


def parted(plan: TrainPlan, everything: Sequence[Example]) -> tuple[list[int], list[int]]:
    """The places in ``everything`` of the texts that ``plan`` trains on, and of those that it holds out, drawn once for all
    defenses and seeds. Raises ``InputError`` if there are too few to hold any out."""
    order = torch.randperm(len(everything), generator=generator(plan.recipe.seed, "part")).tolist()
    some = order[: plan.limit]
    # Each person is one of those trained on, or held out, with all of their texts.
    whose = [everything[k].unit if plan.unit else k for k in some]
    each = list(dict.fromkeys(whose))
    count = plan.held_out(len(each))
    if count >= len(each):
        kind = "texts" if plan.unit is None else "persons"
        raise InputError(f"{plan.data}: {len(each)} {kind} are too few to hold any out; expected at least 2")
    apart = set(each[:count])
    held = [k for k, one in zip(some, whose) if one in apart]
    kept = [k for k, one in zip(some, whose) if one not in apart]
    return kept, held


def untrained(rows: Sequence[Batch], trained: Sequence[Batch], source: str, instead: str) -> list[Batch]:
    """Those of ``rows`` of ``source``, one text each, that a model is judged on: each once, and none that it is ``trained``
    on. Raises ``InputError`` with the advice ``instead`` if there are none."""
    if found := apart(rows, trained):
        return found
    raise InputError(f"{source}: every text is also among those to train on; {instead}")


def left_out(rows: Sequence[Batch], trained: Sequence[Batch], plan: TrainPlan) -> list[Batch]:
    """As ``untrained``, of the ``rows`` that ``plan`` holds out."""
    return untrained(rows, trained, f"{plan.data}, texts held out", "remove repeated texts, or hold out more with --holdout")
