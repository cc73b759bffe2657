"""The score of ``rasura read --candidates``, for code that gets attacks only by name."""

from rasura.attacks.updates.candidates import like_earlier, scores

__all__ = ["like_earlier", "scores"]
