"""What a protected training run guarantees: (epsilon, delta) of DP-SGD, the guarantees of DirDP-SGD, or that there is none.

Epsilon is an upper bound for every text. A mechanism that is not known here has no formal guarantee, and no number stands in
for one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from rasura.accounting.directional import directional_epsilon
from rasura.accounting.epsilon import checked_delta, epsilon
from rasura.errors import InputError
from rasura.values import Mechanism, Stage

POISSON = ("dp-sgd", "normalised")
"""Mechanisms whose guarantee assumes that every text joins a batch by chance, each for itself."""

DIRECTIONAL = "directional"

NONE = "no formal guarantee"


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
