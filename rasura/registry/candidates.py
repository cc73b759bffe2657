"""The score of ``rasura read --candidates``, for code that gets attacks only by name."""

from rasura.attacks.updates.candidates import scores

__all__ = ["scores"]
