"""What an adversary knows of the language."""

from __future__ import annotations

from rasura.interfaces import Prior
from rasura.priors.causal import CausalPrior
from rasura.priors.ngram import Unigram
from rasura.priors.trigram import Trigram
from rasura.values import Grant, Observation


def language(seen: Observation) -> Prior:
    """A language model where one is granted, else trigrams of the reference text where that is, else single English words.

    Raises ``InputError`` where neither has a token in the model's vocabulary.
    """
    if Grant.LANGUAGE_MODEL in seen:
        return CausalPrior(*seen.language_model, seen.vocabulary)
    if Grant.REFERENCE_TEXT in seen and seen.reference_text:
        return Trigram(seen.vocabulary, seen.reference_text)
    return Unigram.english(seen.vocabulary)
