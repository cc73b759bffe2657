"""The methods behind the names in an audit's plan, each made once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rasura.core.interfaces import Attack, Defense, Metric, check_sealed_last
from rasura.core.local import Local
from rasura.core.values import Reconstruction
from rasura.registry import Methods, parse_defense, parse_update
from rasura.registry import metric as make_metric
from rasura.registry.building import built_attack
from rasura.runs.plans import Plan


@dataclass(frozen=True)
class ChosenMethods:
    """The methods of a plan. ``defenses`` has every defense of the matrix by its text, with the added baseline first;
    ``updates`` has the local training of each kind of update, and what happens to its message after every protection.
    """

    attacks: dict[str, Attack[Reconstruction]]
    defenses: Mapping[str, Defense]
    updates: Mapping[str, tuple[Local, Defense]]
    metrics: Mapping[str, Metric[Reconstruction]]


def chosen_methods(plan: Plan, methods: Methods, baseline: bool) -> ChosenMethods:
    """The methods behind the names of a checked ``plan``. With ``baseline``, no protection is included even if it is not
    named. Raises ``InputError`` where an update changes the message behind ``sealing``."""
    added = () if "none" in plan.defenses or not baseline else ("none",)
    chosen = ChosenMethods(
        attacks={name: built_attack(name, methods.attacks[name].make) for name in plan.attacks},
        defenses={text: parse_defense(text, methods=methods.defenses) for text in (*added, *plan.defenses)},
        updates={text: parse_update(text) for text in plan.updates},
        metrics={name.partition(":")[0]: make_metric(name, methods.metrics) for name in plan.metrics},
    )
    for defense in chosen.defenses.values():
        for _, after in chosen.updates.values():
            check_sealed_last((*defense, *after))
    return chosen
