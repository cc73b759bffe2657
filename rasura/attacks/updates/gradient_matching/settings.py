"""What makes one method of the family, and how much work each budget level is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rasura.attacks.updates.gradient_matching.objective import Kind


@dataclass(frozen=True)
class Settings:
    """One method of the family.

    ``learning_rate`` is in units of the embedding table's standard deviation, so that one value fits all models: GRAB's 0.01
    on BERT-base, whose entries deviate by about .04, is 0.25. It decays by ``decay`` every ``decay_every`` steps (GRAB,
    sec. 5.1); with ``linear``, in a line to 0 behind the last step. ``steepest``: norm to which the gradient of a restart's
    embeddings is clipped. ``embedding_norm``: weight of LAMP's regulariser. With ``reorder``, after a first tenth of the
    steps, restarts try other orders of their tokens now and then and keep what has the least distance plus ``prior`` times
    the mean negative log-likelihood of a token (LAMP). ``learn_masks``: where dropout is announced, its masks are variables
    too, moved at ``mask_rate``. ``match_norm``: where clipping is announced, candidates' gradients are scaled as the
    client's was (GRAB).
    """

    objective: Kind
    alpha: float = 0.0
    learning_rate: float = 0.25
    decay: float = 0.89
    decay_every: int = 50
    linear: bool = False
    steepest: float = math.inf
    embedding_norm: float = 0.0
    reorder: bool = False
    prior: float = 0.0
    learn_masks: bool = False
    mask_rate: float = 0.01
    match_norm: bool = False

    def rate(self, step: int, steps: int) -> float:
        """What the learning rates are multiplied by at a step of so many, counted from 0."""
        return 1 - step / steps if self.linear else self.decay ** (step // self.decay_every)


@dataclass(frozen=True)
class Work:
    """Work of one budget level.

    Where tokens are reordered, ``orders`` are tried every ``every`` steps. With a ``beam``, each of ``rounds`` ends with a
    beam search of so many ``sweeps`` over the texts' own tokens, from the best of ``orders``. ``entries``: the share of a
    matrix that L1 and masks of visible entries are evaluated on; with 0, L1 is left out and masks are evaluated whole.
    ``guided``: of a batch of one whose block 0 shows a row space, the beam search begins with the texts that ``likely``
    finds, tries its words alone, and is all there is.
    """

    candidates: int
    restarts: int
    steps: int
    orders: int = 0
    every: int = 1
    rounds: int = 1
    beam: int = 0
    sweeps: int = 0
    entries: float = 1.0
    guided: bool = False


# GRAB's public defaults are 2,000 candidates and 2,000 steps a round (sec. 5.1); ``paper`` spends that on eight restarts.
LEVELS: Mapping[str, Work] = {"quick": Work(8, 2, 80), "default": Work(64, 8, 500), "paper": Work(2000, 8, 2000)}
