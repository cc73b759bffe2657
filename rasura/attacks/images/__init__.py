"""Attacks on an update of an image classifier."""
