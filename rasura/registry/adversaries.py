"""Which attacks know a protection: a run must include all of them before a verdict says that it stops anything
(``docs/verdicts.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rasura.core.specs import AttackSpec, DefenseSpec
from rasura.core.values import Grant
from rasura.registry.collect import ours
from rasura.registry.parsing import parts
from rasura.registry.tables import ATTACKS, DEFENSES, MEMBERSHIP


@dataclass(frozen=True)
class Adversaries:
    """``attacks`` know the protection, those of its parts together; no attack knows the parts ``unknown``.

    ``protection_readers``: those of ``attacks`` that read the protection itself, so they cannot be shown to work without it.
    """

    attacks: tuple[str, ...]
    unknown: tuple[str, ...]
    protection_readers: tuple[str, ...]


def adversaries(
    defense: str,
    *,
    images: bool = False,
    defenses: Mapping[str, DefenseSpec] = DEFENSES,
    attacks: Mapping[str, AttackSpec] = ATTACKS,
) -> Adversaries:
    """The attacks that know ``defense``, which may have unknown parts."""
    wanted: dict[str, None] = {}
    unknown = []
    names = [name.partition("/")[0] for name, _ in parts(defense)]
    for name in names:
        spec = defenses.get(name)
        known_by = None if spec is None else spec.known_by_on_images if images else spec.known_by
        # That nobody needs to know it is true of rounding and of no protection, and no other package can say it.
        if spec is None or known_by is None or not (known_by or ours(spec.make)):
            unknown.append(name)
        else:
            wanted |= dict.fromkeys(known_by)
    if "frozen-embeddings" in names:  # no gradient of the embeddings is sent
        wanted = {a: None for a in wanted if not attacks[a].embedding}
    return Adversaries(tuple(wanted), tuple(unknown), tuple(a for a in wanted if attacks[a].protection))


def membership_adversaries(defense: str) -> Adversaries:
    """The membership attacks that know ``defense``: those whose shadow models are trained under it. None for ``none``."""
    protected = any(name != "none" for name, _ in parts(defense))
    return Adversaries(tuple(a for a in MEMBERSHIP if protected and Grant.TRAINING in MEMBERSHIP[a].make().needs), (), ())
