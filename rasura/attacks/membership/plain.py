"""Membership without shadow models: the loss itself, and the blind baseline, which looks at no model at all."""

from __future__ import annotations

import torch
from torch import Generator

from rasura.core.answers import Membership, ModelObservation
from rasura.core.specs import MembershipSpec
from rasura.core.values import Grant


class Loss:
    """A member's loss is lower (Yeom et al. 2018): the score is minus the loss.

    Their threshold is the model's mean loss over its training, which somebody who only asks is not told: there is none here.
    """

    name = "loss"
    needs = frozenset({Grant.MODEL, Grant.CANDIDATES})
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        return Membership(-seen.ask(seen.candidates).losses)


class Blind:
    """Guesses from the candidates alone, the longer the likelier, and asks no model.

    An area away from one half, on either side, says that members and others differ in length: then the other attacks'
    figures measure how the texts were chosen, not what the model remembers.
    """

    name = "blind"
    needs = frozenset({Grant.CANDIDATES})
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        return Membership(torch.tensor([float(row.lengths[0]) for row in seen.candidates], dtype=torch.float64))


BLIND = MembershipSpec(
    name="blind",
    about="ranks by text length without querying the model; should have an AUC of 0.5",
    source="Rasura: the baseline",
    make=Blind,
)

LOSS = MembershipSpec(
    name="loss",
    about="a member has a lower loss",
    source="Yeom et al. 2018, sec. 3",
    make=Loss,
)
