"""Methods given as objects: a researcher's own attack or protection, without a plug-in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from rasura.core.errors import InputError
from rasura.core.interfaces import Attack, Defense, Metric, Transform
from rasura.core.specs import IMAGES, TEXT, AttackSpec, DefenseSpec, MethodSpec, MetricSpec
from rasura.core.values import OWN, Reconstruction
from rasura.defenses.compose import chain
from rasura.registry.building import built_defense
from rasura.registry.tables import ATTACKS, DEFENSES, METRICS

S = TypeVar("S", bound=MethodSpec)
T = TypeVar("T")
GIVEN = "given as an object"
USUAL_SECONDS = 60.0
"""The assumed cost of an attack that does not state one."""

AttackLike = str | AttackSpec | Attack[Reconstruction]
DefenseLike = str | DefenseSpec | Transform[Any, Any, Any] | Defense
MetricLike = str | MetricSpec | Metric[Reconstruction]


@dataclass(frozen=True)
class Methods:
    """The methods that a run can name: those of the registry, and those that were given as objects."""

    attacks: Mapping[str, AttackSpec] = field(default_factory=lambda: ATTACKS)
    defenses: Mapping[str, DefenseSpec] = field(default_factory=lambda: DEFENSES)
    metrics: Mapping[str, MetricSpec] = field(default_factory=lambda: METRICS)


def named_attacks(given: Iterable[AttackLike]) -> tuple[tuple[str, ...], dict[str, AttackSpec]]:
    """The names of ``given``, and specs for those that are objects."""
    return _named(given, AttackSpec, attack_spec, ATTACKS)


def named_defenses(given: Iterable[DefenseLike]) -> tuple[tuple[str, ...], dict[str, DefenseSpec]]:
    """The names of ``given``, and specs for those that are objects."""
    return _named(given, DefenseSpec, defense_spec, DEFENSES)


def named_metrics(given: Iterable[MetricLike]) -> tuple[tuple[str, ...], dict[str, MetricSpec]]:
    """The names of ``given``, and specs for those that are objects."""
    return _named(given, MetricSpec, metric_spec, METRICS)


def _named(
    given: Iterable[Any], kind: type[S], made: Callable[[Any], S], registered: Mapping[str, S]
) -> tuple[tuple[str, ...], dict[str, S]]:
    if isinstance(given, str):
        raise InputError(f"{given!r} is one text; expected a list of names or objects")
    names, specs = [], {}
    for one in given:
        if isinstance(one, str):
            names.append(one)
            continue
        spec = one if isinstance(one, kind) else made(one)
        if spec.name in registered and registered[spec.name] is not spec:
            # It must not count as what Rasura has under this name.
            given_as = {"example": f"{OWN}{spec.name}"} if isinstance(spec, DefenseSpec) else {}
            spec = replace(spec, name=f"{OWN}{spec.name}", **given_as)
        if spec.name in names:
            raise InputError(f"two of the methods are called {spec.name!r}; give one of them another name")
        names.append(spec.name)
        specs[spec.name] = spec
    return tuple(names), specs


def attack_spec(attack: Attack[Reconstruction]) -> AttackSpec:
    """A spec for an attack that has none. Raises ``InputError`` for objects that are not attacks."""
    if not isinstance(attack, Attack):
        raise InputError(f"{type(attack).__name__} is not an attack; expected name, needs, uses and a call")
    return AttackSpec(
        name=attack.name, about=GIVEN, source=_origin(attack), make=partial(_given, attack), seconds=USUAL_SECONDS,
        tasks=TEXT | IMAGES,
    )  # fmt: skip


def defense_spec(defense: Transform[Any, Any, Any] | Defense) -> DefenseSpec:
    """A spec for a protection that has none. No attack is known to know it, so no verdict says that it stops anything. It is
    named by its mechanisms. Raises ``InputError`` for objects that are not protections, and for an empty chain.
    """
    parts = defense if isinstance(defense, tuple) else (defense,)
    if not parts or not all(isinstance(part, Transform) for part in parts):
        raise InputError(f"{type(defense).__name__} is not a protection; expected a Transform, or a chain of them")
    name = "-".join(str(getattr(part.mechanism, "name", _origin(part.apply))) for part in parts)
    built_defense(name, parts)
    return DefenseSpec(name=name, about=GIVEN, source=_origin(parts[0].apply), make=partial(chain, *parts), example=name)


def metric_spec(metric: Metric[Reconstruction]) -> MetricSpec:
    """A spec for a metric that has none. Raises ``InputError`` for objects that are not metrics."""
    if not isinstance(metric, Metric):
        raise InputError(f"{type(metric).__name__} is not a metric; expected name, unit, higher_is, bounds and a call")
    return MetricSpec(
        name=metric.name, about=GIVEN, source=_origin(metric), make=partial(_given, metric), tasks=TEXT | IMAGES, usual=False
    )


def _given(method: T) -> T:
    """What specs of objects make: a run's identity sees the object in the ``partial``."""
    return method


def _origin(method: Any) -> str:
    made_in = getattr(method, "__module__", type(method).__module__)
    return f"{made_in}.{getattr(method, '__qualname__', type(method).__qualname__)}"


REGISTERED = Methods()
"""The methods of the registry alone."""


def methods_with(
    attacks: Mapping[str, AttackSpec], defenses: Mapping[str, DefenseSpec], metrics: Mapping[str, MetricSpec]
) -> Methods:
    """The registry's methods, and those that were given as objects."""
    return Methods({**ATTACKS, **attacks}, {**DEFENSES, **defenses}, {**METRICS, **metrics})
