"""Images from gradients: Inverting Gradients (Geiping et al. 2020), and with what linear layers give away (batch size 1).

A linear layer's weight gradient for one image is ``delta x^T`` and its bias gradient is ``delta``: their quotient is the
layer's input ``x``, exactly (Geiping et al., Proposition 3.1). It follows from any part of the entries, so hiding a
tenth of them hides little. Behind convolutions ``x`` is not the image but its features, which an image can be fitted to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from rasura.attacks.images.layers import ImageGradients
from rasura.attacks.images.search import ImageSearch, Settings, Work
from rasura.attacks.updates.label_recovery import LabelRecovery
from rasura.core.interfaces import AttackFailed, Budget, NotApplicable
from rasura.core.specs import IMAGES, AttackSpec, Home
from rasura.core.values import Grant, Observation, Reconstruction

# ``paper``: 8,000 steps are the default of the paper's public code. A step of one image takes 10 to 20 ms on one core.
LEVELS: Mapping[str, Work] = {"quick": Work(1, 120, 80), "default": Work(1, 500, 200), "paper": Work(8, 8000, 1000)}
FEATURE_LEVELS: Mapping[str, Work] = {"quick": Work(1, 40, 80), "default": Work(1, 300, 300), "paper": Work(4, 2000, 1500)}


@dataclass(frozen=True)
class InvertingGradients:
    """Optimises images in ``[0, 1]`` until the cosine between their gradient and the observed one is 1, smoothly.

    Labels that are not granted are read off the head's gradient. Entries that are not visible are left out of both sides.
    Returns ``images`` ``(batch, channels, height, width)``, never more than ``matched``: quite different images have almost
    the same gradient. ``residual`` is the relative error of the gradient.

    Raises ``NotApplicable`` for other tasks, and when no gradient of a convolution or linear layer is visible;
    ``AttackFailed`` when the labels cannot be told or the optimisation diverges.
    """

    name: str
    settings: Settings
    needs: frozenset[Grant] = frozenset({Grant.MODEL})
    uses: frozenset[Grant] = frozenset({Grant.BATCH_SIZE, Grant.LABELS})
    levels: Mapping[str, Work] = field(default_factory=lambda: LEVELS)

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        if seen.task != "vision":
            raise NotApplicable("this attack reads images; for texts use span or gradient matching")
        gradients = ImageGradients(seen.model, seen.gradients)
        if not gradients.names:
            raise NotApplicable("no gradient of a convolution or linear layer is in the update")
        if not all(bool(torch.isfinite(seen.gradients[n]).all()) for n in gradients.names):
            raise AttackFailed("the observed gradient is not finite")
        if not any(bool(seen.gradients[n].any()) for n in gradients.names):
            raise AttackFailed("no visible entry of the gradient differs from zero")
        size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
        labels = seen.labels if Grant.LABELS in seen else _labels(seen, size, rng, budget)
        return ImageSearch(self.settings, self.levels[budget.level], seen, gradients, size, labels, rng)()


def inverting_gradients() -> InvertingGradients:
    """The method of the paper (Geiping et al. 2020)."""
    return InvertingGradients("inverting-gradients", Settings())


def feature_matching() -> InvertingGradients:
    """The same, begun at an image that has the linear layers' inputs (batch size 1), and ended by L-BFGS.

    Not a paper's method. That the inputs follow from the gradient is Geiping et al.'s Proposition 3.1; here they are a
    target of their own, which the cosine hardly feels once other entries dominate it or are hidden. L-BFGS on the squared
    error is what DLG does (Zhu et al. 2019); it needs the good start and the total variation.
    """
    settings = Settings(total_variation=0.1, learning_rate=0.05, features=1.0, polish=True)
    return InvertingGradients("feature-matching", settings, levels=FEATURE_LEVELS)


def _labels(seen: Observation, size: int, rng: Generator, budget: Budget) -> Tensor | None:
    """Labels from the head's gradient; None where it does not tell the label of a single image."""
    try:
        found = LabelRecovery()(seen, rng=rng, budget=budget).labels
    except (AttackFailed, NotApplicable) as error:
        if size == 1:
            return None
        raise AttackFailed(f"the labels are not granted and cannot be read: {error}") from None
    return None if not found or len(found) != size else torch.tensor(found)


SPEC = AttackSpec(
    name="inverting-gradients",
    about="images: gradient matching with cosine distance, signed steps and total variation",
    source="Geiping et al. 2020, sec. 4",
    make=inverting_gradients,
    seconds=20.0,
    tasks=IMAGES,
    home=Home("lenet", "vision"),
)

FEATURE_MATCHING = AttackSpec(
    name="feature-matching",
    about="images: inverting-gradients with L-BFGS, started from what linear layers reveal of a single image",
    source="Rasura, after Geiping et al. 2020, sec. 3",
    make=feature_matching,
    seconds=20.0,
    tasks=IMAGES,
    home=Home("lenet", "vision"),
)
