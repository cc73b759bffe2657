"""The noise that a target epsilon needs, put into a protection that names none: ``dp-sgd`` becomes ``dp-sgd:0.8132``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rasura.accounting import Guarantee, Run, sigma_for
from rasura.accounting.banded import banded_sigma
from rasura.core.errors import InputError
from rasura.core.interfaces import Defense
from rasura.registry import parse_defense, parts

SAMPLED = ("dp-sgd", "normalised")
"""Those of ``SOLVED`` for batches drawn by Poisson sampling."""

SOLVED = (*SAMPLED, "dp-ftrl")
"""The protections whose noise multiplier is found for a target epsilon."""


def noiseless(defense: str) -> bool:
    """Whether ``defense`` has a part whose noise a target epsilon would set. Raises ``InputError`` where it has two, or one
    that names its noise already."""
    named = [(name, value) for name, value in parts(defense) if name in SOLVED]
    if len(named) > 1:
        raise InputError(f"{defense} has {len(named)} protections with noise; expected one for a target epsilon")
    for name, value in named:
        if any("=" not in part or part.startswith("sigma=") for part in value.split("/") if part):
            raise InputError(f"{name}:{value} names its noise, and a target epsilon was given; leave one of them out, "
                f"for example {name} or {name}:clip=0.5")  # fmt: skip
    return bool(named)


def with_noise(defense: str, sigma: float) -> str:
    """``defense`` with the noise multiplier ``sigma``.

    >>> with_noise("frozen-blocks:6+dp-sgd:clip=0.5", 1.25)
    'frozen-blocks:6+dp-sgd:1.25/clip=0.5'
    """
    noiseless(defense)
    out = []
    for name, value in parts(defense):
        value = "/".join((f"{sigma:.10g}", *filter(None, [value]))) if name in SOLVED else value
        out.append(f"{name}:{value}" if value else name)
    return "+".join(out)


def solved(defense: str | Defense, target: float, run: Run) -> str:
    """``defense`` with the least noise, to a thousandth, under which all of ``run`` spends at most ``target`` epsilon.

    ``dp-ftrl`` takes the batches of ``run`` in a fixed order; the others draw them by Poisson sampling. Raises
    ``InputError`` for a target that no noise reaches, for batches drawn in another way, for a protection with noise of its
    own, and for one that is not text. The guarantee of the whole is checked by ``check_target``.
    """
    if not isinstance(defense, str):
        raise InputError("a target epsilon needs the protection as text, such as dp-sgd; it then finds the noise")
    if not noiseless(defense):
        raise InputError(f"{defense} has no part whose noise a target epsilon sets; expected one of {', '.join(SOLVED)}")
    if (band := _band(defense)) is not None:
        return with_noise(defense, banded_sigma(target, run.steps, run.steps_an_epoch, band, run.fails))
    if run.sampling != "poisson":
        raise InputError(
            "a target epsilon needs batches drawn by Poisson sampling; nothing is proven for a loader that shuffles"
        )
    noise = "laplace" if "noise=laplace" in defense else "gaussian"
    # Rounded up, so that the figure in the name is the one that was checked.
    sigma = math.ceil(1e4 * sigma_for(target, run.rate, run.steps, run.fails, noise=noise)) / 1e4
    return with_noise(defense, sigma)


def _band(defense: str) -> int | None:
    """The band of correlated noise in ``defense``; None where it has none."""
    known = [p.mechanism for p in parse_defense(with_noise(defense, 1.0))]
    return next((int(m.parameters["band"] or 0) for m in known if m.name == "dp-ftrl"), None)


def check_target(promised: Guarantee, target: float) -> None:
    """Raises ``InputError`` unless ``promised`` is a guarantee of at most ``target`` epsilon."""
    if promised.epsilon is None or not promised.epsilon <= target:
        raise InputError(f"epsilon {target:g} was not reached: {promised.statement}")


def solved_all(defenses: Sequence[str], target: float, run: Run) -> tuple[str, ...]:
    """``solved`` of each of ``defenses`` that a target concerns; the others, such as ``none``, as they are. Raises
    ``InputError`` if it concerns none."""
    if not any(map(noiseless, defenses)):
        raise InputError(f"a target epsilon was given, but no defense is one of {', '.join(SOLVED)}; pass --defense dp-sgd")
    return tuple(solved(text, target, run) if noiseless(text) else text for text in defenses)
