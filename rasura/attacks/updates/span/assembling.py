"""Texts from tokens: tokens with known positions are dealt to the texts of the batch; tokens without are put in order."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from rasura.attacks.shared.verify import check
from rasura.attacks.updates.span.grouping import affinity, cluster, dealt
from rasura.attacks.updates.span.inputs import Inputs
from rasura.attacks.updates.span.placing import likely
from rasura.attacks.updates.span.rows import RowSpace
from rasura.attacks.updates.span.sentences import Finder, Text, checker, choices
from rasura.attacks.updates.span.tokens import Row, nearest
from rasura.core.values import UNKNOWN, Grant, Observation, Vocabulary
from rasura.victims.models import attention_heads

Sentences = list[list[tuple[int, int]]]
"""Texts as (token, segment) pairs, ``UNKNOWN`` for a hole."""

MAX_ARRANGED = 32
"""Where no positions are visible, the order of at most this many tokens is searched for."""

MAX_ALIKE = 2
"""How many tokens longer such a text may be than the layer after the attention shows."""

MAX_COPIES = 16
"""Where the batch size is unknown: how many texts may share a token at one position, and how many ways of filling a batch
with copies are tried."""


def assembled(
    seen: Observation,
    spaces: Mapping[int, RowSpace],
    inputs: Inputs,
    rows: list[Row],
    size: int,
    active: bool,
    rng: torch.Generator,
    restarts: int,
) -> Sentences:
    """The ``size`` texts of the batch from ``rows`` at known positions; with ``active`` dropout, by which tokens attend to
    each other.

    ``restarts``: random texts tried for each text of the batch.
    """
    score = None if active else checker(seen, spaces, inputs)
    if size == 1 and (score is None or len({r.position for r in rows}) == len(rows)):
        return [_with_holes({row.position: (row.token, row.segment) for row in nearest(rows)})]
    ambiguous = not active and len(rows) > spaces[0].rank  # more rows than dimensions have no coefficients of their own
    first = likely(seen, inputs.parts.blocks[0], spaces[0], rows) if ambiguous else rows
    rows = first if score is None else rows
    groups: list[list[int]] = []
    likeness = torch.ones(len(rows), len(rows), dtype=torch.double)
    if not ambiguous or score is None:
        x = torch.stack([r.input for r in rows])
        found = affinity(seen, inputs.parts.blocks[0], x, spaces[0], attention_heads(seen.model))
        likeness = likeness if found is None else found
        labels = cluster(likeness, size)
        if score is None:
            labels = dealt(likeness, [r.position for r in rows], labels, size)
        groups = [[i for i, g in enumerate(labels) if g == group] for group in range(size)]
    if score is None:
        return [_strongest(rows, group, likeness) for group in groups if group]
    frame = seen.vocabulary
    finder = Finder(
        choices(rows), score, prefix=frame.prefix, suffix=frame.suffix, rng=rng, likely=choices(first),
        lengths=seen.lengths if Grant.LENGTHS in seen else None,
    )  # fmt: skip
    if not finder.lengths:  # no token was found for some place of every text: they come back with holes
        groups = groups or [sorted(range(len(rows)), key=lambda i: rows[i].residual)]
        return [_strongest(rows, group, likeness) for group in groups if group]
    starts = [[rows[i] for i in group] for group in groups if group]
    known, rest = finder(starts, size, restarts * size)
    return [list(text) for text in _filled_up(seen, known, rest, size)]


def arranged(
    seen: Observation,
    spaces: Mapping[int, RowSpace],
    inputs: Inputs,
    rows: list[Row],
    size: int,
    rng: torch.Generator,
    restarts: int,
) -> Sentences:
    """One text in order, where block 0 shows no positions; empty if no order explains the layer after the attention.

    That layer's row space has as many dimensions as the text has tokens, or fewer where copies of a word are alike.
    """
    score = checker(seen, spaces, inputs)
    if size != 1 or score is None or score.space.rank > MAX_ARRANGED:
        return []
    frame, min_length = seen.vocabulary, score.space.rank
    lengths = seen.lengths if Grant.LENGTHS in seen else tuple(range(min_length, min_length + MAX_ALIKE + 1))
    pairs = [(row.token, row.segment) for row in rows]
    begins, ends = frame.prefix, frame.suffix[-1:]
    inner = [p for p in pairs if p[0] not in {*begins, *frame.suffix}] or pairs
    last = [p for p in pairs if p[0] in ends] or inner
    anything = list(dict.fromkeys([*inner, *last]))
    allowed = {n: [(begins[n], 0)] if n < len(begins) else anything for n in range(max(lengths))}
    finder = Finder(allowed, score, prefix=begins, suffix=frame.suffix, lengths=lengths, rng=rng, likely=allowed)
    found, _ = finder([], 1, restarts)
    return [list(text) for text in found]


def _filled_up(seen: Observation, found: list[Text], rest: list[Text], size: int) -> list[Text]:
    """``size`` texts: those ``found``, and copies of them or some of the ``rest``, whatever repeats the gradient best; where
    the batch size is not known, perhaps those found alone."""
    missing = size - len(found)
    if not missing or not found:
        return [*found, *rest][:size]
    fills = itertools.combinations_with_replacement([*rest[:2], *found], missing)
    tried = [[*found, *rest[:missing]], *([*found, *more] for more in itertools.islice(fills, MAX_COPIES))]
    if Grant.BATCH_SIZE not in seen:  # the size is the largest that the rows allow
        tried.insert(0, found)

    def error(texts: list[Text]) -> float:
        return check(seen, [[t for t, _ in text] for text in texts], [[s for _, s in text] for text in texts])[0]

    return min(tried, key=error)


def _with_holes(known: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
    return [known.get(n, (UNKNOWN, 0)) for n in range(max(known) + 1)]


def completed(text: list[tuple[int, int]], likely: list[list[int]], vocabulary: Vocabulary) -> list[tuple[int, int]]:
    """``text`` with what the search under dropout may have missed: the tokenizer's own tokens and, in each hole, the
    ``likely`` token.

    A missing token was hidden by its own copies, so its input without dropout is near the row space.
    """
    out = list(text)
    for n, token in enumerate(vocabulary.prefix[: len(out)]):
        if out[n][0] == UNKNOWN:
            out[n] = (token, 0)
    for n, (token, segment) in enumerate(out):
        if token == UNKNOWN and n < len(likely) and likely[n]:
            out[n] = (likely[n][0], segment)
    end = vocabulary.suffix
    if end and out[-1][0] != end[-1]:
        have = next(k for k in range(len(end), -1, -1) if [t for t, _ in out[len(out) - k :]] == list(end[:k]))
        out += [(token, out[-1][1]) for token in end[have:]]
    return out


def _strongest(rows: list[Row], group: list[int], likeness: Tensor) -> list[tuple[int, int]]:
    """One text from a group of rows: at each position the row that the rest of the group attends to most."""
    best: dict[int, tuple[float, int]] = {}
    for i in group:
        weight = float(likeness[i, group].sum() - likeness[i, i])
        if rows[i].position not in best or weight > best[rows[i].position][0]:
            best[rows[i].position] = (weight, i)
    return _with_holes({n: (rows[i].token, rows[i].segment) for n, (_, i) in best.items()})
