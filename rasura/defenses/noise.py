"""Clipping with Gaussian or Laplace noise on the gradient of a whole batch, as attack papers evaluate it.

No formal guarantee is claimed for this per-batch form: differential privacy for single texts needs clipping *per example*
(DP-SGD), noise from a cryptographic source, and accounting over all steps. In a real deployment, pass
``rasura.core.rng.secret_generator()``, the operating system's randomness: anyone who knows a seed can subtract the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rasura.core.exact import norm
from rasura.core.interfaces import InputError, Transform, made
from rasura.core.mechanisms import Gaussian, Laplace
from rasura.core.rng import Randomness, laplace, normal
from rasura.core.specs import DefenseSpec, Strength
from rasura.core.values import Message, Stage
from rasura.defenses.compose import stateless

Draw = Callable[[Sequence[int], Randomness], Tensor]


def visible_norm(message: Message) -> float:
    """The Euclidean norm of all entries of ``message`` together (entries that are not visible are zero)."""
    return float(norm(message.gradients.values()))


def _noise(name: str, knob: str, width: float, clip: float, draw: Draw) -> Transform[Message, Message, None]:
    for label, value, wanted in ((knob, width, "0 or more"), ("clip", clip, "above 0 (float('inf') for no clipping)")):
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
        if not number or value < 0 or (value == 0 and label == "clip"):
            raise InputError(f"{name}: {label} is {value!r}; expected a number {wanted}")
    if math.isinf(width):
        raise InputError(f"{name}: {knob} is infinite; expected a finite number")

    def apply(message: Message, state: None, rng: Randomness) -> tuple[Message, None]:
        factor = min(1.0, clip / max(visible_norm(message), 1e-300))
        noisy = {}
        for key, gradient in message.gradients.items():
            out = gradient * factor
            if width > 0:
                # Drawn on the CPU in float32, so that a seed gives the same noise on every device and for every dtype.
                noise = draw(gradient.shape, rng).mul_(width).to(gradient)
                mask = message.visible.get(key)
                out = out + (noise if mask is None else noise * mask)
            noisy[key] = out
        return replace(message, gradients=noisy), None

    told = Gaussian(width, clip) if name == "gaussian" else Laplace(width, clip)
    return made(Stage.WIRE, told, stateless, apply)


def gaussian_noise(sigma: float, clip: float = 1.0) -> Transform[Message, Message, None]:
    """Clip the whole gradient to norm ``clip``, then add Gaussian noise of deviation ``sigma`` to every visible entry.

    ``sigma`` is in the units of the gradient, not a multiple of ``clip``. ``sigma=0, clip=inf`` changes nothing. Raises
    ``InputError`` unless ``sigma >= 0`` and ``clip > 0``. See the module for what this does not guarantee.
    """
    return _noise("gaussian", "sigma", sigma, clip, lambda shape, rng: normal(shape, rng, torch.float32))


def laplace_noise(scale: float, clip: float = 1.0) -> Transform[Message, Message, None]:
    """Clip the whole gradient to norm ``clip``, then add Laplace noise of ``scale`` b to every visible entry.

    The standard deviation of an entry is ``sqrt(2) * b``. Raises ``InputError`` unless ``scale >= 0`` and ``clip > 0``. See
    the module for what this does not guarantee.
    """
    return _noise("laplace", "scale", scale, clip, lambda shape, rng: laplace(shape, rng).float())


GAUSSIAN = DefenseSpec(
    name="gaussian",
    about="clips the update to norm 1 and adds Gaussian noise SIGMA to each entry",
    source="Zhu et al. 2019 (DLG), sec. 5; GRAB, sec. 5.5",
    make=gaussian_noise,
    example="gaussian:0.001",
    parameter=float,
    known_by=("pursuit", "lamp-weighted"),
    strength=Strength(name="sigma", weakest=1e-5, strongest=1.0, points=6),
    neutral=lambda: gaussian_noise(0.0, clip=math.inf),
    draws=True,
)

LAPLACE = DefenseSpec(
    name="laplace",
    about="clips the update to norm 1 and adds Laplace noise SCALE to each entry",
    source="Zhu et al. 2019 (DLG), sec. 5; GRAB, sec. 5.5",
    make=laplace_noise,
    example="laplace:0.001",
    parameter=float,
    known_by=("pursuit", "lamp-weighted"),
    strength=Strength(name="scale", weakest=1e-5, strongest=1.0, points=6),
    neutral=lambda: laplace_noise(0.0, clip=math.inf),
    draws=True,
)
