"""Balanced substitutes: groups of like tokens, and the law that what is sent depends on the groups alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rasura.core.interfaces import InputError
from rasura.core.rng import generator
from rasura.ghost.groups import bands, by_frequency, groups_of
from rasura.ghost.models import made_for
from rasura.ghost.selection import Selector
from rasura.ghost.table import RELAXED, ShadowSettings, ShadowTable
from rasura.testing.tiny import CLS, SEP, VOCABULARY, tiny

PLAIN = ShadowSettings(k=12, overlap=0.3, grow=4, max_k=40, language=None)
GROUPS = replace(PLAIN, group=4, choices=6)


@pytest.mark.parametrize("count", [3, 4, 9, 100, 1000])
def test_bands_cover_every_rank_once_and_double(count: int) -> None:
    found = bands(count, 4)
    ranks = [r for band in found for r in range(count)[band]]
    assert ranks == list(range(count))
    assert all(band.stop - band.start >= min(4, count) for band in found)
    assert all(band.stop <= max(2 * band.start, 4) or band is found[-1] for band in found)


def test_frequent_words_come_first() -> None:
    ranked = by_frequency(VOCABULARY, torch.arange(3, 60)).tolist()
    assert set(ranked[:8]) == set(range(3, 11)), "the real words among w11 w12 ..."
    assert ranked[8:] == sorted(ranked[8:])


@pytest.mark.parametrize("size", [2, 5, 16])
def test_groups_part_all_tokens_and_mix_lemmas(size: int) -> None:
    rows = torch.nn.functional.normalize(torch.randn(203, 8, generator=generator(0)), dim=1)
    names = [f"l{k // 2}" for k in range(203)]
    found = groups_of(rows, names, size)
    assert sorted(k for group in found for k in group) == list(range(203))
    assert all(size <= len(group) < 2 * size for group in found)
    mixed = [len({names[k] for k in group}) == len(group) for group in found[:-1]]
    assert sum(mixed) >= 0.9 * len(mixed)
    # The first of each group has its nearest free neighbours: no one left for a later group was nearer.
    later = [k for group in found[1:] for k in group if names[k] not in {names[i] for i in found[0]}]
    assert (rows[found[0][1:]] @ rows[found[0][0]]).min() >= (rows[later] @ rows[found[0][0]]).max()


def table() -> ShadowTable:
    return made_for(tiny("bert", "classification"), VOCABULARY, GROUPS)


def test_tokens_of_a_group_share_their_substitutes_and_none_is_of_the_group() -> None:
    found = table()
    for number in found.groups.unique().tolist():
        members = (found.groups == number).nonzero().flatten().tolist()
        sets = {tuple(found.of(t).tolist()) for t in members}
        assert len(sets) == 1
        (own,) = sets
        if own:
            assert len(members) >= 4 and len(own) <= 6 and not set(own) & set(members)
    replaced = (found.offsets.diff() > 0).sum()
    assert int(replaced) > 0.9 * (VOCABULARY.size - 3)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_what_is_sent_depends_on_the_groups_alone(family: str) -> None:
    model = tiny(family, "classification")
    found = made_for(model, VOCABULARY, GROUPS)
    selector = Selector(model, found, VOCABULARY.special_ids)
    text = [CLS, 40, 41, 9, 50, 77, SEP]
    other = [t if t in VOCABULARY.special_ids else int((found.groups == found.groups[t]).nonzero()[-1]) for t in text]
    assert sum(a != b for a, b in zip(text, other)) >= 3
    (one,), (two,) = selector([text], generator(0)), selector([other], generator(0))
    assert one.ids == two.ids
    published = Selector(model, made_for(model, VOCABULARY, PLAIN), VOCABULARY.special_ids)
    (one,), (two,) = published([text], generator(0)), published([other], generator(0))
    assert one.ids != two.ids, "published GHOST tells them apart"


def test_policies_leave_marks_and_numbers_and_take_what_reads_back() -> None:
    model = tiny("bert", "classification")
    settings = replace(PLAIN, keep_punctuation=True, keep_numbers=True, round_trip=True)
    found = made_for(model, VOCABULARY, settings)
    marks = [3 + 6, 3 + 7]
    assert not any(len(found.of(t)) for t in marks) and not torch.isin(found.ids, torch.tensor(marks)).any()
    assert all(RELAXED[int(found.relaxed[t])] == "kept by policy" for t in [*marks, 40])  # w40 holds a number
    words = [t for t in range(3, 9) if len(found.of(t))]
    assert all(VOCABULARY.encode(VOCABULARY.decode([s])) == [int(s)] for t in words for s in found.of(t).tolist())
    (one,) = Selector(model, found, VOCABULARY.special_ids)([[CLS, 3, 40, marks[0], SEP]], generator(0))
    assert one.ids[2:4] == (40, marks[0]) and one.kept == () and one.weak.keys() <= {1}


def test_groups_larger_than_the_vocabulary_are_refused() -> None:
    with pytest.raises(InputError, match="too few for groups of 400"):
        made_for(tiny("bert", "classification"), VOCABULARY, replace(GROUPS, group=400))
    with pytest.raises(InputError, match="at least 1"):
        replace(GROUPS, group=0)
