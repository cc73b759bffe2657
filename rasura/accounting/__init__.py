"""The guarantees of a run: epsilon of sampled, ordered and directional noise, a ledger, and statements in words."""

from __future__ import annotations

from rasura.accounting.compositions import Composition, composition
from rasura.accounting.directional import directional_epsilon, log_normaliser, renyi_divergence
from rasura.accounting.epsilon import ACCOUNTANTS, checked_delta, epsilon, sigma_for
from rasura.accounting.guarantees import NONE, Guarantee, Run, assumes_poisson, carries, formal, guarantee, sampling_for
from rasura.accounting.ledger import Ledger
from rasura.accounting.one_run import LowerBound, gaussian_run_bound, one_run_bound, one_run_p_value, right_guesses
from rasura.accounting.releases import Draw, Release

__all__ = [
    "ACCOUNTANTS", "NONE", "Composition", "Draw", "Guarantee", "Ledger", "LowerBound", "Release", "Run", "assumes_poisson",
    "carries", "checked_delta", "composition", "directional_epsilon", "epsilon", "formal", "gaussian_run_bound",
    "guarantee", "log_normaliser", "one_run_bound", "one_run_p_value", "renyi_divergence", "right_guesses",
    "sampling_for", "sigma_for",
]  # fmt: skip
