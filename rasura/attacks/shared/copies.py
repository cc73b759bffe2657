"""Equal texts of a guess. With the right labels, copies add hardly anything to an update, so a guess may hold
one too many; and those that a batch does hold may cancel out nearly whole."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rasura.attacks.shared.twins import Texts
from rasura.core.values import Grant, Observation

Types = Sequence[Sequence[int]]
Batch = tuple[Texts, Types | None]
"""Texts and their segments, if there are any."""


def named_once(tokens: Texts, types: Types | None) -> Batch:
    """Each text of ``tokens`` one time, and the segments of the first."""
    rows = [min(same) for same in rows_of(tokens, types).values()]
    return _chosen(tokens, types, rows)


def labels_once(tokens: Texts, types: Types | None, labels: Sequence[int] | None) -> tuple[int, ...] | None:
    """``labels`` of the texts that ``named_once`` names; None where copies of one differ: a weight looks like both."""
    told = [] if labels is None else [{labels[row] for row in same} for same in rows_of(tokens, types).values()]
    return tuple(min(same) for same in told) if told and all(len(same) == 1 for same in told) else None


def one_fewer(tokens: Texts, types: Types | None) -> list[Batch]:
    """For each text that ``tokens`` hold more than once, the batch without one of its copies."""
    last = [max(same) for same in rows_of(tokens, types).values() if len(same) > 1]
    return [_chosen(tokens, types, [row for row in range(len(tokens)) if row != left]) for left in last]


def read_once(tokens: Texts, special: Container[int]) -> Texts:
    """``tokens`` without texts that read like another one: between the ``special`` tokens around it, each text is another.
    Of texts that read alike, the longest stays."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for text in tokens:
        places = [n for n, t in enumerate(text) if t not in special] or [0]
        inner = text[places[0] : places[-1] + 1]
        found[inner] = max(found.get(inner, ()), text, key=len)
    return tuple(found.values())


def rows_of(tokens: Texts, types: Types | None = None) -> dict[tuple[tuple[int, ...], ...], list[int]]:
    """The rows of each text of ``tokens``, by the text and its segments."""
    out: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for row, text in enumerate(tokens):
        out.setdefault((text, () if types is None else tuple(types[row])), []).append(row)
    return out


def known(seen: Observation, grant: Grant) -> bool:
    """Whether ``grant`` is granted, and not only stated."""
    return grant in seen and grant not in seen.claimed


def without_stated_labels(seen: Observation) -> Observation:
    """``seen`` without labels that are only stated: they would say how many texts there are."""
    if Grant.LABELS not in seen.claimed:
        return seen
    granted: Mapping[Grant, Any] = {grant: value for grant, value in seen.granted.items() if grant != Grant.LABELS}
    return replace(seen, granted=granted, claimed=seen.claimed - {Grant.LABELS})


def _chosen(tokens: Texts, types: Types | None, rows: Sequence[int]) -> Batch:
    return tuple(tokens[row] for row in rows), None if types is None else [types[row] for row in rows]
