"""Checking an audit's plan: what the names in it stand for, each made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rasura.core.interfaces import Attack, Defense, Metric
from rasura.core.local import Local
from rasura.core.values import Reconstruction
from rasura.registry import Methods, parse_defense, parse_update
from rasura.registry import metric as make_metric
from rasura.runs.plans import Plan


@dataclass(frozen=True)
class ChosenMethods:
    """The methods of a plan. ``defenses`` has every column of the matrix by its text, the baseline first where it is added;
    ``updates`` the local training of each kind of update, and what happens to its message behind every protection.
    """

    attacks: dict[str, Attack[Reconstruction]]
    defenses: Mapping[str, Defense]
    updates: Mapping[str, tuple[Local, Defense]]
    metrics: Mapping[str, Metric[Reconstruction]]


def chosen_methods(plan: Plan, methods: Methods, baseline: bool) -> ChosenMethods:
    """What the names of a checked ``plan`` stand for; with ``baseline`` also no protection, named or not."""
    added = () if "none" in plan.defenses or not baseline else ("none",)
    return ChosenMethods(
        attacks={name: methods.attacks[name].make() for name in plan.attacks},
        defenses={text: parse_defense(text, methods=methods.defenses) for text in (*added, *plan.defenses)},
        updates={text: parse_update(text) for text in plan.updates},
        metrics={name.partition(":")[0]: make_metric(name, methods.metrics) for name in plan.metrics},
    )
