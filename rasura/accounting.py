"""What a protected training run guarantees: (epsilon, delta) of DP-SGD, the guarantees of DirDP-SGD, or that there is none.

Epsilon is an upper bound for every text: PLD (privacy loss distributions) by default, RDP as a cross-check, and ``paper``,
the accountant that most papers used: RDP on Opacus' grid of orders, whose large epsilons are artefacts of a grid that starts
at 1.1. A mechanism that is not known here has no formal guarantee, and no number stands in for one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from rasura.errors import InputError, MissingExtra
from rasura.values import Mechanism, Stage

Accountant = Literal["pld", "rdp", "paper"]
ACCOUNTANTS = ("pld", "rdp", "paper")

POISSON = ("dp-sgd", "normalised")
"""Mechanisms whose guarantee assumes that every text joins a batch by chance, each for itself."""

DIRECTIONAL = "directional"

NONE = "no formal guarantee"

LEAST_SIGMA = 1e-3
"""Below it epsilon is said to be infinite: it is a million and more after a single step."""

PAPER_ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(12, 64))
ORDERS = (*(1 + 10 ** (-4 + k / 15) for k in range(60)), *(2 + k / 10 for k in range(1, 90)), *range(12, 64), 128, 256, 512)


@dataclass(frozen=True)
class Run:
    """How a model is trained: ``examples`` texts, ``batch_size`` of them a step, each on average once an epoch.

    ``delta``: probability with which the guarantee may fail, a tenth of 1 / examples if None. ``sampling``: how batches are
    drawn, ``shuffled`` being what most loaders do.
    """

    examples: int
    batch_size: int
    epochs: int
    delta: float | None = None
    sampling: Literal["poisson", "shuffled"] = "poisson"

    def __post_init__(self) -> None:
        for name in ("examples", "batch_size", "epochs"):
            if getattr(self, name) < 1:
                raise InputError(f"accounting: {name} is {getattr(self, name)}; expected at least 1")
        checked_delta(self.fails)

    @property
    def steps_an_epoch(self) -> int:
        """Batches until each text has come up once, on average."""
        return math.ceil(self.examples / self.batch_size)

    @property
    def steps(self) -> int:
        """Batches in all."""
        return self.epochs * self.steps_an_epoch

    @property
    def rate(self) -> float:
        """Probability of each text to be in a batch."""
        return min(1.0, self.batch_size / self.examples)

    @property
    def fails(self) -> float:
        """Delta."""
        return 0.1 / self.examples if self.delta is None else self.delta


@dataclass(frozen=True)
class Guarantee:
    """What holds for each text of a run, in words, with the figures behind them.

    ``epsilon`` and ``delta`` are None where nothing is guaranteed. ``pure`` is epsilon at delta 0, ``metric`` the factor of
    the metric guarantee on directions (``DirDP``), ``cross_check`` epsilon by the other accountant. ``warnings`` say what
    weakens or voids it.
    """

    statement: str
    epsilon: float | None = None
    delta: float | None = None
    pure: float | None = None
    metric: float | None = None
    cross_check: float | None = None
    neighbours: str | None = None
    steps: int | None = None
    rate: float | None = None
    sampling: str | None = None
    warnings: tuple[str, ...] = ()

    def told(self) -> dict[str, Any]:
        """Plain values for a record, without what is not known."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items() if v not in (None, ())}


def checked_delta(delta: float) -> float:
    """``delta`` if it is a probability above 0 and below 1."""
    if not 0 < delta < 1:
        raise InputError(f"accounting: delta is {delta}; expected above 0 and below 1, less than 1 / number of texts")
    return delta


@contextmanager
def _library() -> Iterator[Any]:
    try:
        import dp_accounting
        from dp_accounting import pld, rdp
    except ImportError:
        raise MissingExtra("epsilon needs dp-accounting; pip install 'rasura[dp]'") from None
    assert pld is not None and rdp is not None  # they are attributes of the package from here on
    # It tells of every order that it leaves out, which only makes the bound larger.
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield dp_accounting
    finally:
        log.setLevel(level)


