"""Decoys: texts so close to a guess that only an update which distinguishes the guess from them can prove it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Generator, Tensor

from rasura.attacks.shared.copies import Types, known, rows_of
from rasura.attacks.shared.dummies import ordinary_ids
from rasura.attacks.shared.twins import Texts, nearest, twins
from rasura.core.rng import generator
from rasura.core.updates import changed
from rasura.core.values import Grant, Observation, Vocabulary
from rasura.victims.models import parts
from rasura.victims.positions import positions

Side = Literal["begins", "ends"]

MAX_TEXTS = 4
"""Texts of a batch that get decoys of their own: those whose share of the loss's gradient is smallest, so the worst told."""


def free_places(tokens: Sequence[Sequence[int]], vocabulary: Vocabulary) -> list[list[int]]:
    """Of every text, the places of tokens that are not special."""
    return [[n for n, token in enumerate(text) if token not in vocabulary.special_ids] for text in tokens]


def decoys(
    seen: Observation, tokens: Texts, *, inputs: dict[str, Tensor], weakest: Sequence[int], rng: Generator
) -> Iterator[Texts]:
    """Batches of the lengths of ``tokens``, the hardest to tell first.

    Of every text: each word that has twins replaced by each of them (``twins``). For each of the ``weakest`` texts: the word
    that weighs least replaced by the word nearest to it, a token by a random word, its two least influential neighbours
    exchanged, a token exchanged with the next text's at its place. Last, the nearest words everywhere, and random ones.
    A word weighs by its gradient and by how far the nearest other word is from it. Of several copies of a text, one is
    changed, and all of them are: copies of different labels may cancel out nearly whole.
    ``inputs``: the guess as keyword arguments of the model. A text without a free place yields none.
    """
    equal = {row: rows for rows in rows_of(tokens).values() for row in rows}

    def changed_in(row: int, new: dict[int, int]) -> Iterator[Texts]:
        for rows in [[row], equal[row]][: len(equal[row])]:
            yield with_words(tokens, {(one, n): word for one in rows for n, word in new.items()})

    for (row, n), words in twins(seen, tokens).items():
        for word in words:
            yield from changed_in(row, {n: word})
    model, vocabulary = seen.model, seen.vocabulary
    places, ordinary = free_places(tokens, vocabulary), ordinary_ids(vocabulary)
    name = parts(model).word_embedding
    influence = changed(model, inputs, [name])[0][name].norm(dim=1)
    free = [(row, n) for row, some in enumerate(places) for n in some]
    own = sorted({tokens[row][n] for row, n in free})
    if not own or len(ordinary) < 2:
        return
    ids, far = nearest(model.get_parameter(name), own, ordinary, 1)
    beside = dict(zip(own, ids[:, 0].tolist()))
    weight = {word: float(influence[word]) * apart for word, apart in zip(own, far[:, 0].tolist())}

    def other(token: int) -> int:
        rest = ordinary[ordinary != token]
        return int(rest[int(torch.randint(len(rest), (), generator=rng))])

    for row in weakest:
        text = tokens[row]
        if not places[row]:
            continue
        least = min(places[row], key=lambda n: weight[text[n]])
        yield from changed_in(row, {least: beside[text[least]]})
        place = places[row][int(torch.randint(len(places[row]), (), generator=rng))]
        yield from changed_in(row, {place: other(text[place])})
        pairs = [(a, b) for a, b in zip(places[row], places[row][1:]) if text[a] != text[b]]
        if pairs:
            a, b = min(pairs, key=lambda pair: float(influence[text[pair[0]]] + influence[text[pair[1]]]))
            yield from changed_in(row, {a: text[b], b: text[a]})
        after = (row + 1) % len(tokens)
        shared = [n for n in places[row] if n in places[after] and text[n] != tokens[after][n]]
        if shared:
            n = shared[int(torch.randint(len(shared), (), generator=rng))]
            moved = with_words(tokens, {(row, n): tokens[after][n], (after, n): text[n]})
            if sorted(moved) != sorted(tokens):  # texts that differ in one token would only change names
                yield moved
    near = with_words(tokens, {(row, n): beside[tokens[row][n]] for row, n in free})
    if sorted(near) != sorted(tokens):
        yield near
    yield with_words(tokens, {(row, n): other(tokens[row][n]) for row, n in free})


def lengths_known(seen: Observation) -> bool:
    """Whether the lengths of the texts are known, and not only stated."""
    return known(seen, Grant.LENGTHS)


