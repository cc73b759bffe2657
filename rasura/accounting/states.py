"""The state of a ledger as plain values: read, and which of its releases were not made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rasura.accounting.releases import Counted, Release
from rasura.core.errors import InputError

VERSION, STATED = 1, {"unit", "unmade", "copies", "earlier"}
"""Of a state; and the entries that it has only where there is something to say."""


def read(state: Any) -> tuple[list[Counted], int]:
    """The releases of a ``state_dict``, and the number of its last pass. Raises ``InputError`` for anything else."""
    names = {"version", "examples", "batch_size", "delta", "passes", "defense", "runs"}
    if not isinstance(state, Mapping) or set(state) - STATED != names or state["version"] != VERSION:
        raise InputError(f"no state of a ledger; expected an object of version {VERSION} with {', '.join(sorted(names))}")
    whole = (
        _count(state["passes"], 0)
        and _count(state["examples"], 1)
        and _count(state["batch_size"], 1)
        and isinstance(state["delta"], float)
        and state.get("unit", "text") in ("text", "person")
        and _count(state.get("unmade", 0), 0)
        and isinstance(state.get("earlier", ""), str)
    )
    if not whole or not isinstance(state["runs"], list):
        raise InputError("the state of a ledger lacks a list of releases, or has invalid numbers")
    runs = []
    for one in state["runs"]:
        if not isinstance(one, Mapping) or set(one) != {"release", "count"} or not _count(one["count"], 1):
            raise InputError("the state of a ledger holds an entry that is not a release with its count")
        runs.append((Release.read(one["release"]), int(one["count"])))
    copies_in(state)
    if state.get("unmade", 0) > sum(count for _, count in runs):
        raise InputError("the state of a ledger has more releases that were not made than releases")
    numbers = [release.number for release, _ in runs if release.number is not None]
    if max(numbers, default=0) > state["passes"]:
        raise InputError("the state of a ledger has a release in a pass that did not begin")
    return runs, state["passes"]


def parted(runs: Sequence[Counted], unmade: int) -> tuple[list[Counted], list[Counted]]:
    """``runs`` without the last ``unmade`` releases, and these."""
    made: list[Counted] = []
    rest: list[Counted] = []
    for release, count in reversed(runs):
        last = min(count, unmade)
        unmade -= last
        rest[:0] = [(release, last)] if last else []
        made[:0] = [(release, count - last)] if count > last else []
    return made, rest


def less(unmade: Sequence[Counted], release: Release, count: int) -> list[Counted]:
    """``unmade`` without those whose place ``count`` releases like ``release`` take."""
    left = []
    for one, many in unmade:
        taken = min(count, many) if replace(release, number=one.number) == one else 0
        count -= taken
        if many > taken:
            left.append((one, many - taken))
    return left


def copies_in(state: Mapping[str, Any]) -> tuple[int, int]:
    """How many texts a ``state_dict`` says were seen in several rows, and in how many at most."""
    found = state.get("copies", [0, 0])
    if not isinstance(found, list) or len(found) != 2 or not all(_count(one, 0) for one in found):
        raise InputError("the state of a ledger does not say of how many texts there are copies")
    return found[0], found[1]


def _count(value: Any, min_value: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= min_value
