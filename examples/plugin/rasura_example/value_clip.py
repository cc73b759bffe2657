"""Clipping every entry of an update to a largest absolute value."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rasura.core.checked import number
from rasura.core.interfaces import Transform
from rasura.core.protection import Protection
from rasura.core.rng import Randomness
from rasura.core.specs import DefenseSpec
from rasura.core.values import Message, Stage
from rasura.defenses.compose import stateless


@dataclass(frozen=True)
class ValueClip(Protection, named="value-clip", at=Stage.WIRE):
    """Its public description: the largest absolute value of an entry."""

    limit: float = number(minimum=0, open="low")


def value_clip(limit: float) -> Transform[Message, Message, None]:
    """Clip every entry to [-limit, limit] (Pascanu et al. 2013, sec. 3.2, where it is a norm)."""

    def apply(message: Message, state: None, rng: Randomness) -> tuple[Message, None]:
        clipped = {name: entries.clamp(-limit, limit) for name, entries in message.gradients.items()}
        return replace(message, gradients=clipped), None

    return Transform(Stage.WIRE, ValueClip(limit), stateless, apply)


SPEC = DefenseSpec(
    name="value-clip",
    about="every entry clipped to a largest absolute value LIMIT",
    source="Pascanu et al. 2013, sec. 3.2",
    make=value_clip,
    parameter=float,
    example="value-clip:0.001",
    known_by=("touched-rows",),
)