@lru_cache(256)
def epsilon(
    sigma: float, rate: float, steps: int, delta: float, *, by: Accountant = "pld", noise: str = "gaussian"
) -> float:
    """Epsilon of ``steps`` releases with noise multiplier ``sigma``, each text in each with probability ``rate``.

    Neighbours differ in one text that is there or not. Never below the true value by ``pld`` and ``rdp``. Laplace noise is
    known to ``pld`` alone. Raises ``InputError`` for values that cannot be.
    """
    if not 0 < sigma < math.inf:
        raise InputError(f"accounting: sigma is {sigma}; expected a finite number above 0")
    if not 0 < rate <= 1 or steps < 1:
        raise InputError(f"accounting: rate {rate}, {steps} steps; expected a rate above 0 and at most 1, at least 1 step")
    checked_delta(delta)
    if by not in ACCOUNTANTS:
        raise InputError(f"unknown accountant {by!r}; known: {', '.join(ACCOUNTANTS)}")
    if noise == "laplace" and by != "pld":
        raise InputError(f"the accountant {by} knows Gaussian noise only; use pld")
    if sigma < LEAST_SIGMA:
        return math.inf
    if by == "paper":
        return _by_orders(sigma, rate, steps, delta, PAPER_ORDERS)
    found = math.inf
    for less in (0.0, 1e-4, 1e-3, 1e-2):
        # The library's numbers overflow at single points. Less noise never has a smaller epsilon: a bound, too.
        found = _by_library(sigma * (1 - less), rate, steps, delta, by, noise)
        if math.isfinite(found):
            return found
    return found if noise == "laplace" else _by_orders(sigma, rate, steps, delta, ORDERS)


def _by_library(
    sigma: float, rate: float, steps: int, delta: float, by: Accountant, noise: str, digits: float | None = None
) -> float:
    with _library() as library:
        one = library.LaplaceDpEvent(sigma) if noise == "laplace" else library.GaussianDpEvent(sigma)
        event = library.SelfComposedDpEvent(library.PoissonSampledDpEvent(rate, one) if rate < 1 else one, steps)

        if by == "rdp":
            accountant = library.rdp.RdpAccountant(ORDERS)
            accountant.compose(event)
            return float(accountant.get_epsilon(delta))

        def by_loss(width: float) -> float:
            accountant = library.pld.PLDAccountant(value_discretization_interval=width)
            try:
                with np.errstate(all="ignore"):
                    accountant.compose(event)
                    return float(accountant.get_epsilon(delta))
            except OverflowError:
                return math.inf

        # The loss is rounded up to a grid: fine enough for four digits, not so fine that large losses fill the memory.
        if digits is not None:
            return by_loss(digits)
        about = steps / sigma if noise == "laplace" else _by_orders(sigma, rate, steps, delta, ORDERS)
        found = by_loss(max(1e-4, about / 1e4))
        return found if about < 1.5 * found else by_loss(max(1e-4, found / 1e5))


def _by_orders(sigma: float, rate: float, steps: int, delta: float, orders: Sequence[float]) -> float:
    """Epsilon of the sampled Gaussian mechanism by RDP on a grid of orders (Mironov et al. 2019).

    By quadrature: dp_accounting leaves out low orders whose series is slow, and so has another epsilon than Opacus.
    """
    best = math.inf
    for order in orders:
        # At order a the integrand is a row of bells of width sigma between 0 and a.
        x = np.arange(-12 * sigma, order + 12 * sigma, sigma / 8)
        ratio = (2 * x - 1) / (2 * sigma**2)
        mixed = np.logaddexp(math.log1p(-rate), math.log(rate) + ratio) if rate < 1 else ratio
        logs = order * mixed - x**2 / (2 * sigma**2)
        top = float(logs.max())
        moment = top + math.log(float(np.exp(logs - top).sum()) / 8) - 0.5 * math.log(2 * math.pi)
        best = min(best, _converted(order, steps * max(moment, 0.0) / (order - 1), delta))
    return best


