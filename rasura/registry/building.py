"""Methods are built here, and looked at before anything runs: what others bring may raise, or lack what a run relies on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rasura.core.errors import FAULTS, InputError, in_its_words
from rasura.core.interfaces import Attack, Defense, Metric, Transform
from rasura.core.mechanisms import typed
from rasura.core.values import Grant, Mechanism, Reconstruction, Stage


def built(kind: str, name: str, make: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """What ``make`` returns. Raises ``InputError`` with the method's name and the error's own words for whatever it raises:
    nothing private has been read yet."""
    try:
        return make(*given, **named)
    except InputError:
        raise
    except FAULTS as error:
        raise InputError(f"the {kind} {name} cannot be made: {in_its_words(error)}") from error


def built_attack(name: str, make: Callable[..., Any]) -> Attack[Reconstruction]:
    """The attack that ``make`` makes. Raises ``InputError`` for anything else than an attack."""
    made = built("attack", name, make)
    if not isinstance(made, Attack):
        raise InputError(f"the attack {name} is made as {type(made).__name__}; expected name, needs, uses and a call")
    for what in ("needs", "uses"):
        grants: Any = getattr(made, what)
        if not isinstance(grants, frozenset | set) or not all(isinstance(one, Grant) for one in grants):
            raise InputError(f"the attack {name}: {what} is {grants!r}; expected a set such as frozenset({{Grant.MODEL}})")
    return made


def built_metric(name: str, make: Callable[..., Any], *given: Any) -> Metric[Reconstruction]:
    """The metric that ``make`` makes of ``given``. Raises ``InputError`` for anything else than a metric."""
    made = built("metric", name, make, *given)
    if not isinstance(made, Metric):
        raise InputError(f"the metric {name} is made as {type(made).__name__}; expected name, unit, higher_is and a call")
    if made.higher_is not in ("worse", "better"):
        raise InputError(f"the metric {name}: higher_is is {made.higher_is!r}; expected worse or better")
    if not isinstance(made.unit, str):
        raise InputError(f"the metric {name}: unit is {made.unit!r}; expected text")
    if made.bounds is not None and not _is_range(made.bounds):
        raise InputError(f"the metric {name}: bounds are {made.bounds!r}; expected two finite numbers, the lower one first")
    return made


def _is_range(bounds: Any) -> bool:
    if not isinstance(bounds, tuple | list) or len(bounds) != 2:
        return False
    return all(isinstance(b, float | int) and math.isfinite(b) for b in bounds) and bounds[0] < bounds[1]


def built_defense(name: str, made: Any) -> Defense:
    """The parts of the protection ``made``. Raises ``InputError`` for anything else than one, and where its description does
    not say whether it adds noise, hides entries or drops out: no attack could take it into account."""
    parts = made if isinstance(made, tuple) else (made,)
    for part in parts:
        if not isinstance(part, Transform):
            raise InputError(
                f"the protection {name} is made as {type(part).__name__}; expected a Transform, or a chain of them"
            )
        if not isinstance(part.stage, Stage):
            raise InputError(f"the protection {name}: its stage is {part.stage!r}; expected a Stage, such as Stage.WIRE")
        if not isinstance(part.mechanism, Mechanism):
            raise InputError(f"the protection {name}: its mechanism is {part.mechanism!r}; expected a Protection")
        if part.mechanism.stage is not part.stage:
            raise InputError(
                f"the protection {name} acts at the stage {part.stage.value}, but its mechanism says "
                f"{part.mechanism.stage}; expected the same stage"
            )
        try:
            typed(part.mechanism)
        except InputError:
            raise InputError(
                f"the protection {name} is described by a plain Mechanism, which does not say whether it adds noise or "
                "hides entries, and attacks must know; describe it by a Protection of your own (docs/how-to/own-defense.md)"
            ) from None
    return parts
