"""Attacks on an update of a language model: from gradients back to texts."""
