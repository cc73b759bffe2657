"""How large a change of an entry may be in one round: one scale for all tensors, or one for each.

A hidden entry is rounded to steps of its tensor's scale, so a scale that fits makes 16 bits enough. Scales are agreed on
before a client looks at its texts: from the rate and the number of steps, or from an update on public texts
(``block_scales``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import Tensor

from rasura.core.interfaces import InputError

Scale = float | Mapping[str, float]
"""The largest change of an entry in one round, of all tensors or by the tensor's name."""

LEAST, MOST = -120, 60
"""Exponents of scales, from the least to the most."""

LEAST_PART = 1 / 1024
"""A tensor that hardly changed on public texts may change on others."""


def each(scale: Scale, names: Iterable[str]) -> dict[str, float]:
    """The scale of each tensor in ``names``. Raises ``InputError`` for a scale that is not a number above 0 or that no
    message can state, and for a mapping of other tensors."""
    wanted = list(names)
    found = {n: scale.get(n, math.nan) for n in wanted} if isinstance(scale, Mapping) else dict.fromkeys(wanted, scale)
    if isinstance(scale, Mapping) and set(scale) != set(wanted):
        odd = min(set(scale) ^ set(wanted))
        raise InputError(
            f"the scales are those of {len(scale)} tensors; expected the {len(wanted)} that are trained ({odd})"
        )
    for name, one in found.items():
        if isinstance(one, bool) or not isinstance(one, int | float) or not 2.0**LEAST <= one <= 2.0**MOST:
            raise InputError(f"the scale of {name} is {one!r}; expected a number from 2**{LEAST} to 2**{MOST}")
    return found


def read_scale(told: object, names: Iterable[str]) -> Scale:
    """The scale that a server states: a number, or one for each of ``names`` in order. Raises ``InputError`` for anything
    else."""
    wanted = list(names)
    found: Any = dict(zip(wanted, told)) if isinstance(told, list) and len(told) == len(wanted) else told
    each(found, wanted)
    return cast(Scale, found)


def exponents(scale: Scale, names: Iterable[str]) -> tuple[int, ...]:
    """The scale of each tensor, rounded up to a power of two. Raises as ``each`` does."""
    return tuple(math.ceil(math.log2(one)) for one in each(scale, names).values())


def block_scales(before: Mapping[str, Tensor], *after: Mapping[str, Tensor], margin: float = 8.0) -> dict[str, float]:
    """A scale for each tensor: ``margin`` times its largest change from ``before`` to any of ``after``, and no less than
    ``LEAST_PART`` of the largest scale.

    ``after`` are weights after a round on public texts: several rounds, on texts of all kinds, since one text that is fitted
    already has tiny changes. Scales of private texts would reveal something about them. Raises ``InputError`` if nothing
    changed.
    """
    moved = {n: [float((one[n] - t).abs().max()) for one in after] if t.numel() else [] for n, t in before.items()}
    found = {n: margin * max(sizes, default=0.0) for n, sizes in moved.items()}
    most = max(found.values(), default=0.0)
    if not 0 < most < math.inf or not all(math.isfinite(s) for sizes in moved.values() for s in sizes):
        raise InputError("no tensor changed, or one has entries that are not finite numbers; scales need a real round")
    return {n: min(max(s, most * LEAST_PART, 2.0**LEAST), 2.0**MOST) for n, s in found.items()}
