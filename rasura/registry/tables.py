"""The registries, one a kind of method, and what is built by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rasura.core.errors import InputError
from rasura.core.interfaces import Attack, MembershipAttack, Metric, ServiceAttack
from rasura.core.specs import (
    AttackSpec,
    DefenseSpec,
    MembershipSpec,
    MetricSpec,
    ModelSpec,
    ServiceAttackSpec,
    ServiceMetricSpec,
    ServiceProtectionSpec,
    UpdateSpec,
)
from rasura.core.values import Reconstruction, Task
from rasura.registry.building import built, built_attack, built_metric
from rasura.registry.collect import Registry, named

ATTACKS = Registry("attack", AttackSpec, "rasura.attacks", "rasura.attacks")
DEFENSES = Registry("defense", DefenseSpec, "rasura.defenses", "rasura.defenses", also="rasura.ghost")
METRICS = Registry("metric", MetricSpec, "rasura.metrics", "rasura.metrics")
MEMBERSHIP = Registry("membership attack", MembershipSpec, "rasura.attacks", "rasura.membership_attacks")
SERVICE_ATTACKS = Registry("attack on a service", ServiceAttackSpec, "rasura.attacks", "rasura.service_attacks")
SERVICE_METRICS = Registry("metric of a service", ServiceMetricSpec, "rasura.metrics", "rasura.service_metrics")
SERVICE_PROTECTIONS = Registry(
    "protection of a service", ServiceProtectionSpec, "rasura.service_protections", "rasura.service_protections"
)
UPDATES = Registry("update", UpdateSpec, "rasura.core.updates", "rasura.update_kinds")
MODELS = Registry("model family", ModelSpec, "rasura.victims", "rasura.models")

KINDS: Mapping[str, Registry[Any]] = {
    "attacks": ATTACKS, "defenses": DEFENSES, "metrics": METRICS, "membership-attacks": MEMBERSHIP, "update-kinds": UPDATES,
    "service-attacks": SERVICE_ATTACKS, "service-metrics": SERVICE_METRICS, "service-protections": SERVICE_PROTECTIONS,
    "models": MODELS,
}  # fmt: skip
"""What ``rasura list`` can list, by the word that users write."""


def for_task(methods: Mapping[str, Any], task: Task | str) -> tuple[str, ...]:
    """The names of those ``methods`` that work on ``task``."""
    return tuple(name for name, spec in methods.items() if task in spec.tasks)


def usual_membership(task: Task | str) -> tuple[str, ...]:
    """The membership attacks that run on ``task`` unless told otherwise."""
    return tuple(name for name, spec in MEMBERSHIP.items() if task in spec.usual)


def usual_metrics(task: Task | str = "classification") -> tuple[str, ...]:
    """What an audit computes unless told otherwise: all that needs no model of its own."""
    return tuple(name for name in for_task(METRICS, task) if METRICS[name].usual)


def attack(name: str) -> Attack[Reconstruction]:
    """The attack called ``name``.

    >>> sorted(grant.name for grant in attack("span").needs)
    ['BASE_MODEL', 'MODEL']
    >>> attack("spam")
    Traceback (most recent call last):
    rasura.core.errors.InputError: unknown attack 'spam'; did you mean span or span-matching?
    """
    return built_attack(name, named(name, ATTACKS, "attack", ATTACKS.unusable.items()).make)


def membership_attack(name: str) -> MembershipAttack:
    """The membership attack called ``name``."""
    made: MembershipAttack = built("membership attack", name, named(name, MEMBERSHIP, "membership attack").make)
    return made


def service_attack(name: str) -> ServiceAttack:
    """The attack on a service called ``name``."""
    made: ServiceAttack = built("attack on a service", name, named(name, SERVICE_ATTACKS, "attack on a service").make)
    return made


def metric(name: str, methods: Mapping[str, MetricSpec] = METRICS) -> Metric[Reconstruction]:
    """The metric called ``name``, of texts or images; ``sentence_cosine:FOLDER`` names its encoder."""
    bare, _, encoder = name.partition(":")
    spec = named(bare, methods, "metric")
    if spec.encoder:
        from rasura.victims.encoder import sentence_encoder

        return built_metric(bare, spec.make, sentence_encoder(*filter(None, [encoder])))
    if encoder:
        raise InputError(f"metric {bare} takes no parameter, found {encoder!r}")
    return built_metric(bare, spec.make)
