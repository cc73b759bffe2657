"""The HTML templates of the reports, and the colours of their curves."""

from __future__ import annotations

import re
from typing import Any

from rasura.core.errors import MissingExtra

COLOURS = ("#542d87", "#b5482a", "#2f7d5b", "#2a6fb5", "#a17c1a", "#8c3b6e")
"""Of the curves in a plot, in their order."""


def spaced(defense: str) -> str:
    """The name of a protection with room for a break between its parts: ``a + b``, ``k=10 / epsilon=0.1``."""
    return re.sub(r"(?<=[\w.])([+/])(?=[A-Za-z])", r" \1 ", defense)


def filled(name: str, **values: Any) -> str:
    """The template ``name`` with ``values``, escaped, as a string. Raises ``MissingExtra`` without Jinja2."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError:
        raise MissingExtra(
            "the page needs Jinja2; run: pip install 'rasura[report]', then `rasura report FOLDER` (the results are stored)"
        ) from None

    loader = PackageLoader("rasura", "report")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["spaced"] = spaced
    return environment.get_template(name).render(values)
