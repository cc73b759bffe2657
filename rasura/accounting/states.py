"""The state of a ledger as plain values: read, and which of its releases are not in the weights beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rasura.accounting.releases import Counted, Release
from rasura.core.errors import InputError

VERSION, STATED = 1, {"unit", "unmade", "later", "copies", "earlier"}
"""Of a state; and the entries that it has only where there is something to say."""

UNTOLD = (
    "an earlier version of Rasura wrote this ledger. It does not say whether the releases that are not in the weights were "
    "ever made, so all of them count, also where the training goes on"
)


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
        and all(_count(state.get(name, 0), 0) for name in ("unmade", "later"))
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
    if sum(beside_weights(state)) > sum(count for _, count in runs):
        raise InputError("the state of a ledger has more releases that are not in the weights than releases")
    numbers = [release.number for release, _ in runs if release.number is not None]
    if max(numbers, default=0) > state["passes"]:
        raise InputError("the state of a ledger has a release in a pass that did not begin")
    return runs, state["passes"]


def beside_weights(state: Mapping[str, Any]) -> tuple[int, int]:
    """How many releases of a ``state_dict`` were not made, and how many were made later than the weights beside it. Earlier
    versions told one number for both: all of these count as made."""
    unmade = state.get("unmade", 0)
    return (unmade, state["later"]) if "later" in state else (0, unmade)


def earlier_in(state: Mapping[str, Any]) -> str:
    """What a ``state_dict`` says of an earlier training of the model, and of its own unknown releases."""
    untold = UNTOLD if state.get("unmade", 0) and "later" not in state else ""
    return ". ".join(filter(None, [state.get("earlier", ""), untold]))


def parted(runs: Sequence[Counted], last: int) -> tuple[list[Counted], list[Counted]]:
    """``runs`` without the ``last`` releases, and these."""
    made: list[Counted] = []
    rest: list[Counted] = []
    for release, count in reversed(runs):
        some = min(count, last)
        last -= some
        rest[:0] = [(release, some)] if some else []
        made[:0] = [(release, count - some)] if count > some else []
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
