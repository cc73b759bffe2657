"""DP-SGD (Abadi et al. 2016) and its variant that scales instead of clipping: each text's gradient separately, then noise.

The guarantee is in ``rasura.accounting``. It holds for batches drawn by Poisson sampling, for noise that cannot be repeated
(``rasura.core.rng.secret_generator()``), and for everything that is trained: a frozen layer sends nothing and needs no
noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rasura.core.exact import half
from rasura.core.following import of_count, of_sum
from rasura.core.interfaces import InputError, Transform, made
from rasura.core.mechanisms import DpSgd, Normalised
from rasura.core.options import options
from rasura.core.rng import Randomness, laplace, normal
from rasura.core.specs import DefenseSpec, Strength
from rasura.core.values import Gradients, PerExample, Stage
from rasura.defenses.compose import stateless

NOISES = ("gaussian", "laplace")

RATE = 0.2
"""How fast the clip follows its quantile: the logarithm of its change over how far the fraction of norms is off."""


LEAST = 1e-30
"""The least norm that is scaled to 1. Below it, numbers of float32 have lost digits, or underflow."""


def positive(name: str, knob: str, value: Any) -> float:
    """``value`` if it is a finite number above 0. Otherwise raises ``InputError``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise InputError(f"{name}: {knob} is {value!r}; expected a finite number above 0")
    return float(value)


def noise_width(name: str, sigma: float, clip: float = 1.0) -> float:
    """``sigma * clip``. Raises ``InputError`` unless both are finite numbers above 0, and the product is a normal float32:
    updates would have no noise, or no finite entry."""
    width = positive(name, "sigma", sigma) * positive(name, "clip", clip)
    kinds = torch.finfo(torch.float32)
    if not kinds.tiny <= width <= kinds.max:
        raise InputError(
            f"{name}: sigma {sigma:.3g} times the clip {clip:.3g} is {width:.3g}; expected {kinds.tiny:.3g} to "
            f"{kinds.max:.3g}, as float32 holds it"
        )
    return width


def bounded(total: Gradients) -> Gradients:
    """``total``. Raises ``InputError`` where no clip bounds what a text adds: where it is not finite, or was rounded to half
    precision, which one text more may move by several clips."""
    for name, gradient in total.items():
        if half(gradient):
            raise InputError(f"the sum of the gradients of {name} is in {str(gradient.dtype).removeprefix('torch.')}, which "
                "rounds it by more than a clip, and nothing was released; expected float32 or float64")  # fmt: skip
    if not all(bool(torch.isfinite(gradient).all()) for gradient in total.values()):
        raise InputError("the gradient of a text is not a finite number, so no clip bounds it, and nothing was released; "
            "lower the learning rate, or train in float32")  # fmt: skip
    return total


def _released(total: Gradients, examples: PerExample, width: float, noise: str, rng: Randomness) -> Gradients:
    """``total`` with noise, over the size that the batch has or was expected to have. Raises ``InputError`` as ``bounded``
    does."""
    divisor = examples.expected or examples.size
    out = {}
    for name, gradient in bounded(total).items():
        # Added in float64: the noise keeps its tail.
        drawn = normal(gradient.shape, rng) if noise == "gaussian" else laplace(gradient.shape, rng)
        out[name] = ((gradient.double() + width * drawn) / divisor).to(gradient.dtype)
    return out


def _clipped_absolutely(each: Iterable[Gradients], clip: float) -> dict[str, Tensor]:
    """The sum of the gradients, each at most ``clip`` in the sum of its absolute entries."""
    out: dict[str, Tensor] = {}
    for found in each:
        size = sum(float(g.double().abs().sum()) for g in found.values())
        for name, g in found.items():
            part = g * min(1.0, clip / max(size, 1e-300))
            out[name] = out[name] + part if name in out else part
    return out


def _following(known: DpSgd) -> Transform[PerExample, Gradients, float]:
    """``dp_sgd`` whose clip follows a quantile of the norms. The state is the clip of the next step."""
    if known.quantile is None:
        raise InputError("dp-sgd: expected a quantile")
    quantile = known.quantile

    def apply(examples: PerExample, clip: float, rng: Randomness) -> tuple[Gradients, float]:
        counted = [0, 0]

        def weigh(norms: Tensor) -> Tensor:
            counted[0] += int((norms <= clip).sum())
            counted[1] += len(norms)
            return (clip / norms.clamp_min(1e-300)).clamp(max=1)

        total = examples.weighted(weigh)
        if counted[1] != examples.size:
            raise InputError(f"dp-sgd: {counted[1]} norms of {examples.size} texts were seen, so none was released")
        texts = examples.expected or examples.size
        found = _released(total, examples, noise_width("dp-sgd", of_sum(known.sigma, texts), clip), "gaussian", rng)
        # Centred, so that a text changes the count by one half.
        noisy = counted[0] - counted[1] / 2 + of_count(known.sigma, texts) * float(normal((1,), rng))
        return found, clip * math.exp(-RATE * (noisy / texts + 0.5 - quantile))

    return made(Stage.AGGREGATE, known, lambda model: known.clip, apply)


