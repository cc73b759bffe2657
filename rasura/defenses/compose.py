"""Composing defenses: ``chain`` enforces the order of the stages, and ``mean`` is the usual aggregation."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rasura.core.interfaces import Defense, InputError, Transform, check_sealed_last, made
from rasura.core.mechanisms import Mean
from rasura.core.rng import Randomness
from rasura.core.specs import DefenseSpec
from rasura.core.values import Gradients, PerExample, Stage

ORDER = (Stage.DATA, Stage.MODEL, Stage.AGGREGATE, Stage.WIRE)
"""The stages in the order in which a step runs through them."""


def stateless(_: Any) -> None:
    """The ``init`` of a transform that keeps no state."""
    return


def none() -> Defense:
    """No protection at all: the empty chain."""
    return ()


def mean() -> Transform[PerExample, Gradients, None]:
    """The gradient of the mean loss of the batch, as in training without protection."""

    def apply(examples: PerExample, state: None, rng: Randomness) -> tuple[Gradients, None]:
        return examples.mean(), None

    return made(Stage.AGGREGATE, Mean(), stateless, apply)


def chain(*parts: Transform[Any, Any, Any] | Defense) -> Defense:
    """Join transforms and defenses into one defense, in the order given; ``chain()`` is no protection.

    Raises ``InputError``, with the names of both parts, if the stages are out of order (DATA < MODEL < AGGREGATE < WIRE), or
    if two parts aggregate. So does a part behind ``sealing``, which would change no entry that is sealed. A wrong order is
    refused and not corrected, so that the description is what runs.

    Examples:
        >>> from rasura.defenses.noise import gaussian_noise
        >>> [part.mechanism for part in chain(gaussian_noise(0.1), gaussian_noise(0.2))]
        [Gaussian(sigma=0.1, clip=1.0), Gaussian(sigma=0.2, clip=1.0)]

    """
    flat: list[Transform[Any, Any, Any]] = []
    for part in parts:
        for one in part if isinstance(part, tuple) else (part,):
            if not isinstance(one, Transform):
                raise InputError(f"a {type(one).__name__} is not a defense; expected a Transform or a tuple of them")
            flat.append(one)
    for before, after in pairwise(flat):
        if ORDER.index(before.stage) > ORDER.index(after.stage):
            raise InputError(
                f"'{before.mechanism.name}' ({before.stage.value}) stands before "
                f"'{after.mechanism.name}' ({after.stage.value}); the order is {' < '.join(s.value for s in ORDER)}: "
                f"put '{after.mechanism.name}' first"
            )
    aggregations = [one.mechanism.name for one in flat if one.stage is Stage.AGGREGATE]
    if len(aggregations) > 1:
        raise InputError(f"'{aggregations[0]}' and '{aggregations[1]}' both aggregate the batch; remove one of them")
    check_sealed_last(flat)
    return tuple(flat)


def with_aggregation(defense: Defense) -> Defense:
    """``defense`` with ``mean()`` at the place of the aggregation, unless it has one."""
    if any(one.stage is Stage.AGGREGATE for one in defense):
        return defense
    before = tuple(one for one in defense if ORDER.index(one.stage) < ORDER.index(Stage.AGGREGATE))
    return (*before, mean(), *defense[len(before) :])


SPEC = DefenseSpec(
    name="none",
    about="baseline: the plain gradient, without dropout",
    source="Rasura: the baseline of every audit",
    make=none,
    example="none",
    known_by=(),
    known_by_on_images=(),
    neutral=none,
)
