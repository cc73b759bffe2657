"""The one figure that sets how strong a protection is: from which to which value it is tried, and how it is written.

A knob is turned by a position, 0 at the weakest and 1 at the strongest value tried; between them values grow by ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rasura.interfaces import InputError
from rasura.recipes import DEFENSES, known


@dataclass(frozen=True)
class Knob:
    """The figure of one protection. ``points``: values tried at first, ``weakest`` and ``strongest`` among them.

    ``dropped``: it is a share that is dropped, whose rest is what shrinks by ratios. ``whole``: it is a whole number.
    ``entries``: it counts in units of the model's trained entries. ``end``: what is written behind it.
    """

    name: str
    weakest: float
    strongest: float
    points: int
    dropped: bool = False
    whole: bool = False
    entries: bool = False
    end: str = ""

    def positions(self) -> tuple[float, ...]:
        """Where the knob is set at first, from weak to strong."""
        return tuple(k / (self.points - 1) for k in range(self.points))

    def value(self, position: float, entries: int = 1) -> float:
        """The figure at ``position``, to two digits."""
        first, last = (1 - self.weakest, 1 - self.strongest) if self.dropped else (self.weakest, self.strongest)
        at: float = first * (last / first) ** position * (entries if self.entries else 1)
        if self.whole:
            return round(at)
        rounded = float(f"{at:.2g}")
        return round(1 - rounded, 12) if self.dropped else rounded


KNOBS: Mapping[str, Knob] = {
    "gaussian": Knob("sigma", 1e-5, 1.0, 6),
    "laplace": Knob("scale", 1e-5, 1.0, 6),
    "pruning": Knob("ratio", 0.1, 0.9999, 5, dropped=True),
    "random-pruning": Knob("ratio", 0.1, 0.9999, 5, dropped=True),
    "dropout": Knob("probability", 0.05, 0.9, 5),
    "dp-sgd": Knob("sigma", 1e-5, 10.0, 7),
    "normalised": Knob("sigma", 1e-5, 10.0, 7),
    "directional": Knob("kappa", 10.0, 1e-4, 6, entries=True),
    "accumulate": Knob("hidden sizes", 0.125, 2.0, 5, end="d"),
    "sealing": Knob("share", 0.01, 1.0, 5),
    "ghost": Knob("group", 1, 32, 6, whole=True),
}
"""Protection -> its figure."""


@dataclass(frozen=True)
class Family:
    """A protection whose figure is open: ``text`` as written by the user, ``rest`` all that does not change.

    ``form`` is the protection with a place ``{}`` for the figure; ``entries`` the trained entries of the model.
    """

    text: str
    form: str
    rest: str
    knob: Knob
    entries: int = 1

    def setting(self, position: float) -> str:
        """The protection with its figure at ``position``, as ``rasura audit --defense`` takes it."""
        value = self.knob.value(position, self.entries)
        # Never with an exponent's plus, which joins protections.
        return self.form.replace("{}", f"{value:.15g}".replace("e+", "e") + self.knob.end)


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
    name = parts[place].partition(":")[0].partition("/")[0]
    others = parts[:place] + parts[place + 1 :]
    whole = "+".join([*parts[:place], form, *parts[place + 1 :]])
    return Family(text, whole, "+".join(others) or "none", KNOBS[name], entries)


def _form(part: str) -> str | None:
    """``part`` with a place for its figure; None where it has none, or a value already."""
    head, *options = part.split("/")
    name, _, value = head.partition(":")
    if known("defense", name, DEFENSES) not in KNOBS or (name == "sealing" and "=" in value):
        return None
    if name == "sealing":
        return "/".join([f"sealing:{value or 'grad'}={{}}", *options])
    if name == "ghost":
        options = [o for o in (value, *options) if o]
        return None if any(o.startswith("group=") for o in options) else "/".join(["ghost:group={}", *options])
    return None if value else "/".join([f"{name}:{{}}", *options])


def _refusal(text: str, parts: list[str], opened: list[str]) -> str:
    if opened:
        return f"defense {text}: {' and '.join(opened)} have no value; calibrate finds one figure, give the others theirs"
    valued = [p for p in parts if p.partition(":")[0].partition("/")[0] in KNOBS]
    if valued:
        return f"defense {valued[-1]} has its value already; calibrate finds it: pass {valued[-1].partition(':')[0]} alone"
    return f"defense {text} has no figure to calibrate; expected one of {', '.join(KNOBS)}"
