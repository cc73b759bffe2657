"""A protection whose one figure is open, as calibration is given it: ``frozen-embeddings+gaussian``.

The figure is turned by a position, 0 at the weakest and 1 at the strongest value tried; between them values grow by ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rasura.core.errors import InputError
from rasura.core.options import name_of
from rasura.core.specs import DefenseSpec, Strength
from rasura.registry.collect import named
from rasura.registry.tables import DEFENSES


@dataclass(frozen=True)
class Family:
    """A protection whose figure is open: ``text`` as written by the user, ``rest`` all that does not change.

    ``form`` is the protection with a place ``{}`` for the figure; ``entries`` the trained entries of the model.
    """

    text: str
    form: str
    rest: str
    strength: Strength
    entries: int = 1

    def setting(self, position: float) -> str:
        """The protection with its figure at ``position``, as ``rasura audit --defense`` takes it."""
        value = self.strength.value(position, self.entries)
        # Never with an exponent's plus, which joins protections.
        return self.form.replace("{}", f"{value:.15g}".replace("e+", "e") + self.strength.end)


def strengths(methods: Mapping[str, DefenseSpec] = DEFENSES) -> dict[str, Strength]:
    """The protections that have a figure to find, by name."""
    return {name: spec.strength for name, spec in methods.items() if spec.strength is not None}


def family(text: str, entries: int = 1) -> Family:
    """``"frozen-embeddings+gaussian"`` as a protection whose one figure is open; options may follow the name:
    ``directional/blocks=parameters``, ``sealing:param/scheme=bfv``.

    Raises ``InputError`` for unknown names, and unless exactly one part has a figure and no value.
    """
    parts = [part.strip() for part in text.split("+")]
    forms = {k: form for k, part in enumerate(parts) if (form := _form(part)) is not None}
    if len(forms) != 1:
        raise InputError(_refusal(text, parts, [parts[k] for k in forms]))
    ((place, form),) = forms.items()
    others = parts[:place] + parts[place + 1 :]
    whole = "+".join([*parts[:place], form, *parts[place + 1 :]])
    strength = strengths()[name_of(parts[place])]
    return Family(text, whole, "+".join(others) or "none", strength, entries)


def _form(part: str) -> str | None:
    """``part`` with a place for its figure; None where it has none, or a value already."""
    head, *rest = part.split("/")
    name, _, value = head.partition(":")
    strength = named(name, DEFENSES, "defense").strength
    if strength is None:
        return None
    if not strength.keys:
        return None if value else "/".join([f"{name}:{{}}", *rest])
    options = [o for o in (value, *rest) if o]
    if any(o.partition("=")[0] in strength.keys and "=" in o for o in options):
        return None
    chosen = next((o for o in options if o in strength.keys), strength.keys[0])
    return f"{name}:" + "/".join([f"{chosen}={{}}", *(o for o in options if o != chosen)])


def _refusal(text: str, parts: list[str], opened: list[str]) -> str:
    if opened:
        return f"defense {text}: {' and '.join(opened)} have no value; calibrate finds one figure, give the others theirs"
    valued = [p for p in parts if name_of(p) in strengths()]
    if valued:
        return f"defense {valued[-1]} has its value already; calibrate finds it: pass {valued[-1].partition(':')[0]} alone"
    return f"defense {text} has no figure to calibrate; expected one of {', '.join(strengths())}"
