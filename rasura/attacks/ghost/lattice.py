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

    def likely(ids: Sequence[int]) -> float:
        return prior.log_probability(ids) if prior is not None and ids else 0.0

    beams: list[tuple[float, tuple[int, ...], tuple[int, ...]]] = [(0.0, (), ())]  # chance, text, text for the prior
    for originals, chances in options:
        pairs = [(float(c), int(t)) for t, c in zip(originals, chances)]
        alone = sorted(pairs, key=lambda p: -(math.log(p[0]) + (0.0 if p[1] in fixed else likely([p[1]]))))
        scored = []
        for chance, text, told in beams:
            for c, token in alone[:tried]:
                more = told if token in fixed or token == UNKNOWN else (*told, token)
                own = chance + math.log(c)
                scored.append((own + likely(more), own, (*text, token), more))
        scored.sort(key=lambda s: (-s[0], s[2]))
        beams = [(own, text, told) for _, own, text, told in scored[:beam]]
    return beams[0][1]
