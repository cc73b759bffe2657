"""Plain Records of audits that nobody ran, for tests of what is said of them. No model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from html import unescape
from typing import Any

from hypothesis import strategies as some

from rasura.registry import adversaries
from rasura.report.verdicts import Verdict, verdict

GUESS = 0.2
METRIC = "token_recall"
MANY = 60
"""Enough examples for a bound of .1."""


def sentences(page: str) -> str:
    """A page with its sentences whole: names stand in elements that no line breaks."""
    return " ".join(unescape(re.sub(r"</?(?:span|wbr)[^>]*>", "", page)).split())


def stored(rows: Iterable[Mapping[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """``rows`` with what a page needs beside what is judged."""
    return [{**r, "data": "d", "versions": {}, "device": "cpu", "schema": 3, **more} for r in rows]


def record(
    attack: str, defense: str = "none", value: float | None = None, *, note: int = 0, status: str = "ok", **more: Any
) -> dict[str, Any]:
    """One text in one update. Without a ``value`` the attack has no score."""
    fields: dict[str, Any] = {
        "attack": attack, "defense": defense, "update": "fedsgd", "threat": "honest-server", "batch_size": 1, "seed": 0,
        "batch": note, "examples": [note], "status": status, "reason": "" if status == "ok" else f"it {status}",
        "confidence": "none", "scores": {} if value is None else {METRIC: {"per_record": [value]}},
        "blind": {METRIC: {"per_record": [GUESS]}}, "details": {}, "recovered": [], "wall_seconds": 0.0,
        "threat_plain": "", "sent_bytes": 0, "defense_seconds": 0.0, "known_by": asdict(adversaries(defense)),
    }  # fmt: skip
    return {**fields, **more}


def column(attack: str, defense: str, values: Sequence[float | None], status: str = "ok") -> list[dict[str, Any]]:
    """An attack on one text after another. Where a value is None, it ended with ``status``."""
    return [record(attack, defense, v, note=k, status=status if v is None else "ok") for k, v in enumerate(values)]


def of(records: Sequence[dict[str, Any]], defense: str) -> Verdict:
    here = [r for r in records if r["defense"] == defense]
    return verdict(defense, here, [r for r in records if r["defense"] == "none"], METRIC)


READ = column("span", "none", [1.0] * MANY)
"""What makes ``span`` a yardstick."""

STATUSES = ("ok", "failed", "crashed", "not_applicable")


@some.composite
def runs(draw: Any) -> list[dict[str, Any]]:
    """Any few Records: attacks, protections, notes, statuses, scores."""
    rows = []
    for _ in range(draw(some.integers(0, 24))):
        status = draw(some.sampled_from(STATUSES))
        value = draw(some.sampled_from([None, 0.0, GUESS, 0.6, 1.0, math.nan])) if status == "ok" else None
        rows.append(
            record(
                draw(some.sampled_from(["blind", "span", "embedding-rows", "best"])),
                draw(some.sampled_from(["none", "bf16", "dropout:0.1", "gaussian:1"])),
                value,
                note=draw(some.integers(0, 2)),
                status=status,
                seed=draw(some.integers(0, 1)),
                confidence=draw(some.sampled_from(["none", "verified"])),
                details={"ran": draw(some.sampled_from(["", "span", "span,pursuit"]))},
            )
        )
    return rows
