"""The published methods as settings of the engine."""

from __future__ import annotations

from rasura.attacks.gradient_matching.engine import GradientMatching, Settings


def dlg() -> GradientMatching:
    """Deep Leakage from Gradients (Zhu et al. 2019): squared L2, dummy labels optimised with the dummy text.

    The paper uses L-BFGS on images; the text papers that compare with it (LAMP, GRAB sec. 5.1) use Adam, as here.
    """
    return GradientMatching("dlg", Settings("l2"))


def tag() -> GradientMatching:
    """TAG (Deng et al. 2021): squared L2 plus alpha times L1; alpha 0.01 as in GRAB sec. 5.1."""
    return GradientMatching("tag", Settings("l2+l1", alpha=0.01))
