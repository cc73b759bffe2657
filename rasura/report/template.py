"""The HTML templates of the reports, and the colours of their curves."""

from __future__ import annotations

from typing import Any

COLOURS = ("#542d87", "#b5482a", "#2f7d5b", "#2a6fb5", "#a17c1a", "#8c3b6e")
"""Of the curves in a plot, in their order."""


def filled(name: str, **values: Any) -> str:
    """The template ``name`` with ``values``, escaped, as a string."""
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("rasura", "report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name).render(values)
