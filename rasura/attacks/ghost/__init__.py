"""Attacks on GHOST: from substitutes back to the tokens that they stand for."""
