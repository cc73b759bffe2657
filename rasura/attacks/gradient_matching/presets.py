"""The published methods as settings of the engine."""

from __future__ import annotations

from collections.abc import Mapping

from rasura.attacks.gradient_matching.engine import GradientMatching, Settings, Work

# LAMP takes 2,000 steps (GRAB sec. 5.1); its public code tries 200 orders every 75 of them after a first tenth.
LAMP_LEVELS: Mapping[str, Work] = {
    "quick": Work(8, 2, 80, 10, 25),
    "default": Work(64, 2, 300, 50, 50),
    "paper": Work(2000, 1, 2000, 200, 75),
}


def dlg() -> GradientMatching:
    """Deep Leakage from Gradients (Zhu et al. 2019): squared L2, dummy labels optimised with the dummy text.

    The paper uses L-BFGS on images; the text papers that compare with it (LAMP, GRAB sec. 5.1) use Adam, as here.
    """
    return GradientMatching("dlg", Settings("l2"))


def tag() -> GradientMatching:
    """TAG (Deng et al. 2021): squared L2 plus alpha times L1; alpha 0.01 as in GRAB sec. 5.1."""
    return GradientMatching("tag", Settings("l2+l1", alpha=0.01))


def lamp_cos() -> GradientMatching:
    """LAMP with cosine distance (Balunovic et al. 2022): embedding-norm regulariser 1, other orders now and then, with
    0.2 times the prior.

    The paper's prior is GPT-2 with the victim's tokenizer; here it is trigrams of the reference text where that is granted.
    """
    return GradientMatching("lamp-cos", Settings("cosine", embedding_norm=1.0, reorder=True, prior=0.2), levels=LAMP_LEVELS)


def lamp_l1l2() -> GradientMatching:
    """LAMP with squared L2 plus 0.01 times L1 (Balunovic et al. 2022); else as ``lamp_cos``."""
    settings = Settings("l2+l1", alpha=0.01, embedding_norm=1.0, reorder=True, prior=0.2)
    return GradientMatching("lamp-l1l2", settings, levels=LAMP_LEVELS)
