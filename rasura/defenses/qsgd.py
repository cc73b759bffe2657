"""QSGD (Alistarh et al. 2017): each entry is rounded at random to one of a few levels, without bias.

What it stops, on the tests' tiny BERT with one text of eight tokens: span recovers the text at 65536 levels and not at 256,
where embedding rows still recovers it. At 16 levels half of the text is recovered, at 1 level nothing. No attack uses the
levels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from rasura.core.checked import whole
from rasura.core.exact import norm
from rasura.core.interfaces import Transform, made
from rasura.core.protection import Protection
from rasura.core.rng import Randomness, uniform
from rasura.core.specs import DefenseSpec, Strength
from rasura.core.values import Message, Stage
from rasura.defenses.compose import stateless


@dataclass(frozen=True)
class Qsgd(Protection, named="qsgd", at=Stage.WIRE):
    """Entries rounded at random to multiples of their tensor's norm over ``levels``.

    The rounding error depends on the tensor's norm, so ``noise_per_entry`` cannot state it in advance and stays 0. For this
    reason, the spec names no attack that knows it.
    """

    levels: int = whole(minimum=1)


def _rounded(gradient: Tensor, levels: int, rng: Randomness) -> Tensor:
    length = norm([gradient])
    if not bool(length > 0):
        return gradient
    scaled = gradient.double().abs() * (levels / length)
    up = uniform(gradient.shape, rng).to(gradient.device) < scaled.frac()
    size: Tensor = (scaled.floor() + up) * (length / levels)
    return (size * gradient.sign()).to(gradient.dtype)


def qsgd(levels: int) -> Transform[Message, Message, None]:
    """Entries rounded to multiples of ``norm / levels``, up or down at random so that the mean is the entry itself.

    ``norm`` is the Euclidean norm of the tensor that the entry stands in; the paper's sec. 3.1 takes the whole gradient as
    one vector, and its experiments pieces of it, as here. An entry changes by at most ``norm / levels``; zeros and entries
    that are not visible stay zero. It saves traffic and does not give differential privacy. Raises ``InputError`` unless
    ``levels`` is a whole number of at least 1.
    """
    told = Qsgd(levels)

    def apply(message: Message, state: None, rng: Randomness) -> tuple[Message, None]:
        return replace(message, gradients={n: _rounded(g, told.levels, rng) for n, g in message.gradients.items()}), None

    return made(Stage.WIRE, told, stateless, apply)


SPEC = DefenseSpec(
    name="qsgd",
    about="rounds entries stochastically to LEVELS levels of the tensor's norm",
    source="Alistarh et al. 2017 (QSGD), sec. 3.1",
    make=qsgd,
    example="qsgd:16",
    parameter=int,
    strength=Strength(name="levels", weakest=65536, strongest=1, points=5, whole=True),
    draws=True,
)
