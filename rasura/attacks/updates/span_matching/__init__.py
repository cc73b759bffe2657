"""Span matching: one text that satisfies the row spaces of all visible layers at once."""

from rasura.attacks.updates.span_matching.attack import SpanMatching

__all__ = ["SpanMatching"]
