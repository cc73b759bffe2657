"""Balanced substitutes (ours): tokens in groups of similar frequency, each group with one set of substitutes.

Published GHOST gives every token its own set, so a substitute reveals much about its original. Here the tokens of a group
share their set, and the selection uses the group's mean embedding instead of the token's: the obfuscated text depends only
on the groups (and on chance). It therefore says nothing about which of two tokens in a group was the original, whatever the
adversary computes, and the odds between them stay those of the language. Groups are made among tokens of similar frequency,
since a rare token would not hide a frequent one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rasura.core.interfaces import InputError
from rasura.core.values import Vocabulary
from rasura.ghost.neighbours import unit_rows
from rasura.ghost.table import NONE, ShadowTable
from rasura.priors.ngram import Unigram

PIVOTS = 64
"""Groups whose members are looked for at once."""


def by_frequency(vocabulary: Vocabulary, tokens: Tensor) -> Tensor:
    """``tokens`` ``(n,)``, the most frequent first: by English word frequencies, then in the order of the vocabulary, which
    tokenizers make by frequency or by merges and so nearly by frequency."""
    try:
        usual = Unigram.english(vocabulary).probabilities
    except InputError:
        return tokens.sort().values
    return tokens[usual[tokens].sort(descending=True, stable=True).indices]


def bands(count: int, size: int) -> list[slice]:
    """Ranks ``0 .. count - 1`` cut where the rank doubles: frequencies in a band differ by a factor of about two. The first
    two hold ``size`` ranks, and none holds fewer."""
    out = []
    start = 0
    while start < count:
        end = start + max(size, start)
        end = count if count - end < size else end
        out.append(slice(start, end))
        start = end
    return out


def groups_of(rows: Tensor, names: Sequence[str], size: int) -> list[list[int]]:
    """Numbers of ``rows`` ``(n, hidden)``, norm 1, in groups of at least ``size``: the first left over with the nearest that
    are left over, of other lemmas (``names``) where possible."""
    alive = torch.ones(len(rows), dtype=torch.bool)
    out: list[list[int]] = []
    while int(alive.sum()) >= 2 * size:
        pivots = alive.nonzero().flatten()[:PIVOTS]
        cosines = (rows[pivots] @ rows.T).masked_fill(~alive, -torch.inf)
        nearest = cosines.topk(min(len(rows), 16 * size), dim=1).indices.tolist()
        for pivot, near in zip(pivots.tolist(), nearest):
            if not alive[pivot]:
                continue
            group = [pivot]
            seen = {names[pivot]}
            for other in near:
                if len(group) < size and other != pivot and alive[other] and names[other] not in seen:
                    group.append(other)
                    seen.add(names[other])
            if len(group) < size and pivot != int(pivots[0]):
                break  # too many of those near are taken by now: look again
            rest = [i for i in alive.nonzero().flatten().tolist() if i not in group] if len(group) < size else []
            group += rest[: size - len(group)]
            alive[group] = False
            out.append(group)
            if int(alive.sum()) < 2 * size:
                break
    if bool(alive.any()):
        out.append(alive.nonzero().flatten().tolist())
    return out


def grouped(table: ShadowTable, embedding: Tensor, names: Sequence[str], vocabulary: Vocabulary) -> ShadowTable:
    """``table`` with the substitutes of groups of ``settings.group`` tokens: of all that its members have, those that share
    no lemma with any member, the ``settings.choices`` nearest to the members' mean. ``embedding``: ``(tokens, hidden)``."""
    settings = table.settings
    rows = unit_rows(embedding)
    replaced = (table.offsets.diff() > 0).nonzero().flatten()
    if len(replaced) < settings.group:
        raise InputError(
            f"ghost: only {len(replaced)} tokens have substitutes, too few for groups of "
            f"{settings.group}; pass a smaller group"
        )
    ranked = by_frequency(vocabulary, replaced)
    groups, relaxed = table.groups.clone(), table.relaxed.clone()
    found: list[Tensor] = [torch.empty(0, dtype=torch.int32)] * len(table)
    for members in _all_groups(ranked, rows, names, settings.group):
        groups[members] = members[0]
        own = {names[t] for t in members}
        pool = sorted({int(s) for t in members for s in table.of(t)})
        left = torch.tensor([s for s in pool if names[s] not in own and s not in members], dtype=torch.int64)
        centre = rows[members].mean(0)
        best = left[(rows[left] @ centre).argsort(descending=True, stable=True)[: settings.choices]].int()
        for t in members:
            found[t] = best
        if not len(best):
            relaxed[members] = NONE
    offsets = torch.zeros(len(table) + 1, dtype=torch.int64)
    offsets[1:] = torch.tensor([len(ids) for ids in found]).cumsum(0)
    return replace(table, offsets=offsets, ids=torch.cat(found), relaxed=relaxed, groups=groups)


def _all_groups(ranked: Tensor, rows: Tensor, names: Sequence[str], size: int) -> list[list[int]]:
    out = []
    for band in bands(len(ranked), size):
        some = ranked[band]
        lemma = [names[t] for t in some.tolist()]
        out += [some[group].tolist() for group in groups_of(rows[some], lemma, size)]
    return out
