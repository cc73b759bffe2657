"""Texts from the tokens that a crafted model's gradient gave: by what the tokens of one text have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from rasura.attacks.updates.decepticons.layout import Layout, first_place, value
from rasura.attacks.updates.decepticons.reading import Token
from rasura.core.values import UNKNOWN


def into_texts(tokens: Sequence[Token], size: int | None) -> list[tuple[int, ...]]:
    """Texts of a model whose tokens see their whole text: the tokens of one have one code. ``size``: texts, if known."""
    if size == 1 or len(tokens) < 2:
        return [_placed(tokens)]
    if size is not None:
        return _assigned(tokens, size)
    from sklearn.cluster import AgglomerativeClustering

    codes = torch.stack([t.code for t in tokens])
    cut = 0.2 * float(codes.norm(dim=1).median())
    labels = AgglomerativeClustering(n_clusters=None, distance_threshold=cut, linkage="average").fit_predict(codes.numpy())
    return [_placed([t for t, label in zip(tokens, labels) if label == k]) for k in sorted(set(labels.tolist()))]


STARTS = 8
"""Places whose tokens are taken as the first of each text, one after another: from one start, a token may stay in a text
whose code is only near its own."""


def _assigned(tokens: Sequence[Token], size: int) -> list[tuple[int, ...]]:
    """``size`` texts with at most one token a place: at every place the tokens go to the texts whose codes they fit."""
    by_place: dict[int, list[Token]] = {}
    for t in sorted(tokens, key=lambda t: -t.energy):
        if len(by_place.setdefault(t.place, [])) < size:
            by_place[t.place].append(t)
    fullest = sorted(by_place.values(), key=lambda here: (-len(here), -sum(t.energy for t in here)))
    starts = [here for here in fullest if len(here) == len(fullest[0])][:STARTS]
    found = min((_settled(by_place, here, size) for here in starts), key=_spread)
    return [_placed(text) for text in found if text]


def _settled(by_place: Mapping[int, Sequence[Token]], start: Sequence[Token], size: int) -> list[list[Token]]:
    """The tokens of each of ``size`` texts, of which those in ``start`` are the first."""
    every, seeds = [t for here in by_place.values() for t in here], list(start)
    while len(seeds) < min(size, len(every)):
        seeds.append(max(every, key=lambda t: min(float((t.code - s.code).norm()) for s in seeds)))
    centres = torch.stack([s.code for s in seeds])
    texts: list[list[Token]] = []
    for _ in range(20):
        texts = [[] for _ in centres]
        for here in by_place.values():
            distance = torch.cdist(torch.stack([t.code for t in here]), centres).square()
            for i, k in zip(*linear_sum_assignment(distance.numpy())):
                texts[k].append(here[i])
        # A token's code is as exact as the token is strong.
        centres = torch.stack([_centre(text) if text else centre for text, centre in zip(texts, centres)])
    return texts


def _spread(texts: Sequence[Sequence[Token]]) -> float:
    """How far the codes of tokens are from that of their text, squared, by their energy."""
    return sum(t.energy * float((t.code - _centre(text)).square().sum()) for text in texts for t in text)


def _centre(text: Sequence[Token]) -> Tensor:
    weight = torch.tensor([t.energy for t in text], dtype=torch.float64)
    return (weight[:, None] * torch.stack([t.code for t in text])).sum(0) / weight.sum()


def _placed(tokens: Sequence[Token]) -> tuple[int, ...]:
    """Tokens at their places, the strongest where several claim one, ``UNKNOWN`` where none does."""
    out = [UNKNOWN] * (1 + max(t.place for t in tokens))
    for t in sorted(tokens, key=lambda t: t.energy):
        out[t.place] = t.word
    return tuple(out)


def along_prefixes(tokens: Sequence[Token], model: nn.Module, where: Layout) -> list[tuple[int, ...]]:
    """Texts of a causal model: a token's code is the mean over its prefix, so it tells the code of the token before it.

    Texts are followed back from tokens that nothing follows. A prefix that several texts share is read once for all of them.
    """
    found = where.found
    assert found.position_embedding is not None
    start, seen = first_place(model), value(model, where).double()
    words, places = model.get_parameter(found.word_embedding), model.get_parameter(found.position_embedding)[start:]
    by_place: dict[int, list[Token]] = {}
    for t in tokens:
        by_place.setdefault(t.place, []).append(t)
    children: set[int] = set()
    parent: dict[int, Token] = {}
    for place, here in by_place.items():
        before = by_place.get(place - 1, [])
        if not before:
            continue
        codes = torch.stack([o.code for o in before])
        for t in here:
            own = (words[t.word] + places[t.place]).double()
            wrote = seen @ torch.nn.functional.layer_norm(own, own.shape)
            wanted = ((place + 1) * t.code - (wrote - wrote.mean())) / place
            nearest = before[int((codes - wanted).norm(dim=1).argmin())]
            parent[id(t)] = nearest
            children.add(id(nearest))
    texts = []
    for t in (t for here in by_place.values() for t in here if id(t) not in children):
        chain = [t]
        while id(chain[-1]) in parent:
            chain.append(parent[id(chain[-1])])
        texts.append(_placed(chain))
    return texts