def dp_sgd(
    sigma: float, clip: float = 1.0, noise: str = "gaussian", quantile: float | None = None, per: str | None = None
) -> Transform[PerExample, Gradients, Any]:
    """Clip every text's gradient to norm ``clip``, sum, add noise of ``sigma * clip`` to every entry, divide by the size.

    ``sigma`` is the noise multiplier: deviation of the Gaussian, or scale b of the Laplace noise, over the clipping norm.
    For Laplace noise the norm is the L1 norm, as its guarantee requires. ``quantile``: the clip changes after each step, so
    that this fraction of the norms is below it, and ``clip`` is the first one (Andrew et al. 2021, algorithm 1, with rate
    .2; texts in place of clients). The guarantee is that of ``sigma`` without a quantile: the sum gets as much more noise
    as the count costs. ``per`` layer: the part of each of L layers is clipped by itself, to ``clip / sqrt(L)``, where the
    parameters of one module are a layer (per-layer clipping of McMahan et al. 2018, all layers alike). A text's norm then
    is at most ``clip`` as before, so that the guarantee is the same. Raises ``InputError`` unless ``sigma`` and ``clip`` are
    above 0, and where float32 does not hold their product.
    """
    width = noise_width("dp-sgd", sigma, clip)
    if noise not in NOISES:
        raise InputError(f"dp-sgd: noise is {noise!r}; expected {' or '.join(NOISES)}")
    if quantile is not None:
        return _following(DpSgd(sigma, clip, noise, quantile, per))
    known = DpSgd(sigma, clip, noise, per=per)

    def weigh(norms: Tensor) -> Tensor:
        each = clip if per is None else clip / math.sqrt(len(norms))
        return (each / norms.clamp_min(1e-300)).clamp(max=1)

    def apply(examples: PerExample, state: None, rng: Randomness) -> tuple[Gradients, None]:
        if noise == "gaussian" or not examples.size:
            total = examples.weighted(weigh, per is not None)
        else:
            total = _clipped_absolutely(examples.each(), clip)
        return _released(total, examples, width, noise, rng), None

    return made(Stage.AGGREGATE, known, stateless, apply)


def normalised_gaussian(sigma: float) -> Transform[PerExample, Gradients, None]:
    """Scale every text's gradient to norm 1, sum, add Gaussian noise of ``sigma`` to every entry, divide by the size.

    It is close to DirDP-SGD without partitions, and a fair baseline for it. It hides the norms, which clipping shows if they
    are below the clip. A gradient of zero, or of a norm below ``LEAST``, adds nothing. The guarantee is that of DP-SGD at
    the same ``sigma``.
    """
    width = noise_width("normalised", sigma)

    def apply(examples: PerExample, state: None, rng: Randomness) -> tuple[Gradients, None]:
        total = examples.weighted(lambda norms: torch.where(norms > LEAST, 1 / norms.clamp_min(LEAST), 0.0))
        return _released(total, examples, width, "gaussian", rng), None

    return made(Stage.AGGREGATE, Normalised(sigma), stateless, apply)


def described(text: str) -> Transform[PerExample, Gradients, None]:
    """DP-SGD as written on the command line: ``1.0``, ``1.0/clip=0.5``, ``1.0/noise=laplace``, ``1.0/quantile=0.5``,
    ``1.0/per=layer``."""
    usual = {"sigma": 1.0, "clip": 1.0, "noise": "gaussian", "quantile": 0.5, "per": "layer"}
    return dp_sgd(**options("dp-sgd", f"sigma={text}", usual))


DP_SGD = DefenseSpec(
    name="dp-sgd",
    about="clips the gradient of each example to norm 1 and adds noise SIGMA to the sum: dp-sgd:1.0, "
    "dp-sgd:1.0/clip=0.5/noise=laplace, dp-sgd:1.0/clip=0.5/quantile=0.5, dp-sgd:1.0/per=layer",
    source="Abadi et al. 2016, Algorithm 1",
    make=described,
    example="dp-sgd:1.0/clip=0.5",
    parameter=str,
    guarantee="(epsilon, delta)-differential privacy, counted by the ledger",
    known_by=("pursuit", "lamp-weighted"),
    strength=Strength(name="sigma", weakest=1e-5, strongest=10.0, points=7),
    draws=True,
)

NORMALISED = DefenseSpec(
    name="normalised",
    about="scales the gradient of each example to norm 1 and adds noise SIGMA to the sum",
    source="Empirical calibration with metric DP, sec. III; every text scaled, not clipped",
    make=normalised_gaussian,
    example="normalised:1.0",
    parameter=float,
    guarantee="(epsilon, delta)-differential privacy, counted by the ledger",
    known_by=("pursuit", "lamp-weighted"),
    strength=Strength(name="sigma", weakest=1e-5, strongest=10.0, points=7),
    draws=True,
)
