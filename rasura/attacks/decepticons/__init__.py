"""Decepticons: weights that a malicious server crafts, and what their gradient tells."""

from rasura.attacks.decepticons.attack import Decepticons

__all__ = ["Decepticons"]
