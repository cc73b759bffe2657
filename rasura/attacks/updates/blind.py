"""The blind attack: guesses from the prior alone and never looks at the update. Every risk is measured against it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator

from rasura.core.interfaces import Budget, NotApplicable
from rasura.core.specs import IMAGES, TEXT, AttackSpec
from rasura.core.values import Grant, Observation, Reconstruction
from rasura.priors import words
from rasura.priors.ngram import Unigram


def best_guess(prior: Unigram, length: int) -> tuple[int, ...]:
    """The tokens with the best expected F1 (ROUGE-1) against a text of ``length`` tokens, special ones left out.

    Expected F1 of m guesses is ``2 * (sum of their gains) / (m + length)``; gains fall, so the best m is a prefix.
    """
    best, best_size, total = 0.0, 0, 0.0
    copies = prior.expected_copies(length)[:length]
    for size, (gain, _) in enumerate(copies, start=1):
        total += gain
        if 2 * total / (size + length) > best:
            best, best_size = 2 * total / (size + length), size
    return tuple(token for _, token in copies[:best_size])


def _grey(seen: Observation) -> Reconstruction:
    """Of the model, only its input's size is read."""
    if Grant.MODEL not in seen:
        raise NotApplicable("the size of an image is a property of the model, which is not granted")
    config: Any = seen.model.config
    size = seen.batch_size if Grant.BATCH_SIZE in seen else 1
    images = torch.full((size, config.num_channels, config.image_size, config.image_size), 0.5)
    return Reconstruction((), "none", details={"prior": "grey"}, images=images)


class Blind:
    """A guess without the update: the most common tokens of the language, or of reference text of the same kind.

    For images it is grey, the mean of all pixel values. Without a granted batch size it guesses one text, without lengths a
    text of usual length. Every text of a batch gets the best guess for its length. Reads no gradient.
    """

    name = "blind"
    needs = frozenset({Grant.BASE_MODEL})
    uses = frozenset({Grant.BATCH_SIZE, Grant.LENGTHS, Grant.REFERENCE_TEXT, Grant.MODEL})

    def __call__(self, seen: Observation, *, rng: Generator, budget: Budget) -> Reconstruction:
        if seen.task == "vision":
            return _grey(seen)
        vocabulary = seen.vocabulary
        prior = words(seen)
        around = len(vocabulary.prefix) + len(vocabulary.suffix)
        if Grant.LENGTHS in seen:
            lengths = [max(1, n - around) for n in seen.lengths]
        else:
            lengths = [prior.typical_tokens] * (seen.batch_size if Grant.BATCH_SIZE in seen else 1)
        guesses = {n: (*vocabulary.prefix, *best_guess(prior, n), *vocabulary.suffix) for n in set(lengths)}
        return Reconstruction(
            tuple(guesses[n] for n in lengths),
            confidence="none",
            details={"prior": "reference text" if Grant.REFERENCE_TEXT in seen else "English words"},
        )


SPEC = AttackSpec(
    name="blind",
    about="baseline: guesses from a language model without looking at the update",
    source="Rasura: the baseline of every audit",
    make=Blind,
    seconds=0.1,
    tasks=TEXT | IMAGES,
)
