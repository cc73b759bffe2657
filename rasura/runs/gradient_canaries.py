"""Canary gradients in a private training (white box): each is a single large entry, in the training by a coin of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rasura.accounting import Draw, Ledger, LowerBound, gaussian_run_bound, one_run_bound, right_guesses
from rasura.core.errors import InputError
from rasura.core.files import read_limited, write_whole
from rasura.core.interfaces import Defense, Transform
from rasura.core.layers import layers_of
from rasura.core.rng import Randomness, bernoulli, integers, secret_generator
from rasura.core.rounding import above, below
from rasura.core.values import Gradients, PerExample, Stage, Weigh

VERSION, MAX_BYTES, LEAST, LOUD = 1, 1 << 26, 20, 8.0
"""Of the file of a state; the least number of canaries; a canary's norm over the clip, so that clipping has work to do."""

CARRIERS = ("dp-sgd", "normalised")


@dataclass(frozen=True)
class CanaryBounds:
    """What one run shows of its guarantee: ``bound`` for any training, ``gaussian`` under the assumption that the training
    hides a canary as one release with Gaussian noise does.

    ``stated``: the epsilon that the ledger counted; None where nothing is guaranteed. ``refuted``: ``bound`` is above it.
    """

    bound: LowerBound
    gaussian: LowerBound
    stated: float | None

    @property
    def refuted(self) -> bool:
        """Whether the guarantee is false, with the bound's confidence."""
        return self.stated is not None and self.bound.epsilon > self.stated

    @property
    def statement(self) -> str:
        """The figures in words."""
        one = self.bound
        says = (
            f"{one.right} of {one.guesses} guesses right, on {one.canaries} canaries: epsilon is at least "
            f"{below(one.epsilon)} at delta {one.delta:g} (confidence {one.confidence:g}), "
            f"{below(self.gaussian.epsilon)} if the training hides a canary as Gaussian noise does."
        )
        if not one.epsilon:
            start = "Without that assumption the" if self.gaussian.epsilon else "The"
            says += f" {start} guesses show nothing, which does not prove that the training is private."
        if self.stated is None:
            return f"{says} No epsilon is stated."
        return f"{says} Stated: {above(self.stated)}" + ("; it is refuted." if self.refuted else ".")


