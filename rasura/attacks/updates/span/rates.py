"""The search under active dropout at the rates that come into question, where none is announced."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rasura.attacks.updates.span.scan import Scan
from rasura.attacks.updates.span.tokens import Search


def own_rate(model: nn.Module) -> float:
    """The rate of the model's first dropout layer, which a training loop leaves active; 0 without one."""
    return next((float(m.p) for m in model.modules() if isinstance(m, nn.Dropout) and m.p < 1), 0.0)


def searched(
    scan: Scan,
    longest: int,
    rate: float,
    *,
    copies: int,
    opening: Sequence[int],
    known_length: bool,
    work: tuple[int, int],
    rng: torch.Generator,
) -> Search:
    """A ``Search`` that is done, with ``work``: its ``prefilter`` and ``rounds``.

    ``rate``: 0 if it is not known. The model's own is tried first then; of the two searches, the one that fills the row
    space or found more is returned."""
    done: list[Search] = []
    for tried in (rate,) if rate else dict.fromkeys((own_rate(scan.inputs.model), 0.0)):
        done.append(Search(scan, longest, rate=tried, copies=copies, opening=opening, rng=rng))
        done[-1](known_length=known_length, prefilter=work[0], rounds=work[1])
        if done[-1].complete:
            return done[-1]
    return max(done, key=lambda search: len(search.rows))
