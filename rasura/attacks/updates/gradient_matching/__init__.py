"""Gradient matching: optimise a dummy text until its gradient equals the observed one. One engine, named settings."""
