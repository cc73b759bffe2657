"""What a run stores about itself once, beside its records: the model's fingerprints, and what its methods are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rasura.accounting.compositions import composition
from rasura.core.interfaces import Defense
from rasura.core.options import names_of
from rasura.core.run_store import RunStore
from rasura.core.specs import AttackSpec, DefenseSpec, MethodSpec, ServiceAttackSpec, ServiceProtectionSpec
from rasura.registry.objects import Methods
from rasura.registry.tables import KINDS
from rasura.runs.identity import identity_of
from rasura.victims.fingerprint import fingerprints
from rasura.victims.loading import Victim


def describe_run(
    store: RunStore,
    cells: int,
    protections: Iterable[str],
    defenses: Mapping[str, DefenseSpec] | Mapping[str, ServiceProtectionSpec],
    attacks: Iterable[str],
    known: Mapping[str, AttackSpec] | Mapping[str, ServiceAttackSpec],
    fixed: Mapping[str, str | Mapping[str, str]],
    compositions: Mapping[str, str] | None = None,
) -> None:
    """Store the number of ``cells`` that the run has, from the specs what each of ``protections`` and ``attacks`` is, and
    ``fixed``: by name, fingerprints of what all results depend on, the model first (``of_model``). A guarantee is stored as
    ``unchecked`` where the method is not Rasura's own. ``compositions``: why no differential privacy is proven for each
    whole protection; empty where it is.

    Raises ``InputError`` if the folder holds results of anything else that is fixed: a run must not mix two.
    """
    told = {
        name: {"about": spec.about, "source": spec.source, "guarantee": getattr(spec, "guarantee", "none")}
        | ({} if _shipped(spec) else {"unchecked": True})
        | ({"figure": list(spec.strength.keys)} if isinstance(spec, DefenseSpec) and spec.strength else {})
        for name in _names(protections)
        if (spec := defenses.get(name)) is not None
    }
    reads = {name: {"about": known[name].about, "source": known[name].source} for name in attacks if name in known}
    about = {
        **fixed,
        "cells": cells,
        "protections": told,
        "attacks": reads,
        "compositions": dict(compositions or {}),
    }
    store.describe(about, fixed=tuple(fixed))


def unproven(defenses: Mapping[str, Defense]) -> dict[str, str]:
    """Why the ledger states no differential privacy for each of ``defenses``, by its text; empty where it does."""
    found = {text: composition([one.counted for one in parts]) for text, parts in defenses.items()}
    return {text: "" if one.verdict == "proven" else one.why for text, one in found.items()}


def of_model(victim: Victim) -> dict[str, str | Mapping[str, str]]:
    """What tells the model of a run from others, with its tokenizer, for ``RunStore.describe``. The weights are hashed at
    each call, since they may have changed after the last one."""
    sides = {f"tokenizer_{name}": str(getattr(victim.tokenizer, name, None)) for name in ("padding_side", "truncation_side")}
    return fingerprints("model", victim.model, victim.vocabulary, {"most_tokens": str(victim.max_length), **sides})


def _names(protections: Iterable[str]) -> list[str]:
    return sorted({name for text in protections for name in names_of(text)})


def own_methods(
    methods: Methods, attacks: Iterable[str], protections: Iterable[str], metrics: Iterable[str]
) -> list[MethodSpec]:
    """Those of the named methods that are not Rasura's own: given as objects, or of a plug-in."""
    kinds: tuple[tuple[Mapping[str, MethodSpec], Iterable[str]], ...] = (
        (methods.attacks, attacks), (methods.defenses, _names(protections)), (methods.metrics, metrics),
    )  # fmt: skip
    used = [specs[name] for specs, some in kinds for name in sorted(some) if name in specs]
    return [spec for spec in used if not _shipped(spec)]


def code_of(own: Iterable[MethodSpec]) -> str:
    """A fingerprint of ``own_methods``; "none" without any. A name alone does not say what a researcher's method does."""
    told = {f"{type(spec).__name__} {spec.name}": identity_of(spec) for spec in own}
    return identity_of(told) if told else "none"


def codes_of(protections: Iterable[str], service: bool) -> dict[str, str]:
    """A fingerprint of the methods that are not Rasura's own in each of ``protections``, of updates or of a ``service``,
    that has any, by its text."""
    known = KINDS["service-protections" if service else "defenses"]
    # A protection of a service is one name, which may hold a plus.
    named = {text: sorted({text.partition(":")[0], *_names([text])}) for text in protections}
    own = {text: [known[n] for n in names if n in known and not _shipped(known[n])] for text, names in named.items()}
    return {text: code_of(some) for text, some in own.items() if some}


def own_code(used: Iterable[MethodSpec]) -> dict[str, Mapping[str, str]]:
    """Of what results of services and trained models also depend on: fingerprints of those methods in ``used`` that are not
    Rasura's own, for ``RunStore.describe``."""
    own = (spec for spec in used if not _shipped(spec))
    return {"code of own methods": {f"{type(spec).__name__} {spec.name}": identity_of(spec) for spec in own}}


def _shipped(spec: MethodSpec) -> bool:
    """Whether ``spec`` is of the registry, and made by Rasura's own code."""
    made_in = str(getattr(getattr(spec, "make", None), "__module__", ""))
    ours = made_in.partition(".")[0] == __name__.partition(".")[0]
    return ours and any(table.get(spec.name) is spec for table in KINDS.values())
