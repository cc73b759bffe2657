"""Methods by name: what the package and installed plug-ins bring, and how users write them.

The only room that imports concrete methods. ``ATTACKS["span"].make()`` builds one.
"""

from rasura.registry.adversaries import Adversaries, adversaries, membership_adversaries
from rasura.registry.collect import Registry, named
from rasura.registry.objects import (
    REGISTERED,
    AttackLike,
    DefenseLike,
    Methods,
    MetricLike,
    methods_with,
    named_attacks,
    named_defenses,
    named_metrics,
)
from rasura.registry.parsing import parse_defense, parse_update, parts
from rasura.registry.strength import Family, family, strengths
from rasura.registry.tables import (
    ATTACKS,
    DEFENSES,
    KINDS,
    MEMBERSHIP,
    METRICS,
    MODELS,
    SERVICE_ATTACKS,
    SERVICE_METRICS,
    SERVICE_PROTECTIONS,
    UPDATES,
    attack,
    for_task,
    membership_attack,
    metric,
    service_attack,
    usual_membership,
    usual_metrics,
)
from rasura.registry.trust import declared, trusted, with_open_ends

__all__ = [
    "ATTACKS",
    "DEFENSES",
    "KINDS",
    "MEMBERSHIP",
    "METRICS",
    "MODELS",
    "REGISTERED",
    "SERVICE_ATTACKS",
    "SERVICE_METRICS",
    "SERVICE_PROTECTIONS",
    "UPDATES",
    "Adversaries",
    "AttackLike",
    "DefenseLike",
    "Family",
    "Methods",
    "MetricLike",
    "Registry",
    "adversaries",
    "attack",
    "declared",
    "family",
    "for_task",
    "membership_adversaries",
    "membership_attack",
    "methods_with",
    "metric",
    "named",
    "named_attacks",
    "named_defenses",
    "named_metrics",
    "parse_defense",
    "parse_update",
    "parts",
    "service_attack",
    "strengths",
    "trusted",
    "usual_membership",
    "usual_metrics",
    "with_open_ends",
]  # fmt: skip
