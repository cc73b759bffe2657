"""MIA: a classifier that learned from shadow models how a model answers to what it was trained on."""

from __future__ import annotations

import numpy as np
import torch
from torch import Generator

from rasura.core.answers import Answers, Membership, ModelObservation
from rasura.core.specs import MembershipSpec
from rasura.core.values import Grant


def features(answers: Answers) -> np.ndarray:
    """What the classifier sees of a text, ``(texts, features)``: log probabilities, largest first, margin and loss.

    Margin and loss hold the label in; of a causal model there is nothing else.
    """
    logs = torch.log_softmax(answers.logits, 1).sort(1, descending=True).values
    together = torch.cat([logs, answers.margins[:, None], answers.losses[:, None]], 1)
    return np.asarray(together.clamp(-1e3, 1e3).numpy())


class Shadow:
    """MIA with shadow models (Shokri et al. 2017): one attack model a class, trained on what the shadow models answer.

    The attack models are logistic regressions on sorted log probabilities, margin and loss, where the paper has small
    networks on the probabilities: with two classes both see the same figure.
    """

    name = "mia"
    needs = frozenset({Grant.MODEL, Grant.CANDIDATES, Grant.TRAINING})
    uses: frozenset[Grant] = frozenset()

    def __call__(self, seen: ModelObservation, *, rng: Generator) -> Membership:
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        target = features(seen.ask(seen.candidates))
        shadows = [(features(model.answers), model.inside.numpy()) for model in seen.shadow_models]
        classes = np.zeros(len(target), dtype=int)
        if seen.task == "classification":
            classes = np.array([int(row.labels[0]) for row in seen.candidates])
        scores = np.zeros(len(target))
        for label in np.unique(classes):
            here = classes == label
            known = np.concatenate([inside[here] for _, inside in shadows])
            if known.all() or not known.any():
                continue  # a class with a single text may lie on one side alone: nothing is learned of it
            attack = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced"))
            attack.fit(np.concatenate([rows[here] for rows, _ in shadows]), known)
            scores[here] = attack.decision_function(target[here])
        # The classifier's own border. A class of which nothing was learned lies on it, and is not taken for members.
        return Membership(torch.tensor(scores, dtype=torch.float64), {"shadow_models": len(shadows)}, threshold=0.0)


SPEC = MembershipSpec(
    name="mia",
    about="a classifier trained on shadow models",
    source="Shokri et al. 2017, sec. V",
    make=Shadow,
    usual=frozenset({"classification"}),
)
