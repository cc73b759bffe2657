"""Matching pursuit: private tokens one by one, from gradients that show no row space."""

from rasura.attacks.updates.pursuit.attack import Pursuit

__all__ = ["Pursuit"]
