"""Span attacks: what the row spaces of linear layers' gradients reveal about their inputs."""

from rasura.attacks.updates.span.attack import Span

__all__ = ["Span"]
