"""DP-FTRL by banded matrix factorisation (Choquette-Choo et al. 2023): private training in a fixed order, without sampling.

Step t releases the sum of clipped gradients plus row t of ``sigma * clip * C^-1 z``, with z independent standard normal.
``C`` is lower triangular and Toeplitz; its entries are the first ``band`` coefficients of (1 - x)^(-1/2). So noise of nearby
steps partly cancels in the sum of all updates.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from rasura.accounting.gaussian import gaussian_epsilon
from rasura.core.errors import InputError
from rasura.core.rng import Randomness, normal, secret_generator

MAX_STEPS = 10**7
MAX_SIGMA = 1e5
MAX_FLOATS = 2**31
"""Entries of noise that are kept at most, 16 GiB."""


@dataclass(frozen=True)
class BandedPlan:
    """``steps`` releases with noise multiplier ``sigma``, where a text takes part at most once in any ``separation`` steps
    that follow each other. ``band`` 1 is independent noise. Raises ``InputError`` for a band above the separation: columns
    of ``C`` would overlap, and the sensitivity given here would be too small."""

    sigma: float
    steps: int
    separation: int
    band: int

    def __post_init__(self) -> None:
        for name in ("steps", "separation", "band"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_STEPS:
                raise InputError(f"accounting: {name} is {value!r}; expected a whole number from 1 to {MAX_STEPS}")
        if isinstance(self.sigma, bool) or not isinstance(self.sigma, (int, float)) or not 0 < self.sigma < math.inf:
            raise InputError(f"accounting: sigma is {self.sigma!r}; expected a finite number above 0")
        if self.band > self.separation:
            raise InputError(
                f"accounting: the band {self.band} is above the separation {self.separation}; nothing is proven for it here"
            )

    @property
    def coefficients(self) -> list[float]:
        """The first column of ``C``, up to its band."""
        ratios = ((2 * k - 1) / (2 * k) for k in range(1, self.band))
        return list(itertools.accumulate(ratios, lambda one, ratio: one * ratio, initial=1.0))

    @property
    def sensitivity(self) -> float:
        """How far one text moves ``C`` times all clipped sums at most, in units of the clip.

        Columns at least a band apart do not overlap, so their squared norms add up. The norms never grow from column to
        column, so the worst text takes part in step 0 and then as often as it may.
        """
        squares = list(itertools.accumulate(c * c for c in self.coefficients))
        columns = range(0, self.steps, self.separation)
        return math.sqrt(math.fsum(squares[min(self.band, self.steps - column) - 1] for column in columns))

    def epsilon(self, delta: float) -> float:
        """Epsilon of all planned steps for one text, whose gradient is replaced by zero in each of its steps."""
        return gaussian_epsilon(self.sensitivity / self.sigma, delta)


def banded_sigma(target: float, steps: int, separation: int, band: int, delta: float) -> float:
    """The smallest noise multiplier, to a ten-thousandth, with which such a plan spends at most ``target`` epsilon.

    Raises ``InputError`` for a target that is not a finite number above 0, and as ``BandedPlan`` does.
    """
    if isinstance(target, bool) or not isinstance(target, (int, float)) or not 0 < target < math.inf:
        raise InputError(f"accounting: the target epsilon is {target!r}; expected a finite number above 0")
    reach = BandedPlan(1.0, steps, separation, band).sensitivity
    low, high = 0.0, reach
    while gaussian_epsilon(reach / high, delta) > target:
        low, high = high, 2 * high
        if high > MAX_SIGMA:
            raise InputError(f"no noise up to {MAX_SIGMA:.0f} gives epsilon {target}; choose a larger epsilon")
    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if gaussian_epsilon(reach / middle, delta) <= target else (middle, high)
    # Rounded up, so that the figure in a name is the one that was checked.
    return math.ceil(1e4 * high) / 1e4


class BandedNoise:
    """The noise of ``plan`` on sums of gradients, each clipped to the norm ``clip``; one call of ``draw`` per step.

    It keeps the noise of ``band - 1`` steps in float64. It cannot be copied or saved: two runs that go on from the same
    noise would release it twice. Without ``rng`` the noise is drawn from a secret generator of its own. A seeded ``rng`` is
    for experiments: the guarantee does not hold, since anyone who knows the seed can subtract the noise.
    """

    def __init__(self, plan: BandedPlan, clip: float, rng: Randomness | None = None) -> None:
        if isinstance(clip, bool) or not isinstance(clip, (int, float)) or not 0 < clip < math.inf:
            raise InputError(f"banded noise: clip is {clip!r}; expected a finite number above 0")
        self.plan, self.clip, self.drawn = plan, clip, 0
        self.rng = secret_generator() if rng is None else rng
        self._shape: tuple[int, ...] | None = None
        self._last: deque[Tensor] = deque(maxlen=plan.band - 1)

    def draw(self, shape: Sequence[int]) -> Tensor:
        """The noise of the next step, of ``shape`` in float64. Raises ``InputError`` beyond the planned steps, for another
        shape than before, and for more noise than can be kept."""
        shape = tuple(shape)
        if self.drawn >= self.plan.steps:
            raise InputError(f"banded noise: all {self.plan.steps} planned steps were made; plan more steps")
        if self._shape not in (None, shape):
            raise InputError(f"banded noise: the shape is {shape}; expected {self._shape}, as in the steps before")
        if math.prod(shape) * self.plan.band > MAX_FLOATS:
            raise InputError(
                f"banded noise: {shape} entries for a band of {self.plan.band} are too many; use a smaller band"
            )
        found = normal(shape, self.rng)
        for coefficient, earlier in zip(self.plan.coefficients[1:], self._last):
            found -= coefficient * earlier
        self._shape, self.drawn = shape, self.drawn + 1
        self._last.appendleft(found)
        return found * (self.plan.sigma * self.clip)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise InputError("banded noise cannot be copied or saved: two runs would release the same noise")
