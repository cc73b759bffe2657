"""What a run guarantees: epsilon of sampled noise, of directional noise, and the words that say what holds."""

from __future__ import annotations

from rasura.accounting.directional import directional_epsilon, log_normaliser, renyi_divergence
from rasura.accounting.epsilon import ACCOUNTANTS, checked_delta, epsilon, sigma_for
from rasura.accounting.guarantees import NONE, Guarantee, Run, assumes_poisson, formal, guarantee

__all__ = [
    "ACCOUNTANTS", "NONE", "Guarantee", "Run", "assumes_poisson", "checked_delta", "directional_epsilon", "epsilon",
    "formal", "guarantee", "log_normaliser", "renyi_divergence", "sigma_for",
]  # fmt: skip
