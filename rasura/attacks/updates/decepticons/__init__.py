"""Decepticons: weights that a malicious server crafts, and what their gradient reveals."""

from rasura.attacks.updates.decepticons.attack import Decepticons

__all__ = ["Decepticons"]
