"""Protections and updates as users write them: ``frozen-embeddings+dropout:0.1``, ``fedavg-sgd:4:0.01+bf16``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rasura.core.errors import InputError
from rasura.core.interfaces import Defense
from rasura.core.local import Local
from rasura.core.specs import DefenseSpec
from rasura.core.values import Stage
from rasura.defenses.compose import chain
from rasura.registry.building import built, built_defense
from rasura.registry.collect import named
from rasura.registry.tables import DEFENSES, UPDATES

ORDER = tuple(Stage)


def parts(defense: str) -> tuple[tuple[str, str], ...]:
    """``"dropout:0.1+fp16"`` as names with their parameters: ``(("dropout", "0.1"), ("fp16", ""))``."""
    found = (part.strip().partition(":") for part in defense.split("+"))
    return tuple((name, value) for name, _, value in found)


def parse_defense(
    text: str, sealing: Mapping[str, Any] | None = None, methods: Mapping[str, DefenseSpec] = DEFENSES
) -> Defense:
    """``"frozen-embeddings+dropout:0.1"`` as a defense: names with their parameter, joined by ``+``, in any order, but
    ``sealing`` last.

    ``sealing``: what clients agreed on, by the names that ``rasura.defenses.sealing.sealing`` has for it. Raises
    ``InputError`` for unknown names, for a parameter that is missing, out of range or not wanted, and as ``chain`` does.

    Examples:
        >>> [part.mechanism for part in parse_defense("frozen-blocks:1+gaussian:0.01")]
        [FrozenBlocks(n=1), Gaussian(sigma=0.01, clip=1.0)]

    """
    made = [_built(named(name, methods, "defense"), value, sealing or {}) for name, value in parts(text)]
    flat = [part for one in made for part in one]
    return chain(*sorted(flat, key=lambda t: ORDER.index(t.stage)))


def _built(spec: DefenseSpec, value: str, sealing: Mapping[str, Any]) -> Defense:
    if spec.parameter is None:
        if value:
            raise InputError(f"defense {spec.name} takes no parameter, found {value!r}")
        return built_defense(spec.name, built("protection", spec.name, spec.make))
    try:
        parameter = spec.parameter(value)
    except ValueError:
        raise InputError(
            f"defense {spec.name} needs a number, found {value!r}; write {spec.name}:... ({spec.about})"
        ) from None
    more = sealing if spec.name == "sealing" else {}
    return built_defense(spec.name, built("protection", f"{spec.name}:{value}", spec.make, parameter, **more))


def parse_update(text: str) -> tuple[Local, Defense]:
    """``"fedavg-sgd:4:0.01+bf16"`` as local training, and what happens to the message after every protection.

    Raises ``InputError`` for unknown names, figures out of range, and parts that are not applied to a message.
    """
    first, *rest = (part.strip() for part in text.split("+"))
    name, *figures = first.split(":")
    spec = named(name, UPDATES, "update")
    if len(figures) > spec.figures or len(figures) < spec.needed:
        takes = f"{spec.figures} figure{'s' * (spec.figures != 1)}"
        raise InputError(f"update {first!r} takes {takes}, found {len(figures)}: {spec.about}")
    try:
        local: Local = spec.make(*figures)
    except InputError:
        raise
    except (TypeError, ValueError):
        raise InputError(f"update {first!r} has no whole number and rate; write {spec.example}: {spec.about}") from None
    wire = parse_defense("+".join(rest)) if rest else ()
    for part in wire:
        if part.stage is not Stage.WIRE:
            raise InputError(f"update {text!r}: {part.mechanism.name} is a protection of the client; pass it as a defense")
    return local, wire
