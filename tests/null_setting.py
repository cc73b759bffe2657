"""The null of a row space, asked at once for all others of a guess."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rasura.attacks.updates.span import null


def chance_limit(outside: Tensor, trials: float) -> float:
    """The limit beside others of whose inputs ``outside`` is left."""
    chance = null.Chance()
    chance.add(outside)
    return chance.limit(trials)


def stand_clear(residuals: Tensor, beside: Sequence[Tensor], trials: float) -> bool:
    """Whether ``residuals`` stand clear of what is left ``beside`` each of them; the same others are counted once."""
    chance = null.Chance()
    least = {id(outside): chance.add(outside) for outside in {id(o): o for o in beside}.values()}
    return null.stand_clear(
        residuals, torch.tensor([least[id(o)] for o in beside], dtype=torch.double), chance.limit(trials)
    )
