"""The published methods as settings of the engine."""

from __future__ import annotations

from rasura.attacks.gradient_matching.engine import GradientMatching, Settings, Work

# DLG and TAG take 2,500 steps (GRAB sec. 5.1, and LAMP's public dlg.sh and tag.sh) from one start; LAMP chooses the best of
# 500 starts (its init_candidates). ``paper`` spends both, on eight restarts; the others are ours, for two cores.
LEVELS = {"quick": Work(8, 2, 80), "default": Work(64, 8, 500), "paper": Work(500, 8, 2500)}


def dlg() -> GradientMatching:
    """Deep Leakage from Gradients (Zhu et al. 2019): squared L2, dummy labels optimised with the dummy text.

    The paper uses L-BFGS on images; the text papers that compare with it (LAMP, GRAB sec. 5.1) use Adam, as here.
    """
    return GradientMatching("dlg", Settings("l2", LEVELS))


def tag() -> GradientMatching:
    """TAG (Deng et al. 2021): squared L2 plus alpha times L1; alpha 0.01 as in GRAB sec. 5.1."""
    return GradientMatching("tag", Settings("l2+l1", LEVELS, alpha=0.01))
