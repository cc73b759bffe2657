"""What a run stores about itself once, beside its records: the model's fingerprint, and what its methods are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from rasura.core.run_store import RunStore
from rasura.core.specs import AttackSpec, DefenseSpec, ServiceAttackSpec, ServiceProtectionSpec
from rasura.registry import parts
from rasura.victims.fingerprint import fingerprint


def describe_run(
    store: RunStore,
    model: nn.Module,
    cells: int,
    protections: Iterable[str],
    defenses: Mapping[str, DefenseSpec] | Mapping[str, ServiceProtectionSpec],
    attacks: Iterable[str],
    known: Mapping[str, AttackSpec] | Mapping[str, ServiceAttackSpec],
) -> None:
    """Store the fingerprint of ``model``, the number of ``cells`` that the run has, and from the specs what each of
    ``protections`` and ``attacks`` is.

    The weights are hashed at each call, since they may have changed after the last one. Raises ``InputError`` if the folder
    holds results of other weights: a run must not mix two models.
    """
    names = {name.partition("/")[0] for text in protections for name, _ in parts(text)}
    told = {
        name: {"about": spec.about, "source": spec.source, "guarantee": getattr(spec, "guarantee", "none")}
        | {"calibrated": "yes" if getattr(spec, "strength", None) else "no"}
        for name in sorted(names)
        if (spec := defenses.get(name)) is not None
    }
    reads = {name: {"about": known[name].about, "source": known[name].source} for name in attacks if name in known}
    about = {"model": fingerprint(model), "cells": cells, "protections": told, "attacks": reads}
    store.describe(about, fixed=("model",))
