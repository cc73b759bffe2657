"""What a training's guarantee does not cover, as far as the training itself shows it: sentences that stand beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rasura.accounting.beside import of_copies
from rasura.core.batches import Batch, ImageBatch, contents
from rasura.runs.earlier import trained_before
from rasura.runs.train_plan import TrainPlan


def uncovered(plan: TrainPlan, rows: Sequence[Batch | ImageBatch], held: Sequence[int], owned: bool) -> list[str]:
    """The sentences for a training by ``plan`` on ``rows``, and which texts are ``held`` out. ``owned``: persons are
    protected, each with all copies of a text."""
    earlier = trained_before(plan.model)
    return [*_repeated([] if owned else rows), *_chose(plan, len(held)), *([earlier] if earlier else [])]


def _repeated(rows: Sequence[Batch | ImageBatch]) -> list[str]:
    often = [count for count in Counter(one for row in rows for one in contents(row)).values() if count > 1]
    return of_copies(len(often), max(often, default=0))


def _chose(plan: TrainPlan, held: int) -> list[str]:
    if plan.recipe.compared == 1 or not held:
        return []
    return [
        f"nothing is guaranteed for the {held} texts held out of {Path(plan.data).name}: without noise, they decide which "
        "epoch is kept and when the training ends. Pass --keep last, and a --patience of all epochs"
    ]
