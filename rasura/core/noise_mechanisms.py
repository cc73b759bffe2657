"""The public description of each protection by noise, as typed values: ``core.mechanisms`` has the others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rasura.core.checked import number, whole, word
from rasura.core.errors import InputError
from rasura.core.following import of_sum
from rasura.core.protection import Protection
from rasura.core.values import Stage


def _texts(batch_size: int) -> int:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"a batch of {batch_size!r} texts; expected a whole number of at least 1")
    return batch_size


class _Clipped(Protection):
    """Clipping before noise is added."""

    clip: float

    @property
    def largest_norm(self) -> float:
        return self.clip


@dataclass(frozen=True)
class Gaussian(_Clipped, named="gaussian", at=Stage.WIRE):
    """The whole update clipped to the norm ``clip``, then Gaussian noise of deviation ``sigma`` on every visible entry."""

    sigma: float = number(minimum=0)
    clip: float = number(1.0, minimum=0, open="low", infinite=True)

    def noise_per_entry(self, batch_size: int = 1, entries: int | None = None) -> float:
        return self.sigma


@dataclass(frozen=True)
class Laplace(_Clipped, named="laplace", at=Stage.WIRE):
    """The whole update clipped to the norm ``clip``, then Laplace noise of ``scale`` b on every visible entry."""

    scale: float = number(minimum=0)
    clip: float = number(1.0, minimum=0, open="low", infinite=True)

    def noise_per_entry(self, batch_size: int = 1, entries: int | None = None) -> float:
        return math.sqrt(2) * self.scale


@dataclass(frozen=True)
class DpSgd(_Clipped, named="dp-sgd", at=Stage.AGGREGATE):
    """Each text's gradient clipped to ``clip``, noise of ``sigma * clip`` on their sum, divided by the number of texts.

    The clip also bounds the mean of the texts' gradients. With Laplace noise, ``sigma * clip`` is its scale b, and the norm
    is the L1 norm, which is at least the Euclidean one. ``quantile``: ``clip`` is the first of clips that follow this
    quantile of the norms; the noise on the sum and that on the count of small norms cost what ``sigma`` alone costs. ``per``
    layer: the part of each of L layers is clipped to ``clip / sqrt(L)``, so that the whole is clipped to ``clip`` at most.
    """

    sigma: float = number(minimum=0, open="low")
    clip: float = number(1.0, minimum=0, open="low")
    noise: str = word("gaussian", words=("gaussian", "laplace"))
    quantile: float | None = number(None, minimum=0, maximum=1, open="low high", optional=True, absent=True)
    per: str | None = word(None, words=("layer",), optional=True, absent=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantile is not None and self.noise != "gaussian":
            raise InputError("dp-sgd: a quantile needs Gaussian noise")
        if self.per is not None and (self.quantile is not None or self.noise != "gaussian"):
            raise InputError("dp-sgd: a clip per layer needs Gaussian noise, and takes no quantile")

    def noise_per_entry(self, batch_size: int = 1, entries: int | None = None) -> float:
        wide = math.sqrt(2) if self.noise == "laplace" else 1.0
        sigma = self.sigma if self.quantile is None else of_sum(self.sigma, batch_size)
        return wide * sigma * self.clip / _texts(batch_size)


@dataclass(frozen=True)
class DpFtrl(_Clipped, named="dp-ftrl", at=Stage.AGGREGATE):
    """Each text's gradient clipped to ``clip``, noise on their sum that is correlated over ``band`` steps of a training,
    divided by the number of texts.

    The noise of the first step is that of ``DpSgd`` with the same ``sigma``. Later steps add a multiple of new noise and
    subtract some of the earlier steps' noise, which differs little in size.
    """

    sigma: float = number(minimum=0, open="low")
    band: int = whole(minimum=1, maximum=10**7)
    clip: float = number(1.0, minimum=0, open="low")
    noise: str = word("gaussian", words=("gaussian",))

    def noise_per_entry(self, batch_size: int = 1, entries: int | None = None) -> float:
        """That of a first step; later steps have more, never less."""
        return self.sigma * self.clip / _texts(batch_size)


@dataclass(frozen=True)
class Normalised(_Clipped, named="normalised", at=Stage.AGGREGATE):
    """Each text's gradient scaled to norm 1, Gaussian noise of ``sigma`` on their sum, divided by the number of texts."""

    sigma: float = number(minimum=0, open="low")
    clip: float = number(1.0, minimum=1, maximum=1)
    noise: str = word("gaussian", words=("gaussian",))

    def noise_per_entry(self, batch_size: int = 1, entries: int | None = None) -> float:
        return self.sigma / _texts(batch_size)


@dataclass(frozen=True)
class Directional(Protection, named="directional", at=Stage.AGGREGATE):
    """The mean of one unit vector per text, drawn around its direction with concentration ``kappa`` (von Mises-Fisher)."""

    kappa: float = number(minimum=0, open="low")
    blocks: str = word("whole", words=("whole", "parameters"))

    def noise_per_entry(self, batch_size: int = 1, entries: int | None = None) -> float:
        """The deviation of a draw from its expectation, spread evenly over ``entries``.

        A draw has norm 1 and the expectation ``A mu``, so its total variance is ``1 - A^2``. ``A`` is a ratio of Bessel
        functions, replaced here by a lower bound (Amos 1974). Parameters as blocks share kappa in proportion to their size,
        which leaves the figure unchanged except for blocks of few entries. Without ``entries``: across the direction an
        entry's variance is ``A / kappa``, at most ``1 / kappa``.
        """
        if entries is None:
            return 1 / math.sqrt(self.kappa * _texts(batch_size))
        if isinstance(entries, bool) or not isinstance(entries, int) or entries < 1:
            raise ValueError(f"an update of {entries!r} entries; expected a whole number of at least 1")
        half = (entries - 1) / 2
        mean = self.kappa / (half + math.hypot(self.kappa, half + 1))
        return math.sqrt((1 - mean**2) / (entries * _texts(batch_size)))

    @property
    def largest_norm(self) -> float:
        return 1.0
