"""Which attacks know a protection: a run must include all of them before a verdict says that it stops anything
(``docs/verdicts.md``)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rasura.core.errors import InputError
from rasura.core.specs import AttackSpec, DefenseSpec, ServiceAttackSpec
from rasura.core.values import Grant, Task
from rasura.registry.collect import Registry
from rasura.registry.parsing import parts
from rasura.registry.tables import ATTACKS, DEFENSES, MEMBERSHIP


@dataclass(frozen=True)
class Adversaries:
    """``attacks`` know the protection, those of its parts together; no attack knows the parts ``unknown``.

    ``protection_readers``: those of ``attacks`` that read the protection itself, so they cannot be shown to work without it.
    Only Rasura's are believed to work nevertheless.
    """

    attacks: tuple[str, ...]
    unknown: tuple[str, ...]
    protection_readers: tuple[str, ...]


def is_known(
    name: str, known_by: tuple[str, ...] | None, own: bool, attacks: Mapping[str, AttackSpec | ServiceAttackSpec]
) -> bool:
    """Whether an attack is taken to know the protection ``name``, which names the attacks ``known_by``.

    Of Rasura's ``own`` protections that is tested, and rounding and no protection need none. Of others, an attack must name
    the protection in turn: one that was not written for it may read nothing, and that would speak for the protection. Raises
    ``InputError`` for names of no attack.
    """
    for one in known_by or ():
        if one not in attacks:
            raise InputError(f"the protection {name} names the attack {one!r} in known_by, and there is no such attack; "
                "install it, pass it, or leave it out there")  # fmt: skip
    return known_by is not None and (own or any(name in attacks[one].knows for one in known_by))


def readers(
    wanted: Iterable[str], registry: Registry[Any], attacks: Mapping[str, AttackSpec | ServiceAttackSpec]
) -> tuple[str, ...]:
    """Those of the attacks ``wanted`` that read the protection itself, and are Rasura's."""
    return tuple(a for a in wanted if attacks[a].protection and registry.own(attacks[a]))


def adversaries(
    defense: str,
    *,
    task: Task = "classification",
    own_output: bool = False,
    defenses: Mapping[str, DefenseSpec] = DEFENSES,
    attacks: Mapping[str, AttackSpec] = ATTACKS,
) -> Adversaries:
    """The attacks that know ``defense`` and apply to models of ``task``. Some of its parts may be unknown. ``own_output``:
    the model has an output layer whose rows belong to tokens and that is not the word embedding, so that it is trained where
    the embeddings are frozen."""
    wanted: dict[str, None] = {}
    unknown = []
    names = [name.partition("/")[0] for name, _ in parts(defense)]
    for name in names:
        spec = defenses.get(name)
        known_by = None if spec is None else spec.known_by_on_images if task == "vision" else spec.known_by
        able = known_by and tuple(a for a in known_by if a not in attacks or task in attacks[a].tasks)
        if able and "frozen-embeddings" in names and not own_output:  # no gradient of a table of words is sent
            able = tuple(a for a in able if a not in attacks or not attacks[a].embedding)
        if spec is None or (known_by and not able) or not is_known(name, able, DEFENSES.own(spec), attacks):
            unknown.append(name)
        wanted |= dict.fromkeys(able or ())
    return Adversaries(tuple(wanted), tuple(unknown), readers(wanted, ATTACKS, attacks))


def membership_adversaries(defense: str) -> Adversaries:
    """The membership attacks that know ``defense``: those whose shadow models are trained under it. None for ``none``."""
    protected = any(name != "none" for name, _ in parts(defense))
    return Adversaries(tuple(a for a in MEMBERSHIP if protected and Grant.TRAINING in MEMBERSHIP[a].make().needs), (), ())
