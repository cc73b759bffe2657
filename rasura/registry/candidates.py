"""The score of ``rasura read --candidates``, for those who ask for attacks by name only."""

from rasura.attacks.updates.candidates import scores

__all__ = ["scores"]