def of_other_lengths(
    seen: Observation, tokens: Texts, types: Types | None, logits: Tensor
) -> Iterator[tuple[Texts, Types | None]]:
    """Batches of other lengths than ``tokens``, with their segments, where ``lengths_known`` does not exclude them.

    ``types``: the segments of ``tokens``. ``logits``: of ``tokens``; of a causal model ``(batch, length, words)``.
    """
    if lengths_known(seen):
        return
    if seen.task == "causal":
        yield from ((decoy, None) for decoy in longer_or_shorter(seen, tokens, logits))
    else:
        yield from longer(seen, tokens, types).values()


def longer(seen: Observation, tokens: Texts, types: Types | None) -> dict[Side, tuple[Texts, Types | None]]:
    """Of a classifier's batch, those whose longest text has one word more, and their segments: it ``begins`` earlier, or
    ``ends`` later. Where attention reaches only so many tokens, such a word may leave nothing in the update.

    A position table tells where a text begins. Where a decoder's text ends, there its head reads.
    """
    known, row = parts(seen.model), max(range(len(tokens)), key=lambda row: len(tokens[row]))
    ordinary, text, prefix = ordinary_ids(seen.vocabulary), tokens[row], seen.vocabulary.prefix
    most = positions(seen.model)
    if not len(ordinary) or (most is not None and len(text) >= most):
        return {}
    word = int(ordinary[int(torch.randint(len(ordinary), (), generator=generator(0, "longer")))])
    places: dict[Side, int] = {}
    if known.position_embedding is None:
        places["begins"] = len(prefix) if text[: len(prefix)] == prefix else 0
    if not known.causal:
        places["ends"] = len(text)
    return {side: with_one_more(tokens, types, row, n, word) for side, n in places.items()}


def with_one_more(tokens: Texts, types: Types | None, row: int, n: int, token: int) -> tuple[Texts, Types | None]:
    """``tokens`` with ``token`` in front of place ``n`` of the text ``row``, and their segments, if there are ``types``."""
    text = tokens[row]
    longer_text = _replaced(tokens, row, (*text[:n], token, *text[n:]))
    if types is None:
        return longer_text, None
    own = tuple(types[row])
    beside = own[min(n, len(own) - 1)]
    return longer_text, _replaced(tuple(map(tuple, types)), row, (*own[:n], beside, *own[n:]))


def longer_or_shorter(seen: Observation, tokens: Texts, logits: Tensor) -> Iterator[Texts]:
    """Of a causal batch, two batches of other lengths: one text goes on with the word that the model foresees, or lacks its
    last word. A word that the model is certain of leaves hardly anything in the update.

    Of all texts, the one whose word is the most certain is taken. ``logits``: ``(batch, length, words)``, of ``tokens``.
    """
    vocabulary = seen.vocabulary
    p = logits.detach().double().softmax(-1)
    # A special token counts as a word: a chat template ends in one and a line break, and the model foresees both.
    known = torch.tensor([i for i in range(vocabulary.size) if i not in vocabulary.unused_ids])
    most = positions(seen.model)
    if going := [row for row, text in enumerate(tokens) if most is None or len(text) < most]:
        ahead = {row: p[row, len(tokens[row]) - 1, known].max(0) for row in going}
        row = max(going, key=lambda row: float(ahead[row].values))
        yield _replaced(tokens, row, (*tokens[row], int(known[ahead[row].indices])))
    if ending := [row for row, text in enumerate(tokens) if len(text) > 2]:
        row = max(ending, key=lambda row: float(p[row, len(tokens[row]) - 2, tokens[row][-1]]))
        yield _replaced(tokens, row, tokens[row][:-1])


def _replaced(tokens: Texts, row: int, text: tuple[int, ...]) -> Texts:
    return (*tokens[:row], text, *tokens[row + 1 :])


def with_words(tokens: Texts, new: dict[tuple[int, int], int]) -> Texts:
    """``tokens`` with other words at the places ``(text, number)`` of ``new``."""
    return tuple(tuple(new.get((row, n), t) for n, t in enumerate(text)) for row, text in enumerate(tokens))


def weakest(logits: Tensor, labels: Tensor, mask: Tensor) -> list[int]:
    """The texts whose logits pull least at the loss, at most ``MAX_TEXTS``, weakest first.

    ``logits``: ``(batch, classes)`` with labels ``(batch,)``, or ``(batch, length, words)`` of a causal model.
    """
    p = logits.double().softmax(-1)
    if p.dim() == 3:
        target, p = labels[:, 1:], p[:, :-1]
        there = (mask[:, 1:] * (target >= 0)).double()
        own = p.gather(-1, target.clamp_min(0)[..., None])[..., 0]
        pull = ((1 - own).square() * there).sum(1)
    else:
        pull = (1 - p.gather(-1, labels[:, None])[:, 0]).square()
    return [int(i) for i in pull.argsort()[:MAX_TEXTS]]
