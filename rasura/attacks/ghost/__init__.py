"""Attacks on GHOST: from substitutes back to the original tokens."""
