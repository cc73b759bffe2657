"""Prefix matching: a decoder's text, token by token, by how much of the update each prefix explains."""

from rasura.attacks.updates.prefix_matching.attack import SPEC, PrefixMatching

__all__ = ["SPEC", "PrefixMatching"]