class GradientCanaries:
    """``number`` canaries for ``rasura.protect_training(..., canaries=...)`` and ``PrivateTrainer(..., canaries=...)``.

    A canary is an example whose gradient has a single entry, eight times as long as the clip (a Dirac gradient). No two
    share an entry. A fair coin says whether it is in the training. One that is in joins each batch by Poisson sampling with
    the rate of a text, and is clipped as a text is. Its two scores are the sum and the variance of what all steps released
    at its entry. ``measure(ledger)`` guesses from the highest and lowest scores which canaries are in (Steinke, Nasr and
    Jagielski 2023). Coins, entries, signs and draws come from the operating system, whatever the seed of the training.

    It measures clipping, noise, their scale, and the number of releases. It does not see how texts are drawn, nor how a
    text's gradient is computed. Raises ``InputError`` for fewer than 20 canaries.
    """

    def __init__(self, number: int = 1000) -> None:
        if isinstance(number, bool) or not isinstance(number, int) or number < LEAST:
            raise InputError(
                f"{number} canaries; expected at least {LEAST}, and some hundreds for a bound that says something"
            )
        rng = secret_generator()
        self.number = number
        self.included: NDArray[np.bool_] = bernoulli(0.5, (number,), rng).bool().numpy()
        self._signs = 2 * bernoulli(0.5, (number,), rng).double() - 1
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._places: list[tuple[str, int]] = []
        self._totals = torch.zeros(number, dtype=torch.float64)
        self._squares = torch.zeros(number, dtype=torch.float64)
        self.releases = 0

    def joined(
        self, defense: Defense, draw: Draw, trained: Mapping[str, Sequence[int]]
    ) -> tuple[Defense, Callable[[], None]]:
        """``defense`` for one step with a batch drawn as ``draw``, in which the canaries join the aggregation; and a
        function to call when its result is released and counted: it then counts for the scores as well.

        ``trained``: the shape of each trained parameter. Raises ``InputError`` for protections other than ``dp-sgd`` and
        ``normalised``, for batches not drawn by Poisson sampling, and for other parameters than in the first step.
        """
        parts = [p for p in defense if p.stage is Stage.AGGREGATE]
        if len(parts) != 1 or parts[0].mechanism.name not in CARRIERS or draw.sampling != "poisson" or draw.rate is None:
            raise InputError(f"gradient canaries need {' or '.join(CARRIERS)}, and batches drawn by Poisson sampling")
        self._bind({name: tuple(shape) for name, shape in trained.items()})
        chosen = bernoulli(draw.rate, (self.number,), secret_generator()).bool().numpy() & self.included
        seen: list[Tensor] = []
        mine = self._carrying(parts[0], np.flatnonzero(chosen).tolist(), seen)

        def released() -> None:
            along = seen.pop()
            self._totals += along
            self._squares += along**2
            self.releases += 1

        return tuple(mine if p is parts[0] else p for p in defense), released

    def _bind(self, shapes: dict[str, tuple[int, ...]]) -> None:
        if self._places:
            if shapes != self._shapes:
                raise InputError("these canaries belong to a training of other parameters; make new ones for each training")
            return
        sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        entries = sum(sizes.values())
        if self.number > entries:
            raise InputError(f"{self.number} canaries, but {entries} weights are trained; expected a weight for each canary")
        ends = np.cumsum(list(sizes.values()))
        for place in self._distinct(entries):
            k = int(np.searchsorted(ends, place, side="right"))
            self._places.append((list(sizes)[k], place - int(ends[k]) + list(sizes.values())[k]))
        self._shapes = shapes

    def _distinct(self, below: int) -> list[int]:
        """``number`` different whole numbers, drawn at random."""
        found: dict[int, None] = {}
        while len(found) < self.number:
            found.update(dict.fromkeys(integers(below, (self.number,), secret_generator()).tolist()))
        return list(found)[: self.number]

    def _by_name(self) -> dict[str, tuple[list[int], list[int]]]:
        """For each tensor with canaries: which, and at which of its entries."""
        out: dict[str, tuple[list[int], list[int]]] = {}
        for k, (name, place) in enumerate(self._places):
            who, where = out.setdefault(name, ([], []))
            who.append(k)
            where.append(place)
        return out

    def _carrying(self, part: Transform[Any, Any, Any], chosen: list[int], seen: list[Tensor]) -> Transform[Any, Any, Any]:
        """``part`` with the ``chosen`` canaries among its examples; what it releases at each entry goes to ``seen``."""
        length = LOUD * float(part.mechanism.parameters["clip"] or 1.0)

        def apply(examples: PerExample, state: Any, rng: Randomness) -> tuple[Gradients, Any]:
            found, after = part.apply(self._among(examples, chosen, length), state, rng)
            if {name: tuple(g.shape) for name, g in found.items()} != self._shapes:
                raise InputError("a step released other entries than are trained, so the canaries cannot be scored")
            along = torch.zeros(self.number, dtype=torch.float64)
            for name, (who, where) in self._by_name().items():
                along[who] = found[name].detach().reshape(-1)[where].double().cpu()
            seen.append(self._signs * along)
            return found, after

        return replace(part, apply=apply)

    def _among(self, examples: PerExample, chosen: list[int], length: float) -> PerExample:
        def rows() -> Iterator[Gradients]:
            yield from examples.each()
            for k in chosen:
                name, place = self._places[k]
                row = {n: torch.zeros(shape) for n, shape in self._shapes.items()}
                row[name].view(-1)[place] = self._signs[k] * length
                yield row

        def weighted(weigh: Weigh, by_layer: bool = False) -> Gradients:
            out = dict(examples.weighted(weigh, by_layer))
            layers = layers_of(self._shapes) if by_layer else [list(self._shapes)]
            own = torch.tensor([[self._places[k][0] in names for k in chosen] for names in layers], dtype=torch.float64)
            weights = (own * weigh(own * length)).sum(0) if by_layer else weigh(own[0] * length)
            added = torch.zeros(self.number, dtype=torch.float64)
            added[chosen] = self._signs[chosen] * length * weights
            for name, (who, where) in self._by_name().items():
                out[name] = out[name].clone()
                out[name].view(-1)[where] += added[who].to(out[name].dtype)
            return out

        return replace(examples, each=rows, weighted=weighted, size=examples.size + len(chosen))

    def measure(self, ledger: Ledger, *, guesses: int | None = None, confidence: float = 0.95) -> CanaryBounds:
        """The lower bounds of epsilon that the run of ``ledger`` shows, at its delta.

        ``guesses``: a fifth of the canaries if None, which does not depend on the coins. Raises ``InputError`` before any
        release, and where the ledger counted other releases than the canaries saw: the scores would lack some.
        """
        if not self.releases:
            raise InputError("the canaries saw no release; pass them to protect_training or PrivateTrainer, and train")
        if self.releases != ledger.releases:
            raise InputError(f"the canaries saw {self.releases} releases, but the ledger counted {ledger.releases}; where a "
                "training is resumed, load the canaries' state as well")  # fmt: skip
        asked = max(2, self.number // 10 * 2) if guesses is None else guesses
        spread = self._squares / self.releases - (self._totals / self.releases) ** 2
        right = max(right_guesses(score.numpy(), self.included, asked) for score in (self._totals, spread))
        # The larger of two bounds: each has half of the failures that the confidence allows.
        figures = (self.number, asked, right, ledger.run.fails, (1 + confidence) / 2)
        general, gaussian = (replace(one(*figures), confidence=confidence) for one in (one_run_bound, gaussian_run_bound))
        return CanaryBounds(general, gaussian, ledger.spent().epsilon)

    def state_dict(self) -> dict[str, Any]:
        """All that is known of the canaries, as plain values for JSON. It holds the coins: keep it secret until the end."""
        return {
            "version": VERSION, "included": self.included.tolist(), "signs": self._signs.tolist(),
            "shapes": {name: list(shape) for name, shape in self._shapes.items()},
            "places": [list(one) for one in self._places], "totals": self._totals.tolist(),
            "squares": self._squares.tolist(), "releases": self.releases,
        }  # fmt: skip

    def load_state_dict(self, state: Any) -> None:
        """Go on from ``state``, as returned by ``state_dict``. Raises ``InputError`` for anything else, and if these
        canaries already saw a release."""
        if self.releases:
            raise InputError(f"these canaries already saw {self.releases} releases; load a state before training begins")
        try:
            included, signs, totals, squares = (np.asarray(state[n]) for n in ("included", "signs", "totals", "squares"))
            shapes = {str(n): tuple(map(int, shape)) for n, shape in state["shapes"].items()}
            places = [(str(name), int(k)) for name, k in state["places"]]
            releases = int(state["releases"])
            whole = (
                state["version"] == VERSION
                and included.dtype == np.bool_
                and len(included) == len(signs) == len(totals) == len(squares) >= LEAST
                and bool((np.abs(signs) == 1).all())
                and bool(np.isfinite(totals).all() and np.isfinite(squares).all())
                and len(set(places)) == len(places) == (len(included) if shapes else 0)
                and all(0 <= k < math.prod(shapes[name]) for name, k in places)
                and releases >= 0
                and (bool(places) or not releases)
            )
            if not whole:
                raise ValueError
        except (ValueError, LookupError, TypeError, AttributeError):
            raise InputError("no state of gradient canaries; expected what state_dict returned") from None
        self.number, self.included, self.releases = len(included), included, releases
        self._signs, self._totals = torch.from_numpy(signs).double(), torch.from_numpy(totals).double()
        self._squares, self._shapes, self._places = torch.from_numpy(squares).double(), shapes, places

    def save(self, path: str | Path) -> None:
        """Write ``state_dict`` as JSON, in place of an earlier state."""
        write_whole(Path(path), json.dumps(self.state_dict()))

    def load(self, path: str | Path) -> None:
        """``load_state_dict`` of what ``save`` wrote. Raises ``InputError`` if the file is missing or is anything else."""
        content, _ = read_limited(Path(path), "file of canaries", MAX_BYTES)
        try:
            state = json.loads(content)
        except ValueError:
            raise InputError(f"{path} holds no state of gradient canaries") from None
        self.load_state_dict(state)
