"""What clients say where they send no update: that they cannot open the sum they were handed, or another error."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rasura.core.interfaces import InputError

REFUSED = 1000
"""The code of a reply of a client that refuses the sum. Flower's own codes are below 100."""

LONGEST_REASON = 300


class SumRefused(InputError):
    """A client cannot open the sum that the server handed out, or may not."""


@dataclass(frozen=True)
class Failure:
    """A client's reply without an update: ``why``, and whether it ``refused`` the sum."""

    node: int
    why: str
    refused: bool


def failures(replies: Iterable[Any]) -> list[Failure]:
    """What Flower's ``replies`` with an error say."""
    found = ((r.metadata.src_node_id, str(r.error.reason or "an error without a reason"), r.error.code) for r in replies)
    return [Failure(node, one_line(why.removeprefix("rasura: ")), code == REFUSED) for node, why, code in found]


def one_line(text: str) -> str:
    """``text`` in one line of bounded length: a stranger wrote part of it."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= LONGEST_REASON else line[: LONGEST_REASON - 1] + "…"


def grouped(reasons: Iterable[tuple[int, str]]) -> str:
    """Each reason once, with the clients that give it."""
    found: dict[str, list[int]] = {}
    for node, why in reasons:
        found.setdefault(why, []).append(node)
    return "; ".join(f"client{'s' * (len(n) > 1)} {', '.join(map(str, sorted(n)))}: {why}" for why, n in found.items())
