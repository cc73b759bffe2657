"""The HTML templates of the reports, and the colours of their curves."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from rasura.core.errors import MissingExtra
from rasura.core.rounding import percent, percent_above, percent_below
from rasura.report.language import LANGUAGES, current, number, recorded, size, tell

if TYPE_CHECKING:
    from jinja2 import Environment

COLOURS = tuple(f"var(--c{k})" for k in range(1, 7))
"""Of the curves in a plot, in their order: variables of ``base.html``, which differ in dark mode."""


WHOLE = re.compile(r"(?<=\d) %|\bn = (?=\d)|(?<=\d) (?:to|bis|à) (?=\d)")
"""Where no line ends: between a figure and its sign, in ``n = 60``, and in an interval."""


def spaced(defense: str) -> str:
    """The name of a protection with room for a break between its parts: ``a + b``, ``k=10 / epsilon=0.1``."""
    return re.sub(r"(?<=[\w.])([+/])(?=[A-Za-z])", r" \1 ", defense)


def pieces(text: str) -> list[tuple[str, bool, bool]]:
    """``text`` in pieces for a page: each with whether no line may break in it (names and options: ``--attack``,
    ``embedding-rows``), and whether a line may break after it: in lists after a comma, in paths after a slash, in no number
    (``90,0``)."""
    found = []
    for word in re.findall(r"\s+|\S+", text):
        *first, last = re.split(r"(?<=[,/])(?!(?<=\d,)\d)(?=.)", word)
        found += [(part, True, True) for part in first] + [(last, "-" in last or bool(first), False)]
    return found


def brief(seconds: float) -> str:
    """Seconds to one decimal place, of which no positive figure reads as none."""
    return f"< {number(0.1, '.1f')} s" if seconds < 0.05 else f"{number(seconds, '.1f')} s"


def environment() -> Environment:
    """Where the templates are found and filled. Raises ``MissingExtra`` without Jinja2."""
    try:
        from jinja2 import Environment, PackageLoader
    except ImportError:
        raise MissingExtra(
            "the page needs Jinja2; run: pip install 'rasura[report]', then `rasura report FOLDER` (the results are stored)"
        ) from None

    loader = PackageLoader("rasura", "report")
    made = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {
        "spaced": spaced,
        "pieces": pieces,
        "number": number,
        "size": size,
        "brief": brief,
        "recorded": recorded,
        "percent": percent,
        "percent_above": percent_above,
        "percent_below": percent_below,
    }
    made.globals |= {"tell": tell}
    return made


def filled(name: str, **values: Any) -> str:
    """The template ``name`` with ``values``, escaped, as a string. Raises ``MissingExtra`` without Jinja2."""
    page = environment().get_template(name).render(values, language=current(), languages=LANGUAGES)
    return re.sub(WHOLE, lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), page)
