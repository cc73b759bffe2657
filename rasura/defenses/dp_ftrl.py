"""DP-FTRL by banded matrix factorisation (Choquette-Choo et al. 2023): clipped gradients in a fixed order, correlated noise.

The guarantee is in ``rasura.accounting``. It holds for the batches of one fixed order, the same in every pass, and for noise
that cannot be repeated (``rasura.core.rng.secret_generator()``). The noise of a training is not made here: it depends on
the whole plan, so a training hands it in as the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from rasura.core.interfaces import InputError, Transform, made
from rasura.core.mechanisms import DpFtrl
from rasura.core.options import options
from rasura.core.rng import Randomness, normal
from rasura.core.specs import DefenseSpec
from rasura.core.values import Gradients, PerExample, Stage
from rasura.defenses.compose import stateless
from rasura.defenses.dp_sgd import bounded, noise_width


class Noise(Protocol):
    """The noise of a training, step by step."""

    def draw(self, shape: Sequence[int]) -> Tensor:
        """The noise of the next step, on the sum of clipped gradients, of ``shape`` in float64."""


def dp_ftrl(sigma: float, band: int, clip: float = 1.0) -> Transform[PerExample, Gradients, Noise | None]:
    """Clip every text's gradient to norm ``clip``, sum, add the noise of this step, divide by the size.

    ``sigma`` is the noise multiplier: deviation of the independent noise, over the clipping norm, from which correlated
    noise is made. ``band``: over how many steps it is correlated; 1 is independent noise. The state is the noise of a
    training. Without it, a step is a first one, whose noise has the deviation ``sigma * clip``. Raises ``InputError`` unless
    ``sigma`` and ``clip`` are above 0 and ``band`` is a whole number from 1 on.
    """
    width = noise_width("dp-ftrl", sigma, clip)

    def apply(examples: PerExample, state: Noise | None, rng: Randomness) -> tuple[Gradients, Noise | None]:
        total = bounded(examples.weighted(lambda norms: (clip / norms.clamp_min(1e-300)).clamp(max=1)))
        # One draw for all entries, so that an entry has the same place in every step.
        shape = (sum(gradient.numel() for gradient in total.values()),)
        drawn = width * normal(shape, rng) if state is None else state.draw(shape)
        divisor = examples.expected or examples.size
        out, start = {}, 0
        for name, gradient in total.items():
            noise = drawn[start : start + gradient.numel()].reshape(gradient.shape)
            start += gradient.numel()
            out[name] = ((gradient.double() + noise) / divisor).to(gradient.dtype)
        return out, state

    return made(Stage.AGGREGATE, DpFtrl(sigma, band, clip), stateless, apply)


def described(text: str) -> Transform[PerExample, Gradients, Noise | None]:
    """DP-FTRL as written on the command line: ``1.0/band=8``, ``1.0/band=8/clip=0.5``. Raises ``InputError`` without a band:
    the right one depends on the training."""
    given: dict[str, Any] = options("dp-ftrl", f"sigma={text}", {"sigma": 1.0, "band": 8, "clip": 1.0})
    if "band" not in given:
        raise InputError(
            "dp-ftrl needs a band: how many steps the noise is correlated over, at most the batches of a pass, such as "
            "dp-ftrl:1.0/band=8. A wider one leaves less noise in the sum of all updates, and takes more memory"
        )
    return dp_ftrl(**given)


SPEC = DefenseSpec(
    name="dp-ftrl",
    about="clips the gradient of each example to norm 1 and adds noise SIGMA to the sum, correlated over BAND steps, for "
    "batches in a fixed order: dp-ftrl:1.0/band=8, dp-ftrl:1.0/band=8/clip=0.5",
    source="Choquette-Choo et al. 2023, banded matrix factorisation; noise of a square root of prefix sums",
    make=described,
    example="dp-ftrl:1.0/band=4/clip=0.5",
    parameter=str,
    guarantee="(epsilon, delta)-differential privacy without sampling, counted by the ledger",
    known_by=("pursuit", "lamp-weighted"),
    draws=True,
)
