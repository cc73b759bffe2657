"""The likeliest text of a lattice: at every place some originals, each with its chance."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from rasura.core.interfaces import Prior
from rasura.core.values import UNKNOWN

Options = Sequence[tuple[Tensor, Tensor]]
"""At every place the originals ``(n,)`` and their chances ``(n,)``."""


def likelihood(prior: Prior | None, fixed: frozenset[int], text: Sequence[int]) -> float:
    """The log probability of ``text`` without ``fixed`` and unknown tokens, in nats; 0 without a ``prior``."""
    told = [token for token in text if token not in fixed and token != UNKNOWN]
    return prior.log_probability(told) if prior is not None and told else 0.0


def likeliest(options: Options, prior: Prior | None, fixed: frozenset[int], beam: int, tried: int) -> tuple[int, ...]:
    """The likeliest text: at every place the chance of the substitute times that of the language so far."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]  # chance, text
    for originals, chances in options:
        pairs = [(float(c), int(t)) for t, c in zip(originals, chances)]
        alone = sorted(pairs, key=lambda p: -(math.log(p[0]) + likelihood(prior, fixed, [p[1]])))
        scored = []
        for chance, text in beams:
            for c, token in alone[:tried]:
                own, more = chance + math.log(c), (*text, token)
                scored.append((own + likelihood(prior, fixed, more), own, more))
        scored.sort(key=lambda s: (-s[0], s[2]))
        beams = [(own, text) for _, own, text in scored[:beam]]
    return beams[0][1]
