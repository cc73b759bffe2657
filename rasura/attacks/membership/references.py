"""Membership by comparison with shadow models: MIA-R, LiRA, RMIA.

Every attack asks the same question: is the model surer of this text than models like it that were trained without it? They
differ in how they use the shadow models' answers.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Generator, Tensor

from rasura.core.answers import Answers, Membership, ModelObservation, ShadowModel
from rasura.core.interfaces import NotApplicable
from rasura.core.specs import MembershipSpec
from rasura.core.values import Grant

_NEEDS = frozenset({Grant.MODEL, Grant.CANDIDATES, Grant.TRAINING})


def _inside(shadows: tuple[ShadowModel, ...]) -> Tensor:
    """Which shadow model was trained on which candidate, ``(models, candidates)`` bool: each in some and not in others."""
    inside = torch.stack([model.inside for model in shadows])
    for what, lacking in (("every", inside.all(0)), ("no", ~inside.any(0))):
        if bool(lacking.any()):
            raise NotApplicable(f"{what} shadow model was trained on {int(lacking.sum())} candidates; train more")
    return inside


class ReferenceModels:
    """MIA-R: how rarely a model that was not trained on the text has so low a loss (Ye et al. 2022, Attack R).

    The score is one minus the fraction of shadow models without the text whose loss is lower, interpolated between their
    losses. Beyond the lowest and the highest loss it is constant, so that few models leave ties. Not applicable where a
    text has fewer than two such models.
    """

    name = "mia-r"
    needs = _NEEDS
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        target = seen.ask(seen.candidates).losses.numpy()
        inside = _inside(seen.shadow_models).numpy()
        own = np.stack([model.answers.losses.numpy() for model in seen.shadow_models])
        fewest = int((~inside).sum(0).min())
        if fewest < 2:  # the place beside a single loss is one half, whatever the model's own loss is
            raise NotApplicable(
                f"a text has {fewest} shadow model that was trained without it, and a rank needs at least 2; train at least "
                "4 shadow models"
            )
        scores = []
        for k, loss in enumerate(target):
            without = np.sort(own[~inside[:, k], k])
            places = np.arange(1, len(without) + 1) / (len(without) + 1)
            scores.append(1.0 - float(np.interp(loss, without, places)))
        return Membership(torch.tensor(scores, dtype=torch.float64), {"shadow_models": len(own)})


class Lira:
    """LiRA: the likelihood ratio of the text's margin, shadow models with it to those without (Carlini et al. 2022, Alg. 1).

    Two Gaussians a text. With fewer than 64 shadow models the paper shares one variance among all texts. Here it is the mean
    of the texts' own variances; the authors' code takes the spread of all margins together, which differences between
    texts inflate.
    """

    name = "lira"
    needs = _NEEDS
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        target = seen.ask(seen.candidates).margins
        inside = _inside(seen.shadow_models)
        own = torch.stack([model.answers.margins for model in seen.shadow_models])
        likelihood = []
        for chosen in (inside, ~inside):
            count = chosen.sum(0)
            mean = torch.where(chosen, own, 0.0).sum(0) / count
            squares = torch.where(chosen, (own - mean).square(), 0.0).sum(0)
            if len(own) >= 64 and int(count.min()) > 1:
                variance = squares / (count - 1)
            else:
                variance = squares.sum() / max(1, int((count - 1).sum()))
            variance = variance.clamp(min=1e-12)
            likelihood.append(-0.5 * (target - mean).square() / variance - 0.5 * torch.log(2 * math.pi * variance))
        # Likelier with the text than without it. The paper sweeps the threshold; this is the one of even odds.
        return Membership(likelihood[0] - likelihood[1], {"shadow_models": len(own)}, threshold=0.0)


class Rmia:
    """RMIA: is the text likelier under the model than under the average one, more so than other texts are?

    Zarifzadeh et al. 2024, eq. 4 to 6, with shadow models that hold each text as often as not (the paper's online form):
    ``ratio(x) = p(x | model) / mean of p(x | shadow model)``, and the score is the share of reference texts z with
    ``ratio(x) >= ratio(z)`` (their gamma is 1; another one changes ties alone, not the order). Without reference texts the
    candidates stand in for them.
    """

    name = "rmia"
    needs = _NEEDS
    uses = frozenset({Grant.REFERENCE_TEXT})

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        ratio = self._ratio(seen.ask(seen.candidates), [model.answers for model in seen.shadow_models])
        others = ratio
        if Grant.REFERENCE_TEXT in seen and seen.reference:
            own = [model.reference for model in seen.shadow_models if model.reference is not None]
            others = self._ratio(seen.ask(seen.reference), own)
        below = torch.searchsorted(others.sort().values, ratio, right=True)
        details = {"shadow_models": len(seen.shadow_models), "compared_with": len(others)}
        return Membership(below.double() / len(others), details)

    def _ratio(self, target: Answers, own: list[Answers]) -> Tensor:
        average = torch.logsumexp(torch.stack([-a.losses for a in own]), 0) - math.log(len(own))
        return -target.losses - average


MIA_R = MembershipSpec(
    name="mia-r",
    about="how rarely reference models trained without the text reach a loss this low",
    source="Ye et al. 2022, sec. 4 (Attack R)",
    make=ReferenceModels,
    usual=frozenset({"classification"}),
)

LIRA = MembershipSpec(
    name="lira",
    about="likelihood ratio of models trained with and without the text",
    source="Carlini et al. 2022, Algorithm 1",
    make=Lira,
    usual=frozenset({"classification"}),
)

RMIA = MembershipSpec(
    name="rmia",
    about="likelihood of the text relative to that of other texts",
    source="Zarifzadeh et al. 2024, eq. 4 to 6",
    make=Rmia,
    usual=frozenset({"classification"}),
)