def _converted(order: float, spent: float, delta: float) -> float:
    """Epsilon at ``delta`` of a Renyi divergence ``spent`` (Canonne, Kamath, Steinke 2020, prop. 12)."""
    return max(0.0, spent + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def sigma_for(
    target: float, rate: float, steps: int, delta: float, *, by: Accountant = "pld", noise: str = "gaussian"
) -> float:
    """The least noise multiplier, to a thousandth, with at most ``target`` epsilon: never less privacy than asked."""
    if not 0 < target < math.inf:
        raise InputError(f"accounting: the target epsilon is {target}; expected a finite number above 0")

    epsilon(1.0, rate, steps, delta, by="pld" if noise == "laplace" else "paper", noise=noise)  # says what cannot be
    if by == "paper":
        return _as_opacus(lambda sigma: epsilon(sigma, rate, steps, delta, by=by), target)

    def spent(sigma: float) -> float:
        return _by_library(sigma, rate, steps, delta, by, noise, max(1e-4, target / 1e4))

    # RDP is quick and asks for somewhat more noise than is needed.
    high = steps / target if noise == "laplace" else _least(lambda s: _by_orders(s, rate, steps, delta, ORDERS), target)
    low = high
    while spent(low) <= target:
        low, high = 0.8 * low, low
    while spent(high) > target:
        low, high = high, 1.05 * high
    while high - low > 5e-4 * high:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def _least(spent: Callable[[float], float], target: float) -> float:
    low, high = 1e-3, 1e5
    if spent(high) > target:
        raise InputError(f"no noise up to {high:.0f} gives epsilon {target}; ask for a larger epsilon or a larger delta")
    while high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def _as_opacus(spent: Callable[[float], float], target: float) -> float:
    """Opacus' search: halving from 20 on, until epsilon is within .01 of the target; that slack is part of its figures."""
    low, high = 0.0, 20.0
    while (reached := spent(high)) > target:
        high *= 2
        if high > 1e6:
            raise InputError(f"no noise up to 1e6 gives epsilon {target}; ask for a larger epsilon or a larger delta")
    while target - reached > 0.01 and high - low > 1e-6 * high:
        middle = (low + high) / 2
        found = spent(middle)
        if found < target:
            high, reached = middle, found
        else:
            low = middle
    return high


# --- the von Mises-Fisher mechanism


def log_normaliser(kappa: float, dimension: int) -> float:
    """log C_d(kappa) less its value at kappa 0, C_d being the constant of the von Mises-Fisher density.

    By the uniform expansion of the Bessel function (DLMF 10.41.3), written so that nothing cancels; below 60 dimensions by
    the function itself.
    """
    nu = dimension / 2 - 1
    if dimension == 1:
        return -(abs(kappa) + math.log1p(math.exp(-2 * abs(kappa))) - math.log(2))
    if kappa == 0 or kappa * kappa < 1e-8 * dimension:
        return -kappa * kappa / (2 * dimension)
    if dimension < 60:
        from scipy import special

        log_bessel = math.log(float(special.ive(nu, kappa))) + kappa
        return nu * math.log(kappa / 2) - math.lgamma(nu + 1) - log_bessel
    z = kappa / nu
    r = math.hypot(1, z)
    p, beyond = 1 / r, z * z / (1 + r)
    first = (3 * p - 5 * p**3) / 24
    second = (81 * p**2 - 462 * p**4 + 385 * p**6) / 1152
    third = (30375 * p**3 - 369603 * p**5 + 765765 * p**7 - 425425 * p**9) / 414720

    def series(a: float, b: float, c: float) -> float:
        return math.log1p(a / nu + b / nu**2 + c / nu**3)

    at_zero = series(-1 / 12, 1 / 288, 139 / 51840)
    return nu * (math.log1p(beyond / 2) - beyond) + 0.5 * math.log(r) - series(first, second, third) + at_zero


def renyi_divergence(order: float, kappa: float, dimension: int) -> float:
    """Of order ``order`` between two opposite von Mises-Fisher distributions, the worst case for a text that is replaced."""
    return (log_normaliser(kappa, dimension) - log_normaliser((2 * order - 1) * kappa, dimension)) / (order - 1)


def directional_epsilon(kappa: float, sizes: Sequence[int], releases: int, delta: float) -> float:
    """Epsilon of ``releases`` draws around a text's directions, one for each block of ``sizes`` entries with its share of
    ``kappa``; the least of RDP over all orders and of the pure guarantee. Neighbours differ in one text that is replaced."""
    if not 0 < kappa < math.inf:
        raise InputError(f"accounting: kappa is {kappa}; expected a finite number above 0")
    if releases < 1 or not sizes or min(sizes) < 1:
        raise InputError(f"accounting: {releases} releases of blocks {list(sizes)[:4]}; expected at least one of each")
    checked_delta(delta)
    counts: dict[int, int] = {}
    for size in sizes:
        counts[size] = counts.get(size, 0) + 1
    share = kappa / sum(sizes)
    best = 2 * kappa * releases
    for order in (*ORDERS, *(2**k for k in range(10, 31))):
        spent = releases * sum(n * renyi_divergence(order, share * size, size) for size, n in counts.items())
        best = min(best, _converted(order, spent, delta))
    return best


# --- what a defense guarantees


def assumes_poisson(defense: Sequence[Mechanism]) -> bool:
    """Whether the guarantee of ``defense`` assumes Poisson sampling."""
    return any(m.name in POISSON for m in defense)


def formal(defense: Sequence[Mechanism]) -> Mechanism | None:
    """The part of ``defense`` that carries a formal guarantee; None where there is none."""
    return next((m for m in defense if m.name in (*POISSON, DIRECTIONAL)), None)


def guarantee(defense: Sequence[Mechanism], run: Run, *, sizes: Sequence[int] = (), secure: bool = True) -> Guarantee:
    """What ``defense`` guarantees to each text after ``run``.

    ``sizes``: entries of each trained parameter tensor, which DirDP's guarantee depends on. ``secure``: the noise came from
    the operating system; a seeded generator's noise can be taken off again by whoever knows the seed.
    """
    part = formal(defense)
    if part is None:
        names = " + ".join(m.name for m in defense) or "none"
        return Guarantee(f"{NONE}: nothing is proven for {names}; only an audit says what it stops")
    notes = [] if secure else ["the noise is seeded: nothing is guaranteed against whoever knows or guesses the seed"]
    if any(m.stage is Stage.DATA for m in defense):
        notes.append("the protection of the data changes texts one by one; what it looks up in other texts is not covered")
    if run.fails >= 1 / run.examples:
        notes.append(
            f"delta {run.fails:.3g} is not below 1 / {run.examples} texts: publishing one text at random in full would meet "
            "this guarantee"
        )
    known = part.parameters
    if part.name == DIRECTIONAL:
        return _directional(known, run, sizes, notes)
    sigma, noise = float(known["sigma"] or 0), str(known.get("noise") or "gaussian")
    spent = epsilon(sigma, run.rate, run.steps, run.fails, noise=noise)
    pure = None
    if noise == "laplace":
        unseen = math.log1p(-run.rate) if run.rate < 1 else -math.inf
        pure = run.steps * float(np.logaddexp(unseen, math.log(run.rate) + 1 / sigma))
    other = None if noise == "laplace" else epsilon(sigma, run.rate, run.steps, run.fails, by="rdp")
    if not math.isfinite(spent):
        return Guarantee(f"{NONE}: sigma {sigma:.3g} is too small for any", warnings=tuple(notes))
    head = ""
    if run.sampling != "poisson":
        head = (
            NONE + " for this run, whose loader shuffles; with Poisson sampling, which the accountant assumes, it would be "
        )
        notes.append("the loader shuffles where the accountant assumes Poisson sampling: epsilon is not proven for this run")
    return Guarantee(
        f"{head}({spent:.4g}, {run.fails:.3g})-differential privacy for each text, after {run.epochs} epochs",
        spent, run.fails, pure, None, other, "one text is there or not", run.steps, run.rate, run.sampling, tuple(notes),
    )  # fmt: skip


def _directional(known: Mapping[str, Any], run: Run, sizes: Sequence[int], notes: list[str]) -> Guarantee:
    kappa = float(known["kappa"])
    releases = run.epochs if run.sampling == "shuffled" else run.steps
    if run.sampling != "shuffled":
        notes.append(
            "batches overlap within an epoch, so that every step counts; a loader that shuffles needs the epochs only"
        )
    pure = 2 * kappa * releases
    spent, delta = pure, 0.0
    if sizes:
        blocks = list(sizes) if known.get("blocks") == "parameters" else [sum(sizes)]
        spent, delta = directional_epsilon(kappa, blocks, releases, run.fails), run.fails
    return Guarantee(
        f"({spent:.4g}, {delta:.3g})-differential privacy for each text, after {run.epochs} epochs; pure {pure:.4g}; the "
        f"directions of two texts at distance x on the sphere are told apart by at most {kappa * releases:.4g} x",
        spent, delta, pure, kappa * releases, None, "one text is replaced", releases, None, run.sampling, tuple(notes),
    )  # fmt: skip
