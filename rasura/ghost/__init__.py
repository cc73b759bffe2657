"""Tokens that lie near a token and mean something else: GHOST substitutes them, and an adversary can compute them, too."""
