"""Why attacks of a study gave up, in the lines below its table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


def reasons_of(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each reason of an attack that gave up; those that differ by a rank alone are one, with its range."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for text in sorted({f"- {r['attack']}: {r['reason']}" for r in records if r["reason"]}):
        first, number, rest = [*re.split(r"(?<=rank )(\d+)", text, maxsplit=1), "", ""][:3]
        ranks.setdefault((first, rest), []).extend([int(number)] if number else [])
    told = {place: f"{min(some)} to {max(some)}" if len(some) > 1 else str(*some) for place, some in ranks.items()}
    return [f"{first}{rank}{rest}" for (first, rest), rank in told.items()]
